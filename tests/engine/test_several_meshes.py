"""Units on two meshes: prefetching and its memory, and the mesh of each parameter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.engine.passes import UnitCall
from layerzero.engine.scheduler import Scheduler
from tests.estimates.test_memory_estimate import needs_caching
from tests.sharding.test_expert_parallel import integer_batch, integer_loss, shard
from tests.support.ranks import run_ranks

COUNT = 6


def _gathered_ahead(model: nn.Module) -> dict[str, list[str]]:
    """Return the units that a backward prefetches at each unit."""
    ahead: dict[str, list[str]] = {}
    prefetch = Scheduler._prefetch_before

    def prefetching(self: Scheduler, call: UnitCall) -> None:
        ahead[call.unit.name] = [earlier.unit.name for earlier in call.preceding_calls(self._config.prefetch)]
        prefetch(self, call)

    x = torch.ones(1, 4, requires_grad=True) * 1
    with mock.patch.object(Scheduler, "_prefetch_before", prefetching):
        model(x).sum().backward()
    ahead.pop("", None)
    return ahead


def _prefetch(rank: int) -> None:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    rest = layerzero.init_mesh(2)
    names = [str(index) for index in range(COUNT)]
    for mesh, apart in ((rest, 1), (lambda name, _: whole["edp"] if name in ("1", "3", "5") else rest, 2)):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in names))
        model = layerzero.shard_model(model, mesh=mesh, units=names)
        for _ in range(2):
            expected = {name: [names[at - apart]] if at >= apart else [] for at, name in enumerate(names)}
            assert _gathered_ahead(model) == expected, apart


def test_a_backward_gathers_ahead_where_units_of_two_meshes_follow_each_other() -> None:
    run_ranks(_prefetch)


def _memory(rank: int) -> None:
    for expert_size, size in ((2, 4), (2, 2), (1, 2)):
        model, optimizer = shard(2, size, expert_size=expert_size)
        for step in range(3):
            integer_loss(model, integer_batch(rank=rank, step=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        report = layerzero.memory(model)
        assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted, (expert_size, size)


@needs_caching
def test_memory_is_as_predicted_with_several_meshes() -> None:
    run_ranks(_memory)


class Experts(nn.Module):
    """Module with an expert's weight, a DTensor on the ep axis, and a plain router."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.router = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        held = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return self.router(x @ held[0])


def _router(rank: int) -> None:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    rest = layerzero.init_mesh(2)

    def made() -> nn.Module:
        weight = DTensor.from_local(torch.ones(1, 4, 4), whole["ep"], [Shard(0)], run_check=False)
        return nn.Sequential(Experts(weight))

    def mesh_of(name: str, module: nn.Module) -> object:
        return whole["edp"] if isinstance(module, Experts) else rest

    with pytest.raises(ValueError, match=r"'0.router.weight' is a plain tensor in unit '0'.*unit on the root's mesh"):
        layerzero.shard_model(made(), mesh=mesh_of, units=[Experts])
    model = layerzero.shard_model(made(), mesh=mesh_of, units=[Experts, nn.Linear])
    assert {unit.name: len(unit.mesh_info.ranks) for unit in get_state(model).units} == {"": 4, "0": 2, "0.router": 4}
    frozen = made()
    frozen[0].router.requires_grad_(False)
    layerzero.shard_model(frozen, mesh=mesh_of, units=[Experts])


def test_a_router_on_the_mesh_of_its_experts_is_refused() -> None:
    """Refuse the mesh: the router's copies would be trained as separate parameters."""
    run_ranks(_router)
