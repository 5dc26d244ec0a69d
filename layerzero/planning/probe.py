"""Measure the speeds of the cluster on which a job runs."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero.comm.collectives import Collective, Communicator, all_gather
from layerzero.comm.mesh_info import MeshInfo, init_mesh
from layerzero.comm.model_ranks import all_reduce_over
from layerzero.comm.process_groups import ModelGroups
from layerzero.device.accelerator import host_memory, synchronize_current_stream
from layerzero.planning.cluster import Cluster

__all__ = ["ProbeResult", "latency_and_bandwidth", "probe"]

_ROUNDS = 7  # number of rounds per measurement; the result is the median
_SMALL = 1  # number of elements that each rank sends when latencies are measured
# By device type: width of a unit, and number of tokens, when FLOP/s are measured. Some CPUs are slow in bf16.
_WIDTHS = {"cpu": (256, 256)}
_WIDTH = (4096, 4096)
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class ProbeResult:
    """Result of :func:`probe`, the same on all ranks.

    Attributes:
        cluster: description of the cluster. Fields that were not measured have default values.
        measured: names of the measured fields.
    """

    cluster: Cluster
    measured: tuple[str, ...]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the description of the cluster to a YAML file that :meth:`Cluster.from_yaml` can read."""
        Path(path).write_text(f"{self}\n", encoding="utf-8")

    def __str__(self) -> str:
        """Return the fields as YAML. Fields that were not measured are written as comments."""
        lines = [
            f"# measured on {self.cluster.ranks} ranks",
            "# The fields that are commented out were not measured and show the defaults. Correct them if necessary.",
        ]
        for name, value in {**asdict(self.cluster), "between": self.cluster.node_link}.items():
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            unit = "  # Gbit/s per node" if name == "between" else ""
            lines.append(f"{'' if name in self.measured else '# '}{name}: {text}{unit}")
        return "\n".join(lines)


def probe(*, zero3_size: int | None = None, nbytes: int = 1 << 26, dtype: torch.dtype = torch.bfloat16) -> ProbeResult:
    """Measure the cluster on which this job runs, for :func:`layerzero.plan`.

    All ranks must call this function after ``torch.distributed.init_process_group``. The probe takes a few seconds and
    uses several times `nbytes` of memory. It measures all-gathers, first within nodes (on all nodes simultaneously),
    then between nodes (with all ranks on a node simultaneously). It measures FLOP/s in the forward and backward passes
    of two linear layers in `dtype`, on all ranks simultaneously. The slowest rank determines the result. Other programs
    that run on these machines affect the result.

    Args:
        zero3_size: number of ranks per node. The default is ``LOCAL_WORLD_SIZE``, which torchrun sets.
        nbytes: number of bytes that a rank receives in a large collective.
        dtype: compute dtype in which FLOP/s are measured.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: `zero3_size` is not given and ``LOCAL_WORLD_SIZE`` is not set, the number of ranks per node does not
            divide the world size, or `nbytes` is less than 4096.

    Example::

        # torchrun --nnodes 2 --nproc-per-node 8 ... probe.py
        torch.distributed.init_process_group()
        found = layerzero.planning.probe()
        print(layerzero.plan(model, found.cluster))
    """
    if nbytes < 1 << 12:
        raise ValueError(f"nbytes={nbytes} is too small to measure speeds instead of latencies. Use 4096 or more")
    existing = set(dist.distributed_c10d._world.pg_map)
    groups = ModelGroups()
    try:
        return _run_probe(MeshInfo.from_mesh(init_mesh(zero3_size), groups=groups), nbytes, dtype)
    finally:
        groups.release()
        for group in [each for each in dist.distributed_c10d._world.pg_map if each not in existing]:
            dist.destroy_process_group(group)


