"""Train, save and resume with any optimizer class on ranks, and compare the result with training in one process."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from benchmarks.optimizer_survey import builder
from layerzero import checkpoint
from tests.support.models import full_parameters, update
from tests.support.ranks import mesh_of, run_ranks

STEPS = 3  # before the save, and after it
SHAPES: dict[str, tuple[int, ...]] = {
    "square": (130, 130),  # more than 128 per side, and more than 4096 elements
    "matrix": (130, 17),
    "wide": (1, 130),
    "small": (17, 3),
    "column": (3, 1),
    "vector": (130,),
    "scalar": (),
    "one": (1,),
}


class Pull(nn.Module):
    """Parameters that are pulled to random targets, which change with the step."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        for seed, name in enumerate(names):
            start = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
            self.register_parameter(name, nn.Parameter(start))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + step)
        losses = [
            (parameter - torch.randn(SHAPES[name], generator=generator)).square().sum() / 2
            for name, parameter in self.named_parameters()
        ]
        return torch.stack(losses).sum()


class Shapes(nn.Module):
    UNITS = ("first", "second")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pull([*SHAPES][::2]), Pull([*SHAPES][1::2])

    def forward(self, step: int) -> Tensor:
        return self.first(step) + self.second(step)


def build(name: str, model: nn.Module) -> Optimizer:
    """Build the optimizer whose class has this module and name, in training mode if it has one."""
    module, _, kind = name.rpartition(".")
    optimizer = builder(getattr(importlib.import_module(module), kind))(list(model.parameters()))
    getattr(optimizer, "train", bool)()
    return optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(step).backward()
        update(optimizer)


def _alone(name: str) -> dict[str, Tensor] | str:
    """Return the parameters after training in one process, or the reason why there is no such result."""
    net, start = Shapes(), dict(Shapes().named_parameters())
    try:
        train(net, build(name, net), range(2 * STEPS))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    after = {key: value.detach() for key, value in net.named_parameters()}
    if not all(value.isfinite().all() for value in after.values()):
        return "not finite"
    return "nothing moves" if all(torch.equal(after[key], start[key]) for key in start) else after


def _differences(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Return the parameters that differ by more than rounding, with the part of their movement by which they differ."""
    found = []
    for key, start in Shapes().named_parameters():
        moved, off = (expected[key] - start).norm().item(), (ours[key] - expected[key]).norm().item()
        if not off <= 1e-4 * moved + 4 * 2.0**-24 * expected[key].norm().item():
            found.append(f"{key} {off / max(moved, 1e-30):.2g}")
    return ", ".join(found)


def _try_all(rank: int, names: Sequence[str], zero3_size: int, folder: Path, saves: bool) -> dict[str, str]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with torch.compiler.set_stance("force_eager"):
        return {name: _try_one(rank, name, zero3_size, folder / name, saves=saves) for name in names}


def _try_one(rank: int, name: str, zero3_size: int, path: Path, *, saves: bool) -> str:
    model = layerzero.shard_model(Shapes(), mesh=mesh_of(zero3_size), units=Shapes.UNITS)
    try:
        optimizer = layerzero.shard_optimizer(build(name, model), model)
    except Exception as error:
        return f"refused: {error}"
    alone: list[Any] = [_alone(name) if rank == 0 else None]
    dist.broadcast_object_list(alone)
    if isinstance(expected := alone[0], str):
        return f"not judged: {expected}"
    accepted, part = "whole" if optimizer.has_owners else "on rows", "training"
    try:
        if saves:
            train(model, optimizer, range(STEPS))
            part = "the save"
            checkpoint.save(path, model, optimizer, overwrite=True)  # a repetition
        else:
            part = "the load"
            checkpoint.load(path, model, optimizer)
        part = "training on"
        train(model, optimizer, range(STEPS, 2 * STEPS))
    except Exception as error:
        return f"{accepted} and WRONG in {part}: {type(error).__name__}: {error}"
    wrong = _differences(full_parameters(model), expected)
    return f"{accepted} and WRONG: {wrong}" if wrong else accepted


def survey(names: Sequence[str], folder: Path, zero3_size: int, *, saves: bool, world_size: int) -> dict[str, str]:
    """Return for each optimizer "on rows", "whole", or a text with "refused", "not judged" or "WRONG".

    Each optimizer takes 6 steps in one process. On ranks, it takes 3, saves and takes 3, or it loads and takes 3.

    Args:
        names: modules and names of classes.
        folder: folder of the checkpoints.
        saves: True to save, False to load what a call with other ranks has saved.
    """
    try:
        return run_ranks(_try_all, names, zero3_size, folder, saves, world_size=world_size, timeout=300)[0]
    except AssertionError as error:
        if len(names) == 1:  # one rank failed, and the others waited for it
            return {names[0]: f"WRONG on some ranks: {str(error)[-400:]}"}
        alone = [survey([name], folder, zero3_size, saves=saves, world_size=world_size) for name in names]
        return {name: found for each in alone for name, found in each.items()}


def survey_and_resume(
    names: Sequence[str], folder: Path, loads: Iterable[tuple[int, int]] = ((1, 1), (2, 2), (3, 1))
) -> dict[str, str]:
    """Return the result of a survey on 4 ranks with ZeRO-3 groups of 2, and then of loads on other ranks.

    Args:
        loads: pairs of the number of ranks and `zero3_size`.
    """
    found = survey(names, folder, 2, saves=True, world_size=4)
    for world_size, zero3_size in loads:
        saved = [name for name in names if found[name] in ("on rows", "whole")]
        if saved:
            found |= survey(saved, folder, zero3_size, saves=False, world_size=world_size)
    return found
