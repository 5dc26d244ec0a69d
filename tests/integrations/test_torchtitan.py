"""layerzero.integrations.torchtitan in torchtitan's own trainer, beside its FSDP2 on the same data."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

if find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan: pip install --no-deps -r requirements-loops.txt", allow_module_level=True)

from tests.support.torchtitan_cpu import on_cpu, summing, tiny

# isort: split
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.trainer import Trainer

import layerzero
from layerzero.integrations.torchtitan import OptimizersContainer, parallelize, with_layerzero
from tests.support.loops import assert_like, launched
from tests.support.ranks import run_ranks

UNITS = 2 + 1 + 2  # layers, root, and the two ends


def train(config: Any, *, keep: bool = False) -> tuple[list[float], list[float], dict[str, Tensor], Any]:
    """Losses and norms as torchtitan logs them, whole weights at the end, and the trainer."""
    losses, norms = [], []
    with launched(), on_cpu(), contextlib.redirect_stderr(io.StringIO()):
        trainer = config.build()

        def log(step: int, loss: float, most: float, norm: float, **_: Any) -> None:
            losses.append(loss)
            norms.append(norm)

        if not keep:
            overwrite(trainer.model_parts)
        with mock.patch.object(trainer.metrics_processor, "log", log), mock.patch("time.sleep"):
            trainer.train()
        trainer.close()
        return losses, norms, weights_of(trainer.model_parts), trainer


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


@torch.no_grad()
def overwrite(parts: list[torch.nn.Module]) -> None:
    """The same weights for everybody."""
    for part in parts:
        for name, parameter in part.named_parameters():
            generator = torch.Generator().manual_seed(sum(plain(name).encode()))
            whole = torch.randn(parameter.shape, generator=generator) * 0.02 + ("norm" in name)
            if type(parameter.data) is DTensor:
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)


@torch.no_grad()
def weights_of(parts: list[torch.nn.Module]) -> dict[str, Tensor]:
    held = {plain(name): p.detach() for part in parts for name, p in part.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in held.items()}


def _same(rank: int, folder: str, how: str) -> None:
    def config() -> Trainer.Config:
        made = tiny(folder)
        if how == "tp":
            made.parallelism.data_parallel_replicate_degree, made.parallelism.tensor_parallel_degree = 1, 2
        if how == "checkpointed":
            made.activation_checkpoint = type(made).__dataclass_fields__["activation_checkpoint"].default_factory()
        if how == "whole loss":
            made.loss = made.loss.loss_fn
        return made

    losses, norms, weights, _ = train(summing(config()))
    ours = train(with_layerzero(config(), accumulation="full" if how == "full" else "sharded"))
    assert_like(ours[0], losses)
    assert_like(ours[1], norms)
    assert ours[2].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(ours[2][name], value, rtol=1e-4, atol=2e-5, msg=name)
    (part,) = ours[3].model_parts
    if how != "tp":  # one replica
        assert layerzero.traffic(part).calls["hop2"] == UNITS * 3  # two micro-batches in each of three steps


@pytest.mark.parametrize("how", ["chunked loss", "whole loss", "full", "checkpointed", "tp"])
def test_losses_norms_and_weights_are_those_of_its_fsdp(how: str, tmp_path: Path) -> None:
    run_ranks(_same, str(tmp_path), how, timeout=300)


def _resumed(rank: int, folder: str) -> None:
    def config(folder: str, steps: int) -> Trainer.Config:
        made = tiny(folder, steps=steps)
        made.checkpoint.enable, made.checkpoint.interval, made.checkpoint.last_save_model_only = True, 2, False
        return with_layerzero(made)

    losses, norms, weights, _ = train(config(f"{folder}/whole", 4))
    train(config(f"{folder}/parts", 2))
    dist.barrier()
    again = train(config(f"{folder}/parts", 4), keep=True)
    assert again[0] == losses[2:] and again[1] == norms[2:]
    for name, value in weights.items():
        assert torch.equal(again[2][name], value), name


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    run_ranks(_resumed, str(tmp_path), timeout=300)
