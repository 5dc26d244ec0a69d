"""FSDP2 usage patterns that no other test file covers: see `docs/fsdp2.md`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerzero
from tests.support.graphs import MODES, WIDTH, WORLD, Block, Case, batch, blocks, compare, shard
from tests.support.models import TiedTransformer, full_parameters, update
from tests.support.ranks import on_ranks

FP64 = torch.float64


# --- an optimizer for each parameter, which steps in the backward ---


def _step_in_backward(model: nn.Module, *, sharded: bool) -> None:
    for parameter in model.parameters():
        inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        optimizer = layerzero.shard_optimizer(inner, model) if sharded else inner

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            update(optimizer)

        parameter.register_post_accumulate_grad_hook(step)


@on_ranks(world_size=WORLD)
def test_optimizers_step_in_the_backward(rank: int) -> None:
    for settings in MODES:
        torch.manual_seed(0)
        alone = blocks()
        model = shard(copy.deepcopy(alone), **settings)
        _step_in_backward(model, sharded=True)
        _step_in_backward(alone, sharded=False)
        for step in range(3):
            model(batch(rank, step)).sum().backward()
            torch.stack([alone(batch(r, step)).sum() for r in range(WORLD)]).mean().backward()
            assert all(p.grad is None for p in model.parameters())
        for name, whole in full_parameters(model).items():
            torch.testing.assert_close(whole, alone.get_parameter(name).detach(), rtol=1e-10, atol=1e-12)


# --- inputs and outputs ---


@dataclass
class Activations:
    """Two tensors, one of which the model may ignore, and a non-tensor."""

    used: Tensor
    other: Tensor
    step: int


class Splitting(Block):
    def forward(self, x: Tensor) -> Activations:  # type: ignore[override]
        y = super().forward(x)
        return Activations(y, 2 * y, 3)


class Joining(Block):
    def forward(self, activations: Activations) -> list[Any]:  # type: ignore[override]
        return [super().forward(activations.used), {"step": activations.step}, None]


class Structured(nn.Module):
    """Module without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.splitting, self.joining = Splitting(), Joining()
        self.start = nn.Parameter(torch.ones(3, WIDTH, dtype=FP64))

    def forward(self) -> Tensor:
        joined: Tensor = self.joining(self.splitting(self.start))[0]
        return joined


def _no_inputs(model: nn.Module, rank: int, step: int) -> None:
    (model() * batch(rank, step)).sum().backward()


@on_ranks(world_size=WORLD)
def test_dataclasses_unused_outputs_and_forwards_without_inputs(rank: int) -> None:
    for settings in (*MODES, {"size": 4}):
        compare(rank, "structures", Case(Structured, _no_inputs), **settings)


# --- units called outside of the model's forward ---


def _one_by_one(model: nn.Module, rank: int, step: int) -> None:
    x = batch(rank, step).requires_grad_()
    for unit in model.units:
        x = unit(x)
    x.sum().backward()


@on_ranks(world_size=WORLD)
def test_units_are_called_one_by_one_without_their_model(rank: int) -> None:
    for settings in MODES:
        compare(rank, "units alone", Case(lambda: blocks(own=False), _one_by_one), **settings)


class Skipping(TiedTransformer):
    """Model whose loss may call the head, on one chunk of tokens at a time."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        if not tied:
            self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _in_chunks(model: nn.Module, rank: int, step: int) -> None:
    tokens, targets = TiedTransformer.batch(step=step, rank=rank)
    hidden = model(tokens)
    chunks = zip(hidden.flatten(0, 1).split(5), targets.flatten().split(5), strict=True)
    torch.stack([F.cross_entropy(model.head(h), t, reduction="sum") for h, t in chunks]).sum().backward()


def _together(name: str, module: nn.Module) -> bool | str:
    if name in ("embedding", "norm", "head"):
        return "ends"
    return name.startswith("blocks.") and name.count(".") == 1


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_a_loss_calls_the_head_in_chunks_outside_of_the_model(rank: int) -> None:
    for tied in (True, False):
        for settings in MODES:
            case = Case(lambda tied=tied: Skipping(tied=tied), _in_chunks)
            compare(rank, "chunks", case, units=_together, **settings)


# --- FSDP2's method names ---


@on_ranks(world_size=WORLD)
def test_methods_of_fsdp2_that_are_there_work_and_others_raise(rank: int) -> None:
    model = shard(blocks())
    model.set_requires_gradient_sync(False)
    model(batch(rank, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="not reduced yet"):
        model.scale.grad.clone()
    model.set_requires_gradient_sync(True)
    model(batch(rank, 1)).sum().backward()
    model.scale.grad.clone()
    # Missing names raise; docs/fsdp2.md gives the reasons and alternatives.
    for name in ("set_is_last_backward", "set_unshard_in_backward", "set_all_reduce_hook", "set_custom_all_gather"):
        with pytest.raises(AttributeError, match=name):
            getattr(model, name)
    with pytest.raises(TypeError, match=r"from torch.float64 to torch.float32.*before shard_model"):
        model.float()
    with pytest.raises(TypeError, match="deepcopy"):
        copy.deepcopy(model)
