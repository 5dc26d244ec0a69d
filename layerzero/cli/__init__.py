"""Command line ``layerzero``. Only ``layerzero.__main__`` imports this package, which requires typer."""

from __future__ import annotations

import typer

from layerzero.cli.checkpoints import export_checkpoint, import_checkpoint, inspect_checkpoint
from layerzero.cli.doctor import check_environment
from layerzero.cli.plan import plan_model
from layerzero.cli.verify import verify_model

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.command("verify")(verify_model)
app.command("inspect")(inspect_checkpoint)
app.command("export")(export_checkpoint)
app.command("import")(import_checkpoint)
app.command("plan")(plan_model)
app.command("doctor")(check_environment)


@app.callback(epilog="layerzero --version prints the version.")
def _layerzero() -> None:
    """Hybrid of ZeRO-1 and ZeRO-3: optimizer state sharded over all ranks, weights over a few ranks with fast links."""
