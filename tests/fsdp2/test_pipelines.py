"""Stages that `fully_shard` has sharded in the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import layerzero
from tests.end_to_end.test_torch_pipelining import (
    MICRO_BATCHES,
    SAMPLES,
    STEPS,
    WIDTH,
    _alone,
    batch,
    loss_of,
    sgd,
    whole_model,
)
from tests.support.models import update
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("interleaved", [False, True])
@on_ranks(world_size=4)
def test_schedules_reduce_and_scale_gradients_as_with_fsdp2(rank: int, interleaved: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place, replica, count = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), 4 if interleaved else 2
    sent = torch.zeros(SAMPLES, WIDTH, requires_grad=True)
    chunks: dict[int, nn.Module] = {}
    for index in range(place, count, 2):
        chunks[index] = nn.Sequential(*whole_model(2 * count)[2 * index : 2 * index + 2])
        for unit in (*chunks[index], chunks[index]):
            layerzero.fully_shard(unit, mesh=mesh["dp"])
    optimizers = [layerzero.shard_optimizer(sgd(chunk.parameters()), chunk) for chunk in chunks.values()]
    settings: dict[str, Any] = {"group": mesh["pp"].get_group(), "output_args": sent}
    stages = [
        PipelineStage(chunk, index, count, torch.device("cpu"), input_args=sent if index else sent.detach(), **settings)
        for index, chunk in chunks.items()
    ]
    kind: Any = ScheduleInterleaved1F1B if interleaved else Schedule1F1B
    schedule = kind(stages if interleaved else stages[0], MICRO_BATCHES, loss_fn=loss_of)
    for step in range(STEPS):
        inputs, targets = batch(step, replica)
        schedule.step(*([inputs] if place == 0 else []), target=targets if place == 1 else None)
        update(*optimizers)
    expected = _alone(2 * count, 2)
    for index, chunk in chunks.items():
        for name, parameter in chunk.named_parameters():
            layer, _, rest = name.partition(".")
            wanted = expected[f"{2 * index + int(layer)}.{rest}"]
            torch.testing.assert_close(parameter.detach().full_tensor(), wanted, rtol=1e-5, atol=1e-6)
