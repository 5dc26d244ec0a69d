"""Compute the difference of each parameter between two training runs of the same model.

This module compares recorded tensors and formats the report. It neither trains models nor communicates.

[Note: Scale of differences]
The gradient of a bias before a normalization layer is zero except for rounding errors, which differ between two runs.
Therefore, a gradient's difference is divided by the largest element of that parameter's gradient. If `FLOOR` times the
largest gradient element in the model is larger, it is the divisor instead. A weight's difference is divided by the
distance that training has moved the weight, because even a wrong update is small compared with the weight. If `FLOOR`
times the largest movement in the model, or `FLOOR` times the parameter's largest element, is larger, it is the divisor
instead. Rounding errors then do not count. Two weights that differ by at most one ulp (unit in the last place) count as
equal, regardless of their movement, because sums in a different order round differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.extend import format_first_names, table

FLOOR = 1e-2
_SHOWN = 20  # maximum number of rows in the text of a report


@dataclass(frozen=True)
class StepRecord:
    """Gradients and weights of one optimizer step, as full tensors in host memory, by parameter name."""

    gradients: Mapping[str, Tensor | None]
    weights: Mapping[str, Tensor]  # weights after the step, including floating-point buffers


@dataclass(frozen=True)
class ParameterDifference:
    """Differences of one parameter (or floating-point buffer) between one distributed run and the unsharded run.

    Attributes:
        zero3_size: number S of ranks over which the distributed run shards weights. None if the user's function
            determines it.
        precision: coarsest dtype of the distributed run, such as ``"float32"``.
        name: name of the parameter, as in ``named_parameters()``.
        gradient: largest relative difference of the parameter's gradient. The value is ``inf`` if only one run has a
            gradient, or if the gradient of the distributed run is not finite.
        gradient_step: index of the step, counted from 0, in which the gradient first differed by more than the
            tolerance. If it never did, index of the step in which the difference `gradient` occurred.
        weight: largest relative difference among trained values that differ by more than one ulp.
        weight_step: as `gradient_step`, for the weight after the step.
        tolerance: largest accepted value of `gradient` and `weight`.
        note: remark, such as ``"no gradient in the distributed run"``; usually empty.
    """

    zero3_size: int | None
    precision: str
    name: str
    gradient: float
    gradient_step: int
    weight: float
    weight_step: int
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.relative_to_tolerance <= 1.0

    @property
    def relative_to_tolerance(self) -> float:
        """The larger of `gradient` and `weight`, divided by the tolerance."""
        return max(self.gradient, self.weight) / self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """Result of :func:`layerzero.verify`. ``str(report)`` formats the rows as a table.

    Attributes:
        rows: one row per parameter and distributed run, in decreasing order of the difference relative to its
            tolerance.
        world_size, steps, micro_batches: settings of the runs.
        notes: remarks about the unsharded run.
        scheme: scheme of the distributed runs, or name of the user's function.
    """

    rows: tuple[ParameterDifference, ...]
    world_size: int
    steps: int
    micro_batches: int
    notes: tuple[str, ...] = ()
    scheme: str = "layerzero"

    @property
    def ok(self) -> bool:
        """True if every parameter is within its tolerance in every distributed run."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> ParameterDifference | None:
        """Row with the largest difference relative to its tolerance; None for a model without parameters."""
        return self.rows[0] if self.rows else None

    def __str__(self) -> str:
        different = list(dict.fromkeys(row.name for row in self.rows if not row.ok))
        tried = sorted({row.zero3_size for row in self.rows if row.zero3_size is not None})
        sizes = f"zero3_size {', '.join(map(str, tried))}; " if tried else ""
        names = len({row.name for row in self.rows})
        lines = [
            f"one process and {self.scheme}: {self.world_size} ranks; {sizes}{self.steps} steps of "
            f"{self.micro_batches} micro-batches",
            "",
            _table(self.rows[:_SHOWN]),
        ]
        if len(self.rows) > _SHOWN:
            lines.append(f"and {len(self.rows) - _SHOWN} more rows with smaller differences")
        lines += ["", *(f"note: {note}" for note in self.notes)]
        if different:
            lines.append(f"first difference: {self._first_difference()}")
            examples = ", ".join(different[:5]) + (", ..." if len(different) > 5 else "")
            lines.append(
                f"DIFFERENT: {len(different)} of {names} parameters train differently with {self.scheme}: {examples}"
            )
        else:
            lines.append(f"OK: all {names} parameters match within the tolerance")
        return "\n".join(lines)

    def _first_difference(self) -> str:
        """Describe the earliest differences beyond the tolerance."""
        found = [(row.gradient_step, False, row.name) for row in self.rows if row.gradient > row.tolerance]
        found += [(row.weight_step, True, row.name) for row in self.rows if row.weight > row.tolerance]
        step, in_weight, _ = min(found)
        names = format_first_names(sorted({name for *when, name in found if when == [step, in_weight]}))
        if not in_weight:
            return f"gradients in step {step}: {names}"
        return (
            f"weights after step {step}: {names}. All gradients agree until then. Either the update is wrong, for "
            "example because the optimizer has parameters, aliases of .data or state from before sharding, or the "
            "optimizer turns rounding errors of gradients into large steps, like Adam. Try SGD"
        )


