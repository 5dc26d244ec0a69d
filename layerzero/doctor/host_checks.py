"""Check Python, torch, the devices, the memory and the limits of one machine."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from layerzero.device.accelerator import default_device_type
from layerzero.doctor.environment_checks import (
    check_interfaces,
    check_launch,
    check_threads,
    check_variables,
    whole_number,
)
from layerzero.doctor.findings import Finding, Level
from layerzero.utils.machine import available_memory
from layerzero.utils.text_tables import parameters_text, size_text

__all__ = [
    "TESTED_PYTHON",
    "TESTED_TORCH",
    "check_backends",
    "check_devices",
    "check_file_limit",
    "check_host",
    "check_locked_memory",
    "check_shared_memory",
    "check_version",
    "device_names",
]

# Oldest supported and newest tested version, as in pyproject.toml and CONTRIBUTING.md.
TESTED_PYTHON = ((3, 11), (3, 13))
TESTED_TORCH = ((2, 11), (2, 14))
_VERSIONS, _DEVICES, _MEMORY = "Python and torch", "devices", "memory and limits"
_SHM = Path("/dev/shm")
_SMALL_SHM = 1_000_000_000  # NVIDIA's guide starts containers with --shm-size=1g


def check_host(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Run all checks of this module and of environment_checks with the values of this machine."""
    kind = default_device_type()
    names, world = device_names(kind), whole_number(environment, "WORLD_SIZE") or 1
    ranks = whole_number(environment, "LOCAL_WORLD_SIZE") or 1
    rdma = [path.name for path in _list_folder(Path("/sys/class/infiniband"))]
    interfaces = [name for _, name in socket.if_nameindex()]
    loopback = world > ranks and not _is_reachable(socket.gethostname())
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    files, locked = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    return [
        check_version("Python", platform.python_version(), TESTED_PYTHON),
        check_version("torch", torch.__version__, TESTED_TORCH),
        *check_devices(kind, names, ranks, has_nvidia=Path("/dev/nvidia0").exists(), cuda=torch.version.cuda),
        *check_backends(kind, dist.is_backend_available),
        *_check_nccl(kind),
        *check_launch(environment),
        check_threads(torch.get_num_threads(), _num_cores(), ranks, kind),
        *check_variables(environment, kind, rdma=rdma),
        *check_interfaces(environment, interfaces, kind, loopback=loopback),
        *check_shared_memory(None if shm is None else (shm.total, shm.free), available_memory(), kind),
        check_file_limit(files, world, ranks),
        check_locked_memory(locked, rdma),
    ]


def device_names(kind: str) -> list[str]:
    """Return the names of the accelerators of this machine."""
    if kind == "cpu":
        return []
    module: Any = torch.get_device_module(kind)
    numbers = range(torch.accelerator.device_count())
    return [module.get_device_name(i) if hasattr(module, "get_device_name") else kind for i in numbers]


