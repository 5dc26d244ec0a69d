"""Optimizer steps with any accumulation setting, and the same steps in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from tests.support.models import (
    Step,
    different,
    exact_model,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    train_alone,
    union,
)

WORLD = 4
MODES = ("sharded", "full", "local")


def prepare(mode: str, **settings: object) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    settings = {"zero3_size": 2} | settings
    return exact_model(accumulation=mode, **settings)


def backward(model: nn.Module, rank: int, index: int, *, inside_no_sync: bool, step: int = 0) -> None:
    batch = integer_batch(step=step, micro_batch=index, rank=rank)
    with layerzero.no_sync(model) if inside_no_sync else nullcontext():
        integer_loss(model, batch).backward()


def alone(steps: Sequence[Sequence[int]]) -> list[Step]:
    """Train in one process on the union of the ranks' batches; `steps` lists the micro-batches of each step."""
    net = integer_net()
    batches = [
        [union([integer_batch(step=step, micro_batch=index, rank=rank) for rank in range(WORLD)]) for index in indices]
        for step, indices in enumerate(steps)
    ]
    return train_alone(net, batches, exact_sgd(net.parameters()))


def gradients_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def assert_step(model: nn.Module, optimizer: Optimizer, expected: Step, case: str) -> None:
    """Step, and assert that gradients and parameters equal the expected ones bit for bit."""
    optimizer.step()
    wrong = different(full_gradients(model), expected.gradients)
    assert not wrong, f"{case}: gradients of {wrong}"
    wrong = different(full_parameters(model), expected.parameters)
    assert not wrong, f"{case}: parameters {wrong}"


def answer_of(use: Callable[[Any], object], subject: nn.Module | Tensor) -> str:
    try:
        return f"gave {use(subject)!r}"
    except RuntimeError as error:
        return str(error)
