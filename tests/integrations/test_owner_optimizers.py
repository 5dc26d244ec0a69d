"""Optimizers of pytorch_optimizer that need full parameters train as in one process."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from tests.optimizers.test_owner_state import train
from tests.optimizers.test_owner_step import Wide, step_of
from tests.support.models import different, full_parameters
from tests.support.ranks import mesh_of, run_ranks

NAMES = ("SOAP", "Shampoo", "Lamb", "CAME", "StableAdamW", "MARS")
SETTINGS: dict[str, dict[str, float]] = {
    "Shampoo": {"matrix_eps": 1.0},  # the root of a nearly singular matrix is NaN on some processors
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer, installed with --no-deps"
)


def _build(name: str, model: nn.Module) -> Optimizer:
    import pytorch_optimizer  # noqa: PLC0415 - not there on every machine

    return getattr(pytorch_optimizer, name)(model.parameters(), lr=0.01, **SETTINGS.get(name, {}))


def _train(rank: int, zero3_size: int) -> None:
    warnings.simplefilter("ignore")  # from pytorch_optimizer
    for name in NAMES:
        model, net = layerzero.shard_model(Wide(), mesh=mesh_of(zero3_size), units=Wide.UNITS), Wide()
        ours, theirs = layerzero.shard_optimizer(_build(name, model), model), _build(name, net)
        for step in range(4):
            step_of(model, [ours], [rank], step, 1.0, zero3_size)
            step_of(net, [theirs], range(4), step, 0.25, zero3_size)
        expected = dict(net.named_parameters())
        assert all(p.isfinite().all() for p in expected.values()), f"{name} has no numbers in one process"
        wrong = different(full_parameters(model), expected)
        assert not wrong, f"{name}: {wrong}"


def _has_matrices(state: dict[str, Any], key: str) -> bool:
    return all(isinstance(each, Tensor) for each in state.get(key, [None]))


def _resume(rank: int, path: str, saves: bool) -> None:
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    model = layerzero.shard_model(Wide(), mesh=mesh_of(world), units=Wide.UNITS)
    optimizer = layerzero.shard_optimizer(_build("SOAP", model), model)
    if saves:
        train(model, [optimizer], range(2))
        checkpoint.save(path, model, optimizer)
        return
    checkpoint.load(path, model, optimizer)
    train(model, [optimizer], range(2, 4))
    net = Wide()
    theirs = _build("SOAP", net)
    train(net, [theirs], range(2))
    for state in theirs.state.values():  # torch's bases are in column order, those of a checkpoint in rows
        state.update({key: [m.contiguous() for m in state[key]] for key in ("Q", "GG") if _has_matrices(state, key)})
    train(net, [theirs], range(2, 4))
    wrong = different(full_parameters(model), dict(net.named_parameters()))
    assert not wrong, wrong


def test_lists_of_matrices_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_resume, str(tmp_path / "step"), True)
    run_ranks(_resume, str(tmp_path / "step"), False, world_size=2)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
def test_optimizers_of_another_package_have_the_bits_of_one_process(zero3_size: int) -> None:
    run_ranks(_train, zero3_size)
