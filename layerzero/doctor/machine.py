"""Check one machine: versions, devices, launcher, environment variables, shared memory and packages."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import layerzero
from layerzero.doctor.findings import Finding, Level
from layerzero.extend import default_device_type

# Oldest supported and newest tested version, as in pyproject.toml and CONTRIBUTING.md.
TESTED_PYTHON = ((3, 11), (3, 13))
TESTED_TORCH = ((2, 11), (2, 14))
_VERSIONS, _DEVICES, _LAUNCH = "Python and torch", "devices", "launch"
_VARIABLES, _MEMORY, _PACKAGES = "environment variables", "memory", "packages"
_SHM, _ADAPTERS = Path("/dev/shm"), Path("/sys/class/infiniband")
_SMALL_SHM = 1_000_000_000  # NVIDIA's guide starts containers with --shm-size=1g
_OURS = "torch-layerzero"
_DESCRIPTORS_OF_GROUP = 4  # of a gloo group besides its connections: a socket that listens, and three for its thread
_DESCRIPTORS_OF_PROCESS = 16  # of Python, torch and the connections to the store
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_", "GLOO_", "CUDA_", "PYTORCH_")
_OFF = {"", "0", "n", "no", "f", "false", "off"}


class _Rule(NamedTuple):
    """Effect of a variable that is switched on, or, if `value` is not None, that has the value `value`."""

    name: str
    effect: str
    value: str | None = None
    fix: str = "Unset it"
    gpu_only: bool = True

    def applies(self, found: str) -> bool:
        return found.strip().lower() not in _OFF if self.value is None else found.strip().upper() == self.value


# From NVIDIA's NCCL user guide ("Environment Variables") and torch's pages on CUDA, NCCL and distributed debugging.
_RULES = (
    _Rule("NCCL_P2P_DISABLE", "GPUs of a node send weights through host memory instead of NVLink or PCI"),
    _Rule("NCCL_SHM_DISABLE", "GPUs of a node without direct access to each other communicate over the network"),
    _Rule("TORCH_NCCL_BLOCKING_WAIT", "each wait for a collective blocks the host, so it cannot launch work ahead"),
    _Rule("NCCL_BLOCKING_WAIT", "each wait for a collective blocks the host, so it cannot launch work ahead"),
    _Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", "if a rank fails, the other ranks hang instead of ending", "0"),
    _Rule("NCCL_ASYNC_ERROR_HANDLING", "if a rank fails, the other ranks hang instead of ending", "0"),
    _Rule("CUDA_LAUNCH_BLOCKING", "each kernel launch waits for its kernel, so nothing overlaps"),
    _Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "each tensor calls the driver for memory, which synchronizes the device"),
    _Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "gathers and reductions wait for computation, because all streams share one hardware queue",
        "1",
        "Set it to 32, or unset it, unless Megatron-LM requires it for GPUs older than Blackwell",
    ),
    _Rule("TORCH_DISTRIBUTED_DEBUG", "ranks compare every collective before it starts", "DETAIL", gpu_only=False),
)
# NVIDIA's guide lists these variables under "Debugging": NCCL then no longer selects the best setting itself.
_OVERRIDES = {
    *(f"NCCL_{name}" for name in ("ALGO", "PROTO", "BUFFSIZE", "NTHREADS", "MAX_NCHANNELS", "MIN_NCHANNELS")),
    *(f"NCCL_{name}" for name in ("P2P_LEVEL", "P2P_DIRECT_DISABLE", "CHECK_POINTERS", "CHECK_MODE", "LAUNCH_MODE")),
    *(f"NCCL_IB_{name}" for name in ("AR_THRESHOLD", "QPS_PER_CONNECTION", "SPLIT_DATA_ON_QPS", "CUDA_SUPPORT")),
    *(f"NCCL_IB_{name}" for name in ("PCI_RELAXED_ORDERING", "ADAPTIVE_ROUTING")),
}


def check_machine(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Run all checks of this module with the values of this machine."""
    kind = default_device_type()
    local = whole_number(environment, "LOCAL_WORLD_SIZE") or 1
    adapters = sorted(os.listdir(_ADAPTERS)) if _ADAPTERS.is_dir() else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    has_nvidia = Path("/dev/nvidia0").exists()
    return [
        check_version("Python", platform.python_version(), TESTED_PYTHON),
        check_version("torch", torch.__version__, TESTED_TORCH),
        check_devices(kind, device_names(kind), local, has_nvidia=has_nvidia, cuda=torch.version.cuda),
        check_launch(environment),
        check_threads(torch.get_num_threads(), cores, local, kind),
        check_descriptors(environment, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        *check_variables(environment, kind, adapters=adapters),
        check_shared_memory(shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0, kind),
        *check_distributions(),
    ]


def whole_number(environment: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable, or None if it is not set or not a whole number."""
    value = environment.get(name, "")
    return int(value) if value.isdigit() else None


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


def check_devices(kind: str, names: Sequence[str], ranks: int, *, has_nvidia: bool, cuda: str | None) -> Finding:
    """Compare the devices that torch can use with the devices of the machine and with the number of ranks.

    Args:
        kind: type of the accelerator that torch uses, or ``"cpu"``.
        names: names of the accelerators.
        ranks: number of ranks on this node.
        has_nvidia: True if the machine has an NVIDIA device.
        cuda: CUDA version that torch was built with, or None.
    """
    if kind == "cpu" and has_nvidia:
        text = "the machine has an NVIDIA GPU that torch cannot use, so training runs on the CPU"
        fix = f"Check CUDA_VISIBLE_DEVICES, and use nvidia-smi to check that the driver supports CUDA {cuda}"
        return Finding(_DEVICES, "problem", text, fix if cuda else "Install a build of torch with CUDA")
    if kind == "cpu":
        return Finding(_DEVICES, "ok", "no accelerator; models run on the CPU")
    unique_names = ", ".join(dict.fromkeys(names))
    if 1 < len(names) < ranks:  # a launcher may show each rank only its own device
        text = f"{ranks} ranks on this node, but only {len(names)} {kind} devices ({unique_names})"
        return Finding(_DEVICES, "problem", text, f"Start at most {len(names)} ranks per node")
    level: Level = "note" if len(set(names)) > 1 else "ok"
    return Finding(_DEVICES, level, f"{len(names)} {kind} device{'s' * (len(names) > 1)}: {unique_names}")


def check_launch(environment: Mapping[str, str]) -> Finding:
    """Check the variables with the numbers of ranks, which torchrun sets."""
    world, local = (whole_number(environment, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not world:
        text = "one process; to check ranks and links, start this command with torchrun"
        return Finding(_LAUNCH, "ok", text)
    if not local or world % local:
        text = f"LOCAL_WORLD_SIZE={environment.get('LOCAL_WORLD_SIZE', '')} does not divide WORLD_SIZE={world}"
        fix = "zero3_size then has no default. Pass it, or start the same number of ranks on each node with torchrun"
        return Finding(_LAUNCH, "problem", text, fix)
    return Finding(_LAUNCH, "ok", f"{world} ranks, {local} on each node")


def check_threads(threads: int, cores: int, ranks: int, kind: str) -> Finding:
    """Check the number of CPU threads.

    Args:
        threads: number of CPU threads that torch uses in each rank.
        cores: number of CPU cores that this process may use.
        ranks: number of ranks on this node.
    """
    cores_per_rank = max(1, cores // ranks)
    if ranks > 1 and threads > cores_per_rank:
        level: Level = "problem" if kind == "cpu" else "note"
        text = f"{ranks} ranks with {threads} threads each share {cores} cores"
        return Finding(_LAUNCH, level, text, f"Set OMP_NUM_THREADS={cores_per_rank}")
    if kind != "cpu" and threads == 1 and cores_per_rank > 1:
        text = "OMP_NUM_THREADS=1, torchrun's default: an offloaded optimizer would use only one thread per rank"
        return Finding(_LAUNCH, "note", text, f"If you offload the optimizer, set OMP_NUM_THREADS={cores_per_rank}")
    return Finding(_LAUNCH, "ok", f"{threads} thread{'s' * (threads > 1)} per rank, {cores} cores")


def needed_descriptors(zero3_size: int, replicas: int) -> int:
    """Return the file descriptors of a rank with one model, after a save, a save in the background and a snapshot.

    The rank has the default groups of torch and of a model on gloo, no process of its own for the store, and two
    partners on other nodes for snapshots. On devices, the backend adds its own.
    """
    world, levels = zero3_size * replicas, 0
    while 4**levels < world:
        levels += 1

    def of_groups(count: int, ranks: int) -> int:
        return count * (ranks - 1 + _DESCRIPTORS_OF_GROUP)

    # Groups: of all ranks; of the mesh, for gathers, reductions and control messages; for checkpoints.
    axes = of_groups(4, zero3_size) + of_groups(3, replicas)
    return _DESCRIPTORS_OF_PROCESS + of_groups(1, world) + axes + of_groups(levels, 4) + of_groups(2, 2)


def check_descriptors(environment: Mapping[str, str], limit: int) -> Finding:
    """Compare the limit of open file descriptors with the connections of a rank, and of the store on the first one."""
    world, local = (whole_number(environment, name) or 1 for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    needed = needed_descriptors(local, max(1, world // local)) + 2 * world  # two connections of each rank to the store
    text = f"up to {needed} connections and files on a rank, with a limit of {limit}"
    if 0 <= limit < needed:
        return Finding(_LAUNCH, "problem", text, f"Run ulimit -n {2 * needed} on all nodes before the job starts")
    return Finding(_LAUNCH, "ok", text)


def check_variables(environment: Mapping[str, str], kind: str, *, adapters: Sequence[str] = ()) -> list[Finding]:
    """Return findings about the variables that are set.

    Args:
        kind: type of the accelerator, or ``"cpu"``. Except on ``"cuda"``, variables for GPUs cause only notes.
        adapters: names of the machine's InfiniBand or RoCE adapters.
    """
    no_infiniband = f"NCCL sends over IP sockets and does not use the adapters {', '.join(adapters)}"
    findings = []
    for rule in [*_RULES, *([_Rule("NCCL_IB_DISABLE", no_infiniband)] if adapters else [])]:
        if rule.name in environment and rule.applies(environment[rule.name]):
            level: Level = "note" if rule.gpu_only and kind != "cuda" else "problem"
            text = f"{rule.name}={environment[rule.name]}: {rule.effect}" + ", if there are GPUs" * (level == "note")
            findings.append(Finding(_VARIABLES, level, text, rule.fix))
    if overrides := [f"{name}={environment[name]}" for name in sorted(_OVERRIDES & environment.keys())]:
        text = f"{', '.join(overrides)}: NCCL's own choice is overridden"
        findings.append(Finding(_VARIABLES, "note", text, "Unset variables whose benefit you have not measured"))
    listed = ", ".join(f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(PREFIXES))
    return [*findings, Finding(_VARIABLES, "ok", f"set: {listed or 'no variables of NCCL, CUDA, gloo or torch'}")]


def check_shared_memory(size: int, kind: str) -> Finding:
    """Check the size of /dev/shm in bytes, or 0 if it does not exist."""
    text = f"/dev/shm has {size / 1e9:.2f} GB, which NCCL, data loader workers and checkpoint.Buddies share"
    if size >= _SMALL_SHM:
        return Finding(_MEMORY, "ok", text)
    fix = "Start the container with --shm-size=1g or more, or --ipc=host"
    return Finding(_MEMORY, "note" if kind == "cpu" else "problem", text, fix)


def check_distributions() -> list[Finding]:
    """Check which distributions provide the module ``layerzero``. PyPI has another project of this name."""
    version, package = layerzero.__version__, Path(layerzero.__file__).parent
    findings = []
    if others := sorted({each.version for each in metadata.distributions(name=_OURS)} - {version}):
        text = f"Python imports layerzero {version} from {package}, but {_OURS} {', '.join(others)} is installed"
        fix = "Remove one of them from the import path, or reinstall"
        findings.append(Finding(_PACKAGES, "problem", text, fix))
    for stranger in metadata.distributions(name="layerzero"):
        if any(file.parts[0] == "layerzero" for file in stranger.files or () if file.suffix == ".py"):
            name = f"{stranger.metadata['Name']} {stranger.version} in {stranger.locate_file('')}"
            text = f"{name} is another project that also installs the module layerzero"
            fix = f"Run pip uninstall layerzero, then install {_OURS} again"
            findings.append(Finding(_PACKAGES, "problem", text, fix))
    unique = list(dict.fromkeys(findings))  # a folder may be on the import path twice
    return unique or [Finding(_PACKAGES, "ok", f"layerzero {version}, imported from {package}")]


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in names}
    return {name: each.version for name, each in found.items() if each is not None}
