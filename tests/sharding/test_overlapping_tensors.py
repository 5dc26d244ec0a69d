"""Models whose tensors share memory when they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from tests.support.ranks import on_ranks


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    size = torch.distributed.get_world_size()
    return layerzero.shard_model(model, mesh=init_device_mesh("cpu", (max(1, size // 2), min(2, size))), **settings)


def _pair(first: Tensor, second: Tensor) -> nn.Module:
    model = nn.Module()
    model.a, model.b = nn.Parameter(first), nn.Parameter(second)
    return model


def _data_tie() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    return model


def _buffer_view(values: Tensor) -> nn.Module:
    model = _pair(values, torch.ones(1))
    model.register_buffer("table", values[1:])
    return model


def _one_twice(values: Tensor) -> nn.Module:
    model = _pair(values, values)
    model.b = model.a
    return model


SHARED: dict[str, Callable[[Tensor], nn.Module]] = {  # given a matrix of shape [6, 4]
    "weights tied through .data": lambda _: _data_tie(),
    "the same memory": lambda base: _pair(base, base.view(-1)),
    "rows inside": lambda base: _pair(base, base[2:3]),
    "overlapping rows": lambda base: _pair(base[:3], base[2:]),
    "overlapping columns": lambda base: _pair(base[:, :3], base[:, 2:]),
    "transposed": lambda base: _pair(base, base.t()),
    "another dtype": lambda base: _pair(base[1:], base.view(torch.bfloat16)[:2]),
    "on meta": lambda base: _pair(*[base.to("meta")] * 2),
    "one element": lambda base: _pair(base[5, 3], base[5]),
    "a buffer": _buffer_view,
    "frozen": lambda base: _pair(base, base).requires_grad_(False),
}
DISJOINT: dict[str, Callable[[Tensor], nn.Module]] = {
    "rows": lambda base: _pair(base[:3], base[3:]),
    "columns": lambda base: _pair(base[:, :3], base[:, 3:]),
    "even and odd rows": lambda base: _pair(base[::2], base[1::2]),
    "zero-size": lambda base: _pair(base, base[6:]),
    "the last element": lambda base: _pair(base.view(-1)[:23], base[5, 3]),
    "a copy": lambda base: _pair(base, base.clone()),
    "one parameter": _one_twice,
    "on meta": lambda base: _pair(base.to("meta"), base.to("meta")),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_tensors_that_share_elements_are_refused_and_views_of_one_buffer_are_not(rank: int, world_size: int) -> None:
    for name, make in SHARED.items():
        with pytest.raises(ValueError, match=r"shares memory with .*b\.weight = a\.weight.*p\.data\.clone\(\)"):
            _shard(make(torch.arange(24.0).view(6, 4)), param_init_fn=lambda module: None)
            pytest.fail(f"{name} was accepted")
    for make in DISJOINT.values():
        model = make(torch.arange(24.0).view(6, 4))
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        _shard(model, param_init_fn=lambda module: None)
        for name, parameter in model.named_parameters():
            assert expected[name].is_meta or torch.equal(parameter.detach().full_tensor(), expected[name])
    ignoring = _pair(*[torch.ones(3)] * 2)
    with pytest.raises(ValueError, match="parameter 'b' shares memory with 'a'"):
        _shard(ignoring, ignored_params=[ignoring.a])
    recurrent = nn.LSTM(4, 3, num_layers=2)
    flat = torch.cat([p.detach().flatten() for p in recurrent.parameters()])
    for p, values in zip(recurrent.parameters(), flat.split([p.numel() for p in recurrent.parameters()]), strict=True):
        p.data = values.view(p.shape)
    _shard(recurrent)
