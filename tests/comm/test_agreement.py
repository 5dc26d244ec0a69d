"""Ranks that disagree raise an error that names field and ranks, on every rank; meshes from existing groups."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import Offload, PrecisionPolicy
from layerzero.comm.process_groups import new_group_like
from tests.support.models import (
    IntegerNet,
    Step,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    train_alone,
    union,
)
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow

WORLD = 4
SECONDS = 10.0  # time until every rank has raised, with a margin for a busy machine

# The rank that differs from the others; its number appears in no value below.
ODD = 3


class Net(nn.Module):
    """Two linear layers of given sizes."""

    def __init__(self, *, width: int = 5, hidden: int = 6, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden, dtype=dtype)
        self.second = nn.Linear(hidden, width, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Raised(NamedTuple):
    kind: str
    message: str
    seconds: float


class Case(NamedTuple):
    """Call that the odd rank makes while the others shard a Net, and patterns that each rank's message must contain."""

    call: Callable[[], Any]
    patterns: tuple[str, ...]
    usual: Callable[[], Any]


def _shard(model: nn.Module | None = None, **settings: Any) -> nn.Module:
    settings = {"zero3_size": 2, "units": ["first"]} | settings
    return layerzero.shard_model(Net() if model is None else model, **settings)


def _changed(change: Callable[[Net], Any]) -> nn.Module:
    model = Net()
    change(model)
    return _shard(model)


def _square(*, tied: bool = False) -> Net:
    model = Net(width=6, hidden=6)
    if tied:
        model.second.weight = model.first.weight
    return model


def _shard_without_bias(model: Net) -> nn.Module:
    return _shard(model, ignored_params=[model.second.bias])


def _fail(message: str) -> Any:
    raise LookupError(message)


def _failing_units(name: str, module: nn.Module) -> bool:
    return _fail("no such luck") if name == "second" else False


def _shard_from_meta(init: Callable[[nn.Module], Any]) -> nn.Module:
    with torch.device("meta"):
        model = Net()
    return _shard(model, param_init_fn=init)


def _case(call: Callable[[], Any], *patterns: str, usual: Callable[[], Any] = _shard) -> Case:
    return Case(call, patterns, usual)


