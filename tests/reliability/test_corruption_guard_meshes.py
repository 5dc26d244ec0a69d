"""Bit flips with tensor parallel layers and with experts on their own mesh are located and repaired."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero.dtensor.local_shard import plain
from layerzero.engine.hooks import get_state
from layerzero.layout.shard_grid import Extent
from tests.dtensor import test_tensor_parallel
from tests.reliability.test_corruption_guard import BF16, flipped_in_turn
from tests.sharding import test_expert_parallel
from tests.support.bits import flip, places
from tests.support.models import full_parameters, integer_batch, integer_loss, update
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

# Tensor parallel layers, experts as DTensors, and plain experts; ranks on the axis; S; S of the experts.
CASES = [("tp", 2, 1, 1), ("tp", 2, 2, 1), ("tp", 4, 1, 1)]
CASES += [("ep", 2, 1, 1), ("ep", 2, 2, 2), ("ep", 4, 2, 1), ("plain ep", 2, 4, 1), ("plain ep", 4, 1, 1)]
Case = tuple[str, int, int, int]


def _sharded(case: Case, *, low: bool) -> tuple[nn.Module, Any, int]:
    """Return a model, its optimizer, and the rank whose batches this rank trains with."""
    (kind, axis, size, expert_size), policy = case, {"mp_policy": BF16} if low else {}
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // axis, axis), mesh_dim_names=("dp", "tp"))
        return *test_tensor_parallel.shard(mesh, size, **policy), mesh["dp"].get_local_rank()
    made = test_expert_parallel.shard(axis, size, expert_size=expert_size, dtensor=kind == "ep", **policy)
    return *made, dist.get_rank()


def _flipped(rank: int, case: Case, low: bool) -> list[str]:
    model, optimizer, batch = _sharded(case, low=low)
    return flipped_in_turn(model, optimizer, batch, low=low, seed=low)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("case", "low"), [*((case, True) for case in CASES), *((case, False) for case in CASES[1::3])])
def test_a_flipped_bit_is_noticed_and_located_whatever_the_meshes(case: Case, low: bool) -> None:
    missed = run_ranks(_flipped, case, low)
    assert missed == [[]] * 4, "\n".join(missed[0])


class _Run:
    """A model in training."""

    def __init__(self, case: Case) -> None:
        self.model, self.optimizer, self._batch = _sharded(case, low=True)
        self.handles = [handle for handle in get_state(self.model).handles if handle.members]

    def backward(self, step: int) -> None:
        with layerzero.no_sync(self.model):
            integer_loss(self.model, integer_batch(step=step, rank=self._batch + 10)).backward()
        integer_loss(self.model, integer_batch(step=step, rank=self._batch)).backward()

    def step(self) -> None:
        update(self.optimizer)

    def flip(self, what: str, number: int) -> bool:
        """Flip a bit of some handle, experts included; return whether this rank has any."""
        if what == "compute weights":
            able = [
                (handle.weights.zero3_shard, at) for handle in self.handles for at, _ in places(handle, Extent.ZERO3)
            ]
        else:
            members = [member for handle in self.handles for member in handle.members if member.master.numel()]
            tensors = [plain(m.sharded.grad) for m in members if m.sharded.grad is not None]
            able = [(tensor, at) for tensor in tensors for at in range(tensor.numel())]
        if able:
            flip(*able[7 * number % len(able)], 12)
        return bool(able)

    def end(self) -> dict[str, Tensor]:
        moments = {f"{name}.m": each["momentum_buffer"] for name, each in self.optimizer.state_by_name().items()}
        return full_parameters(self.model) | moments


def _repeated(rank: int, case: Case) -> tuple[int, int, int]:
    """Flip bits in each step but the first, on each rank that can.

    Each rank flips one of two kinds of memory; every other case swaps the kinds.

    Returns: the numbers of affected handles and of repeated steps.
    """
    calm, run, flips, repeated, handles = _Run(case), _Run(case), torch.zeros(()), 0, set()
    guard = layerzero.guard_corruption(run.model, run.optimizer, every=1)
    for step in range(5):
        weights = (step + CASES.index(case)) % 2
        for each in (calm, run):
            if each is run and weights and rank == step - 1:
                flips += run.flip("compute weights", step)
            each.backward(step)
        if not weights and rank == step - 1:
            flips += run.flip("gradient", step)
        calm.step()
        try:
            run.step()
        except layerzero.SilentDataCorruption as error:
            repeated += 1
            handles |= {each.handle for each in error.corruptions}
            assert error.recoverable, error
            guard.recover()
            run.backward(step)
            run.step()
    end, wanted = run.end(), calm.end()
    assert end.keys() == wanted.keys() and all(torch.equal(end[name], wanted[name]) for name in wanted)
    dist.all_reduce(flips)
    return int(flips), repeated, len(handles)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_repeated_step_has_the_bits_of_one_without_a_fault_whatever_the_meshes(case: Case) -> None:
    for flips, repeated, handles in run_ranks(_repeated, case):
        assert repeated == flips >= 3 and handles > 1


def _lost(rank: int, case: Case) -> str:
    run = _Run(case)
    guard = layerzero.guard_corruption(run.model, run.optimizer, every=1)
    for step in range(2):
        run.backward(step)
        if step and rank == 1:
            flip(next(m.master for handle in run.handles[::-1] for m in handle.members if m.master.numel()), 0, 20)
        if not step:
            run.step()
    with pytest.raises(layerzero.SilentDataCorruption, match=r"masters of .* on rank 1") as raised:
        run.step()
    assert not raised.value.recoverable
    with pytest.raises(layerzero.SilentDataCorruption, match="Load the last checkpoint"):
        guard.recover()
    return str(raised.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES[1::3], ids=str)
def test_masters_of_one_rank_are_lost_to_all_ranks_of_all_meshes(case: Case) -> None:
    assert len(set(run_ranks(_lost, case))) == 1