def check_version(what: str, found: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> Finding:
    """Compare a version with the oldest supported and the newest tested version."""
    oldest, newest = (".".join(map(str, version)) for version in tested)
    major, minor = found.split(".")[:2]
    version = int(major), int(minor)
    if version < tested[0]:
        return Finding(_VERSIONS, "problem", f"{what} {found} is not supported", f"Install {what} {oldest} or newer")
    if version > tested[1]:
        text = f"{what} {found} is newer than {newest}, the newest version that layerzero's tests have run on"
        return Finding(_VERSIONS, "note", text, "Run layerzero verify on your model before a long run")
    return Finding(_VERSIONS, "ok", f"{what} {found}")


def check_devices(kind: str, names: Sequence[str], ranks: int, *, has_nvidia: bool, cuda: str | None) -> list[Finding]:
    """Compare the devices that torch can use with the devices of the machine and with the number of ranks.

    Args:
        kind: type of the accelerator that torch uses, or ``"cpu"``.
        names: names of the accelerators.
        ranks: number of ranks on this node.
        has_nvidia: True if the machine has an NVIDIA device.
        cuda: CUDA version that torch was built with, or None.
    """
    if kind == "cpu" and has_nvidia and cuda is None:
        text = "the machine has an NVIDIA GPU, but torch was built without CUDA"
        return [Finding(_DEVICES, "problem", text, "Install a build of torch with CUDA")]
    if kind == "cpu" and has_nvidia:
        text = "the machine has an NVIDIA GPU that torch cannot use"
        fix = f"Check CUDA_VISIBLE_DEVICES, and use nvidia-smi to check that the driver supports CUDA {cuda}"
        return [Finding(_DEVICES, "problem", text, fix)]
    if kind == "cpu":
        return [Finding(_DEVICES, "ok", "no accelerator; models run on the CPU")]
    unique_names = ", ".join(dict.fromkeys(names))
    if 1 < len(names) < ranks:
        text = f"{ranks} ranks on this node, but only {len(names)} {kind} devices ({unique_names})"
        return [Finding(_DEVICES, "problem", text, f"Start at most {len(names)} ranks per node")]
    level: Level = "note" if len(set(names)) > 1 else "ok"
    return [Finding(_DEVICES, level, f"{len(names)} {kind} device{'s' * (len(names) > 1)}: {unique_names}")]


def check_backends(kind: str, is_available: Callable[[str], bool]) -> list[Finding]:
    """Check that torch has the backends for `kind` and for the CPU. Small messages always use gloo on the CPU."""
    findings = []
    for device in dict.fromkeys((kind, "cpu")):
        backend = dist.get_default_backend_for_device(device)
        if is_available(backend):
            findings.append(Finding(_DEVICES, "ok", f"backend for {device}: {backend}"))
        else:
            text = f"torch was built without {backend}, the backend for {device}"
            findings.append(Finding(_DEVICES, "problem", text, f"Install a build of torch with {backend}"))
    return findings


def _check_nccl(kind: str) -> list[Finding]:
    if kind != "cuda" or not dist.is_nccl_available():
        return []
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return [Finding(_DEVICES, "ok", f"NCCL {'.'.join(map(str, version))}")]


def check_shared_memory(shm: tuple[int, int] | None, available: float, kind: str) -> list[Finding]:
    """Check /dev/shm, and state which model fits into the memory of this node.

    Args:
        shm: size and free space of /dev/shm in bytes, or None if it does not exist.
        available: number of bytes that this machine or container may still allocate.
        kind: type of the accelerator, or ``"cpu"``.
    """
    users = "NCCL, data loader workers and in-memory snapshots (checkpoint.Buddies)"
    if shm is None:
        findings = [Finding(_MEMORY, "note", f"/dev/shm does not exist: {users} need it")]
    elif shm[0] < _SMALL_SHM:
        level: Level = "note" if kind == "cpu" else "problem"
        text = f"/dev/shm has only {size_text(shm[0])}, which {users} share"
        findings = [Finding(_MEMORY, level, text, "Start the container with --shm-size=1g or more, or --ipc=host")]
    else:
        findings = [Finding(_MEMORY, "ok", f"/dev/shm: {size_text(shm[0])}, {size_text(shm[1])} free, for {users}")]
    if kind != "cpu" or math.isinf(available):
        return findings
    text = (
        f"{size_text(available)} of memory available, enough for a model of up to {parameters_text(available / 18)} "
        "on one node, without activations (bf16 weights, AdamW, several ranks). On n nodes, the ranks of each node "
        "together need 6 + 12/n bytes per parameter, plus activations"
    )
    return [*findings, Finding(_MEMORY, "ok", text)]


def check_file_limit(limit: int, world: int, local: int) -> Finding:
    """Compare the limit on file descriptors with the connections of gloo.

    The default process group connects each rank with all others. Each sharded model has at least one gloo group along
    each axis of its mesh.

    Args:
        limit: number of file descriptors that this process may open, or a negative number if there is no limit.
        world, local: number of ranks, in total and on this node.
    """
    limit_text = "unlimited" if limit < 0 else f"{limit:,}"
    needed = world - 1 + local - 1 + -(-world // local) - 1
    if 0 <= limit <= needed:
        text = (
            f"a process may open only {limit_text} files, but gloo's connections need more than {needed:,} sockets per "
            "rank"
        )
        return Finding(_MEMORY, "problem", text, "Run ulimit -n 65536, or raise the limit of the job")
    return Finding(
        _MEMORY,
        "ok",
        f"limit of open files per process: {limit_text}" + f"; gloo's connections need {needed:,}" * (world > 1),
    )


def check_locked_memory(limit: int, rdma: Sequence[str]) -> Finding:
    """Check the limit on locked memory, which NCCL needs to register buffers with network adapters.

    Args:
        limit: number of bytes that this process may lock, or a negative number if there is no limit.
        rdma: names of the machine's InfiniBand or RoCE adapters.
    """
    limit_text = "unlimited" if limit < 0 else size_text(limit)
    if rdma and limit >= 0:
        text = (
            f"a process may lock only {limit_text} of memory, but NCCL needs locked memory for the adapters "
            f"{', '.join(rdma)}"
        )
        fix = "Run ulimit -l unlimited, or start the container with --ulimit memlock=-1"
        return Finding(_MEMORY, "problem", text, fix)
    return Finding(_MEMORY, "ok", f"limit of locked memory per process: {limit_text}")


def _list_folder(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_reachable(host: str) -> bool:
    """Return whether a host name resolves to an address other than the loopback."""
    with suppress(OSError):
        return any(not ip_address(entry[4][0]).is_loopback for entry in socket.getaddrinfo(host, None))
    return False


def _num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
