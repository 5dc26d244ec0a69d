"""What the cluster that one is on reaches: :func:`probe`."""

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
from layerzero.comm.model_ranks import reduce_over
from layerzero.comm.process_groups import ModelGroups
from layerzero.device.accelerator import finish_copies, host_memory
from layerzero.planning.cluster import Cluster

__all__ = ["ProbeResult", "probe", "speeds_of"]

_ROUNDS = 7  # of each measurement; the median counts
_SMALL = 1  # element that each rank sends, for latencies
_WIDTHS = {"cpu": (512, 256)}  # of a unit, and tokens, to compute with
_WIDTH = (4096, 4096)
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class ProbeResult:
    """What :func:`probe` returns, the same on all ranks.

    Attributes:
        cluster: what was measured, and the defaults of the rest.
        measured: names of its fields that are no defaults.
    """

    cluster: Cluster
    measured: tuple[str, ...]

    def write(self, path: str | os.PathLike[str]) -> None:
        """A YAML file for :meth:`Cluster.from_yaml`."""
        Path(path).write_text(f"{self}\n", encoding="utf-8")

    def __str__(self) -> str:
        """YAML; what was not measured is a comment."""
        lines = [f"# measured on {self.cluster.ranks} ranks; lines that begin with # are defaults, to be put right"]
        for name, value in asdict(self.cluster).items():
            said = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append(f"{'' if name in self.measured else '# '}{name}: {said}")
        return "\n".join(lines)


def probe(*, zero3_size: int | None = None, nbytes: int = 1 << 26, dtype: torch.dtype = torch.bfloat16) -> ProbeResult:
    """Measure the cluster that this job runs on, as :func:`layerzero.plan` wants to know it.

    Every rank must call this, after ``torch.distributed.init_process_group``. It takes seconds, and the memory of a
    few times `nbytes`. Exchanges are those of a step: gathers inside nodes, all nodes at once, then between nodes, all
    ranks of a node at once; the slowest rank counts. Computing is forward and backward of two linear layers in `dtype`,
    on all ranks at once. Anything else that runs there meanwhile is measured, too.

    Args:
        zero3_size: ranks of a node; by default what torchrun says in ``LOCAL_WORLD_SIZE``.
        nbytes: that a rank receives in a large exchange.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: `zero3_size` does not divide the world, or is not known; `nbytes` is too few.

    Example::

        # torchrun --nnodes 2 --nproc-per-node 8 ... probe.py
        torch.distributed.init_process_group()
        found = layerzero.planning.probe()
        print(layerzero.plan(model, found.cluster))
    """
    if nbytes < 1 << 12:
        raise ValueError(f"nbytes={nbytes}; give 4096 or more, or latencies are all there is")
    before = set(dist.distributed_c10d._world.pg_map)
    groups = ModelGroups()
    try:
        return _probed(MeshInfo.from_mesh(init_mesh(zero3_size), groups=groups), nbytes, dtype)
    finally:
        groups.release()
        for group in [each for each in dist.distributed_c10d._world.pg_map if each not in before]:
            dist.destroy_process_group(group)


def _probed(topology: MeshInfo, nbytes: int, dtype: torch.dtype) -> ProbeResult:
    device = topology.device
    inside, between = topology.zero3_gather_comm, topology.replica_comm
    found: dict[str, float | int | str] = {
        "nodes": topology.replicas,
        "accelerators": topology.zero3_size,
        "device": "cpu" if device.type == "cpu" else "cuda",
    }
    meet = _meeting(topology.control_comms)
    if inside.size > 1:
        latency, speed = _link(inside, nbytes, device, meet)
        found |= {"inside_latency": 1e6 * latency, "inside": speed / 1e9}
    if between.size > 1:
        latency, speed = _link(between, nbytes, device, meet)
        found |= {"between_latency": 1e6 * latency, "between": 8 * speed * topology.zero3_size / 1e9}
    if device.type == "cpu":
        found["processor_per_byte"] = 1e9 * _processor_per_byte(inside if inside.size > 1 else between, nbytes, device)
    lane = inside if inside.size > 1 else between
    if lane.size > 1:
        found["launch"] = 1e6 * _launch(lane, device, meet)
    found["tflops"] = _flops(device, dtype, meet) / 1e12
    found |= _memory(device, topology.zero3_size, nbytes, meet)
    agreed = _slowest(found, topology.control_comms)
    return ProbeResult(Cluster(**agreed), tuple(agreed))  # type: ignore[arg-type]


def speeds_of(small: float, large: float, *, ranks: int, sent: int) -> tuple[float, float]:
    """Seconds of one of log2 n steps of an exchange, and bytes a second, from a small one and one of `sent` bytes."""
    steps = max(1, math.ceil(math.log2(ranks)))
    return small / steps, sent / max(large - small, 1e-2 * large)


def _meeting(lanes: Sequence[Communicator]) -> Callable[[], None]:
    """Begin together."""
    word = torch.zeros(1)

    def meet() -> None:
        reduce_over(lanes, word, dist.ReduceOp.SUM, Collective.METADATA)

    return meet


