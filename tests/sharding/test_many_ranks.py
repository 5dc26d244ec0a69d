"""The host's work and memory per parameter do not grow with the number of ranks."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import layerzero


def _layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(count)))


def _costs(world_size: int) -> tuple[int, int]:
    """Return the numbers of calls and of bytes that 16 more layers cost on rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    try:
        costs, mesh = [], layerzero.init_mesh(8)
        layerzero.shard_model(_layers(1), mesh=mesh, units=nn.Linear, shared_memory="off")  # imports and caches
        for layers in (4, 4, 20):  # the first warms up
            calls, model = 0, _layers(layers)
            gc.collect()  # of the previous model
            tracemalloc.start()
            sys.setprofile(count)
            layerzero.shard_model(model, mesh=mesh, units=nn.Linear, shared_memory="off", sync_module_states=False)
            sys.setprofile(None)
            gc.collect()
            costs.append((calls, tracemalloc.get_traced_memory()[0]))
            tracemalloc.stop()
        return costs[2][0] - costs[1][0], costs[2][1] - costs[1][1]
    finally:
        sys.setprofile(None)
        dist.destroy_process_group()


def test_a_parameter_costs_the_same_on_64_ranks_and_on_4096() -> None:
    (calls, size), (more_calls, more_size) = _costs(64), _costs(4096)
    assert more_calls < 1.1 * calls and more_size < 1.1 * size, (calls, more_calls, size, more_size)