def _run_probe(mesh_info: MeshInfo, nbytes: int, dtype: torch.dtype) -> ProbeResult:
    device = mesh_info.device
    inside_comm, between_comm = mesh_info.zero3_gather_comm, mesh_info.replica_comm
    measured: dict[str, float | int | str] = {
        "nodes": mesh_info.replicas,
        "accelerators": mesh_info.zero3_size,
        "device": "cpu" if device.type == "cpu" else "cuda",
    }
    synchronize = _synchronizer(mesh_info.control_comms)
    if inside_comm.size > 1:
        latency, speed = _link(inside_comm, nbytes, device, synchronize)
        measured |= {"inside_latency": 1e6 * latency, "inside": speed / 1e9}
    if between_comm.size > 1:
        latency, speed = _link(between_comm, nbytes, device, synchronize)
        measured |= {"between_latency": 1e6 * latency, "between": 8 * speed * mesh_info.zero3_size / 1e9}
    if device.type == "cpu":
        measured["processor_per_byte"] = 1e9 * _processor_per_byte(
            inside_comm if inside_comm.size > 1 else between_comm, nbytes, device
        )
    comm = inside_comm if inside_comm.size > 1 else between_comm
    if comm.size > 1:
        measured["launch"] = 1e6 * _launch_seconds(comm, device, synchronize)
    measured["tflops"] = _flops(device, dtype, synchronize) / 1e12
    measured |= _memory(device, mesh_info.zero3_size, nbytes, synchronize)
    worst = _worst_over_ranks(measured, mesh_info.control_comms)
    return ProbeResult(Cluster(**worst), tuple(worst))  # type: ignore[arg-type]


def latency_and_bandwidth(small: float, large: float, *, ranks: int, sent: int) -> tuple[float, float]:
    """Return the latency of one step of a collective, in seconds, and the bandwidth, in bytes per second.

    Args:
        small: duration of a collective of negligible size, in seconds.
        large: duration of a collective in which each rank sends `sent` bytes, in seconds.
        ranks: number of ranks. The collective has log2(`ranks`) steps.
        sent: number of bytes that each rank sends in the large collective.
    """
    steps = max(1, math.ceil(math.log2(ranks)))
    return small / steps, sent / max(large - small, 1e-2 * large)


def _synchronizer(comms: Sequence[Communicator]) -> Callable[[], None]:
    """Return a function that synchronizes all ranks."""
    buffer = torch.zeros(1)

    def synchronize() -> None:
        all_reduce_over(comms, buffer, dist.ReduceOp.SUM, Collective.METADATA)

    return synchronize


