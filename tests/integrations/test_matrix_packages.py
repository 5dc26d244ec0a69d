"""Optimizers of pytorch_optimizer that need whole parameters train as in one process."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
from torch import nn
from torch.optim import Optimizer

import layerzero
from tests.support.models import different, full_parameters
from tests.support.ranks import mesh_of, run_ranks
from tests.test_matrix_optimizers import Wide, step_of

NAMES = ("SOAP", "Shampoo", "Lamb", "CAME", "StableAdamW", "MARS")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer, installed with --no-deps"
)


def _build(name: str, model: nn.Module) -> Optimizer:
    import pytorch_optimizer  # noqa: PLC0415 - not there on every machine

    return getattr(pytorch_optimizer, name)(model.parameters(), lr=0.01)


def _train(rank: int, zero3_size: int) -> None:
    warnings.simplefilter("ignore")  # theirs
    for name in NAMES:
        model, net = layerzero.shard_model(Wide(), mesh=mesh_of(zero3_size), units=Wide.UNITS), Wide()
        ours, theirs = layerzero.shard_optimizer(_build(name, model), model), _build(name, net)
        for step in range(4):
            step_of(model, [ours], [rank], step, 1.0, zero3_size)
            step_of(net, [theirs], range(4), step, 0.25, zero3_size)
        wrong = different(full_parameters(model), dict(net.named_parameters()))
        assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize("zero3_size", [1, 2, 4])
def test_optimizers_of_another_package_have_the_bits_of_one_process(zero3_size: int) -> None:
    run_ranks(_train, zero3_size)
