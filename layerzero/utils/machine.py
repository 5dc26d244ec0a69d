"""Identify this machine."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """Return the identifier of the current boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown ({os.name})"
