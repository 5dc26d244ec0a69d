"""The rows of a parameter are gathered in place: in equal parts, in unequal parts, or from a few ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.late_device import on_device
from tests.support.models import different
from tests.support.ranks import mesh_of, on_ranks


@on_ranks()
def test_full_parameters_are_those_of_one_process_on_gloo_and_on_a_device(rank: int) -> None:
    for context in (nullcontext((None, mesh_of(2))), on_device()):
        net = nn.Sequential(nn.Linear(4, 10, bias=False), nn.Linear(10, 3))
        for parameter in net.parameters():
            nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
        whole = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        with context as (_, mesh):
            model = layerzero.shard_model(net, mesh=mesh, units=["0"])
            counts = {name: member.spec.row_counts for name, member in get_state(model).members.items()}
            assert counts["0.weight"] == (3, 3, 3, 1), "equal parts in one ZeRO-3 shard, unequal ones in the other"
            assert counts["1.bias"].count(0) == 3, "all rows on one rank"
            assert not different(layerzero.full_state_dict(model, rank0_only=False), whole)
