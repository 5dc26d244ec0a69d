"""A model releases its resources when it is garbage collected, and in layerzero.close."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.optim import optimizer as torch_optimizer

import layerzero
from layerzero.comm.process_groups import drop_idle_groups
from layerzero.engine.hooks import get_state
from tests.support.graphs import boom
from tests.support.late_backend import NAME, register
from tests.support.models import different, exact_sgd, full_parameters, integer_batch, integer_loss, integer_net, train
from tests.support.ranks import BOTH, mesh_of, on_ranks, run_ranks
from tests.support.wrapped_gloo import mesh_on

pytestmark = pytest.mark.slow

WORLD = 4
CLOSED = "the model was closed"


BESIDE = {f"layerzero {name}" for name in ("zero3", "replica", "control", "refresh")}  # threads that end by themselves


def counts() -> dict[str, int]:
    """Return the counts of process resources that models use, after collected models have been released."""
    gc.collect()
    drop_idle_groups()
    deadline = time.monotonic() + 3
    while any(thread.name in BESIDE for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(_world.pg_map),
        "names": len(_world.pg_names),
        "ranks of groups": len(_world.pg_group_ranks),
        "backends of groups": len(_world.pg_backend_config),
        "tags": sum(map(len, _world.tags_to_pg.values())),
        "hooks": len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks),
        "mappings": Path("/proc/self/maps").read_text().count("layerzero"),
    }


def assert_not_grown(before: dict[str, int], seconds: float = 5.0) -> None:
    """Assert that no resource has grown. The system takes a moment to remove a thread that has ended."""
    deadline = time.monotonic() + seconds
    while more := [f"{name}: {before[name]} to {count}" for name, count in counts().items() if count > before[name]]:
        assert time.monotonic() < deadline, more
        time.sleep(0.02)


def keys() -> int:
    """Return the number of keys in the store, after all ranks have arrived."""
    dist.barrier()
    number: int = _get_default_store().num_keys()
    dist.barrier()
    return number


def sharded(rank: int, size: int = 2, **settings: Any) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    """Return a model that has made a step, and its optimizer."""
    net = integer_net()
    where = {} if "mesh" in settings else {"zero3_size": size}
    model = layerzero.shard_model(net, units=net.UNITS, **where, **settings)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    train(model, optimizer, rank, range(1))
    return model, optimizer


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Successive models


def _in_turn(rank: int, models: int) -> None:
    before, keys_before = counts(), 0
    for turn in range(models):
        model, optimizer = sharded(rank, (1, 2, 4)[turn % 3], reshard_after_forward=True if turn % 3 < 2 else 2)
        next(model.parameters()).norm().full_tensor()  # torch's caches keep the mesh of the first such result
        del model, optimizer
        if turn == 5:
            before, keys_before = counts(), keys()
    assert_not_grown(before)
    assert keys() == keys_before


@pytest.mark.sample(1)
@BOTH
def test_models_in_turn_leave_nothing_behind(shared_memory: str | None) -> None:
    run_ranks(_in_turn, 18, world_size=WORLD, shared_memory=shared_memory)


@on_ranks(world_size=WORLD)
def test_the_mesh_of_the_user_stays(rank: int) -> None:
    mesh = mesh_of(2)
    sharded(rank, mesh=mesh)
    before = counts()
    for _ in range(3):
        model, optimizer = sharded(rank, mesh=mesh)
        layerzero.close(model)
        del model, optimizer
    assert_not_grown(before)
    number = torch.ones(1)
    dist.all_reduce(number, group=mesh.get_group("zero3"))
    assert number.item() == 2


@on_ranks(world_size=WORLD)
def test_a_model_in_a_cycle_of_the_user_is_released_by_the_collector(rank: int) -> None:
    sharded(rank)
    before = counts()
    with without_collector():
        model, optimizer = sharded(rank)
        model.__dict__["myself"] = model
        weak = weakref.ref(model)
        del model, optimizer
        assert weak() is not None
    assert_not_grown(before)
    assert weak() is None


@on_ranks(world_size=WORLD, pg_timeout=20)
def test_ranks_may_collect_at_different_times(rank: int) -> None:
    """Release models at different times per rank; group names must not depend on counts that then differ."""
    sharded(rank), sharded(rank, 4)
    before = counts()
    pairs = []  # torch itself would reuse the name of a destroyed group for the next one
    with without_collector():
        for turn in range(3):
            model, optimizer = sharded(rank)
            if rank == turn:
                model.__dict__["myself"] = model
            del model, optimizer
            pair = [rank // 2 * 2, rank // 2 * 2 + 1]
            group = dist.new_group(pair, use_local_synchronization=True)
            dist.barrier(group)
            pairs.append(group)
            del group
            model, optimizer = sharded(rank, 4)
            del model, optimizer
    while pairs:
        dist.destroy_process_group(pairs.pop())
    assert_not_grown(before)


@on_ranks(world_size=WORLD)
def test_parameters_that_outlive_the_model_can_still_be_gathered(rank: int) -> None:
    model, optimizer = sharded(rank)
    expected = full_parameters(model)
    kept = dict(model.named_parameters())
    del model, optimizer
    gc.collect()
    drop_idle_groups()
    assert not different({name: parameter.full_tensor() for name, parameter in kept.items()}, expected)


# Failures


@on_ranks(world_size=WORLD, pg_timeout=20)
def test_a_shard_model_that_fails_releases_what_it_made(rank: int) -> None:
    def initialize(module: nn.Module) -> None:
        if rank == 1:
            raise ValueError("no weights here")

    sharded(rank)
    before, keys_before = counts(), keys()
    for _ in range(3):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises((ValueError, RuntimeError), match="no weights here"):
            layerzero.shard_model(net, zero3_size=2, param_init_fn=initialize)
    assert_not_grown(before)
    model, optimizer = sharded(rank)
    del model, optimizer
    assert_not_grown(before)
    assert keys() < keys_before + 3 * 3 * WORLD * 2  # the addresses of three times five groups, and three errors


@pytest.mark.parametrize("fails_on", [(0, 1, 2, 3), (0,)], ids=["all", "one"])
@on_ranks(world_size=WORLD, pg_timeout=60)
def test_a_model_with_a_gather_in_flight_is_released(rank: int, fails_on: tuple[int, ...]) -> None:
    """Begin the gather on all ranks or on one; in the latter case the others' release ends it."""
    sharded(rank)
    before = counts()
    model = layerzero.shard_model(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), zero3_size=2, units={nn.Linear})
    model(torch.ones(1, 8)).sum().backward()
    if rank in fails_on:
        model[0].register_forward_hook(boom)
        # Its own error, or one that the others are gone.
        with pytest.raises((LookupError, RuntimeError), match=r"boom|has ended|gather"):
            model(torch.ones(1, 8))
    del model
    assert_not_grown(before, 20)


