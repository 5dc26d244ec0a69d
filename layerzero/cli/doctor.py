"""Command ``doctor``."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Annotated

import typer

from layerzero import doctor


def check_environment(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other ranks.", min=1.0)] = 60.0,
) -> None:
    """Find problems in the environment before training: versions, variables, memory, packages, ranks and links.

    Exit status: 0 if there is no problem, 1 if there is a problem, 2 for usage errors.
    """
    rank = doctor.whole_number(os.environ, "RANK")

    def show(found: list[doctor.Finding]) -> None:
        if found and not as_json and not rank:
            typer.echo(doctor.findings_as_text(found) + "\n")

    findings = doctor.check_machine()
    if rank is not None and (doctor.whole_number(os.environ, "WORLD_SIZE") or 1) > 1:
        findings = doctor.check_job(findings, timedelta(seconds=timeout), show)
    else:
        show(findings)
    if not rank:
        typer.echo(doctor.findings_as_json(findings) if as_json else doctor.summary(findings))
    elif findings:  # the rendezvous failed
        typer.echo(f"layerzero: rank {rank}: {findings[-1].text}", err=True)
    raise typer.Exit(1 if doctor.has_problem(findings) else 0)
