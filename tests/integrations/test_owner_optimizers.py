"""An optimizer of pytorch_optimizer whose state has lists of matrices resumes on another number of ranks."""

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
from tests.muon.test_owner_state import train
from tests.muon.test_owner_step import Wide
from tests.support.models import different, full_parameters
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer, installed with --no-deps"
)


def _build(model: nn.Module) -> Optimizer:
    import pytorch_optimizer  # noqa: PLC0415 - not there on every machine

    return pytorch_optimizer.SOAP(model.parameters(), lr=0.01)


def _has_matrices(state: dict[str, Any], key: str) -> bool:
    return all(isinstance(each, Tensor) for each in state.get(key, [None]))


def _resume(rank: int, path: str, saves: bool) -> None:
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    model = layerzero.shard_model(Wide(), mesh=mesh_of(world), units=Wide.UNITS)
    optimizer = layerzero.shard_optimizer(_build(model), model)
    if saves:
        train(model, [optimizer], range(2))
        checkpoint.save(path, model, optimizer)
        return
    checkpoint.load(path, model, optimizer)
    train(model, [optimizer], range(2, 4))
    net = Wide()
    theirs = _build(net)
    train(net, [theirs], range(2))
    for state in theirs.state.values():  # torch's bases are in column order, those of a checkpoint in rows
        state.update({key: [m.contiguous() for m in state[key]] for key in ("Q", "GG") if _has_matrices(state, key)})
    train(net, [theirs], range(2, 4))
    wrong = different(full_parameters(model), dict(net.named_parameters()))
    assert not wrong, wrong


def test_lists_of_matrices_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_resume, str(tmp_path / "step"), True)
    run_ranks(_resume, str(tmp_path / "step"), False, world_size=2)
