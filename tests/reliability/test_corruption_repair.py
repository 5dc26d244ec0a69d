"""A step refused for flipped bits is repeated with the correct bits, or reported as unrecoverable."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import checkpoint
from layerzero.dtensor.local_shard import plain
from layerzero.engine.hooks import get_state
from layerzero.layout.shard_grid import Extent
from tests.support.bits import flip, places
from tests.support.logs import logged
from tests.support.models import IntegerNet, exact_sgd, full_parameters, integer_batch, integer_loss, integer_net
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
STEPS = 6


class _Run:
    """A model in training, with the final parameters and states of all ranks."""

    def __init__(self, size: int, *, low: bool, guarded: bool = True) -> None:
        policy = {"mp_policy": BF16} if low else {}
        mesh = mesh_of(size)
        self.model = layerzero.shard_model(integer_net(), mesh=mesh, units=IntegerNet.UNITS, **policy)
        self.optimizer = layerzero.shard_optimizer(exact_sgd(self.model.parameters()), self.model)
        self.guard = layerzero.guard_corruption(self.model, self.optimizer, every=1) if guarded else None
        self.handles = [handle for handle in get_state(self.model).handles if handle.members]

    def backward(self, rank: int, step: int) -> None:
        with layerzero.no_sync(self.model):
            integer_loss(self.model, integer_batch(step=step, rank=rank + 10)).backward()
        integer_loss(self.model, integer_batch(step=step, rank=rank)).backward()

    def step(self, rank: int, step: int) -> None:
        self.backward(rank, step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> dict[str, torch.Tensor]:
        moments = {f"{name}.m": each["momentum_buffer"] for name, each in self.optimizer.state_by_name().items()}
        return full_parameters(self.model) | moments

    def flip(self, what: str, at: int = 0) -> None:
        both = ((handle, member) for handle in self.handles for member in handle.members)
        handle, member = next(pair for pair in both if pair[1].master.numel())
        if what == "compute weights":
            own = handle.mesh_info.grid.slice_within(handle.layout, Extent.ZERO1, Extent.ZERO3)
            all_of_it = [element for element, _ in places(handle, Extent.ZERO3)]
            able = [each for each in all_of_it if not own.start <= each < own.stop] or all_of_it  # other ranks' first
            flip(handle.weights.zero3_shard, able[at % len(able)], 12)
        elif what == "masters":
            flip(member.master, at, 20)
        elif what == "moments":
            flip(self.optimizer.state_by_name()[member.name]["momentum_buffer"], at, 20)
        else:
            flip(plain(member.sharded.grad), at, 20)


def _repeated(rank: int, size: int, low: bool) -> int:
    """Flip bits in each step but the first, on each rank; return the number of repeated steps."""
    calm, run, repeated = _Run(size, low=low, guarded=False), _Run(size, low=low), 0
    for step in range(STEPS):
        calm.step(rank, step)
        if step and step % 2 == 0 and rank == step % 4:
            run.flip("compute weights", at=step)
        run.backward(rank, step)
        if step % 2 and rank == step % 4:
            run.flip("gradient")
        try:
            run.optimizer.step()
        except layerzero.SilentDataCorruption as error:
            repeated += 1
            assert error.recoverable, error
            assert "Call recover() of the guard, and repeat the step" in str(error)
            with logged() as lines:
                run.guard.recover()
            assert ("repeat the step" in "".join(lines)) == (rank == 0)
            assert all(parameter.grad is None for parameter in run.model.parameters())
            with pytest.raises(RuntimeError, match="no step was refused"):
                run.guard.recover()
            run.backward(rank, step)
            run.optimizer.step()
        run.optimizer.zero_grad()
    end, wanted = run.end(), calm.end()
    assert end.keys() == wanted.keys() and all(torch.equal(end[name], wanted[name]) for name in wanted)
    return repeated


@pytest.mark.sample(3)
@pytest.mark.parametrize("shared_memory", [None, "off"])
@pytest.mark.parametrize(("size", "low"), [(1, True), (2, True), (1, False), (2, False)])
def test_a_repeated_step_has_the_bits_of_one_without_a_fault(size: int, low: bool, shared_memory: str | None) -> None:
    assert run_ranks(_repeated, size, low, shared_memory=shared_memory) == [STEPS - 1] * 4


def _lost(rank: int, folder: str, what: str, low: bool) -> None:
    """Raise an unrecoverable error for memory that only a checkpoint can restore. Later flips are reported as usual."""
    calm, run = _Run(4, low=low, guarded=False), _Run(4, low=low)
    for step in range(3):
        calm.step(rank, step)
        run.step(rank, step)
    checkpoint.save(f"{folder}/one", run.model, run.optimizer)
    run.backward(rank, 3)
    if rank == 1:
        run.flip(what)
    with pytest.raises(layerzero.SilentDataCorruption, match="Load the last checkpoint") as raised:
        run.optimizer.step()
    assert not raised.value.recoverable and "repeat the step" not in str(raised.value)
    with pytest.raises(layerzero.SilentDataCorruption, match="Load the last checkpoint"):
        run.guard.recover()
    run.optimizer.zero_grad()
    checkpoint.load(f"{folder}/one", run.model, run.optimizer)
    for step in range(3, STEPS):
        calm.step(rank, step)
        run.step(rank, step)
    end, wanted = run.end(), calm.end()
    assert all(torch.equal(end[name], wanted[name]) for name in wanted)
    run.backward(rank, STEPS)
    if rank == 2:
        run.flip("moments")
    with pytest.raises(layerzero.SilentDataCorruption, match=r"momentum_buffer.* on rank 2"):
        run.optimizer.step()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("what", "low"), [("masters", True), ("moments", True), ("compute weights", False)])
def test_what_cannot_be_made_anew_needs_a_checkpoint(tmp_path: Path, what: str, low: bool) -> None:
    """In fp32 with one replica the compute weights are the masters."""
    run_ranks(_lost, str(tmp_path), what, low)


@on_ranks()
def test_memory_that_does_not_keep_its_bits_is_a_persistent_fault(rank: int) -> None:
    """Simulate a memory cell that does not keep written values."""
    run = _Run(2, low=True)
    run.step(rank, 0)
    refreshes, victim = get_state(run.model).refreshes, 3
    launch = refreshes.launch

    def damaged(*given: object) -> None:
        launch(*given)
        for handle in run.handles:
            handle.weights.finish_refresh()
        if rank == victim:
            run.flip("compute weights")

    run.backward(rank, 1)
    if rank == victim:
        run.flip("compute weights")
    with pytest.raises(layerzero.SilentDataCorruption) as raised:
        run.optimizer.step()
    assert raised.value.recoverable
    refreshes.launch = damaged
    for _ in range(2):
        with pytest.raises(
            layerzero.SilentDataCorruption, match=r"defective memory: compute weights of .* on rank 3"
        ) as raised:
            run.guard.recover()
        assert not raised.value.recoverable and "Load the last checkpoint, and check the memory" in str(raised.value)


@on_ranks()
def test_a_gradient_that_is_wrong_again_is_a_persistent_fault(rank: int) -> None:
    """Repeat a step with a flipped gradient. The repetition rewrites it; if it is wrong again, its memory is broken."""
    run = _Run(2, low=True)
    run.step(rank, 0)
    for times in range(2):
        run.backward(rank, 1)
        if rank == 1:
            run.flip("gradient")
        with pytest.raises(layerzero.SilentDataCorruption) as raised:
            run.optimizer.step()
        assert raised.value.recoverable == (times == 0), raised.value
        if times == 0:
            run.guard.recover()
    assert "wrong again after they were recomputed, which suggests defective memory: gradient of" in str(raised.value)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert str(copied) == str(raised.value) and copied.corruptions == raised.value.corruptions
    assert not copied.recoverable
    with pytest.raises(layerzero.SilentDataCorruption, match="Load the last checkpoint"):
        run.guard.recover()


@pytest.mark.parametrize("every", [1, 3])
@on_ranks()
def test_frozen_weights_are_made_anew_where_each_step_is_looked_at(rank: int, every: int) -> None:
    """Flip frozen weights, which steps do not write. With rare checks the number of affected steps is unknown."""
    model = integer_net()
    model.first.requires_grad_(False)
    model = layerzero.shard_model(model, mesh=mesh_of(2), units=IntegerNet.UNITS, mp_policy=BF16)
    optimizer = layerzero.shard_optimizer(exact_sgd([p for p in model.parameters() if p.requires_grad]), model)
    guard = layerzero.guard_corruption(model, optimizer, every=every)
    for step in range(2 * every - 1):
        integer_loss(model, integer_batch(step=step, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle = next(each for each in get_state(model).handles if not each.may_be_updated)
    if rank == 2:
        flip(handle.weights.zero3_shard, places(handle, Extent.ZERO3)[0][0], 12)
    integer_loss(model, integer_batch(step=9, rank=rank)).backward()
    with pytest.raises(layerzero.SilentDataCorruption, match="compute weights of 'first") as raised:
        optimizer.step()
    if every == 1:
        guard.recover()
        assert layerzero.fingerprint(model).ok
    else:
        assert "may have been wrong for 3 steps. Load an earlier checkpoint" in str(raised.value)
        with pytest.raises(layerzero.SilentDataCorruption, match="Load an earlier checkpoint"):
            guard.recover()


@on_ranks()
def test_a_scaler_and_another_optimizer_repeat_the_step_too(rank: int) -> None:
    """Use a loss scaler with two optimizers, one of which has the guard."""
    results = []
    for faulty in (False, True):
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS, mp_policy=BF16)
        body = [p for name, p in model.named_parameters() if not name.startswith("head")]
        inners = [exact_sgd(body), exact_sgd(model.head.parameters())]
        optimizers = [layerzero.shard_optimizer(inner, model) for inner in inners]
        guard = layerzero.guard_corruption(model, optimizers[0], every=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        handle = next(each for each in get_state(model).handles if each.members)
        for step in range(4):
            if faulty and step == 2 and rank == 0:
                flip(handle.weights.zero3_shard, places(handle, Extent.ZERO3)[0][0], 3)
            for _ in range(2 if faulty and step == 2 else 1):
                scaler.scale(integer_loss(model, integer_batch(step=step, rank=rank))).backward()
                try:
                    for optimizer in optimizers:
                        scaler.step(optimizer)
                except layerzero.SilentDataCorruption as error:
                    assert error.recoverable
                    guard.recover()
                    scaler.update(scaler.get_scale())
                else:
                    scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        results.append((full_parameters(model), scaler.get_scale()))
    (calm, scale), (repeated, other) = results
    assert all(torch.equal(calm[name], repeated[name]) for name in calm) and scale == other == 2.0**9


@on_ranks()
def test_a_guard_that_only_logs_does_not_tell_to_recover(rank: int) -> None:
    run = _Run(2, low=True)
    run.guard.close()
    guard = layerzero.guard_corruption(run.model, run.optimizer, every=1, on_found="log")
    run.step(rank, 0)
    run.backward(rank, 1)
    if rank == 1:
        run.flip("gradient")
    with logged() as lines:
        run.optimizer.step()
    assert [line.endswith("because the guard only logs. Load the last checkpoint") for line in lines] == [True] * (
        rank == 0
    )
    with pytest.raises(RuntimeError, match="no step was refused"):
        guard.recover()
