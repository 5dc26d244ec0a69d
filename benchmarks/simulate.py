"""Simulate steps of 7 B and 70 B models on 8 to 4,096 nodes; see benchmarks/simulation/README.md.

python -m benchmarks.simulate --nodes 8 128 4096 --json projection.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulation.project import MODELS, SCHEMES, Assumptions, Row, project


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS, key=len))
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128, 512, 2048, 4096])
    parser.add_argument("--gbit", type=float, nargs="+", default=[25, 100, 400], help="Gbit/s of a node's link")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--flops", type=float, default=Assumptions.flops)
    parser.add_argument("--memory", type=float, default=Assumptions.memory)
    parser.add_argument("--tokens", type=int, default=Assumptions.tokens)
    parser.add_argument("--steps", choices=["direct", "log", "ring"], default=Assumptions.steps, help="of an exchange")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    run_project(parser.parse_args())


def run_project(args: argparse.Namespace) -> None:
    assumed = Assumptions(flops=args.flops, memory=args.memory, tokens=args.tokens, steps=args.steps)
    print("Simulated, not measured. The schedules are models of the schemes. Share of the step in which a GPU computes")
    print("forward or backward, in percent; (parentheses): weights, gradients and optimizer state alone exceed")
    print(f"{assumed.memory / 1e9:.0f} GB")
    print("assumed: " + ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(assumed).items()))
    rows: list[Row] = []
    for name, gbit in itertools.product(args.models, args.gbit):
        model = MODELS[name]
        print(f"\n{model.name}, {model.numel / 1e9:.1f} B parameters, {gbit:g} Gbit/s a node")
        print(f"{'':>6}" + "".join(f"{f'{n} micro-batches':>{10 * len(SCHEMES) + 2}}" for n in args.micro_batches))
        print(f"{'nodes':>6}" + ("  " + "".join(f"{scheme:>10}" for scheme in SCHEMES)) * len(args.micro_batches))
        for nodes in args.nodes:
            line = f"{nodes:>6}"
            for micro_batches in args.micro_batches:
                found = list(project(model, assumed, gbit, nodes, micro_batches))
                line += "  " + "".join(f"{_percent(row):>10}" for row in found)
                rows += found
            print(line, flush=True)
    if args.json:
        content = {"assumed": dataclasses.asdict(assumed), "rows": [dataclasses.asdict(row) for row in rows]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


def _percent(row: Row) -> str:
    text = f"{100 * row.efficiency:.1f}"
    return text if row.fits else f"({text})"


if __name__ == "__main__":
    main()
