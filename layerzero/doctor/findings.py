"""Results of the checks of ``layerzero doctor``, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        group: heading under which the finding is listed.
        level: ``"problem"`` if training would fail, hang or be much slower than it could be, ``"note"`` if the user
            should know about it, otherwise ``"ok"``.
        text: description of the finding, without a final period.
        fix: change that solves the problem. Every problem has one.
    """

    group: str
    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.level != "problem", self

    def __str__(self) -> str:
        return f"{self.level:<7}  {self.text}" + (f". {self.fix}" if self.fix else "")


def has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "problem" for finding in findings)


def findings_as_text(findings: Sequence[Finding]) -> str:
    """Return the findings under the headings of their groups, in lines of up to 78 columns."""
    lines = textwrap.TextWrapper(78, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)
    groups: dict[str, list[str]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(lines.fill(f"  {finding}"))
    return "\n\n".join("\n".join([group, *found]) for group, found in groups.items())


def summary(findings: Sequence[Finding]) -> str:
    """Return text such as ``1 problem, no notes``."""
    problems, notes = (sum(each.level == level for each in findings) for level in ("problem", "note"))
    return f"{problems or 'no'} problem{'s' * (problems != 1)}, {notes or 'no'} note{'s' * (notes != 1)}"


def findings_as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON object with the fields ``problems`` (a number) and ``findings`` (a list)."""
    problems = sum(finding.level == "problem" for finding in findings)
    return json.dumps({"problems": problems, "findings": [asdict(finding) for finding in findings]}, indent=2)
