"""Tables of docs/gpu.md, made from the results of ``python -m benchmarks.gpu``.

python -m benchmarks.gpu.tables         # print them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results/gpu/gpu.json"

_NAMES = {
    "plain": "plain PyTorch in bf16, no sharding",
    "layerzero": 'layerzero, `"sharded"`',
    "layerzero-full": 'layerzero, `"full"`',
    "layerzero-local": 'layerzero, `"local"`',
    "fsdp2-full": "FSDP2, full sharding",
    "fsdp2-hsdp": "FSDP2, HSDP",
}


def tables(parts: dict[str, Any]) -> dict[str, str]:
    """Return the tables by name, in Markdown."""
    return {
        "overhead": _table(
            ["", "host A=1", "host A=4", "step A=1", "step A=4", "kernels A=4", "peak A=4", "reserved A=4"],
            [
                [_NAMES[scheme], *_milliseconds(case, "host"), *_milliseconds(case, "step"), *_overhead(case["A=4"])]
                for scheme, case in _by_scheme(parts, "overhead, 4 layers of Llama-3 8B, ", 5)
            ],
        ),
        "network": _table(
            ["", "without network", "with network"],
            [
                [_NAMES[scheme], *(_median_and_least(case[which]) for which in ("without", "with"))]
                for scheme, case in _by_scheme(parts, "modeled network, 1.3b, ", 5)
            ],
        ),
        "memory": _table(
            ["", "between steps", "peak in a step"],
            [
                [_NAMES[scheme], f"{case['between_steps'] / 1e9:.1f}", f"{case['peak'] / 1e9:.1f}"]
                for scheme, case in _by_scheme(parts, "memory, 7b, ", 5)
            ],
        ),
        "codecs": _table(
            ["", "billion elements per second"],
            [[what, f"{speed / 1e9:.0f}"] for what, speed in parts["codecs"].items() if "," in what],
        ),
    }


def _by_scheme(parts: dict[str, Any], prefix: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the results of a part by scheme. The part must have results of `count` schemes."""
    found = [(scheme, parts[prefix + scheme]) for scheme in _NAMES if prefix + scheme in parts]
    if len(found) != count:
        raise ValueError(f"{len(found)} schemes have results of {prefix.rstrip(', ')!r} instead of {count}")
    return found


def _milliseconds(case: dict[str, Any], key: str) -> list[str]:
    return [f"{case[count][key] * 1e3:.0f}" for count in ("A=1", "A=4")]


def _median_and_least(case: dict[str, Any]) -> str:
    return f"{case['step']:.2f} ({case['least']:.2f})"


def _overhead(case: dict[str, Any]) -> list[str]:
    return [str(case["kernels"]), f"{case['peak'] / 1e9:.1f}", f"{case['reserved'] / 1e9:.1f}"]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    for name, table in tables(json.loads(RESULTS.read_text())["parts"]).items():
        sys.stdout.write(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    main()
