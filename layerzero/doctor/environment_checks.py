"""Check environment variables of NCCL, torch, gloo and torchrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from layerzero.doctor.findings import Finding, Level
from layerzero.sharding.launchers import connections_warning, restart_warning

__all__ = ["check_interfaces", "check_launch", "check_threads", "check_variables", "relevant_variables", "whole_number"]

_GROUP = "environment variables"
_LAUNCH = "launch"
_UNSET = "Unset it"
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_", "GLOO_", "CUDA_", "PYTORCH_")
_OFF = {"", "0", "n", "no", "f", "false", "off"}


class _Rule(NamedTuple):
    """Effect of a variable that is switched on, or, if `value` is not None, that has the value `value`."""

    name: str
    effect: str
    value: str | None = None
    level: Level = "problem"
    fix: str = _UNSET
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
    _Rule("TORCH_DISTRIBUTED_DEBUG", "ranks compare every collective before it starts", "DETAIL", gpu_only=False),
    _Rule("NCCL_DEBUG", "NCCL logs each communicator and its settings", "INFO", "note", "WARN logs errors only"),
    _Rule("NCCL_DEBUG", "NCCL logs each call", "TRACE", "note", "WARN logs errors only"),
    _Rule("TORCH_NCCL_ENABLE_MONITORING", "torch does not end a process whose watchdog hangs", "0", "note"),
    _Rule("TORCH_NCCL_ENABLE_TIMING", "torch records the start of each collective, for debugging", None, "note"),
    _Rule("TORCH_NCCL_DESYNC_DEBUG", "torch records the start of each collective, for debugging", None, "note"),
    _Rule("NCCL_DEBUG", "NCCL explains its errors", "WARN", "ok", ""),
    _Rule(
        "TORCH_NCCL_TRACE_BUFFER_SIZE", "torch records the last collectives, for a report after a hang", None, "ok", ""
    ),
    _Rule("TORCH_FR_BUFFER_SIZE", "torch records the last collectives, for a report after a hang", None, "ok", ""),
    _Rule("PYTORCH_ALLOC_CONF", "less fragmentation of GPU memory", "EXPANDABLE_SEGMENTS:TRUE", "ok", ""),
    _Rule("PYTORCH_CUDA_ALLOC_CONF", "less fragmentation of GPU memory", "EXPANDABLE_SEGMENTS:TRUE", "ok", ""),
)
# NVIDIA's guide lists these variables under "Debugging": NCCL then no longer selects the best setting itself.
_OVERRIDES = {
    *(f"NCCL_{name}" for name in ("ALGO", "PROTO", "BUFFSIZE", "NTHREADS", "MAX_NCHANNELS", "MIN_NCHANNELS")),
    *(f"NCCL_{name}" for name in ("P2P_LEVEL", "P2P_DIRECT_DISABLE", "CHECK_POINTERS", "CHECK_MODE", "LAUNCH_MODE")),
    *(f"NCCL_IB_{name}" for name in ("AR_THRESHOLD", "QPS_PER_CONNECTION", "SPLIT_DATA_ON_QPS", "CUDA_SUPPORT")),
    *(f"NCCL_IB_{name}" for name in ("PCI_RELAXED_ORDERING", "ADAPTIVE_ROUTING")),
}
# Variables that may differ between ranks without harm.
_OF_ONE_RANK = {
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "CUDA_HOME"),
}
_LOCAL_PATHS = ("_PATH", "_FILE", "_DIR", "_DIRECTORY")  # name suffixes of variables that contain paths on one machine


def whole_number(environment: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable, or None if it is not set or not a whole number."""
    value = environment.get(name, "")
    return int(value) if value.isdigit() else None


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must have the same value on all ranks."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name not in _OF_ONE_RANK
        and not name.endswith(_LOCAL_PATHS)
        and (name.startswith(_PREFIXES) or name in {"OMP_NUM_THREADS", "WORLD_SIZE"})
    }


