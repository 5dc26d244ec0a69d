"""``python -m layerzero``, and the command ``layerzero``. Nothing else imports `layerzero.cli`, which needs typer."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    """Run the command line."""
    try:
        from layerzero.cli import app  # noqa: PLC0415 - here, to say what is missing
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        asked = sys.argv[1:] in (["--help"], ["-h"], ["help"])
        if asked:
            print("Usage: layerzero COMMAND ...\n")
            for name, line in _commands():
                print(f"  {name:<10}{line}")
            print()
        print("the command line of layerzero needs typer: pip install typer", file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    app(prog_name="layerzero")


def _commands() -> Iterator[tuple[str, str]]:
    """Names and first lines of the commands, from the source of what cannot be imported."""
    tree = ast.parse(Path(__file__).with_name("cli.py").read_text(encoding="utf-8"))
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "app.command" and call.args:
                yield ast.literal_eval(call.args[0]), (ast.get_docstring(function) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
