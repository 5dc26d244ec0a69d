"""``python -m layerzero``, and the command ``layerzero``. Nothing else imports `layerzero.cli`, which needs typer."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from layerzero.cli import app  # noqa: PLC0415 - here, to say what is missing
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print("the command line of layerzero needs typer: pip install typer", file=sys.stderr)
        sys.exit(2)
    app(prog_name="layerzero")


if __name__ == "__main__":
    main()