def _median_seconds(operation: Callable[[], object], device: torch.device, synchronize: Callable[[], None]) -> float:
    """Return the median duration, in seconds, of an operation that all ranks run simultaneously.

    The first round is a warm-up and does not count.
    """
    times = []
    for _ in range(_ROUNDS + 1):
        synchronize_current_stream(device)
        synchronize()
        began = time.perf_counter()
        operation()
        synchronize_current_stream(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _gather_operation(comm: Communicator, numel: int, device: torch.device) -> Callable[[], None]:
    out = torch.ones(numel * comm.size, device=device)
    shard = out.view(comm.size, -1)[comm.rank].clone()

    def gather() -> None:
        all_gather(comm, Collective.GATHER, out, shard, name="probe").wait()

    return gather


def _numel(nbytes: int, ranks: int) -> int:
    return max(_SMALL + 1, nbytes // 4 // ranks)


def _link(
    comm: Communicator, nbytes: int, device: torch.device, synchronize: Callable[[], None]
) -> tuple[float, float]:
    numel = _numel(nbytes, comm.size)
    small = _median_seconds(_gather_operation(comm, _SMALL, device), device, synchronize)
    large = _median_seconds(_gather_operation(comm, numel, device), device, synchronize)
    return latency_and_bandwidth(small, large, ranks=comm.size, sent=4 * numel * (comm.size - 1))


def _processor_per_byte(comm: Communicator, nbytes: int, device: torch.device) -> float:
    """Return the CPU time that this process uses per byte that it sends, in seconds."""
    if comm.size == 1:
        return 0.0
    numel = _numel(nbytes, comm.size)
    gather = _gather_operation(comm, numel, device)
    gather()
    began = time.process_time()
    for _ in range(_ROUNDS):
        gather()
    return (time.process_time() - began) / (_ROUNDS * 4 * numel * (comm.size - 1))


def _launch_seconds(comm: Communicator, device: torch.device, synchronize: Callable[[], None]) -> float:
    """Return the median time that the host needs to launch a collective, in seconds."""
    out = torch.ones(comm.size, device=device)
    shard = torch.ones(1, device=device)
    times = []
    for _ in range(_ROUNDS + 1):
        synchronize()
        began = time.perf_counter()
        work = all_gather(comm, Collective.GATHER, out, shard, name="probe")
        times.append(time.perf_counter() - began)
        work.wait()
    return statistics.median(times[1:])


def _flops(device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]) -> float:
    """Return the FLOP/s in the forward and backward passes of a unit.

    The forward pass counts as 2 FLOPs per weight and token, and the backward pass as 4.
    """
    width, tokens = _WIDTHS.get(device.type, _WIDTH)
    unit = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device, dtype)
    batch = torch.ones(tokens, width, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        unit(batch).sum().backward()

    with torch.enable_grad():
        return 6 * 8 * width * width * tokens / _median_seconds(step, device, synchronize)


def _memory(device: torch.device, ranks: int, nbytes: int, synchronize: Callable[[], None]) -> dict[str, float]:
    """Return memory sizes in GB and memory speeds in GB/s, keyed by field name of :class:`Cluster`.

    Memory speeds count both the bytes read and the bytes written. The speed of copies to the host counts each copied
    byte once.
    """
    host = _host_bytes() / 1e9
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    speed = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device, synchronize) / 1e9
    if device.type == "cpu":
        speeds = {"memory_speed": speed, "host_memory_speed": speed * ranks}
        return {"memory": host / ranks, "reserve": 0.0, "host_memory": host, **speeds}
    on_host: Tensor = host_memory(len(source), source.dtype, device=device)
    second = torch.empty_like(on_host)
    copied = _median_seconds(lambda: on_host.copy_(source, non_blocking=True), device, synchronize)
    in_host = (
        2 * second.nbytes * ranks / _median_seconds(lambda: second.copy_(on_host), torch.device("cpu"), synchronize)
    )
    total = torch.get_device_module(device).get_device_properties(device).total_memory
    return {
        "memory": total / 1e9,
        "memory_speed": speed,
        "host": source.nbytes / copied / 1e9,
        "host_memory": host,
        "host_memory_speed": in_host / 1e9,
    }


def _host_bytes(limits: Sequence[Path] = _LIMITS) -> int:
    """Return the size of host memory in bytes, or the container's memory limit if that is lower."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in limits:
        with suppress(OSError, ValueError):  # the file does not exist on this system, or contains "max"
            sizes.append(int(limit.read_text()))
    return min(sizes)


_MORE_IS_WORSE = {"between_latency", "inside_latency", "launch", "processor_per_byte"}


def _worst_over_ranks(
    measured: dict[str, float | int | str], comms: Sequence[Communicator]
) -> dict[str, float | int | str]:
    """Return `measured`, with each floating-point measurement replaced by the worst value on any rank."""
    types = {field.name: field.type for field in fields(Cluster)}
    names = [name for name in measured if types[name] not in ("int", "str")]
    signs = torch.tensor([1.0 if name in _MORE_IS_WORSE else -1.0 for name in names], dtype=torch.float64)
    worst = signs * torch.tensor([float(measured[name]) for name in names], dtype=torch.float64)
    all_reduce_over(comms, worst, dist.ReduceOp.MAX, Collective.METADATA)
    return measured | dict(zip(names, (signs * worst).tolist(), strict=True))
