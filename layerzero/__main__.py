"""Entry point for ``python -m layerzero`` and for the ``layerzero`` command.

No other module imports `layerzero.cli`, because it needs typer.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from layerzero import __version__


def main() -> None:
    """Run the command in ``sys.argv``. If typer is not installed, print how to install it."""
    if sys.argv[1:] == ["--version"]:  # handled here, because it does not need typer
        print(f"layerzero {__version__}")
        return
    try:
        from layerzero.cli import app  # noqa: PLC0415 - imported here, to report a missing package
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        is_help = sys.argv[1:] in (["--help"], ["-h"], ["help"])
        if is_help:
            print("Usage: layerzero COMMAND ...\n       layerzero --version\n")
            for name, line in _commands():
                print(f"  {name:<10}{line}")
            print()
        print(
            "the command line of layerzero needs typer. Run: pip install typer",
            file=sys.stdout if is_help else sys.stderr,
        )
        sys.exit(0 if is_help else 2)
    app(prog_name="layerzero")


def _commands() -> Iterator[tuple[str, str]]:
    """Yield each command's name and the first line of its docstring.

    The function parses the modules' source code, because importing these modules requires typer.
    """
    package = Path(__file__).parent
    for path in (package / "cli.py", package / "cli_planning.py", package / "cli_doctor.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        # @app.command("name") above a function, or app.command("name")(function)
        named: list[tuple[ast.expr, str]] = [(call, f.name) for f in functions.values() for call in f.decorator_list]
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Call)]
        named += [
            (call.func, argument.id) for call in calls for argument in call.args if isinstance(argument, ast.Name)
        ]
        for call, function in named:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "app.command" and call.args:
                yield ast.literal_eval(call.args[0]), (ast.get_docstring(functions[function]) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
