"""Checks of ``layerzero doctor``: machine, ranks and links. A check returns findings."""

from layerzero.doctor.findings import Finding, findings_as_json, findings_as_text, has_problem, summary
from layerzero.doctor.job import check_job
from layerzero.doctor.machine import check_machine, whole_number

__all__ = [
    "Finding",
    "check_job",
    "check_machine",
    "findings_as_json",
    "findings_as_text",
    "has_problem",
    "summary",
    "whole_number",
]
