"""A module that contains sharded models but is not one: a trainer's wrapper, a GAN."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from tests.support.models import different, full_gradients, integer_batch, integer_loss, integer_net, union
from tests.support.ranks import on_ranks

WORLD = 4


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"generator": integer_net(1), "critic": integer_net(2)})
        self.register_buffer("steps", torch.tensor(3))


def _sharded() -> Gan:
    gan = Gan()
    layerzero.shard_model(gan.parts["generator"], zero3_size=2, units=["first", "head"])
    layerzero.shard_model(gan.parts["critic"], zero3_size=4, units=["first"])
    return gan


@on_ranks(world_size=WORLD)
def test_functions_of_a_loop_work_on_all_of_them(rank: int) -> None:
    gan, alone = _sharded(), Gan()
    with layerzero.no_sync(gan):
        for part in gan.parts.values():
            integer_loss(part, integer_batch(rank=rank)).backward()
    assert not layerzero.traffic(gan).calls.get("hop2")
    for part in alone.parts.values():
        integer_loss(part, union([integer_batch(rank=r) for r in range(WORLD)])).backward()
    for norm_type in (2.0, float("inf"), 1.0):
        ours = layerzero.clip_grad_norm_(gan, 1e9, norm_type)
        torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9, norm_type))
    layerzero.clip_grad_norm_(gan, 1.0)
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    for key, part in gan.parts.items():
        for name, gradient in full_gradients(part).items():
            torch.testing.assert_close(gradient, alone.parts[key].get_parameter(name).grad)

    state = layerzero.full_state_dict(gan, rank0_only=False)
    assert not different(state, alone.state_dict()) and list(state) == list(alone.state_dict())
    assert bool(layerzero.full_state_dict(gan)) is (rank == 0)

    memory, traffic = layerzero.memory(gan), layerzero.traffic(gan)
    each = [(layerzero.memory(part), layerzero.traffic(part)) for part in gan.parts.values()]
    for kind, nbytes in memory.measured.items():
        assert nbytes == sum(m.measured[kind] for m, _ in each), kind
    assert memory.predicted["zero1_shard"] == sum(m.predicted["zero1_shard"] for m, _ in each)
    assert traffic.bytes_by_axis["zero3"] == sum(t.bytes_by_axis["zero3"] for _, t in each)
    assert traffic.calls["unshard"] == sum(t.calls["unshard"] for _, t in each)
    assert str(memory) and str(traffic)
    layerzero.traffic(gan, reset=True)
    assert not any(layerzero.traffic(part).calls for part in gan.parts.values())


@on_ranks(world_size=WORLD)
def test_others_name_the_models_inside(rank: int) -> None:
    gan = _sharded()
    calls: dict[str, Any] = {
        "refresh": layerzero.refresh,
        "EMA": layerzero.EMA,
        "load_full_state_dict": lambda gan: layerzero.load_full_state_dict(gan, {}),
        "save": lambda gan: layerzero.checkpoint.save("nowhere", gan),
        "shard_optimizer": lambda gan: layerzero.shard_optimizer(torch.optim.SGD(gan.parameters(), lr=1.0), gan),
    }
    for name, call in calls.items():
        with pytest.raises(
            ValueError, match=r"not sharded, but contains sharded models.*'parts\.generator', 'parts\.critic'"
        ) as caught:
            call(gan)
        assert "each of these models" in str(caught.value), name
    gan.extra = nn.Linear(2, 2)
    gan.extra(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"'extra\.weight'.*'parts\.generator'"):
        layerzero.clip_grad_norm_(gan, 1.0)
    for call in (layerzero.memory, layerzero.full_state_dict, lambda m: layerzero.clip_grad_norm_(m, 1.0)):
        with pytest.raises(ValueError, match="shard_model"):
            call(copy.deepcopy(gan.extra))


@on_ranks(world_size=WORLD)
def test_a_state_of_models_on_different_ranks_is_refused(rank: int) -> None:
    gan, mesh = Gan(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "dp"))
    layerzero.shard_model(gan.parts["generator"], zero3_size=2)
    layerzero.shard_model(gan.parts["critic"], mesh=mesh["dp"])
    expected = "'parts.generator' on ranks [0, 1, 2, 3], 'parts.critic' on ranks {}. Call it for each of these models"
    with pytest.raises(ValueError, match=re.escape(expected.format([0, 1] if rank < 2 else [2, 3]))):
        layerzero.full_state_dict(gan)
    for part, alone in zip(gan.parts.values(), Gan().parts.values(), strict=True):
        assert not different(layerzero.full_state_dict(part, rank0_only=False), alone.state_dict())
