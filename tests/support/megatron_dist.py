"""Training runs that save a distributed checkpoint of Megatron and continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.support.megatron_checkpoints import save
from tests.support.megatron_ranks import (
    Case,
    Run,
    make_scheduler,
    megatron,
    train,
    whole_weights,
)

Make = Callable[[Case], tuple[list[nn.Module], Any]]
GATED = (("gated_linear_unit", True),)  # its first linear layer is stored in two pieces
DATA = Case(zero3_size=2, micro_batches=2, settings=GATED)
BEFORE, AFTER = [0, 1], [2, 3]  # steps


def go_on(case: Case, chunks: list[nn.Module], optimizer: Any, scheduler: Any) -> Run:
    losses, results, scales = train(case, chunks, optimizer, scheduler, AFTER)
    return Run(losses, results, [whole_weights(chunk) for chunk in chunks], scales)


def save_and_go_on(rank: int, path: str, case: Case, metadata: Any, make: Make, parallel: bool = False) -> Run:
    """Train, save, and train on."""
    with megatron(case):
        chunks, optimizer = make(case)
        scheduler = make_scheduler(optimizer)
        for group in optimizer.param_groups:
            group.update({"eps": 1e-6} if "eps" in group else {"dampening": 0.2})  # only the checkpoint has this value
        train(case, chunks, optimizer, scheduler, BEFORE)
        save(path, chunks, optimizer, scheduler, metadata, parallel)
        return go_on(case, chunks, optimizer, scheduler)
