"""An experiment with an optimizer: does it do to rows of parameters what it does to whole ones?

Small parameters are stepped together in one optimizer, and cut into rows in one optimizer a rank, as
:func:`shard_model` cuts them: unevenly, into single rows, into none. Gradients change their scale by orders of
magnitude, have zeros, and point the same way on the whole, so that estimates of a distance or a rate move on.
Afterwards the parameters must agree, and so must every number that the optimizer keeps for itself: one that is computed
from all elements differs from rank to rank long before the parameters show it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from layerzero.optimizers.twin import twin_of, unhooked

__all__ = ["CouldNotTry", "difference"]

_RANKS = 4
_STEPS = 24  # more than the warm-ups and intervals of common defaults
_SEED = 20
# What is trained, and where ranks 0 to 3 cut it. Matrices, vectors, kernels; single rows, and ranks without any.
_CUTS: dict[tuple[int, ...], tuple[int, ...]] = {
    (7, 6): (0, 3, 4, 4, 7),
    (9,): (0, 0, 4, 5, 9),
    (4, 3, 2): (0, 1, 1, 4, 4),
    (1, 5): (0, 0, 0, 1, 1),
    (3, 2, 2, 2): (0, 1, 2, 2, 3),
    (2, 4): (0, 0, 1, 2, 2),
}
_LEAST_RATE = 1e-3  # schedules start at 0, where nothing could be seen


class CouldNotTry(Exception):
    """The experiment itself has failed: nothing is known about the optimizer."""


class _Data(NamedTuple):
    start: list[Tensor]  # the parameters
    pull: list[Tensor]  # what all gradients have in common
    noise: list[list[Tensor]]  # by step
    scales: list[float]  # by step

    def cut(self, rank: int) -> _Data:
        """The rows of one rank."""

        def rows(tensors: Sequence[Tensor]) -> list[Tensor]:
            bounds = _CUTS.values()
            return [tensor[at[rank] : at[rank + 1]] for tensor, at in zip(tensors, bounds, strict=True)]

        return _Data(rows(self.start), rows(self.pull), [rows(step) for step in self.noise], self.scales)


class _Outcome(NamedTuple):
    parameters: list[list[Tensor]]  # by group
    numbers: dict[str, float]  # that the optimizer keeps for itself, by where


def difference(optimizer: Optimizer, device: torch.device) -> str | None:
    """How the optimizer's work on rows differs from its work on whole parameters; None where it does not.

    The optimizer, its parameters and torch's random numbers stay as they are.

    Raises:
        CouldNotTry: a copy of the optimizer could not be made or stepped.
    """
    data, groups = _data(device), _kinds_of_groups(optimizer)
    if not groups:
        return None
    with _random_numbers_kept(device), _uncompiled():
        try:
            whole = _run(optimizer, groups, data)
        except Exception as error:
            raise CouldNotTry(f"stepping small parameters failed with {_said(error)}") from error
        try:
            ranks = [_run(optimizer, groups, data.cut(rank)) for rank in range(_RANKS)]
        except Exception as error:
            raise CouldNotTry(
                "small parameters could be stepped, their rows on ranks of which some hold none of a parameter could "
                f"not: {_said(error)}"
            ) from error
    return _compare(whole, ranks, data)


def _random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.random.fork_rng(devices=[index], device_type=device.type)


def _seed(device: torch.device) -> None:
    """Of this device and the CPU only: torch.manual_seed would leave seeds for devices that are not in use yet."""
    torch.default_generator.manual_seed(_SEED)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(_SEED)


def _uncompiled() -> AbstractContextManager[Any]:
    """Kernels of torch.compile would be compiled for each small shape. Who compiles has imported its front end."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _data(device: torch.device) -> _Data:
    generator = torch.Generator().manual_seed(_SEED)

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    start, pull = [draw(shape) for shape in _CUTS], [draw(shape) for shape in _CUTS]
    noise = [[draw(shape) * 0.1 for shape in _CUTS] for _ in range(_STEPS)]
    return _Data(start, pull, noise, [10.0 ** ((step * 5) % 7 - 4) for step in range(_STEPS)])


