"""Measures of differences between two runs; pure arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from layerzero.verification.comparison import Comparison, ParameterDifference, StepRecord, VerifyReport

ONE = torch.tensor([1.0, -2.0])
START = {"a": torch.zeros(2), "b": torch.zeros(2)}


def row_of(plain: StepRecord, ours: StepRecord, start: dict[str, Tensor] | None = None) -> ParameterDifference:
    """Return the row of parameter "a"."""
    comparison = Comparison(START if start is None else start, zero3_size=2, precision="float32", tolerance=1e-3)
    comparison.add(0, plain, ours)
    return next(row for row in comparison.rows() if row.name == "a")


def snapshot(a: Tensor | None = ONE, *, weight: Tensor = ONE) -> StepRecord:
    """Return a record of the parameters a, with gradient `a` and value `weight`, and b."""
    return StepRecord({"a": a, "b": ONE}, {"a": weight, "b": ONE})


def test_a_gradient_is_measured_by_its_largest_element() -> None:
    row = row_of(snapshot(), snapshot(a=ONE * 1.5))
    assert (row.gradient, row.weight, row.ok) == (0.5, 0.0, False)


def test_a_gradient_of_nothing_but_rounding_is_measured_by_the_models() -> None:
    row = row_of(snapshot(a=ONE * 1e-9), snapshot(a=ONE * -1e-9))
    assert row.ok
    assert row.gradient == pytest.approx(4e-9 / 2e-2)


def test_a_small_but_real_gradient_is_not_lost_below_the_models() -> None:
    assert not row_of(snapshot(a=ONE * 1e-4), snapshot(a=ONE * 2e-4)).ok


@pytest.mark.parametrize(
    ("plain", "ours", "note"),
    [
        (ONE, None, "no gradient in the distributed run"),
        (None, ONE, "no gradient in the unsharded run"),
        (None, None, ""),
    ],
)
def test_a_gradient_that_only_one_run_has_is_a_difference(plain: Tensor | None, ours: Tensor | None, note: str) -> None:
    row = row_of(snapshot(a=plain), snapshot(a=ours))
    assert row.note == note
    assert row.gradient == (math.inf if note else 0.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_a_difference_unless_both_are_alike(wrong: float) -> None:
    odd = torch.tensor([1.0, wrong])
    assert row_of(snapshot(), snapshot(a=odd)).gradient == math.inf
    assert row_of(snapshot(a=odd), snapshot(a=odd)).gradient == 0.0


def test_a_weight_is_measured_by_how_far_it_moved() -> None:
    start = {"a": ONE - 0.1, "b": ONE}
    row = row_of(snapshot(), snapshot(weight=ONE + 0.05), start)
    assert row.weight == pytest.approx(0.5, rel=1e-4)


def test_rounding_of_a_large_weight_that_hardly_moved_is_no_difference() -> None:
    start = {"a": ONE + 1e-6, "b": ONE}
    assert row_of(snapshot(), snapshot(weight=ONE + 2.4e-7), start).ok


def test_a_row_has_the_largest_difference_and_the_first_step_that_exceeds_the_tolerance() -> None:
    comparison = Comparison(START, zero3_size=2, precision="float32", tolerance=1e-2)
    for step, scale in enumerate([1.001, 1.1, 1.5, 1.2]):
        comparison.add(step, snapshot(), snapshot(a=ONE * scale, weight=ONE * (1.0 if step < 2 else scale)))
    row = next(row for row in comparison.rows() if row.name == "a")
    assert (row.gradient, row.gradient_step) == (pytest.approx(0.5), 1)
    assert (row.weight, row.weight_step) == (pytest.approx(0.5), 2)


ULP = 2.0**-23  # of fp32 numbers from 1 to 2
NORM = torch.tensor([1.0, 1.5, 1.0 + 2**-20])  # weights of a norm, near 1.0


def norm_row(weight: Tensor, plain: Tensor = NORM) -> ParameterDifference:
    """Return the row of a norm's weights that training moved by about 2 ulps; the tolerance is 0.01 ulp."""
    comparison = Comparison({"a": plain * (1 - 2 * ULP)}, zero3_size=2, precision="float32", tolerance=1e-7)
    tiny = StepRecord({"a": torch.full((3,), 1e-6)}, {"a": plain})
    comparison.add(0, tiny, StepRecord(tiny.gradients, {"a": weight}))
    return comparison.rows()[0]


@pytest.mark.parametrize("weight", [NORM + ULP, NORM - ULP, NORM + torch.tensor([0.0, ULP, 0.0])])
def test_a_weight_that_is_one_ulp_off_is_no_difference(weight: Tensor) -> None:
    assert not torch.equal(weight, NORM)
    assert norm_row(weight).ok


@pytest.mark.parametrize(
    "weight",
    [NORM + 3 * ULP, NORM - 3 * ULP, NORM + torch.tensor([0.0, 2 * ULP, 0.0]), NORM - 2 * ULP],
    ids=["3 ulps more", "3 ulps less", "one weight 2 ulps off", "an update skipped"],
)
def test_a_weight_that_is_more_than_one_ulp_off_is_a_difference(weight: Tensor) -> None:
    assert not norm_row(weight).ok


def test_an_ulp_is_that_of_each_weight_in_its_own_dtype() -> None:
    small = NORM * 2**-10
    assert not norm_row(small + ULP, plain=small).ok
    half = NORM.bfloat16()
    assert norm_row(half + 2**-7, plain=half).ok
    assert not norm_row(half + 2**-6, plain=half).ok
    assert not norm_row(half + 2**-7, plain=half.float()).ok
    zeros = torch.zeros(3)
    assert not norm_row(zeros + 1e-12, plain=zeros).ok
    infinite = torch.full((3,), math.inf)
    assert norm_row(NORM, plain=infinite).weight == norm_row(infinite).weight == math.inf


def test_weights_that_differ_after_equal_gradients_are_explained() -> None:
    row = ParameterDifference(2, "float32", "a", 0.0, 0, 1.0, 0, tolerance=1e-3)
    report = VerifyReport((row,), world_size=4, steps=1, micro_batches=1)
    assert "first difference: weights after step 0: 'a'. All gradients agree until then" in str(report)
    assert "Try SGD" in str(report)


def test_a_report_shows_the_worst_and_the_verdict() -> None:
    rows = [
        ParameterDifference(2, "float32", f"layer.{i}", 10.0 / (i + 1), 0, 0.0, 0, tolerance=1.0) for i in range(30)
    ]
    report = VerifyReport(tuple(rows), world_size=4, steps=1, micro_batches=1, notes=("a note",))
    lines = str(report).splitlines()
    assert not report.ok
    assert report.worst == rows[0]
    assert lines[0] == "one process and layerzero: 4 ranks; zero3_size 2; 1 steps of 1 micro-batches"
    assert lines[3].split() == ["layer.0", "2", "float32", "1.0e+01", "0", "0.0e+00", "0", "1.0e+00", "different"]
    assert "and 10 more rows with smaller differences" in lines
    assert lines[-3] == "note: a note"
    assert lines[-2] == "first difference: gradients in step 0: 'layer.0', 'layer.1', 'layer.2' and 6 more"
    names = "layer.0, layer.1, layer.2, layer.3, layer.4, ..."
    assert lines[-1] == f"DIFFERENT: 9 of 30 parameters train differently with layerzero: {names}"
    assert VerifyReport((), world_size=1, steps=1, micro_batches=1).ok
