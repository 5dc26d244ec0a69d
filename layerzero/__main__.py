"""Entry point for ``python -m layerzero`` and for the ``layerzero`` command.

No other module imports `layerzero.cli`, because it needs typer.
"""

from __future__ import annotations

import sys

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
        print("the command line of layerzero needs typer. Run: pip install typer", file=sys.stderr)
        sys.exit(2)
    app(prog_name="layerzero")


if __name__ == "__main__":
    main()
