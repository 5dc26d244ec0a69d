"""Silent bit flips are detected before the next step and located; there are no false alarms."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import checkpoint
from layerzero.dtensor.lazy_grad import post_accumulate_grad_hooks
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import get_state
from layerzero.layout.shard_grid import Extent
from layerzero.utils.bit_sums import sum64
from tests.support.bits import flip, places
from tests.support.models import exact_model, full_parameters, integer_batch, integer_loss
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

KINDS = ("compute weights", "masters", "low bits of masters", "moments", "gradients")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)


def _net(size: int, *, low: bool, **settings: Any) -> tuple[nn.Module, Any, list[Handle]]:
    policy = {"mp_policy": BF16} if low else {}
    model, optimizer = exact_model(mesh=mesh_of(size), **policy, **settings)
    return model, optimizer, [handle for handle in get_state(model).handles if handle.members]


def _backward(model: nn.Module, rank: int, step: int) -> None:
    integer_loss(model, integer_batch(step=step, rank=rank)).backward()


def _step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    _backward(model, rank, step)
    optimizer.step()
    optimizer.zero_grad()


def _flipped(rank: int, size: int, low: bool, seed: int) -> list[str]:
    model, optimizer, _ = _net(size, low=low)
    return flipped_in_turn(model, optimizer, rank, low=low, seed=seed)


def flipped_in_turn(model: nn.Module, optimizer: Any, batch: int, *, low: bool, seed: int) -> list[str]:
    """Flip one bit in each kind of memory, on every rank that has it; return the flips that were not found correctly.

    Args:
        batch: rank whose batches this rank trains with.
        low: masters and compute weights have separate memory.
    """
    rank, handles = dist.get_rank(), [handle for handle in get_state(model).handles if handle.members]
    guard = layerzero.guard_corruption(model, optimizer, every=1, on_found="log")
    missed: list[str] = []
    tried: set[tuple[str, int]] = set()
    step = 0

    def seen(what: str, victim: int, wanted: dict[str, Any] | None) -> None:
        nonlocal step
        guard.found.clear()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        said = [(each.kind, each.ranks, each.handle, each.parameter) for each in guard.found]
        dist.broadcast_object_list(boxes := [wanted], src=victim)
        if boxes[0] is not None:  # what the victim reports about its own flip
            tried.add((what, victim))
            expected = boxes[0]
            hits = [
                each
                for each in guard.found
                if each.kind == expected["kind"]
                and each.handle == expected["handle"]
                and each.parameter == expected["parameter"]
                and each.ranks == (victim,)
            ]
            if not hits or len(hits) != len(guard.found):
                missed.append(f"{what} on rank {victim}: expected {expected}, found {said}")

    _step(model, optimizer, batch, step)
    step += 1
    generator = random.Random(seed)
    for victim in range(dist.get_world_size()):
        for what in KINDS:
            number = generator.randrange(1 << 30)
            _backward(model, batch, step)
            wanted = None
            if rank == victim:
                wanted = _hit(what, handles, optimizer, number, low=low)
            seen(what, victim, wanted)
    assert guard.checks == step
    assert {what for what, _ in tried} == set(KINDS)
    has_rows = any(places(handle, Extent.ZERO1) for handle in handles)
    dist.all_gather_object(able := [False] * dist.get_world_size(), has_rows)
    assert {victim for _, victim in tried} == {each for each, has in enumerate(able) if has}, sorted(tried)
    assert sum(able) >= 3, able
    return missed


def _members_with_gradient(handle: Handle) -> list[Any]:
    return [member for member in handle.members if member.master.numel() and member.sharded.grad is not None]


def _hit(what: str, handles: list[Handle], optimizer: Any, number: int, *, low: bool) -> dict[str, Any] | None:
    chosen = random.Random(number)
    able = [handle for handle in handles if places(handle, Extent.ZERO1)]
    if what == "gradients":  # experts may have received no tokens
        able = [handle for handle in able if _members_with_gradient(handle)]
    if not able:
        return None
    handle = chosen.choice(able)
    if what == "compute weights":
        element, parameter = chosen.choice(places(handle, Extent.ZERO3))
        tensor, bit = handle.weights.zero3_shard, chosen.randrange(8 * handle.weights.zero3_shard.element_size())
        own = handle.mesh_info.grid.slice_within(handle.layout, Extent.ZERO1, Extent.ZERO3)
        is_master = not low and own.start <= element < own.stop
        kind = "masters" if is_master else "compute weights"
    elif what in ("masters", "low bits of masters"):
        element, parameter = chosen.choice(places(handle, Extent.ZERO1))
        tensor, bit = handle.weights.master, chosen.randrange(16, 32) if what == "masters" else chosen.randrange(16)
        kind = "masters"
    else:
        members = [m for m in handle.members if m.master.numel()]
        member = chosen.choice(members if what == "moments" else _members_with_gradient(handle))
        parameter = member.name
        state = optimizer.state_by_name()[parameter]["momentum_buffer"]
        tensor = state if what == "moments" else member.sharded.grad.to_local()
        if what == "gradients":
            from layerzero.dtensor.local_shard import plain  # noqa: PLC0415

            tensor = plain(member.sharded.grad)
        element, bit = chosen.randrange(tensor.numel()), chosen.randrange(32)
        kind = "gradient" if what == "gradients" else "optimizer state 'momentum_buffer'"
    flip(tensor, element, bit)
    return {"kind": kind, "handle": handle.name, "parameter": parameter}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "low"), [(1, True), (2, True), (4, True), (1, False), (2, False), (4, False)])
def test_a_flipped_bit_is_noticed_before_the_next_step_and_located(size: int, low: bool) -> None:
    missed = run_ranks(_flipped, size, low, 10 * size + low, shared_memory="off" if size != 4 else None)
    assert missed == [[]] * 4, "\n".join(missed[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "low"), [(1, True), (2, True), (2, False), (4, False)])
@on_ranks(shared_memory=None)
def test_what_users_may_do_is_no_corruption(rank: int, tmp_path: Path, size: int, low: bool) -> None:
    model, optimizer, _ = _net(size, low=low)
    guard = layerzero.guard_corruption(model, optimizer, every=1)
    ema = layerzero.EMA(model, decay=0.5)
    for step in range(10):
        with layerzero.no_sync(model):
            _backward(model, rank, step)
        _backward(model, rank, step + 100)
        if step == 1:
            layerzero.clip_grad_norm_(model, 0.5)
        if step == 2:
            for p in model.parameters():
                p.grad.mul_(2)
        if step == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        if step == 9:
            with layerzero.no_sync(model):
                _backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        with torch.no_grad():
            if step == 3:
                for p in model.parameters():
                    p.mul_(0.5)
            if step == 4:
                for p in model.parameters():
                    p.data.add_(0.25)
        if step == 5:
            with layerzero.unsharded(model, writeback=True):
                model.head.bias.data.zero_()
        if step == 6:
            checkpoint.save(f"{tmp_path}/one", model, optimizer)
            checkpoint.load(f"{tmp_path}/one", model, optimizer)
        if step == 7:
            with ema.swapped():
                model(integer_batch(rank=rank)[0])
        if step == 8:
            model.load_state_dict({name: value.clone() for name, value in full_parameters(model).items()})
            optimizer.load_state_dict(optimizer.state_dict())
            model.first.requires_grad_(False)
    assert guard.checks == 10 and layerzero.fingerprint(model).ok
    assert {len(post_accumulate_grad_hooks(p)) for p in model.parameters()} == {1}, "steps add no hooks"
    guard.close()
    assert not any(post_accumulate_grad_hooks(p) for p in model.parameters())


@on_ranks()
def test_a_step_is_refused_where_it_is_looked_at(rank: int) -> None:
    model, optimizer, handles = _net(2, low=True)
    guard = layerzero.guard_corruption(model, optimizer, every=3)
    for step in range(5):
        _step(model, optimizer, rank, step)
    assert guard.checks == 1
    if rank == 2:
        flip(handles[0].weights.master, places(handles[0], Extent.ZERO1)[0][0], 3)
    _backward(model, rank, 5)
    before = [handle.weights.master.clone() for handle in handles]
    with pytest.raises(
        layerzero.SilentDataCorruption, match=r"masters of .* on rank 2: the sum of its bits has changed"
    ) as raised:
        optimizer.step()
    assert [each.ranks for each in raised.value.corruptions] == [(2,)]
    assert all(torch.equal(handle.weights.master, was) for handle, was in zip(handles, before, strict=True)), (
        "nothing is stepped"
    )
    with pytest.raises(ValueError, match="every must be"):
        layerzero.guard_corruption(model, optimizer, every=0)


def test_every_single_flip_changes_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for numel in (1, 3, 4, 17):
            tensor = torch.randn(numel, generator=generator).to(dtype)
            intact = sum64(tensor).item()
            for bit in range(8 * tensor.nbytes):
                flip(tensor, 0, bit)
                assert sum64(tensor).item() != intact
                flip(tensor, 0, bit)
            assert sum64(tensor).item() == intact
