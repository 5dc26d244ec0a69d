"""Findings as text and as JSON."""

from __future__ import annotations

import json

import pytest

from layerzero.doctor.findings import Finding, findings_as_json, findings_as_text, has_problem, summary

FINDINGS = [
    Finding("one", "ok", "first"),
    Finding("two", "problem", "second", "Change it"),
    Finding("one", "note", "third"),
]


def test_a_finding_is_a_line_under_its_group() -> None:
    assert findings_as_text(FINDINGS).splitlines() == [
        "one",
        "  ok       first",
        "  note     third",
        "",
        "two",
        "  problem  second. Change it",
    ]


def test_problems_and_notes_are_counted() -> None:
    assert summary(FINDINGS) == "1 problem, 1 note" and has_problem(FINDINGS)
    assert summary(FINDINGS[:1]) == "no problems, no notes" and not has_problem(FINDINGS[:1])
    assert summary([*FINDINGS, *FINDINGS]) == "2 problems, 2 notes"


def test_json_has_all_fields() -> None:
    read = json.loads(findings_as_json(FINDINGS))
    assert read["problems"] == 1
    assert [Finding(**each) for each in read["findings"]] == FINDINGS


def test_a_problem_says_what_to_change() -> None:
    with pytest.raises(AssertionError):
        Finding("one", "problem", "no way out")
