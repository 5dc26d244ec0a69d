"""Rows of docs/limits.md on loops, optimizers and settings that no other test file covers."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import Offload
from layerzero.engine.hooks import get_state
from tests.support.graphs import (
    WIDTH,
    WORLD,
    Chain,
    assert_same_gradients,
    batch,
    blocks,
    boom,
    loss_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.late_transfers import late
from tests.support.models import integer_batch, integer_loss, integer_net
from tests.support.ranks import mesh_of, on_ranks, run_ranks, run_sharing

pytestmark = pytest.mark.slow

# --- loops ---


@on_ranks(world_size=WORLD)
def test_inside_a_backward_there_is_no_gradient_to_read(rank: int) -> None:
    model, seen = shard(blocks(2)), []
    for parameter in model.parameters():
        parameter.register_hook(lambda _, p=parameter: seen.append(p.grad))
    one_pass(model, rank, 0)
    assert seen and all(gradient is None for gradient in seen), seen
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(world_size=WORLD, pg_timeout=10)
def test_nodes_may_accumulate_different_numbers_of_micro_batches(rank: int) -> None:
    """Accumulate one micro-batch on node 0 and three on node 1, before the last."""
    for accumulation in ("sharded", "full"):
        torch.manual_seed(0)
        alone = blocks(2)
        model = shard(copy.deepcopy(alone), accumulation=accumulation)
        counts = [1 if r < 2 else 3 for r in range(WORLD)]
        for number in range(counts[rank]):
            with layerzero.no_sync(model):
                one_pass(model, rank, number)
        one_pass(model, rank, 9)
        for r in range(WORLD):
            for number in (*range(counts[r]), 9):
                one_pass(alone, r, number)
        assert_same_gradients(model, alone, accumulation)


def _nodes_with_other_numbers_in_local_mode(rank: int) -> str:
    model = shard(blocks(2), accumulation="local")
    try:
        for number in range(1 if rank < 2 else 3):
            with layerzero.no_sync(model):
                one_pass(model, rank, number)
        one_pass(model, rank, 9)
        layerzero.clip_grad_norm_(model, 1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_numbers_of_micro_batches_are_an_error_in_local_mode() -> None:
    messages = run_ranks(_nodes_with_other_numbers_in_local_mode, world_size=WORLD, pg_timeout=4)
    assert all(messages), messages


def _evaluates_alone(rank: int, trains_first: bool) -> str:
    model = shard(blocks(3), size=2)
    if trains_first:
        one_pass(model, rank, 0)
    try:
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(1, WIDTH, dtype=torch.float64))
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_first_forward_is_a_meeting_of_all_ranks_and_later_ones_need_not_be() -> None:
    message = run_sharing(_evaluates_alone, False, world_size=2, pg_timeout=3)[0]
    assert "first forward" in message and "ranks [1] did not take part" in message, message
    assert run_sharing(_evaluates_alone, True, world_size=2, pg_timeout=3) == ["", ""]


def _scaled_by_the_schedule(rank: int) -> str:
    """Run two stages of two ranks each: torch divides ``.grad`` at the end of its step, before it is reduced."""
    stage_index = rank % 2
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = layerzero.mesh_from_groups(replicas[stage_index], replicas[stage_index])
    chunk = layerzero.shard_model(nn.Linear(4, 4), mesh=mesh)
    sent = torch.zeros(1, 4, requires_grad=True)
    args = sent if stage_index else sent.detach()
    stage = PipelineStage(
        chunk, stage_index, 2, torch.device("cpu"), input_args=args, output_args=sent, group=pipelines[rank // 2]
    )
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, target: (out - target).square().mean(), scale_grads=True)
    given = torch.ones(2, 4)
    with pytest.raises(RuntimeError) as caught, layerzero.no_sync(chunk):
        schedule.step(*([] if stage_index else [given]), target=given if stage_index else None)
    return str(caught.value)


def test_schedules_that_scale_gradients_themselves_are_an_error() -> None:
    for message in run_ranks(_scaled_by_the_schedule, world_size=WORLD, pg_timeout=10):
        assert "no_sync" in message, message


@on_ranks(world_size=WORLD)
def test_low_precision_weights_are_unfrozen_before_or_sharded_in_fp32(rank: int) -> None:
    x = torch.ones(1, 4)
    early = layerzero.shard_model(nn.Linear(4, 4).bfloat16(), zero3_size=2)
    early.requires_grad_(False)
    early(x.bfloat16())
    wide = layerzero.shard_model(nn.Linear(4, 4).bfloat16().requires_grad_(False).float(), zero3_size=2)
    wide(x)
    for model, given in ((early, x.bfloat16()), (wide, x)):
        model.requires_grad_(True)
        model(given).sum().backward()
        assert model.weight.grad.dtype == torch.float32


@on_ranks(world_size=WORLD)
def test_units_under_checkpoints_alone_have_the_right_gradients(rank: int) -> None:
    calls = []
    for inside in (True, False):
        torch.manual_seed(0)
        alone = blocks(2, own=False, reentrant=True)
        model = shard(copy.deepcopy(alone))

        def forward(net: Chain, x: Tensor, around: bool) -> Tensor:
            if around:
                return net(x)
            for unit in net.units:
                x = checkpoint(unit, x, use_reentrant=True)
            return x

        layerzero.traffic(model, reset=True)
        loss_of(forward(model, batch(rank, 0).requires_grad_(), inside)).backward()
        calls.append(layerzero.traffic(model).calls["hop2"])
        for r in range(WORLD):
            loss_of(forward(alone, batch(r, 0).requires_grad_(), inside)).backward()
        assert_same_gradients(model, alone, inside)
    assert calls[0] <= calls[1], calls


# --- optimizers ---


@on_ranks(world_size=2)
def test_a_scaler_may_have_ignored_parameters(rank: int) -> None:
    net = integer_net()
    model = layerzero.shard_model(net, mesh=mesh_of(2), ignored_params=[net.shift])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    together = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scaler.scale(integer_loss(model, integer_batch(rank=rank))).backward()
    expected = net.shift.detach() - net.shift.grad / 4
    scaler.step(together)
    scaler.update()
    assert torch.equal(model.shift.detach(), expected)
    model = layerzero.shard_model(net := integer_net(), mesh=mesh_of(2), ignored_params=[net.shift])
    ours = [p for p in model.parameters() if p is not model.shift]
    optimizers = [
        layerzero.shard_optimizer(torch.optim.SGD(ours, lr=1.0), model),
        torch.optim.SGD([model.shift], lr=1.0),
    ]
    before = model.shift.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(integer_loss(model, integer_batch(rank=rank))).backward()
    expected = before - model.shift.grad / 4
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.shift.detach(), expected)


# --- settings ---


def _groups_of_a_model(rank: int) -> list[int]:
    models = [layerzero.shard_model(nn.Linear(4, 4), zero3_size=2) for _ in range(2)]
    before = len(dist.distributed_c10d._world.pg_map)
    models.append(layerzero.shard_model(nn.Linear(4, 4), mesh=mesh_of(2)))
    assert len(dist.distributed_c10d._world.pg_map) == before, "meshes of the same ranks share their groups"
    return [len(get_state(model).mesh_info.groups._held) for model in models]


def test_each_model_makes_five_process_groups() -> None:
    assert run_ranks(_groups_of_a_model, world_size=WORLD) == [[5, 5, 5]] * WORLD


@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_surprise_in_the_order_of_units_costs_16_bytes(rank: int) -> None:
    model = shard(blocks(3))
    for step in range(3):
        one_pass(model, rank, step)
    layerzero.traffic(model, reset=True)
    model.order = (1, 0, 2)
    one_pass(model, rank, 3)
    sent = layerzero.traffic(model)
    assert sent.calls["gather_order"] > 0 and sent.bytes["gather_order"] == 16 * sent.calls["gather_order"], sent


@on_ranks(world_size=WORLD)
def test_with_one_replica_there_are_no_accumulators_to_offload(rank: int) -> None:
    for size, moved in ((2, True), (4, False)):
        with late():
            model = shard(blocks(2), size, offload=Offload(grads=True))
        with layerzero.no_sync(model):
            one_pass(model, rank, 0)
        assert (layerzero.memory(model).measured.get("host_accumulator", 0) > 0) == moved, size
        model.zero_grad()


@on_ranks(world_size=WORLD, pg_timeout=10)
def test_after_a_failure_the_model_is_used_once_and_zeroed(rank: int) -> None:
    """Call model.zero_grad() after a failure: it counts from the next forward. A model on the same mesh continues."""
    mesh = mesh_of(2)
    torch.manual_seed(0)
    alone = blocks(2)
    model = layerzero.shard_model(copy.deepcopy(alone), mesh=mesh, units=["units.0", "units.1"])
    other = layerzero.shard_model(copy.deepcopy(alone), mesh=mesh, units=["units.0", "units.1"])
    handle = model.units[0].linear.weight.register_hook(boom)
    with pytest.raises(LookupError):
        one_pass(model, rank, 9)
    handle.remove()
    with torch.no_grad():
        model(batch(rank, 0))
    model.zero_grad()
    for net in (other, model):
        one_pass(net, rank, 1)
        reference = copy.deepcopy(alone)
        for r in range(WORLD):
            one_pass(reference, r, 1)
        assert_same_gradients(net, reference, "after a failure")


@on_ranks(world_size=WORLD, pg_timeout=10)
def test_a_penalty_computed_after_the_forward_is_an_error_inside_no_sync(rank: int) -> None:
    model = shard(blocks(2))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    with layerzero.no_sync(model):
        one_pass(model, rank, 0)
        loss = loss_of(model(batch(rank, 1)))
        penalty = sum(p.to_local().square().sum() for p in model.parameters())
        with pytest.raises(RuntimeError, match="no_sync"):
            (loss + penalty).backward()
    optimizer.zero_grad()
    one_pass(model, rank, 2)


class _Tower(nn.Module):
    """Tower on raw data, called before or after the unit of another branch."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.tower, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor, raw: Tensor) -> Tensor:
        if self.first:
            return self.tower(raw) + self.other(hidden)
        return self.other(hidden) + self.tower(raw)


@on_ranks(world_size=2)
def test_a_first_unit_on_raw_data_stays_gathered_until_the_backward_ends(rank: int) -> None:
    for first, needs in itertools.product((False, True), (False, True)):
        model = layerzero.shard_model(_Tower(first), mesh=mesh_of(2), units=["tower", "other"])
        units = {unit.name: unit for unit in get_state(model).units}
        hidden = torch.ones(2, 4, requires_grad=True) * 1
        raw = torch.ones(2, 4, requires_grad=needs) * 1  # after `hidden`, so the backward pass reaches `hidden` last
        seen: list[bool] = []
        hidden.register_hook(lambda _, seen=seen, tower=units["tower"]: seen.append(tower.gathered))
        loss = model(hidden, raw).sum()
        assert not any(unit.gathered for unit in units.values() if unit.name)
        loss.backward()
        assert seen == [first and not needs], (first, needs, seen)
        assert not any(unit.gathered for unit in units.values())
