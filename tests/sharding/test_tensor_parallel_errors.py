"""Tensor parallel ranks that disagree: one error on all of them, as among data-parallel ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import layerzero
from tests.support.models import different, full_parameters
from tests.support.ranks import on_ranks, run_ranks


class Net(nn.Module):
    """Net with a sharded parameter, a replicated DTensor, a plain parameter, and a layer."""

    def __init__(self, tp: DeviceMesh, *, on_meta: bool = False) -> None:
        super().__init__()
        self.cut = nn.Parameter(distribute_tensor(torch.ones(4), tp, [Shard(0)]))
        self.copied = nn.Parameter(distribute_tensor(torch.ones(4), tp, [Replicate()]))
        self.plain = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4, bias=False, device="meta" if on_meta else None)

    def forward(self, x: Tensor) -> Tensor:
        cut, copied = (p.full_tensor() if isinstance(p, DTensor) else p for p in (self.cut, self.copied))
        return self.linear(x * cut * copied * self.plain).sum()


def _meshes() -> DeviceMesh:
    """Return the mesh of all ranks: two on the tp axis, the others data-parallel."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


def _shard(**settings: Any) -> nn.Module:
    mesh = _meshes()
    return layerzero.shard_model(Net(mesh["tp"]), mesh=mesh["dp"], **settings)


@on_ranks()
def test_different_models_and_settings_are_refused_before_anything_is_sent(rank: int) -> None:
    mesh = _meshes()
    odd = rank % 2 == 1
    freeze: Callable[[Net], Any] = lambda net: net.plain.requires_grad_(False) if odd else None  # noqa: E731
    rename: Callable[[Net], Any] = lambda net: net.register_buffer("table", torch.ones(2 + odd))  # noqa: E731

    def tie(net: Net) -> None:
        net.register_buffer("first", torch.ones(2))
        net.register_buffer("second", torch.ones(2) if odd else net.first)

    for change, settings, match in (
        (tie, {}, r"names of the buffer 'first' is .*first.*second.* on rank.*absent on rank"),
        (freeze, {}, r"parameter 'plain' is .* frozen .* on rank [13]"),
        (rename, {}, r"buffer 'table' is"),
        (None, {"units": ["linear"] if odd else None}, r"units is"),
        (None, {"prefetch": 1 + odd}, r"prefetch is 1 on rank [02] and 2 on rank [13]"),
        (None, {"accumulation": "full" if odd else "sharded"}, r"accumulation of the root"),
    ):
        net = Net(mesh["tp"])
        if change is not None:
            change(net)
        with pytest.raises(ValueError, match=match):
            layerzero.shard_model(net, mesh=mesh["dp"], **settings)
    # Ranks of one data-parallel group are alike, and learn how the others differ.
    with pytest.raises((ValueError, RuntimeError), match="prefetch"):
        layerzero.shard_model(Net(mesh["tp"]), mesh=mesh["dp"], prefetch=2 if rank == 3 else 1)
    layerzero.shard_model(Net(mesh["tp"]), mesh=mesh["dp"])(torch.ones(4)).backward()


def _initialize(rank: int) -> tuple[str, float]:
    mesh = _meshes()

    def initialize(module: nn.Module) -> None:
        if rank % 2:
            raise ValueError("no values for this module")
        nn.init.ones_(module.weight)

    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        layerzero.shard_model(Net(mesh["tp"], on_meta=True), mesh=mesh["dp"], param_init_fn=initialize)
    said = str(caught.value), time.monotonic() - began
    layerzero.shard_model(Net(mesh["tp"]), mesh=mesh["dp"])  # no rank is left in a collective
    return said


def test_an_initialization_that_fails_on_some_tp_ranks_fails_on_all() -> None:
    for message, seconds in run_ranks(_initialize, pg_timeout=30):
        assert "no values for this module" in message and seconds < 25, (message, seconds)


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_copies_that_were_edited_differently_on_tp_ranks_are_refused(rank: int, world_size: int) -> None:
    model = _shard()
    before = full_parameters(model)
    for name in ("plain", "copied"):  # the same on the ranks of a data-parallel group
        refused = pytest.raises(ValueError, match=rf"ranks disagree: {name} is")
        with refused, layerzero.unsharded(model, writeback=True), torch.no_grad():
            getattr(model, name).add_(rank % 2)
        assert not different(full_parameters(model), before)
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        model.plain.add_(1)
        model.cut.to_local().add_(rank % 2)  # each rank has its own part
    assert torch.equal(model.plain.detach().full_tensor(), torch.full((4,), 2.0))
    assert torch.equal(model.cut.detach().full_tensor(), torch.tensor([1.0, 1, 2, 2]))
    if torch.distributed.get_world_size() == 4:
        refused = pytest.raises(ValueError, match=r"ranks disagree: cut is .*\b3\b")
        with refused, layerzero.unsharded(model, writeback=True), torch.no_grad():
            model.cut.to_local().add_(rank == 3)


def _load(rank: int) -> list[str]:
    model = _shard()
    x = torch.ones(4)
    whole = {name: torch.full_like(value, 3.0) for name, value in full_parameters(model).items()}
    model.load_state_dict(whole)
    model(x)
    said = []
    for name in ("plain", "cut"):
        model.load_state_dict(whole | {name: torch.full((4,), float(rank % 2))})
        with pytest.raises(ValueError) as caught:
            model(x)
        said.append(str(caught.value))
        model.load_state_dict(whole)
        model(x)
    return said


@pytest.mark.parametrize("world_size", [2, 4])
def test_different_values_that_tp_ranks_have_loaded_are_refused_at_the_next_forward(world_size: int) -> None:
    for messages in run_ranks(_load, world_size=world_size):
        for name, message in zip(("plain", "cut"), messages, strict=True):
            assert re.search(rf"ranks disagree: digest of the full tensor for '{name}' is .* on rank.* 1", message)
