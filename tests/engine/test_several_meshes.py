"""Units on two meshes: prefetching and its memory, and the mesh of each parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import layerzero
from layerzero import Offload
from layerzero.engine.hooks import get_state
from layerzero.engine.passes import UnitCall
from layerzero.engine.scheduler import Scheduler
from tests.sharding.test_expert_parallel import integer_batch, integer_loss, shard
from tests.support.expert_programs import Expert, ExpertNet, expert_mesh_of, expert_units, experts_mesh
from tests.support.late_device import NAME, Device, register
from tests.support.models import different, exact_sgd, full_gradients, full_parameters, update
from tests.support.ranks import mesh_of, needs_caching, on_ranks, run_ranks
from tests.support.wrapped_gloo import mesh_on

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


@on_ranks()
def test_a_backward_gathers_ahead_where_units_of_two_meshes_follow_each_other(rank: int) -> None:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    rest = layerzero.init_mesh(2)
    names = [str(index) for index in range(COUNT)]
    for mesh, apart in ((rest, 1), (lambda name, _: whole["edp"] if name in ("1", "3", "5") else rest, 2)):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in names))
        model = layerzero.shard_model(model, mesh=mesh, units=names)
        for _ in range(2):
            expected = {name: [names[at - apart]] if at >= apart else [] for at, name in enumerate(names)}
            assert _gathered_ahead(model) == expected, apart


@needs_caching
@on_ranks()
def test_memory_is_as_predicted_with_several_meshes(rank: int) -> None:
    for expert_size, size in ((2, 4), (2, 2), (1, 2)):
        model, optimizer = shard(2, size, expert_size=expert_size)
        for step in range(3):
            integer_loss(model, integer_batch(rank=rank, step=step)).backward()
            update(optimizer)
        report = layerzero.memory(model)
        assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted, (expert_size, size)
    for (ep, size, expert_size), kind in itertools.product(((1, 4, 2), (2, 4, 2)), ("nested", "frozen", "flat")):
        own, _ = experts_mesh(expert_size, ep)
        mesh, units = expert_mesh_of(layerzero.init_mesh(size), own), expert_units(kind)
        model = layerzero.shard_model(ExpertNet(kind), mesh=mesh, units=units, accumulation="sharded")
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        for _ in range(3):
            _loss(model, rank, "all").backward()
            update(optimizer)
        report = layerzero.memory(model)
        assert {key: report.measured[key] for key in report.predicted} == report.predicted, (kind, ep, report)


class Experts(nn.Module):
    """Module with an expert's weight, a DTensor on the ep axis, and a plain router."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.router = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        held = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return self.router(x @ held[0])


@on_ranks()
def test_a_router_on_the_mesh_of_its_experts_is_refused(rank: int) -> None:
    """Refuse the mesh: the router's copies would be trained as separate parameters."""
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
    # Meshes of the same ranks differ by their ZeRO-3 sizes.
    sizes = {"": 1, "0": 4, "1": 1}
    meshes = {name: layerzero.init_mesh(size) for name, size in sizes.items()}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = layerzero.shard_model(model, mesh=lambda name, module: meshes[name], units=["0", "1"])
    assert {unit.name: unit.mesh_info.zero3_size for unit in get_state(model).units} == sizes


STEPS = [("all", "none"), ("none", "all"), ("reversed", "none", "first", "none"), ("none",), ("last", "all")]


def _programs(rank: int, cases: Sequence[tuple[str, Sequence[int], dict[str, Any]]], on_device: bool) -> None:
    """Train with experts that some ranks or all ranks do not call in a step, and compare with one process."""
    world = dist.get_world_size()
    if on_device:
        register()
    for kind, (ep, size, expert_size), settings in cases:
        own, axis = experts_mesh(expert_size, ep)
        root = mesh_of(size)
        if on_device:
            own, root = mesh_on(NAME, expert_size), mesh_on(NAME, size)
        alone = [ExpertNet(kind) for _ in range(ep)]
        for net in alone[1:]:  # all parameters but those of the experts are shared
            for path, module in alone[0].named_modules():
                if not isinstance(module, Expert):
                    net.get_submodule(path)._parameters.update(module._parameters)
        exact = exact_sgd({p: None for net in alone for p in net.parameters()})
        # Ranks of a ZeRO-3 group of the experts call the same ones.
        groups = [each // (ep * expert_size) * ep + each % ep for each in range(world)]
        meet = partial(dist.barrier, axis.get_group())
        model = ExpertNet(kind, settings.get("recompute", "none"), meet)
        with Device(one_at_a_time=True).installed() if on_device else nullcontext():
            engine = {name: value for name, value in settings.items() if name != "recompute"}
            layerzero.shard_model(model, mesh=expert_mesh_of(root, own), units=expert_units(kind), **engine)
            optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
            for step, choices in enumerate(STEPS):
                chosen = [choices[group % len(choices)] for group in groups]
                for micro_batch in range(2):
                    with layerzero.no_sync(model) if micro_batch == 0 and step % 2 else nullcontext():
                        _loss(model, rank, chosen[rank]).backward()
                for each in range(world):
                    (_loss(alone[each % ep], each, chosen[each]) * 2 / world).backward()
                net = alone[rank % ep]
                expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
                assert not different(full_gradients(model), expected), (kind, settings, step)
                update(optimizer, exact)
                assert not different(full_parameters(model), dict(net.named_parameters())), (kind, settings, step)


def _loss(model: nn.Module, rank: int, choice: str) -> Tensor:
    return model(torch.ones(1, 4), choice).sum() * (rank + 1)


# Kind of the model; ep, S of the root, S of the experts; settings.
PROGRAMS: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("nested", (2, 2, 1), {"prefetch": 0, "accumulation": "local"}),
    ("returned", (1, 2, 4), {"prefetch": 2, "recompute": "reentrant"}),
    ("inner", (2, 4, 2), {"recompute": "other", "accumulation": "full"}),
    ("twice", (2, 2, 1), {"prefetch": 2}),
    ("frozen", (1, 4, 2), {"prefetch": 0, "recompute": "other"}),
    ("flat", (2, 1, 2), {"recompute": "reentrant"}),
    ("twice", (1, 2, 1), {"accumulation": "full", "recompute": "other", "prefetch": 0}),
    ("inner", (1, 1, 2), {"reshard_after_forward": False}),
    ("beside", (2, 2, 1), {}),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_may_call_no_experts(world_size: int) -> None:
    cases = [("nested", (1, world_size, 1), {}), ("flat", (1, 1, world_size), {"accumulation": "full"})]
    run_ranks(_programs, cases, False, world_size=world_size, pg_timeout=10)


@pytest.mark.slow
def test_ranks_may_call_no_experts_in_any_model() -> None:
    run_ranks(_programs, PROGRAMS, False, pg_timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_of_a_device_may_call_no_experts(world_size: int) -> None:
    """Run the collectives of each rank one at a time, in the order of their launches."""
    cases = [
        (kind, (1, 2, 1 if world_size == 2 else size), each | {"offload": Offload(grads=kind == "frozen")})
        for kind, (ep, _, size), each in PROGRAMS
        if ep == 1
    ]
    run_ranks(_programs, cases, True, world_size=world_size, pg_timeout=20)