# layerzero.close


def _refuses(action: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=CLOSED):
        action()


def _closed(rank: int) -> None:
    sharded(rank)
    before = counts()
    model, optimizer = sharded(rank)
    average = layerzero.EMA(model)
    watchdog = layerzero.watchdog(model)
    guard = layerzero.guard_steps(model, optimizer)
    expected = full_parameters(model)
    loss = integer_loss(model, integer_batch(rank=rank))
    layerzero.close(model)
    layerzero.close(model)
    _refuses(loss.backward)
    del loss  # autograd has saved weights
    assert_not_grown(before)
    for action in (
        lambda: integer_loss(model, integer_batch(rank=rank)),
        optimizer.step,
        average.update,
        lambda: layerzero.clip_grad_norm_(model, 1.0),
        lambda: layerzero.full_state_dict(model),
        lambda: layerzero.memory(model),
        lambda: layerzero.checkpoint.save("nowhere", model, optimizer),
        lambda: layerzero.shard_optimizer(exact_sgd(model.parameters()), model),
        lambda: next(model.parameters()).full_tensor(),
        lambda: model.get_submodule("first")(torch.ones(1, 5)),
    ):
        _refuses(action)
    for name, parameter in model.named_parameters():
        rows = parameter._local_tensor.spec.rows
        assert torch.equal(parameter.to_local(), expected[name][rows.start : rows.stop])
    watchdog.close()
    assert guard is not None
    del model, optimizer, average, watchdog, guard
    assert_not_grown(before)
    model, optimizer = sharded(rank)
    assert not different(full_parameters(model), expected), "a model after one that was closed"


@BOTH
def test_a_closed_model_has_released_everything_and_says_so(shared_memory: str | None) -> None:
    run_ranks(_closed, world_size=WORLD, shared_memory=shared_memory)