RANK = rf"\b{ODD}\b"
CASES: dict[str, Case] = {
    "zero3_size of init_mesh": _case(
        lambda: layerzero.init_mesh(4), "init_mesh", "zero3_size", RANK, usual=lambda: layerzero.init_mesh(2)
    ),
    "zero3_size": _case(lambda: _shard(zero3_size=4), "shard_model", "zero3_size", RANK),
    "param_dtype": _case(
        lambda: _shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "param_dtype", "bfloat16", RANK
    ),
    "reduce_dtype": _case(
        lambda: _shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)), "reduce_dtype", "float16", RANK
    ),
    "replica_reduce_dtype": _case(
        lambda: _shard(mp_policy=PrecisionPolicy(replica_reduce_dtype=torch.bfloat16)),
        "replica_reduce_dtype",
        "bfloat16",
        RANK,
    ),
    "output_dtype": _case(
        lambda: _shard(mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64)), "output_dtype", "float64", RANK
    ),
    "offload_params": _case(lambda: _shard(offload=Offload(params=True)), "offload.params", RANK),
    "pin_memory": _case(lambda: _shard(offload=Offload(grads=True, pin_memory=False)), "offload.pin_memory", RANK),
    "prefetch": _case(lambda: _shard(prefetch=2), "prefetch", RANK),
    "reshard_after_forward": _case(lambda: _shard(reshard_after_forward=False), "reshard_after_forward", RANK),
    "sync_module_states": _case(lambda: _shard(sync_module_states=False), "sync_module_states", RANK),
    "fewer units": _case(lambda: _shard(units=None), "units", "first", RANK),
    "other units": _case(lambda: _shard(units=["second"]), "units", "first", "second", RANK),
    "accumulation": _case(lambda: _shard(accumulation="full"), "accumulation", "full", RANK),
    "accumulation_dtype": _case(
        lambda: _shard(mp_policy=PrecisionPolicy(accumulation_dtype=torch.bfloat16)),
        "accumulation_dtype",
        "bfloat16",
        RANK,
    ),
    "accumulation of one unit": _case(
        lambda: _shard(accumulation=lambda name, _: "full" if name == "first" else "sharded"),
        "accumulation",
        "first",
        RANK,
    ),
    "other shapes": _case(lambda: _shard(Net(hidden=8)), r"first\.weight", "8", RANK),
    "other shapes of the same size": _case(
        lambda: _shard(Net(width=6, hidden=5)), r"first\.weight", r"5, 6", r"6, 5", RANK
    ),
    "other dtype": _case(lambda: _shard(Net(dtype=torch.float64)), r"first\.weight", "float64", RANK),
    "missing parameter": _case(lambda: _shard(Net(bias=False)), r"second\.bias", RANK),
    "additional parameter": _case(
        lambda: _changed(lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(2)))), "scale", RANK
    ),
    "frozen parameter": _case(
        lambda: _changed(lambda m: m.second.bias.requires_grad_(False)), r"second\.bias", "requires_grad|frozen", RANK
    ),
    "tied parameter": _case(lambda: _shard(_square(tied=True)), "weight", RANK, usual=lambda: _shard(_square())),
    "other buffer": _case(lambda: _changed(lambda m: m.register_buffer("mean", torch.zeros(7))), "mean", RANK),
    "ignored parameter": _case(lambda: _shard_without_bias(Net()), r"second\.bias|ignored", RANK),
    "own mistake": _case(lambda: _shard(prefetch=-1), "prefetch", RANK),
    "zero3_size that does not divide": _case(lambda: _shard(zero3_size=9), "zero3_size", RANK),
    "unknown unit": _case(lambda: _shard(units=["fourth"]), "fourth", RANK),
    "exception in units": _case(lambda: _shard(units=_failing_units), "no such luck", RANK),
    "exception in accumulation": _case(
        lambda: _shard(accumulation=lambda name, module: _fail("no such mode")), "no such mode", RANK
    ),
    "something that is no module": _case(lambda: _shard(nn.ModuleList([Net()]).parameters()), "Module", RANK),
}


def _disagree(rank: int) -> dict[str, Raised | None]:
    raised: dict[str, Raised | None] = {}
    for name, case in CASES.items():
        start = time.monotonic()
        try:
            (case.call if rank == ODD else case.usual)()
            raised[name] = None
        except Exception as error:
            raised[name] = Raised(type(error).__name__, str(error), time.monotonic() - start)
        # After each failure the same process group still serves a model that all ranks agree on.
        model = _shard()
        model(torch.ones(2, 5)).sum().backward()
        assert all(p.grad is not None for p in model.parameters()), name
    return raised


@pytest.fixture(scope="module")
def raised() -> list[dict[str, Raised | None]]:
    return run_ranks(_disagree, world_size=WORLD)


@pytest.mark.parametrize("name", CASES)
def test_difference_is_an_error_on_every_rank_that_names_field_and_rank(
    name: str, raised: list[dict[str, Raised | None]]
) -> None:
    for rank, of_rank in enumerate(raised):
        error = of_rank[name]
        assert error is not None, f"rank {rank}: nothing was raised"
        # The odd rank raises its own exception, which need not contain its number.
        patterns = [p for p in CASES[name].patterns if not (rank == ODD and p == RANK)]
        missing = [pattern for pattern in patterns if not re.search(pattern, error.message, re.DOTALL)]
        assert not missing, f"rank {rank}: no {missing} in {error}"
        assert error.seconds < SECONDS, f"rank {rank}: {error}"


