"""Sharded stages in the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import layerzero
from tests.support.graphs import WIDTH, Block
from tests.support.models import update
from tests.support.ranks import BOTH_SHARED_SLOW, on_ranks

SAMPLES, MICRO_BATCHES, STEPS = 2, 4, 3


def whole_model(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers))).float()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def loss_of_micro_batch(output: Tensor, target: Tensor) -> Tensor:
    """Return the scaled loss: scaling by the schedules (`scale_grads`) would come before the reduction."""
    return loss_of(output, target) / MICRO_BATCHES


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    inputs, targets = torch.randn(2, MICRO_BATCHES * SAMPLES, WIDTH, generator=generator)
    return inputs, targets


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _alone(layers: int, replicas: int) -> dict[str, Tensor]:
    net = whole_model(layers)
    optimizer = sgd(net.parameters())
    for step in range(STEPS):
        for replica in range(replicas):
            inputs, targets = batch(step, replica)
            (loss_of(net(inputs), targets) / replicas).backward()
        update(optimizer)
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def _train(rank: int, interleaved: bool, zero3_size: int, accumulation: str) -> None:
    stages_here = 2 if interleaved else 1
    pipeline, replica = rank % 2, rank // 2  # ranks 0 and 1 are the stages of replica 0
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([r]) for r in range(4)]
    zero3_group = replicas[pipeline] if zero3_size == 2 else alone[rank]
    mesh = layerzero.mesh_from_groups(replicas[pipeline], zero3_group)
    count = 2 * stages_here
    layers = 2 * count
    sent = torch.zeros(SAMPLES, WIDTH, requires_grad=True)  # between stages; given so that torch traces nothing
    chunks, stages, optimizers = [], [], []
    for index in range(pipeline, count, 2):
        chunk = nn.Sequential(*whole_model(layers)[2 * index : 2 * index + 2])
        chunk = layerzero.shard_model(chunk, mesh=mesh, units=Block, accumulation=accumulation)
        chunks.append((index, chunk))
        optimizers.append(layerzero.shard_optimizer(sgd(chunk.parameters()), chunk))
        device = torch.device("cpu")
        stages.append(
            PipelineStage(
                chunk,
                index,
                count,
                device,
                input_args=sent if index else sent.detach(),
                output_args=sent,
                group=groups[replica],
            )
        )
    settings: dict[str, Any] = {"loss_fn": loss_of_micro_batch, "scale_grads": False}
    if interleaved:
        schedule: Any = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, **settings)
    else:
        schedule = Schedule1F1B(stages[0], MICRO_BATCHES, **settings)
    for step in range(STEPS):
        inputs, targets = batch(step, replica)
        for _, chunk in chunks:
            layerzero.traffic(chunk, reset=True)
        with layerzero.no_sync(chunks[0][1]), layerzero.no_sync(chunks[-1][1]):  # step() reduces, once
            schedule.step(*([inputs] if pipeline == 0 else []), target=targets if pipeline == 1 else None)
        update(*optimizers)
        for _, chunk in chunks:
            calls = layerzero.traffic(chunk).calls
            if zero3_size == 1:
                hop2 = 2 * (MICRO_BATCHES if accumulation == "local" else 1)
                assert calls["hop2"] == hop2, "one for each layer of the chunk"
            hop1 = 0 if zero3_size == 1 else 2 * (1 if accumulation == "full" else MICRO_BATCHES)
            assert calls.get("hop1", 0) == hop1
    expected = _alone(layers, 2)
    for index, chunk in chunks:
        for name, parameter in chunk.named_parameters():
            layer, _, rest = name.partition(".")
            whole = parameter.detach().full_tensor()
            torch.testing.assert_close(whole, expected[f"{2 * index + int(layer)}.{rest}"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("interleaved", [pytest.param(False, id="1F1B"), pytest.param(True, id="Interleaved1F1B")])
@BOTH_SHARED_SLOW
@on_ranks()
def test_sharded_stages_train_like_one_process(rank: int, interleaved: bool, shared_memory: str) -> None:
    for zero3_size in (1, 2):
        for accumulation in ("sharded", "full", "local"):
            _train(rank, interleaved, zero3_size, accumulation)
