# ruff: noqa: PLC0415 (Megatron is imported where the stand-ins are in place)
"""Units of Megatron models, and the messages about unknown layers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero.megatron
from layerzero.engine.hooks import get_state
from tests.support.megatron_ranks import HIDDEN, Case, make_chunks, make_config, megatron
from tests.support.ranks import on_ranks

CASE = Case(tp=1, pp=1, zero3_size=2, layers=2)


class Mixer(nn.Module):
    """Replacement for the state space kernels, which need a GPU."""

    def __init__(self, config: Any, d_model: int, **unused: Any) -> None:
        super().__init__()
        self.mix = nn.Linear(d_model, d_model)

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        return self.mix(hidden), None


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def _mamba_layers(config: Any) -> list[nn.Module]:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=Mixer, mamba_bda=get_bias_dropout_add)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return [MambaLayer(config, parts, layer_number=number, pg_collection=groups) for number in (1, 2)]


def _units(chunk: nn.Module) -> list[str]:
    """Return the names of the units, without the root."""
    return [unit.name for unit in get_state(chunk).units if unit.name]


@on_ranks(world_size=2)
def test_mamba_layers_are_units(rank: int) -> None:
    with megatron(CASE):
        torch.manual_seed(0)
        config = make_config(CASE)
        stack = Stack(_mamba_layers(config))
        batch = torch.randn(4, 2, HIDDEN)
        expected = torch.autograd.grad(stack(batch).square().sum(), [*stack.parameters()])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (chunk,) = layerzero.megatron.wrap(stack, config, zero3_size=2)
        assert _units(chunk) == ["module.layers.0", "module.layers.1"]
        chunk(batch).square().sum().backward()
        assert layerzero.traffic(chunk).calls["gather"] > 2
        for gradient, parameter in zip(expected, chunk.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


@on_ranks(world_size=2)
def test_layers_that_are_not_recognized_are_told_with_their_bytes(rank: int) -> None:
    with megatron(CASE):
        config = make_config(CASE)
        size = 2 * (HIDDEN * HIDDEN + HIDDEN) * 4 / 2**20
        said = rf"2 layers of class Linear are not units.*\({size:,.1f} MiB on this rank\).*Add their class to units"
        with pytest.warns(UserWarning, match=said):
            (chunk,) = layerzero.megatron.wrap(
                Stack([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]), config, zero3_size=2
            )
        assert not _units(chunk)
        gpt = make_chunks(CASE, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stack = Stack([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
            (chunk,) = layerzero.megatron.wrap(stack, config, zero3_size=2, units=["Linear"])
            assert _units(chunk) == ["module.layers.0", "module.layers.1"]
            (chunk,) = layerzero.megatron.wrap(gpt, config, zero3_size=2)
        assert sum("layers" in name for name in _units(chunk)) == CASE.layers