@on_ranks(world_size=2, shared_memory="off")
def test_a_graph_that_outlives_a_closed_model_keeps_no_scratch_and_no_thread(rank: int) -> None:
    others = threading.enumerate()
    model, optimizer = sharded(rank)
    state = get_state(model)
    pools = [weakref.ref(state.pools.scratch), weakref.ref(state.pools.full)]
    loss = integer_loss(model, integer_batch(rank=rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state.gradients._streams.zero3.run(partial(time.sleep, 0.5))  # a reduction that is in flight
    del state
    threads = set(threading.enumerate()).difference(others)
    layerzero.close(model)
    alive = {thread.name for thread in threads if thread.is_alive()}
    assert threads and "layerzero zero3" not in alive, "close waits for the thread"
    del model, optimizer
    gc.collect()
    assert [pool() for pool in pools] == [None, None] and loss.grad_fn is not None


@on_ranks(world_size=WORLD)
def test_close_is_refused_inside_a_pass(rank: int) -> None:
    model, optimizer = sharded(rank)
    loss = integer_loss(model, integer_batch(rank=rank))
    loss.register_hook(lambda _: layerzero.close(model))
    with pytest.raises(RuntimeError, match="during a backward"):
        loss.backward()
    optimizer.zero_grad()
    with layerzero.unsharded(model), pytest.raises(RuntimeError, match="which restores the model"):
        layerzero.close(model)
    with (
        layerzero.gathered(model),
        pytest.raises(RuntimeError, match=r"close is not possible inside layerzero\.gathered"),
    ):
        layerzero.close(model)
    with pytest.raises(ValueError, match="not sharded"):
        layerzero.close(nn.Linear(2, 2))
    layerzero.close(model)
    wrapper = nn.Sequential(model)
    uses: list[Callable[[], object]] = [
        lambda: layerzero.gathered(model).__enter__(),
        lambda: layerzero.gathered(wrapper).__enter__(),
        lambda: layerzero.unsharded(model).__enter__(),
        lambda: layerzero.full_state_dict(wrapper),
        model.unshard,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="the model was closed"):
            use()


@on_ranks(world_size=WORLD)
def test_a_save_in_the_background_ends_first(rank: int, tmp_path: Path) -> None:
    sharded(rank)
    before = counts()
    for name in ("closed", "collected"):
        model, optimizer = sharded(rank)
        expected = full_parameters(model)
        pending = layerzero.checkpoint.save_async(f"{tmp_path}/{name}", model, optimizer)
        if name == "closed":
            layerzero.close(model)
            assert pending.done()
        del model, optimizer
        pending.wait()
        del pending
        assert_not_grown(before)
        model, optimizer = sharded(rank)
        train(model, optimizer, rank, range(1, 2))
        layerzero.checkpoint.load(f"{tmp_path}/{name}", model, optimizer)
        assert not different(full_parameters(model), expected), name
        del model, optimizer


@on_ranks(world_size=WORLD, shared_memory="auto")
def test_the_rows_of_a_closed_model_keep_no_shared_memory(rank: int) -> None:
    model, optimizer = sharded(rank)
    assert counts()["mappings"]
    layerzero.close(model)
    assert not counts()["mappings"]
    assert [parameter.to_local().sum() for parameter in model.parameters()] and optimizer


# Resources outside the model


@on_ranks(world_size=WORLD)
def test_a_watchdog_ends_with_its_model(rank: int) -> None:
    model, optimizer = sharded(rank)
    layerzero.watchdog(model).close()
    del model, optimizer
    before, keys_before = counts(), keys()
    for _ in range(3):
        model, optimizer = sharded(rank)
        layerzero.watchdog(model)
        del model, optimizer
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any("wait monitor" in thread.name for thread in threading.enumerate()):
            time.sleep(0.05)
        assert_not_grown(before)
        assert keys() <= keys_before


@on_ranks(world_size=WORLD, pg_timeout=20)
def test_groups_of_other_backends_end_on_all_ranks_together(rank: int) -> None:
    register()
    mesh = mesh_on(NAME, 2)
    sharded(rank, mesh=mesh)
    counts()
    sharded(rank, mesh=mesh)
    before = counts()
    for _ in range(3):
        sharded(rank, mesh=mesh)
        assert_not_grown(before)
    model, optimizer = sharded(rank, mesh=mesh)
    layerzero.close(model)
    assert counts()["groups"] < before["groups"], "close compares what all ranks have let go"
    if rank == 0:
        cycle = [get_state(sharded(rank, mesh=mesh)[0]).mesh_info]
    else:
        sharded(rank, mesh=mesh)
    counts()
    model, optimizer = sharded(rank, mesh=mesh)
    if rank == 0:
        assert not cycle.pop().zero3_gather_comm.held_group._closed, "rank 0 has still used it"
    layerzero.close(model)
    del model, optimizer


class Square(nn.Linear):
    """Model that returns its loss."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


def make_batch(index: int, rank: int) -> Tensor:
    return torch.ones(2, 4) + index + rank


@on_ranks(world_size=WORLD)
def test_verify_and_plan_leave_nothing_behind(rank: int) -> None:
    before: dict[str, int] = {}
    for _ in range(3):
        assert layerzero.verify(Square, make_batch, steps=1, zero3_sizes=[2]).ok
        layerzero.plan(Square(), layerzero.planning.Cluster(nodes=2, accelerators=2))
        if before:
            assert_not_grown(before)
        before = counts()


@pytest.mark.exhaustive
def test_verify_on_processes_of_its_own_leaves_none() -> None:
    before, ranks = -1, set(multiprocessing.active_children())
    for _ in range(2):  # the first call starts a helper of multiprocessing, which stays
        assert layerzero.verify(Square, make_batch, steps=1, zero3_sizes=[2], world_size=2).ok
        gc.collect()
        assert set(multiprocessing.active_children()) == ranks
        after = len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))
        assert before in (-1, after)
        before = after