def check_variables(environment: Mapping[str, str], device_type: str, *, rdma: Sequence[str] = ()) -> list[Finding]:
    """Return findings about the variables that are set.

    Args:
        device_type: type of the accelerator, or ``"cpu"``. Except on ``"cuda"``, variables for GPUs cause only notes.
        rdma: names of the machine's InfiniBand or RoCE adapters.
    """
    unused = f"NCCL sends over IP sockets and does not use the adapters {', '.join(rdma)}"
    all_rules = [*_RULES, *([_Rule("NCCL_IB_DISABLE", unused)] if rdma else [])]
    rules = [rule for rule in all_rules if rule.name in environment and rule.applies(environment[rule.name])]
    has_gpu = device_type == "cuda"
    findings = []
    for rule in rules:
        without_gpu = rule.gpu_only and not has_gpu
        level: Level = "note" if without_gpu and rule.level == "problem" else rule.level
        text = f"{rule.name}={environment[rule.name]}: {rule.effect}" + ", if there are GPUs" * without_gpu
        findings.append(Finding(_GROUP, level, text, rule.fix))
    warning = connections_warning(device_type, environment)
    findings += _from_warning(_GROUP, warning)
    if overrides := sorted(_OVERRIDES & environment.keys()):
        assignments = ", ".join(f"{name}={environment[name]}" for name in overrides)
        advice = "Unset variables whose benefit you have not measured"
        findings.append(Finding(_GROUP, "note", f"{assignments}: NCCL's own choice is overridden", advice))
    reported = {rule.name for rule in rules} | set(overrides) | {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    reported |= {"CUDA_DEVICE_MAX_CONNECTIONS"} if warning else set()
    others = [name for name in sorted(environment) if name.startswith(_PREFIXES) and name not in reported]
    if others:
        findings.append(
            Finding(
                _GROUP,
                "ok",
                "set, without known problems: " + ", ".join(f"{name}={environment[name]}" for name in others),
            )
        )
    return findings or [Finding(_GROUP, "ok", "no NCCL, CUDA or torch.distributed variables are set")]


def _from_warning(group: str, warning: str | None) -> list[Finding]:
    """Return the finding for a launcher warning, or an empty list for None. Text after ``". Set "`` becomes the fix."""
    text, _, fix = (warning or "").partition(". Set ")
    return [Finding(group, "problem", text, f"Set {fix}")] if warning else []


def check_interfaces(
    environment: Mapping[str, str], interfaces: Sequence[str], device_type: str, *, loopback: bool = False
) -> list[Finding]:
    """Check that the selected network interfaces exist on this machine.

    Args:
        interfaces: names of the network interfaces of this machine.
        loopback: True if this job has several nodes, and the name of this host does not resolve to an address that
            other hosts can reach.
    """
    findings = []
    listed = f"This machine has {', '.join(interfaces)}"
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    if missing := [name for name in gloo.split(",") if gloo and name not in interfaces]:
        text = f"GLOO_SOCKET_IFNAME={gloo}: there is no interface {', '.join(map(repr, missing))}, so gloo fails"
        findings.append(Finding(_GROUP, "problem", text, f"{listed}. Set GLOO_SOCKET_IFNAME to one of them"))
    elif gloo:
        findings.append(Finding(_GROUP, "ok", f"GLOO_SOCKET_IFNAME={gloo}"))
    elif loopback:
        text = "the name of this host does not resolve to an address of the network, so gloo listens on the loopback"
        fix = f"Set GLOO_SOCKET_IFNAME to the interface that connects the nodes. {listed}"
        findings.append(Finding(_GROUP, "problem", text, fix))
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not any(_is_selected(nccl, name) for name in interfaces):
        level: Level = "problem" if device_type == "cuda" else "note"
        text = f"NCCL_SOCKET_IFNAME={nccl} selects no interface, so NCCL fails"
        findings.append(Finding(_GROUP, level, text, f"{listed}. Set NCCL_SOCKET_IFNAME to one of them"))
    elif nccl:
        findings.append(Finding(_GROUP, "ok", f"NCCL_SOCKET_IFNAME={nccl}"))
    return findings


def _is_selected(pattern: str, interface: str) -> bool:
    """Return whether `pattern`, the value of NCCL_SOCKET_IFNAME, selects an interface.

    A pattern lists prefixes of names. If it starts with ``=``, it lists full names. A leading ``^`` excludes the names.
    """
    excludes, names_text = pattern.startswith("^"), pattern.removeprefix("^")
    exact, names = names_text.startswith("="), names_text.removeprefix("=").split(",")
    return any(interface == name if exact else interface.startswith(name) for name in names) is not excludes


def check_launch(environment: Mapping[str, str]) -> list[Finding]:
    """Check the variables that torchrun sets."""
    world, local = (whole_number(environment, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not world:
        if "WORLD_SIZE" not in environment:
            return [Finding(_LAUNCH, "ok", "one process; to check ranks and links, start this command with torchrun")]
        text = f"WORLD_SIZE={environment['WORLD_SIZE']} is not a number of ranks"
        return [Finding(_LAUNCH, "problem", text, "Start the program with torchrun")]
    findings = []
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        text = f"WORLD_SIZE={world}, but these variables are not set: {', '.join(missing)}"
        findings.append(Finding(_LAUNCH, "problem", text, "Start the program with torchrun, which sets all of them"))
    if not local:
        text = "LOCAL_WORLD_SIZE is not set, so layerzero does not know the number of ranks per node"
        findings.append(Finding(_LAUNCH, "note", text, "Pass zero3_size, or start the program with torchrun"))
    elif world % local:
        text = f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world}, so zero3_size has no default"
        findings.append(
            Finding(_LAUNCH, "problem", text, "Start the same number of ranks on each node, or pass zero3_size")
        )
    else:
        findings.append(Finding(_LAUNCH, "ok", f"{world} ranks, {local} on each node"))
    return findings + _from_warning(_LAUNCH, restart_warning(environment))


def check_threads(threads: int, cores: int, ranks: int, device_type: str) -> Finding:
    """Check the number of CPU threads.

    Args:
        threads: number of CPU threads that torch uses in each rank.
        cores: number of CPU cores that this process may use.
        ranks: number of ranks on this node.
    """
    cores_per_rank = max(1, cores // ranks)
    if ranks > 1 and threads > cores_per_rank:
        level: Level = "problem" if device_type == "cpu" else "note"
        text = f"{ranks} ranks with {threads} threads each share {cores} cores"
        return Finding(_LAUNCH, level, text, f"Set OMP_NUM_THREADS={cores_per_rank}")
    if device_type != "cpu" and threads == 1 and cores_per_rank > 1:
        text = (
            "OMP_NUM_THREADS=1, torchrun's default: with offload_optimizer=True, the optimizer would use only one "
            "thread per rank"
        )
        return Finding(_LAUNCH, "note", text, f"If you offload the optimizer, set OMP_NUM_THREADS={cores_per_rank}")
    return Finding(_LAUNCH, "ok", f"{threads} thread{'s' * (threads > 1)} per rank, {cores} cores")
