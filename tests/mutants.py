"""Break the package on purpose, one place at a time, and see whether a test notices.

    python -m tests.mutants draw                  # draw 300 mutants by seed into tests/mutants.json
    python -m tests.mutants map                   # record which test files execute which lines (as long as make test)
    python -m tests.mutants run                   # run the test files of each mutant that has no result yet
    python -m tests.mutants run --again killed    # after a change: whether the mutants that died before still die

A mutant is one changed expression: a comparison, an operator, a condition, a number, or a call that is left out. It is
known by its file, its function and the text of its statement, so that it is found again when lines move. A mutant that
is not found any more is reported as gone. The tests of a mutant are those that execute its line; they run until one
fails. A mutant survives if none of them fails. `map` and `run` take hours of processor time; `run` can be interrupted.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS, MAP = ROOT / "tests" / "mutants.json", ROOT / "build" / "mutants-map.json"
NUMBER, SEED, TIMEOUT = 300, 20261129, 900.0  # mutants, seed of the draw, seconds for the tests of one mutant
# Parts of the package that are about to be deleted or written anew, of which no mutant is drawn.
LEFT_OUT = (
    *("planning", "estimates", "cli/plan.py"),
    *("comm/process_groups.py", "checkpoint/json_codec.py", "step_trace.py"),
)

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
    **{ast.Div: ast.Mult},
}


class Mutant(NamedTuple):
    """One changed expression. `number` counts equal changes of the unparsed `statement` in `function`."""

    path: str
    function: str
    statement: str
    kind: str
    number: int


def _changes(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each change of a simple statement, or of the condition of a compound one, with its kind."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield "leave out a call", ast.Pass()
    for index, _ in enumerate(_own_nodes(statement)):
        changed = copy.deepcopy(statement)
        node = list(_own_nodes(changed))[index]
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            node.ops[0] = _COMPARISONS[type(node.ops[0])]()
            yield "comparison", changed
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _OPERATORS:
            node.op = _OPERATORS[type(node.op)]()
            yield "operator", changed
        elif isinstance(node, ast.BoolOp):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and or", changed
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield "number", changed
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            yield "condition", changed


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement in a fixed order, without those of the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            child for child in ast.iter_child_nodes(node) if not isinstance(child, (ast.stmt, ast.excepthandler))
        ]


def _sites(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield the statements inside functions, without annotations, docstrings, raises and assertions."""
    for child in ast.iter_child_nodes(tree):
        name = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{function}.{child.name}".removeprefix(".")
        elif isinstance(child, ast.stmt) and function and not isinstance(child, (ast.Raise, ast.Assert, ast.Import)):
            yield function, child
        yield from _sites(child, name)


def mutants_of(path: Path) -> Iterator[tuple[Mutant, int, ast.stmt, ast.stmt]]:
    """Yield each mutant of a file with the line, the statement and the changed statement."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for function, statement in _sites(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.unparse(statement).partition("\n")[0]
        for kind, changed in _changes(statement):
            number = seen[function, text, kind]
            seen[function, text, kind] += 1
            yield (
                Mutant(str(path.relative_to(ROOT)), function, text, kind, number),
                statement.lineno,
                statement,
                changed,
            )


def _break(mutant: Mutant, root: Path) -> int | None:
    """Write the mutant into the tree at `root`; return its line, or None if it is gone."""
    source = ROOT / mutant.path
    if not source.exists():
        return None
    for found, line, statement, changed in mutants_of(source):
        if found == mutant:
            lines = source.read_text(encoding="utf-8").splitlines()
            end = _end_of_head(statement)
            head = " " * statement.col_offset + ast.unparse(ast.fix_missing_locations(changed)).partition("\n")[0]
            lines[line - 1 : end] = [head] + [""] * (end - line)
            (root / mutant.path).write_text("\n".join(lines) + "\n", encoding="utf-8")
            return line
    return None


def _end_of_head(statement: ast.stmt) -> int:
    """Return the last line of a statement, or of the head of a compound statement."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        first = min(child.lineno for child in body)
        return max(statement.lineno, first - 1)
    return statement.end_lineno or statement.lineno


