"""Count the code of the package and of its tests: lines, complexity, settings and modules loaded.

    python benchmarks/code_size.py            # a table by folder, and the totals of core, add-ons, tests and docs
    python benchmarks/code_size.py --complex  # also each function above the bounds

A code line is a line with a token that is neither a comment nor part of a docstring. The complexity of a function is
one plus its branches, loops, exception handlers, boolean operators, comprehensions and assertions, without those of
nested functions. The program reads source text, so it needs no installed package, except for the number of modules
that ``import layerzero`` loads.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "layerzero"

# Files and folders of the package that train without the others. Every other file is an add-on.
CORE = frozenset(
    [
        *("__init__.py", "config.py", "extend.py", "full_state.py"),
        *("comm", "device", "dtensor", "engine", "estimates", "layout", "optimizers", "reports", "sharding"),
        "utils",
    ]
)

MAX_COMPLEXITY, MAX_LINES = 15, 60  # of a function

_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert),
    ast.match_case,
)


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines with code, without blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def complexity(function: ast.AST) -> int:
    """Return one plus the number of decisions in a function, without those of functions inside it."""
    total, pending = 1, list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, _FUNCTIONS):
            continue
        total += isinstance(node, _BRANCHES)
        total += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        pending.extend(ast.iter_child_nodes(node))
    return total


def functions(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, complexity and number of code lines of each function below a folder."""
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, _FUNCTIONS):
                own = sum(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", complexity(node), own


def is_core(path: Path) -> bool:
    """Return whether a file of the package belongs to the core."""
    return path.relative_to(PACKAGE).parts[0] in CORE


def settings() -> int:
    """Return the number of keyword arguments of ``shard_model``."""
    tree = ast.parse((PACKAGE / "sharding" / "shard_model.py").read_text(encoding="utf-8"))
    (function,) = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and node.name == "shard_model"]
    return len(function.args.kwonlyargs)


def modules_loaded() -> str:
    """Return the number of modules of the package that ``import layerzero`` loads, or why it is unknown."""
    program = "import sys, layerzero; print(sum(name.partition('.')[0] == 'layerzero' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown, because torch is not installed for this Python"


def count(folder: Path) -> int:
    return sum(len(code_lines(path.read_text(encoding="utf-8"))) for path in folder.rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--complex", action="store_true", help="list the functions above the bounds")
    args = parser.parse_args()
    by_folder: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # files, lines of the core, lines of add-ons
    for path in sorted(PACKAGE.rglob("*.py")):
        row = by_folder[path.relative_to(PACKAGE).parts[0]]
        row[0] += 1
        row[1 if is_core(path) else 2] += len(code_lines(path.read_text(encoding="utf-8")))
    print(f"{'':20} files    core  add-on")
    for name, (files, core, add_on) in by_folder.items():
        print(f"{name:20} {files:5} {core:7,} {add_on:7,}")
    files, core, add_ons = (sum(row[index] for row in by_folder.values()) for index in range(3))
    measured = list(functions(PACKAGE))
    above = [each for each in measured if each[1] > MAX_COMPLEXITY or each[2] > MAX_LINES]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))
    if args.complex:
        print(f"\n{'complexity':>10} {'lines':>5}")
        for name, decisions, lines in sorted(above, key=lambda each: -each[1]):
            print(f"{decisions:10} {lines:5} {name}")
    print(f"\npackage {core + add_ons:,} code lines in {files} files: core {core:,}, add-ons {add_ons:,}")
    print(f"tests {count(ROOT / 'tests'):,} code lines; docs {words:,} words")
    print(
        f"functions: {len(measured):,}, of which {sum(each[1] > MAX_COMPLEXITY for each in measured)} are above "
        f"complexity {MAX_COMPLEXITY} and {sum(each[2] > MAX_LINES for each in measured)} above {MAX_LINES} lines"
    )
    print(f"settings of shard_model: {settings()}; modules that import layerzero loads: {modules_loaded()}")


if __name__ == "__main__":
    main()
