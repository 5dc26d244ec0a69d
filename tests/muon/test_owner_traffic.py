"""Full parameters: traffic and memory of a step, compatible features, and refusals."""

from __future__ import annotations

import copy
import math
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR

import layerzero
from layerzero import PrecisionPolicy
from layerzero.device.buffer_pools import BufferPool
from layerzero.engine.hooks import get_state
from layerzero.layout.shard_grid import Extent
from layerzero.muon.owner_table import owners_of
from tests.muon.test_owner_step import Wide, matrices, others, owned_sgd, rows, step_of, used_in
from tests.support.late_backend import NAME, register
from tests.support.models import LayerwiseScaling, different, exact_sgd, full_parameters, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

BF16, FP32 = torch.bfloat16, torch.float32
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


class Blocks(nn.Module):
    """Units of two matrices and a vector each."""

    def __init__(self, count: int = 8, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def blocks_on(zero3_size: int, **settings: Any) -> nn.Module:
    units = [f"blocks.{i}" for i in range(8)]
    return layerzero.shard_model(Blocks(), mesh=mesh_of(zero3_size), units=units, **{"mp_policy": POLICY} | settings)


def a_step(model: nn.Module, optimizer: Any, micro_batches: int = 1) -> None:
    for number in range(micro_batches):
        with layerzero.no_sync(model) if number + 1 < micro_batches else nullcontext():
            model(torch.ones(2, 8)).sum().backward()
    update(optimizer)


# Traffic


def _count(rank: int, zero3_size: int) -> tuple[int, int]:
    """Return the bytes between nodes, with full parameters and with rows."""
    world = dist.get_world_size()
    replicas, on_replicas = world // zero3_size, []
    for elementwise in (False, True):
        model = blocks_on(zero3_size, mp_policy=PrecisionPolicy.of(POLICY, replica_reduce_dtype=BF16))
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model, elementwise=elementwise)
        a_step(model, optimizer)
        counts = []
        for micro_batches in (1, 3):
            layerzero.traffic(model, reset=True)
            a_step(model, optimizer, micro_batches)
            counts.append(layerzero.traffic(model, reset=True))
        lz_state, sent = get_state(model), Counter[str]()
        grid = lz_state.mesh_info.grid
        for handle in lz_state.handles:
            own, node = (grid.numel(handle.layout, extent) for extent in (Extent.ZERO1, Extent.ZERO3))
            sent["hop2"] += 2 * (node - own)
            sent["refresh"] += 2 * (replicas - 1) * own
        if not elementwise:
            for member in lz_state.members.values():
                owner, mine = owners_of(lz_state).owners[member.name], member.master.numel()
                if owner.r == grid.replica_rank and owner.s != grid.zero3_rank:
                    sent["owner_gather"] += 2 * 4 * mine
                elif owner[:2] == (grid.replica_rank, grid.zero3_rank):
                    sent["owner_scatter"] += 4 * (math.prod(member.spec.shape) - mine)
        for counted in counts:
            for name in ("hop2", "refresh", "owner_gather", "owner_scatter"):
                assert counted.bytes.get(name, 0) == sent[name], f"{name} elementwise={elementwise}"
        assert counts[0].bytes_by_axis.get("replica", 0) == counts[1].bytes_by_axis.get("replica", 0), "A plays no part"
        on_replicas.append(counts[0].bytes_by_axis.get("replica", 0))
    return on_replicas[0], on_replicas[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
def test_a_step_sends_what_the_formulas_say_and_the_slow_link_carries_no_more(zero3_size: int) -> None:
    counted = run_ranks(_count, zero3_size)
    for node in range(4 // zero3_size):
        of_node = counted[node * zero3_size : (node + 1) * zero3_size]
        whole, on_rows = (sum(each) for each in zip(*of_node, strict=True))
        assert whole <= 1.05 * on_rows, f"node {node}"


# Memory


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
@on_ranks()
def test_one_whole_parameter_and_its_gradient_are_there_at_a_time(rank: int, zero3_size: int) -> None:
    model = blocks_on(zero3_size)
    optimizer, lz_state = owned_sgd(model), get_state(model)
    grid, take, taken = lz_state.mesh_info.grid, BufferPool.acquire, []

    def spy(pool: BufferPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append(4 * numel)
        return take(pool, numel, dtype)

    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        taken.clear()
        with mock.patch.object(BufferPool, "acquire", spy):
            optimizer.step()
        whole = [
            m
            for m in lz_state.members.values()
            if owners_of(lz_state).owners[m.name][:2] == (grid.replica_rank, grid.zero3_rank)
        ]
        away = [4 * math.prod(m.spec.shape) for m in whole if len(m.spec.rows) < m.spec.shape[0]]
        largest = 4 * max(math.prod(member.spec.shape) for member in lz_state.members.values())
        if zero3_size == 1:
            assert not taken, "the rows of the masters are the whole parameters"
        else:
            assert taken[:2] == [max(away, default=0)] * 2, "the largest of its own, and the gradient of it"
            assert len(taken) == 3 and taken[2] < 1.5 * largest, "and the rows of others' that it sends, about as much"
        optimizer.zero_grad()
        report = layerzero.memory(model)
        assert report.measured["optimizer"] == 4 * sum(math.prod(member.spec.shape) for member in whole)
        for kind in ("zero1_shard", "zero3_shard", "gradient_shard", "accumulator"):
            assert report.predicted[kind] == report.measured[kind], kind


# Unaffected features


@on_ranks()
def test_hooks_schedules_scalers_and_averages_work_beside_whole_parameters(rank: int) -> None:
    model = layerzero.shard_model(Wide(), mesh=mesh_of(2), units=Wide.UNITS)
    net = Wide()
    inner, theirs = LayerwiseScaling(model.parameters()), LayerwiseScaling(net.parameters())
    steps = []
    inner.register_step_pre_hook(lambda *_: steps.append("before"))
    ours = layerzero.shard_optimizer(inner, model)
    ours.register_step_post_hook(lambda *_: steps.append("after"))
    schedules = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in (ours, theirs)]
    ema, average = (
        layerzero.EMA(model, 0.5),
        torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        loss = model(rows(rank, step), used_in(step)) * (math.inf if step == 2 and rank == 1 else 1)
        scaler.scale(loss).backward()
        if step != 2:  # which overflows
            step_of(net, [theirs], range(4), step, 0.25, 4)
        before = len(steps)
        scaler.step(ours)
        assert steps[before:] == ([] if step == 2 else ["before", "after"])
        scaler.update()
        ours.zero_grad()
        if step != 2:
            ema.update()
            average.update_parameters(net)
            schedules[0].step()
            schedules[1].step()
        use = dict(net.named_parameters())
        wrong = different(full_parameters(model), use)
        assert not wrong, f"step {step}: {wrong}"
    with ema.swapped():
        assert not different(full_parameters(model), dict(average.module.named_parameters()))
    assert not different(full_parameters(model), dict(net.named_parameters()))


@on_ranks()
def test_a_group_that_comes_before_the_first_step_has_owners_too(rank: int) -> None:
    model, net = layerzero.shard_model(Wide(), mesh=mesh_of(2), units=Wide.UNITS), Wide()
    ours = layerzero.shard_optimizer(LayerwiseScaling(matrices(model)), model)
    theirs = LayerwiseScaling(matrices(net))
    held = dict(model.named_parameters())
    ours.add_param_group({"params": others(model), "lr": 0.5})
    theirs.add_param_group({"params": others(net), "lr": 0.5})
    for step in range(2):
        step_of(model, [ours], [rank], step, 1.0, 2)
        step_of(net, [theirs], range(4), step, 0.25, 2)
    assert not different(full_parameters(model), dict(net.named_parameters()))
    assert all(held[name] is parameter for name, parameter in model.named_parameters())


@on_ranks()
def test_on_a_backend_that_is_not_gloo_parts_of_unequal_length_travel_too(rank: int) -> None:
    register()
    all_ranks = dist.new_group([0, 1, 2, 3], backend=NAME)
    nodes = [dist.new_group(ranks, backend=NAME) for ranks in ([0, 1], [2, 3])]
    mesh = layerzero.mesh_from_groups(all_ranks, nodes[rank // 2])
    for dtype in (None, BF16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
        model = layerzero.shard_model(Wide(), mesh=mesh, units=Wide.UNITS, mp_policy=policy)
        net = Wide()
        ours, theirs = owned_sgd(model), exact_sgd(net.parameters())
        for step in range(4):
            step_of(model, [ours], [rank], step, 1.0, 2)
            step_of(net, [theirs], range(4), step, 0.25, 2)
        assert not different(full_parameters(model), dict(net.named_parameters()))


# Refusals


@on_ranks()
def test_what_would_lose_or_misplace_rows_is_refused(rank: int) -> None:
    def build() -> tuple[nn.Module, LayerwiseScaling]:
        model = layerzero.shard_model(Wide(), mesh=mesh_of(2), units=Wide.UNITS)
        return model, LayerwiseScaling(model.parameters())

    model, inner = build()
    model(rows(rank, 0)).backward()
    before = full_parameters(model)
    with pytest.raises(RuntimeError, match=r"already have gradients. Call shard_optimizer before .*zero_grad"):
        layerzero.shard_optimizer(inner, model)
    with pytest.raises(RuntimeError, match="shard_optimizer"):
        inner.step()
    model.zero_grad()
    with layerzero.unsharded(model), pytest.raises(RuntimeError, match=r"called inside layerzero\.unsharded"):
        layerzero.shard_optimizer(inner, model)
    ours = layerzero.shard_optimizer(inner, model)
    assert not different(full_parameters(model), before)
    step_of(model, [ours], [rank], 0, 1.0, 2)
    with pytest.raises(RuntimeError, match=r"norm\(\) of LayerwiseScaling is not supported"):
        ours.norm(model.scale)
    with pytest.raises(NotImplementedError, match=r"layerzero.checkpoint.save"):
        get_optimizer_state_dict(model, ours)

    model, inner = build()
    sgd = layerzero.shard_optimizer(exact_sgd(others(model)), model)
    step_of(model, [sgd], [rank], 0, 1.0, 2)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"another optimizer already has state for .*before the first step"):
        layerzero.shard_optimizer(LayerwiseScaling(matrices(model)), model)
    step_of(model, [sgd], [rank], 1, 1.0, 2)  # it continues

    model, inner = build()
    ema, alias, entry = layerzero.EMA(model), model.a.weight.detach(), copy.deepcopy(model.state_dict())
    layerzero.shard_optimizer(inner, model)
    for use in (ema.update, ema.state_dict, ema.swapped().__enter__):
        with pytest.raises(RuntimeError, match="Create the EMA after shard_optimizer"):
            use()
    with torch.no_grad(), pytest.raises(RuntimeError, match="Read them from the parameter again"):
        alias.add_(1)
    resharded = "'a.weight' cannot be copied from 'a.weight', which has another sharding"
    with torch.no_grad(), pytest.raises(ValueError, match=resharded):
        model.a.weight.data.copy_(alias)
    with pytest.raises(RuntimeError, match=resharded):
        model.load_state_dict(entry)

    model, _ = build()
    held = matrices(model) if rank == 0 else list(model.parameters())
    with pytest.raises(ValueError, match=r"parameters that an optimizer needs in full: ranks disagree: names"):
        layerzero.shard_optimizer(LayerwiseScaling(held), model)