def _kinds_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of which each differs from the others in more than its rates: one for each layer is common."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        ours = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        rate, decay = ours.pop("lr", None), ours.pop("weight_decay", None)
        kinds.setdefault(repr((sorted(ours.items()), bool(decay), type(rate))), group)
    return list(kinds.values())


def _run(optimizer: Optimizer, groups: Sequence[dict[str, Any]], data: _Data) -> _Outcome:
    _seed(data.start[0].device)
    ours = [[torch.nn.Parameter(start.clone()) for start in data.start] for _ in groups]
    twin = twin_of(optimizer, list(zip(groups, ours, strict=True)))
    for group in twin.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.clamp_(min=_LEAST_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(float(rate), _LEAST_RATE)
    if callable(begin := getattr(twin, "train", None)):  # optimizers with weights of their own for evaluation
        begin()
    step = unhooked(type(twin).step)
    for number, (noise, scale) in enumerate(zip(data.noise, data.scales, strict=True)):
        for parameters in ours:
            for index, parameter in enumerate(parameters):
                gradient = (data.pull[index] + noise[index]) * scale
                if number % 6 == 3:
                    gradient = gradient * (noise[index] > 0)
                parameter.grad = torch.zeros_like(gradient) if (number + index) % 8 == 4 else gradient
        step(twin)
    return _Outcome([[p.detach() for p in parameters] for parameters in ours], dict(_numbers(twin, ours)))


def _numbers(twin: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, float]]:
    yield from _numbers_in("an attribute", vars(twin))
    yield from _numbers_in("the state of all", {k: v for k, v in twin.state.items() if not isinstance(k, Tensor)})
    for at, (group, ours) in enumerate(zip(twin.param_groups, parameters, strict=True)):
        yield from _numbers_in(f"parameter group {at}", group)
        for index, parameter in enumerate(ours):
            values = twin.state.get(parameter)
            if isinstance(values, Mapping):
                yield from _numbers_in(f"the state of parameter {index} of group {at}", values, parameter.shape)


def _numbers_in(where: str, values: Mapping[Any, Any], shape: torch.Size | None = None) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, float):
            yield f"{key!r} in {where}", value
        elif isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and value.shape != shape:
            yield f"{key!r} in {where}", value.item()


def _compare(whole: _Outcome, ranks: Sequence[_Outcome], data: _Data) -> str | None:
    moved = False
    for at, parameters in enumerate(whole.parameters):
        for index, parameter in enumerate(parameters):
            together = torch.cat([rank.parameters[at][index] for rank in ranks])
            if not (parameter.isfinite().all() and together.isfinite().all()):
                raise CouldNotTry("stepping small parameters made them infinite or NaN")
            moves = (parameter - data.start[index]).abs()
            moved = moved or bool(moves.any())
            # Half a thousandth of what the element has moved, or the rounding of as many additions to it.
            allowed = 5e-4 * moves + 1e-4 * moves.mean() + _STEPS * 2.0**-24 * parameter.abs()
            if bool(((parameter - together).abs() > allowed).any()):
                kind = "matrix" if parameter.ndim == 2 else "parameter"
                return f"a {kind} of shape {list(parameter.shape)} and the same cut into rows got different updates"
    for where, value in whole.numbers.items():
        for rank in ranks:
            other = rank.numbers.get(where, value)
            both_nan = math.isnan(value) and math.isnan(other)
            if not (both_nan or math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-12)):
                return f"{where} depends on which rows it sees ({value:.6g} with all, {other:.6g} with some)"
    if not moved:
        raise CouldNotTry(f"{_STEPS} steps on small parameters changed none of them")
    return None
