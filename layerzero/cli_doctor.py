"""Define the command ``doctor``. Only ``layerzero.cli`` imports this module, which requires typer."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

import layerzero
from layerzero.doctor.environment_checks import whole_number
from layerzero.doctor.findings import Finding, findings_as_json, findings_as_text, has_problem, summary
from layerzero.doctor.host_checks import check_host
from layerzero.doctor.link_checks import Job, first_line
from layerzero.doctor.package_checks import check_packages
from layerzero.doctor.rank_checks import RankReport

__all__ = ["add_doctor"]


def _doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other ranks.", min=1.0)] = 60.0,
) -> None:
    """Find problems in the environment before training: versions, variables, limits, packages, ranks and links.

    Exit status: 0 if there is no problem, 1 if there is a problem, 2 for usage errors.
    """
    package = Path(layerzero.__file__).parent
    findings = [*check_host(), *check_packages(layerzero.__version__, package)]

    def show(found: list[Finding]) -> None:
        if found and not as_json:
            typer.echo(findings_as_text(found) + "\n")

    if (whole_number(os.environ, "WORLD_SIZE") or 1) > 1 and "RANK" in os.environ:
        findings = _check_job(findings, show, timedelta(seconds=timeout))
    else:
        show(findings)
    typer.echo(findings_as_json(findings) if as_json else summary(findings))
    raise typer.Exit(1 if has_problem(findings) else 0)


def _check_job(own_findings: list[Finding], show: Callable[[list[Finding]], None], timeout: timedelta) -> list[Finding]:
    """Check the ranks of this job. The first rank shows and returns all findings; all other ranks exit."""
    is_first = whole_number(os.environ, "RANK") == 0
    per_node = 0
    try:
        job = Job(timeout)
        findings, per_node = job.compare(RankReport.of_this_rank(layerzero.__version__, os.environ, own_findings))
    except (RuntimeError, ValueError) as error:
        text = f"the rendezvous failed: {first_line(error)}"
        fix = "Check MASTER_ADDR and MASTER_PORT, and read the output of the other ranks"
        findings = [*own_findings, Finding("ranks", "problem", text, fix)]
        if not is_first:
            typer.echo(f"layerzero: rank {os.environ['RANK']}: {text}", err=True)
            raise typer.Exit(1) from None
    if is_first:
        show(findings)  # now, because a backend may end the process while links are measured
    links = job.measure(per_node) if per_node else []
    if not is_first:
        raise typer.Exit(0)
    show(links)
    return [*findings, *links]


def add_doctor(app: typer.Typer) -> None:
    app.command("doctor")(_doctor)