def draw() -> None:
    """Draw the mutants, from each folder in proportion to its code, and at most four of a function."""
    by_folder: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / "layerzero").rglob("*.py")):
        within = path.relative_to(ROOT / "layerzero")
        if within.parts[0] not in LEFT_OUT and within.as_posix() not in LEFT_OUT:
            by_folder[within.parts[0]] += [mutant for mutant, *_ in mutants_of(path)]
    generator, total = random.Random(SEED), sum(map(len, by_folder.values()))
    drawn: list[Mutant] = []
    for mutants in by_folder.values():
        drawn += generator.sample(mutants, min(len(mutants), round(NUMBER * len(mutants) / total) or 1))
    _write({"seed": SEED, "mutants": [{**mutant._asdict(), "result": None} for mutant in drawn]})
    print(f"{len(drawn)} mutants of {total}")


def record_map() -> None:
    """Run each test file under coverage, and store the lines of the package that it executes and its seconds."""
    found: dict[str, Any] = json.loads(MAP.read_text()) if MAP.exists() else {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if name in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "COVERAGE_FILE": f"{folder}/data"}
            start = time.monotonic()
            coverage = [sys.executable, "-m", "coverage"]
            test = [*coverage, "run", "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", name]
            subprocess.run(test, cwd=ROOT, env=environment, capture_output=True, check=False)
            seconds = time.monotonic() - start
            subprocess.run([*coverage, "combine", "-q"], cwd=ROOT, env=environment, capture_output=True, check=False)
            report = [*coverage, "json", "-q", "--fail-under=0", "-o", f"{folder}/report.json"]
            subprocess.run(report, cwd=ROOT, env=environment, capture_output=True, check=False)
            output = Path(folder, "report.json")
            files = json.loads(output.read_text())["files"] if output.exists() else {}
        lines = {file: entry["executed_lines"] for file, entry in files.items() if entry["executed_lines"]}
        found[name] = {"seconds": round(seconds, 1), "lines": lines}
        MAP.parent.mkdir(exist_ok=True)
        MAP.write_text(json.dumps(found), encoding="utf-8")
        print(f"{name}: {seconds:.0f} s", flush=True)


def run(again: str | None, part: tuple[int, int]) -> None:
    """Run the tests of the mutants without a result, or of those whose result is `again`, and store the results."""
    mapped = json.loads(MAP.read_text(encoding="utf-8"))
    entries = json.loads(RESULTS.read_text(encoding="utf-8"))["mutants"]
    for index, entry in enumerate(entries):
        known = (entry["result"] or "").split(" ")[0]
        if index % part[1] != part[0] or (known != again if again else known):
            continue
        mutant = Mutant(**{name: entry[name] for name in Mutant._fields})
        result = _result(mutant, mapped)
        now = json.loads(RESULTS.read_text(encoding="utf-8"))  # another part may have written meanwhile
        now["mutants"][index]["result"] = result
        _write(now)
        print(f"{index}: {mutant.path} {mutant.function}: {mutant.statement} [{mutant.kind}]: {result}", flush=True)
    print(Counter((each["result"] or "open").split(" ")[0] for each in json.loads(RESULTS.read_text())["mutants"]))


def _result(mutant: Mutant, mapped: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("layerzero", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "pyproject.toml", "setup.py", "Makefile"):
            shutil.copy(ROOT / name, root)
        line = _break(mutant, root)
        if line is None:
            return "gone"
        covering = {
            name: each["seconds"] for name, each in mapped.items() if line in each["lines"].get(mutant.path, ())
        }
        mirror = mutant.path.replace("layerzero/", "tests/", 1).replace("/", "/test_").rpartition("/test_")[2]
        order = sorted(covering, key=lambda name: (not name.endswith(mirror), covering[name]))
        deadline = time.monotonic() + TIMEOUT
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        for name in order:
            test = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", name]
            try:
                left = max(deadline - time.monotonic(), 1.0)
                done = subprocess.run(test, cwd=root, env=environment, capture_output=True, check=False, timeout=left)
            except subprocess.TimeoutExpired:
                return f"undecided after {TIMEOUT:.0f} s"
            if done.returncode not in (0, 5):
                return f"killed by {name}"
        return f"survived {len(order)} test files"


def _write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["draw", "map", "run"])
    parser.add_argument("--again", choices=["killed", "survived", "undecided"], help="run those with this result")
    parser.add_argument("--part", default="0/1", help="run every nth mutant, as in 0/2 and 1/2 at the same time")
    args = parser.parse_args()
    if args.command == "draw":
        draw()
    elif args.command == "map":
        record_map()
    else:
        number, _, parts = args.part.partition("/")
        run(args.again, (int(number), int(parts)))


if __name__ == "__main__":
    main()
