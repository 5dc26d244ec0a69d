"""Identify this machine, and measure its free memory."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

_OLD_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # cgroups v1


def boot_id() -> str:
    """Return an identifier of this machine that changes with each reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown ({os.name})"


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the number of bytes that this process may still allocate on its machine and in its container."""
    return min(_available_on_machine(), _available_in_container(cgroup))


def _available_on_machine() -> float:
    with suppress(OSError):  # not on Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return math.inf


def _available_in_container(root: Path) -> float:
    """Return the number of bytes that the container of this process may still allocate.

    File pages count as free, because the kernel can drop them.
    """
    available = math.inf
    for folder, limit, used in ((root, "memory.max", "memory.current"), (root / "memory", *_OLD_NAMES)):
        with suppress(OSError, ValueError):  # no such cgroup version, or the limit is "max"
            max_bytes, used_bytes = (int((folder / name).read_text()) for name in (limit, used))
            available = min(available, max_bytes - used_bytes + _file_page_bytes(folder / "memory.stat"))
    return available


def _file_page_bytes(stat: Path) -> int:
    """Return the size in bytes of a container's file pages, including those of nested containers."""
    with suppress(OSError, ValueError):
        counters = dict(line.split() for line in stat.read_text().splitlines())
        inside = "total_" if "total_active_file" in counters else ""
        return sum(int(counters.get(f"{inside}{kind}_file", 0)) for kind in ("active", "inactive"))
    return 0
