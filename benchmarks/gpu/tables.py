"""Tables of docs/gpu.md, made from the results of ``python -m benchmarks.gpu``.

python -m benchmarks.gpu.tables                        # the published results
python -m benchmarks.gpu.tables FIRST.json SECOND.json # those of several calls
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results/gpu/gpu.json"

_NAMES = {
    "plain": "plain PyTorch in bf16, no sharding",
    "layerzero": 'layerzero, `"sharded"`',
    "layerzero-full": 'layerzero, `"full"`',
    "layerzero-local": 'layerzero, `"local"`',
    "layerzero-apart": 'layerzero, `"sharded"`, embedding and head as units',
    "layerzero-offload-grads": 'layerzero, `"sharded"`, offloaded gradients',
    "layerzero-offload-optimizer": 'layerzero, `"sharded"`, offloaded optimizer',
    "fsdp2-full": "FSDP2, full sharding",
    "fsdp2-hsdp": "FSDP2, HSDP",
}


def tables(parts: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the parts with results by name, in Markdown."""
    return {name: table for name, table in _tables(parts) if table.count("\n") > 2}


def _tables(parts: dict[str, Any]) -> list[tuple[str, str]]:
    machine = parts.get("machine", {})
    time = parts.get("host time and kernels", {})
    offloads = parts.get("step times with offloads", {})
    return [
        (
            "machine",
            _table(
                ["microseconds", "host", "until done"],
                [[name, *_costs(cost)] for name, cost in machine.items() if isinstance(cost, dict)],
            ),
        ),
        (
            "overhead",
            _table(
                ["", "host A=1", "host A=4", "step A=1", "step A=4", "kernels A=4"],
                [
                    [label, *_milliseconds(time[key], "host"), *_milliseconds(time[key], "step"), _kernels(time[key])]
                    for key, label in _NAMES.items()
                    if key in time
                ],
            ),
        ),
        (
            "memory of four wide layers",
            _table(
                ["", "peak", "reserved", "reserved / peak"],
                [
                    [label, *_gigabytes(case, "peak", "reserved"), f"{case['reserved'] / case['peak']:.2f}"]
                    for label, case in _by_scheme(parts, "memory, llama, ")
                ],
            ),
        ),
        (
            "memory",
            _table(
                ["", "between steps", "peak in a step"],
                [
                    [label, *_gigabytes(case, "between_steps", "peak")]
                    for label, case in _by_scheme(parts, "memory, 7b, ")
                ],
            ),
        ),
        (
            "offloads",
            _table(
                ["", "host", "step"],
                [
                    [label, f"{offloads[key]['host']:.2f}", _median_and_least(offloads[key])]
                    for key, label in _NAMES.items()
                    if key in offloads
                ],
            ),
        ),
        (
            "network",
            _table(
                ["", "without network", "with network"],
                [
                    [label, *(_median_and_least(case[which]) for which in ("without", "with"))]
                    for label, case in _by_scheme(parts, "modeled network, 1.3b, ")
                ],
            ),
        ),
        (
            "codecs",
            _table(
                ["", "billion elements per second"],
                [[what, f"{speed / 1e9:.0f}"] for what, speed in parts.get("codecs", {}).items() if "," in what],
            ),
        ),
    ]


def _by_scheme(parts: dict[str, Any], prefix: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the results of a device by the label of the scheme. A CPU reports no peak of memory."""
    found = {label: parts.get(prefix + scheme, {"ok": False}) for scheme, label in _NAMES.items()}
    return [(label, case) for label, case in found.items() if case["ok"] and ("peak" in case or "with" in case)]


def _costs(cost: dict[str, float]) -> list[str]:
    return [f"{cost[key]:.1f}" if key in cost else "" for key in ("host", "until done")]


def _milliseconds(case: dict[str, Any], key: str) -> list[str]:
    return [f"{case[count][key] * 1e3:.0f}" if count in case else "" for count in ("A=1", "A=4")]


def _kernels(case: dict[str, Any]) -> str:
    return str(case["A=4"]["kernels"]) if "A=4" in case else ""


def _median_and_least(case: dict[str, Any]) -> str:
    return f"{case['step']:.2f} ({case['least']:.2f})"


def _gigabytes(case: dict[str, Any], *keys: str) -> list[str]:
    return [f"{case[key] / 1e9:.1f}" for key in keys]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def checks(parts: dict[str, Any]) -> str:
    """Return one line for each run that only checks something, or that failed."""
    tabled = ("machine", "host time", "memory", "step times", "modeled", "codecs")
    lines = []
    for name, part in parts.items():
        if part["ok"] and name.startswith(tabled):
            continue
        values = {key: value for key, value in part.items() if key not in ("ok", "seconds")}
        lines.append(f"{name}: {'ok' if part['ok'] else 'FAILED'} {json.dumps(values) if values else ''}".rstrip())
    return "\n".join(lines) + "\n"


def main(paths: Sequence[str]) -> None:
    parts: dict[str, Any] = {}
    for path in paths or [str(RESULTS)]:
        parts |= json.loads(Path(path).read_text())["parts"]
    for name, table in tables(parts).items():
        sys.stdout.write(f"{name}\n\n{table}\n")
    sys.stdout.write(checks(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
