"""Simulate steps of layerzero on other machines; docs/simulation.md describes the method and its accuracy.

python -m benchmarks.simulate calibrate --where one-machine      # predicted beside measured, 4 gloo ranks
python -m benchmarks.simulate calibrate --where two-nodes        # two emulated nodes, 1 Gbit/s; needs root
python -m benchmarks.simulate project                            # 7 B and 70 B models, 8 to 4,096 nodes
layerzero simulate TRACE                                         # a file of layerzero.trace on a machine as described
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulation.calibrate import calibrate
from benchmarks.simulation.measure import Case, Plan, measure
from benchmarks.simulation.project import MODELS, SCHEMES, Assumptions, Row, project

_CASES = (
    Case(4),  # the fitted case
    *(Case(count) for count in (1, 2, 8)),
    *(Case(count, "full") for count in (1, 4, 8)),
    *(Case(4, mode, reduce="bfloat16") for mode in ("sharded", "full")),
    *(Case(count, "full", 1) for count in (1, 4)),
    *(Case(count, "sharded", 4) for count in (1, 4)),
    Case(4, "full", 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("calibrate", help="predicted beside measured steps of a small GPT")
    command.add_argument("--where", choices=["one-machine", "two-nodes"], default="one-machine")
    command.add_argument("--rounds", type=int, default=8, help="times that each case is measured; the quietest counts")
    command.add_argument("--steps", type=int, default=3, help="of a round, one after the other")
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--width", type=int, default=512)
    command.add_argument("--json", type=Path, help="write the numbers there, too")
    command.set_defaults(run=run_calibrate)

    command = commands.add_parser("project", help="7 B and 70 B models on 8 to 4,096 nodes")
    command.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS, key=len))
    command.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128, 512, 2048, 4096])
    command.add_argument("--gbit", type=float, nargs="+", default=[25, 100, 400], help="Gbit/s of a node's link")
    command.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    command.add_argument("--flops", type=float, default=Assumptions.flops)
    command.add_argument("--memory", type=float, default=Assumptions.memory)
    command.add_argument("--tokens", type=int, default=Assumptions.tokens)
    command.add_argument("--steps", choices=["direct", "log", "ring"], default=Assumptions.steps, help="of an exchange")
    command.add_argument("--json", type=Path, help="write the rows there, too")
    command.set_defaults(run=run_project)

    args = parser.parse_args()
    args.run(args)


def run_calibrate(args: argparse.Namespace) -> None:
    two_nodes = args.where == "two-nodes"
    plan = Plan(cases=_CASES, rounds=args.rounds, steps=args.steps, layers=args.layers, width=args.width)
    with measure(plan, two_nodes=two_nodes) as measured:
        machine, predictions = calibrate(plan, measured, two_nodes=two_nodes)
    print(
        f"{args.where}: {plan.ranks} ranks, GPT of {plan.layers} blocks of width {plan.width}, {plan.tokens} tokens a "
        f"micro-batch; quietest of {plan.rounds} rounds of {plan.steps} steps"
    )
    print(f"fitted to the first row: {1e9 * machine.processor_per_byte:.2f} ns of a rank's processor for each byte")
    if two_nodes:
        print(f"link between nodes, as seen in the traces: {machine.between / 1e6:.0f} MB/s")
    print("| S | A | accumulation | reduce | measured, s | predicted, s | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for each in predictions:
        count, mode, size, reduce = each.case
        error = "fitted" if each.fitted else f"{each.error:+.1%}"
        print(f"| {size} | {count} | {mode} | {reduce} | {each.measured:.3f} | {each.predicted:.3f} | {error} |")
    if args.json:
        found = [dataclasses.asdict(each) for each in predictions]
        content = {"where": args.where, "plan": dataclasses.asdict(plan), "predictions": found}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


def run_project(args: argparse.Namespace) -> None:
    assumed = Assumptions(flops=args.flops, memory=args.memory, tokens=args.tokens, steps=args.steps)
    print("Simulated, not measured. The schedule of layerzero is the engine's own; those of HSDP and full sharding are")
    print("models of these schemes. Share of the step in which a GPU computes forward or backward, in percent;")
    print(f"(parentheses): weights, gradients and optimizer state alone exceed {assumed.memory / 1e9:.0f} GB")
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
