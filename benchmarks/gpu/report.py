"""Lines in which a part reports its results to ``python -m benchmarks.gpu``. The last line counts."""

from __future__ import annotations

import json
from typing import Any

MARK = "result: "  # before the JSON


def report(found: dict[str, Any]) -> None:
    """Print the results so far. They stay if the part does not finish."""
    print(MARK + json.dumps(found), flush=True)


def last_report(output: str) -> dict[str, Any] | None:
    """Return the last results in the output of a part, or None. A line that was cut off is skipped."""
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            try:
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            except json.JSONDecodeError:
                continue
            return found
    return None