def _zero_own(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def _fail_to_initialize(rank: int) -> Raised:
    start = time.monotonic()
    try:
        _shard_from_meta((lambda module: _fail("no such init")) if rank == ODD else _zero_own)
    except Exception as error:
        raised = Raised(type(error).__name__, str(error), time.monotonic() - start)
    else:
        raise AssertionError(f"rank {rank}: nothing was raised")
    _shard()
    return raised


def test_exception_in_param_init_fn_on_one_rank_is_an_error_on_every_rank() -> None:
    for rank, error in enumerate(run_ranks(_fail_to_initialize, world_size=WORLD, pg_timeout=15, timeout=60)):
        assert "no such init" in error.message, error
        assert rank == ODD or re.search(RANK, error.message), error
        assert error.seconds < SECONDS, error


@on_ranks(world_size=WORLD)
def test_ranks_that_would_start_differently_start_alike_from_meta_too(rank: int) -> None:
    torch.manual_seed(0)
    of_rank_0 = Net().state_dict()
    torch.manual_seed(rank)
    assert not different(full_parameters(_shard(Net())), of_rank_0)
    with torch.device("meta"):
        models = [Net(), Net()]
    zero = _shard(models[0], param_init_fn=_zero_own)
    assert not any(value.any() for value in full_parameters(zero).values())
    reset = full_parameters(_shard(models[1]))
    assert all(value.std() > 0 and value.abs().max() < 0.5 for value in reset.values()), reset  # as nn.Linear does
    alone = Net()
    alone.load_state_dict(reset)
    x = torch.ones(2, 5)
    torch.testing.assert_close(models[1](x), alone(x))


def _leave_out(rank: int, absent: int) -> Raised | None:
    if rank == absent:
        return None
    start = time.monotonic()
    try:
        _shard()
    except Exception as error:
        return Raised(type(error).__name__, str(error), time.monotonic() - start)
    raise AssertionError(f"rank {rank}: nothing was raised")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("absent", "store"), [(0, "file"), (2, "file"), (2, "server")])  # their exceptions differ
def test_rank_that_never_comes_is_named_by_the_others_within_the_timeout(
    absent: int, store: str, tmp_path: Path
) -> None:
    store_file = tmp_path / "store" if store == "file" else None
    errors = run_ranks(_leave_out, absent, world_size=WORLD, pg_timeout=5, timeout=60, store_file=store_file)
    assert errors[absent] is None
    for error in errors[:absent] + errors[absent + 1 :]:
        assert re.search(rf"\b{absent}\b", error.message), error
        assert error.seconds < 5 + SECONDS, error


# --- meshes from process groups of another framework ---

STEPS = 2


def _train(mesh: Any, ranks: list[int]) -> tuple[list[Step], str]:
    """Train an IntegerNet on the batches of `ranks`; return the state of each step and differences from one process."""
    rank = dist.get_rank()
    model = layerzero.shard_model(integer_net(), mesh=mesh, units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    steps = []
    for step in range(STEPS):
        loss = integer_loss(model, integer_batch(step=step, rank=rank))
        loss.backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step([loss.detach()], gradients, full_parameters(model)))
    alone = integer_net()
    batches = [[union([integer_batch(step=step, rank=r) for r in ranks])] for step in range(STEPS)]
    expected = train_alone(alone, batches, exact_sgd(alone.parameters()))
    wrong = [
        (step, different(ours.gradients, theirs.gradients), different(ours.parameters, theirs.parameters))
        for step, (ours, theirs) in enumerate(zip(steps, expected, strict=True))
    ]
    return steps, "" if all(not g and not p for _, g, p in wrong) else str(wrong)


def _groups(*ranks: list[int]) -> dist.ProcessGroup:
    """Make a process group of each list; return the one that contains this rank."""
    made = [dist.new_group(members) for members in ranks]
    return next(group for members, group in zip(ranks, made, strict=True) if dist.get_rank() in members)


def _train_on_given_groups(rank: int) -> None:
    for size in (1, 2, 4):
        zero3 = _groups(*([list(range(start, start + size)) for start in range(0, WORLD, size)]))
        mesh = layerzero.mesh_from_groups(dist.group.WORLD, zero3)
        assert mesh.mesh_dim_names == ("replica", "zero3"), size
        assert mesh.mesh.tolist() == layerzero.init_mesh(size).mesh.tolist(), size
        assert mesh.get_local_rank("zero3") == rank % size, size
        ours, wrong = _train(mesh, list(range(WORLD)))
        assert not wrong, (size, wrong)
        theirs, _ = _train(layerzero.init_mesh(size), list(range(WORLD)))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.losses[0], other.losses[0]), size
            assert not different(one.gradients, other.gradients), size
            assert not different(one.parameters, other.parameters), size