def _seconds(operation: Callable[[], object], device: torch.device, meet: Callable[[], None]) -> float:
    """Of what all ranks do at once: the median of some rounds, after one that does not count."""
    times = []
    for _ in range(_ROUNDS + 1):
        finish_copies(device)
        meet()
        began = time.perf_counter()
        operation()
        finish_copies(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _gather(lane: Communicator, numel: int, device: torch.device) -> Callable[[], None]:
    out = torch.ones(numel * lane.size, device=device)
    shard = out.view(lane.size, -1)[lane.rank].clone()

    def gather() -> None:
        all_gather(lane, Collective.GATHER, out, shard, name="probe").wait()

    return gather


def _numel(nbytes: int, ranks: int) -> int:
    return max(_SMALL + 1, nbytes // 4 // ranks)


def _link(lane: Communicator, nbytes: int, device: torch.device, meet: Callable[[], None]) -> tuple[float, float]:
    numel = _numel(nbytes, lane.size)
    small = _seconds(_gather(lane, _SMALL, device), device, meet)
    large = _seconds(_gather(lane, numel, device), device, meet)
    return speeds_of(small, large, ranks=lane.size, sent=4 * numel * (lane.size - 1))


def _processor_per_byte(lane: Communicator, nbytes: int, device: torch.device) -> float:
    """Seconds of this process's threads for each byte that it sends."""
    if lane.size == 1:
        return 0.0
    numel = _numel(nbytes, lane.size)
    gather = _gather(lane, numel, device)
    gather()
    began = time.process_time()
    for _ in range(_ROUNDS):
        gather()
    return (time.process_time() - began) / (_ROUNDS * 4 * numel * (lane.size - 1))


def _launch(lane: Communicator, device: torch.device, meet: Callable[[], None]) -> float:
    """Seconds of the host until an exchange is on its way."""
    out = torch.ones(lane.size, device=device)
    shard = torch.ones(1, device=device)
    times = []
    for _ in range(_ROUNDS + 1):
        meet()
        began = time.perf_counter()
        work = all_gather(lane, Collective.GATHER, out, shard, name="probe")
        times.append(time.perf_counter() - began)
        work.wait()
    return statistics.median(times[1:])


def _flops(device: torch.device, dtype: torch.dtype, meet: Callable[[], None]) -> float:
    """That are reached in forward and backward of a unit: two FLOP for each weight and token, and twice as many."""
    width, tokens = _WIDTHS.get(device.type, _WIDTH)
    unit = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device, dtype)
    batch = torch.ones(tokens, width, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        unit(batch).sum().backward()

    with torch.enable_grad():
        return 6 * 8 * width * width * tokens / _seconds(step, device, meet)


def _memory(device: torch.device, ranks: int, nbytes: int, meet: Callable[[], None]) -> dict[str, float]:
    """GB of memories, and GB/s of copies: reads and writes together, but to the host."""
    host = _host_bytes() / 1e9
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    speed = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, meet) / 1e9
    if device.type == "cpu":
        speeds = {"memory_speed": speed, "host_memory_speed": speed * ranks}
        return {"memory": host / ranks, "reserve": 0.0, "host_memory": host, **speeds}
    on_host: Tensor = host_memory(len(source), source.dtype, device=device)
    other = torch.empty_like(on_host)
    copied = _seconds(lambda: on_host.copy_(source, non_blocking=True), device, meet)
    in_host = 2 * other.nbytes * ranks / _seconds(lambda: other.copy_(on_host), torch.device("cpu"), meet)
    total = torch.get_device_module(device).get_device_properties(device).total_memory
    return {
        "memory": total / 1e9,
        "memory_speed": speed,
        "host": source.nbytes / copied / 1e9,
        "host_memory": host,
        "host_memory_speed": in_host / 1e9,
    }


def _host_bytes(limits: Sequence[Path] = _LIMITS) -> int:
    """Of this machine, or of what a container may take of it."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in limits:
        with suppress(OSError, ValueError):  # another kind of machine, or "max"
            found.append(int(limit.read_text()))
    return min(found)


_MORE_IS_WORSE = {"between_latency", "inside_latency", "launch", "processor_per_byte"}


def _slowest(found: dict[str, float | int | str], lanes: Sequence[Communicator]) -> dict[str, float | int | str]:
    """Of each number the worst that a rank has seen."""
    types = {field.name: field.type for field in fields(Cluster)}
    names = [name for name in found if types[name] == "float"]
    signs = torch.tensor([1.0 if name in _MORE_IS_WORSE else -1.0 for name in names], dtype=torch.float64)
    worst = signs * torch.tensor([float(found[name]) for name in names], dtype=torch.float64)
    reduce_over(lanes, worst, dist.ReduceOp.MAX, Collective.METADATA)
    return found | dict(zip(names, (signs * worst).tolist(), strict=True))