class Comparison:
    """Largest differences between one distributed run and the unsharded run, collected over all steps."""

    def __init__(
        self, start: Mapping[str, Tensor], *, zero3_size: int | None, precision: str, tolerance: float
    ) -> None:
        self._start = start  # weights before the first step
        self._zero3_size = zero3_size
        self._precision = precision
        self._tolerance = tolerance
        self._gradient: dict[str, tuple[float, int]] = {}
        self._weight: dict[str, tuple[float, int]] = {}
        self._note: dict[str, str] = {}

    def add(self, step: int, plain: StepRecord, ours: StepRecord) -> None:
        """Compare the gradients and the weights of one step and record the largest differences."""
        largest_gradient = _largest_magnitude(g for g in plain.gradients.values() if g is not None)
        largest_move = _largest_magnitude(plain.weights[name] - self._start[name] for name in plain.gradients)
        for name in [*plain.weights, *(name for name in ours.weights if name not in plain.weights)]:
            if name not in plain.weights or name not in ours.weights:
                run = "distributed" if name in plain.weights else "unsharded"
                self._record_if_worse(self._weight, name, math.inf, step, f"does not exist in the {run} run")
                continue
            self._compare_gradient(step, name, plain, ours, FLOOR * largest_gradient)
            weight, start = plain.weights[name], self._start[name]
            scale = max(_distance(weight, start), FLOOR * largest_move, FLOOR * _largest_magnitude([weight]))
            distance = _distance(ours.weights[name], weight, slack=_ulps(weight))
            self._record_if_worse(self._weight, name, _relative_distance(distance, scale), step)

    def _compare_gradient(self, step: int, name: str, plain: StepRecord, ours: StepRecord, floor: float) -> None:
        plain_gradient, gradient = plain.gradients.get(name), ours.gradients.get(name)
        if plain_gradient is None and gradient is None:
            self._record_if_worse(self._gradient, name, 0.0, step)
        elif plain_gradient is None or gradient is None:
            run = "distributed" if gradient is None else "unsharded"
            self._record_if_worse(self._gradient, name, math.inf, step, f"no gradient in the {run} run")
        else:
            scale = max(_largest_magnitude([plain_gradient]), floor)
            self._record_if_worse(
                self._gradient, name, _relative_distance(_distance(gradient, plain_gradient), scale), step
            )

    def _record_if_worse(
        self, largest: dict[str, tuple[float, int]], name: str, value: float, step: int, note: str = ""
    ) -> None:
        before, first_step = largest.get(name, (-1.0, step))
        if value > before:
            largest[name] = (value, first_step if before > self._tolerance else step)
            if note:
                self._note[name] = note

    def rows(self) -> list[ParameterDifference]:
        """Return the differences, one row per parameter or buffer."""
        return [
            ParameterDifference(
                self._zero3_size,
                self._precision,
                name,
                *self._gradient.get(name, (0.0, 0)),
                *self._weight[name],
                tolerance=self._tolerance,
                note=self._note.get(name, ""),
            )
            for name in self._weight
        ]


def _distance(left: Tensor, right: Tensor, *, slack: Tensor | float = 0.0) -> float:
    """Return the largest absolute difference between elements of two tensors.

    The result is infinite if the shapes differ, or if an element is Inf or NaN in only one of the tensors.

    Args:
        left: first tensor.
        right: second tensor.
        slack: number, or tensor with the shape of `right`. Differences up to this value count as zero.
    """
    if left.shape != right.shape:
        return math.inf
    if not left.numel():
        return 0.0
    left, right = left.double(), right.double()
    equal = (left == right) | (left.isnan() & right.isnan())
    difference = (left - right).abs()
    distance = torch.where(equal | (difference <= slack), 0.0, difference).max().item()
    return math.inf if math.isnan(distance) else distance


def _ulps(values: Tensor) -> Tensor:
    """Return the size of one ulp of each element, in fp64.

    One ulp is the distance to the next larger magnitude in the dtype of `values`. The result is 0 for integers, zeros
    and infinite values.
    """
    if not values.is_floating_point():
        return torch.zeros(values.shape, dtype=torch.float64)
    magnitudes = values.double().abs()
    mantissas, _ = torch.frexp(magnitudes)  # in [0.5, 1), so that the quotient is exactly a power of two
    return (magnitudes / mantissas).nan_to_num(0.0) * (torch.finfo(values.dtype).eps / 2)


def _largest_magnitude(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite magnitude among the elements of all tensors, or 0 if no tensor has elements."""
    magnitudes = (t.abs().nan_to_num(0.0, posinf=0.0).max().item() for t in tensors if t.numel())
    return float(max(magnitudes, default=0.0))


def _relative_distance(distance: float, scale: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / scale if scale else math.inf


def _table(rows: Sequence[ParameterDifference]) -> str:
    header = ["parameter", "S", "precision", "gradient", "in step", "weight", "after step", "tolerance", ""]
    cells = [
        [
            row.name,
            "" if row.zero3_size is None else str(row.zero3_size),
            row.precision,
            f"{row.gradient:.1e}",
            str(row.gradient_step),
            f"{row.weight:.1e}",
            str(row.weight_step),
            f"{row.tolerance:.1e}",
            row.note or ("" if row.ok else "different"),
        ]
        for row in rows
    ]
    return table(header, cells, left=len(header))