def test_mesh_from_groups_trains_like_init_mesh_and_like_one_process() -> None:
    run_ranks(_train_on_given_groups, world_size=WORLD)


# Data-parallel groups as with tensor or pipeline parallelism, and the blocks that share weights.
PARTS: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "strided, S = 1": ([[0, 2], [1, 3]], [[0], [1], [2], [3]]),
    "strided, S = 2": ([[0, 2], [1, 3]], [[0, 2], [1, 3]]),
    "neighbors, S = 2": ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "uneven": ([[0], [1, 2, 3]], [[0], [1, 2, 3]]),
}


@on_ranks(world_size=WORLD)
def test_data_parallel_groups_beside_each_other_train_apart(rank: int) -> None:
    for name, (zero1, zero3) in PARTS.items():
        mesh = layerzero.mesh_from_groups(_groups(*zero1), _groups(*zero3))
        ranks = next(members for members in zero1 if rank in members)
        if len(ranks) != 3:  # a mean over 3 ranks is not exact
            _, wrong = _train(mesh, ranks)
            assert not wrong, (name, wrong)


@on_ranks(world_size=WORLD)
def test_difference_in_one_data_parallel_group_leaves_the_others_alone(rank: int) -> None:
    mesh = layerzero.mesh_from_groups(_groups([0, 2], [1, 3]), _groups([0, 2], [1, 3]))
    error = None
    try:
        layerzero.shard_model(integer_net(), mesh=mesh, prefetch=2 if rank == 3 else 1)
    except ValueError as caught:
        error = str(caught)
    if rank in (0, 2):
        assert error is None, error
    else:
        assert error is not None
        assert "prefetch" in error and re.search(RANK, error), error


BAD_BLOCKS: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "every second rank": ([[0, 1, 2, 3]], [[0, 2], [1, 3]]),
    "not aligned": ([[0, 1, 2, 3]], [[0, 3], [1, 2]]),
    "of different sizes": ([[0, 1, 2, 3]], [[0, 1, 2], [3]]),
    "of sizes 2, 1, 1": ([[0, 1, 2, 3]], [[0, 1], [2], [3]]),
    "larger than the data-parallel group": ([[0, 1], [2, 3]], [[0, 1, 2, 3]]),
    "across data-parallel groups": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
}


@on_ranks(world_size=WORLD)
def test_blocks_that_are_not_consecutive_or_equal_are_refused_on_every_rank(rank: int) -> None:
    for name, (zero1, zero3) in BAD_BLOCKS.items():
        zero1_group, zero3_group = _groups(*zero1), _groups(*zero3)
        start = time.monotonic()
        try:
            layerzero.mesh_from_groups(zero1_group, zero3_group)
        except (ValueError, RuntimeError) as error:
            assert "zero3_group" in str(error), (name, error)
            assert time.monotonic() - start < SECONDS, name
        else:
            raise AssertionError(f"{name}: nothing was raised on rank {rank}")
    _train_on_given_groups(rank)


@on_ranks(world_size=2, pg_timeout=10)
def test_ranks_that_have_made_different_numbers_of_groups_are_told_before_they_wait_for_ever(rank: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # torch's group names now differ on the two ranks
    layerzero.mesh_from_groups(dist.group.WORLD, dist.group.WORLD)
    mesh = layerzero.init_mesh(2)
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError):  # the other rank does not arrive
            new_group_like([0, 1], like=impatient, device_type="cpu")
    dist.barrier()
    with pytest.raises(ValueError, match="number of process groups created so far is 2 on rank 0 and 1 on rank 1"):
        layerzero.shard_model(nn.Linear(2, 2), mesh=mesh)
