"""Units on two meshes: whose parameters are on which."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import layerzero
from layerzero.engine.hooks import runtime_of
from tests.support.ranks import run_ranks


class Experts(nn.Module):
    """An expert's weight, a DTensor on the ep axis, beside which something plain lies."""

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
    assert {unit.name: len(unit.topology.ranks) for unit in runtime_of(model).units} == {"": 4, "0": 2, "0.router": 4}
    frozen = made()
    frozen[0].router.requires_grad_(False)
    layerzero.shard_model(frozen, mesh=mesh_of, units=[Experts])


def test_a_router_on_the_mesh_of_its_experts_is_refused() -> None:
    """Its copies would be trained as parameters of their own."""
    run_ranks(_router)
