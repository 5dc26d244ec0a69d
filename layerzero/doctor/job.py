"""Compare the ranks of a job, and measure the links inside a node and between nodes."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import layerzero
from layerzero.doctor.findings import Finding, Level
from layerzero.doctor.machine import PREFIXES, device_names, installed_versions, whole_number
from layerzero.extend import boot_id, default_device_type

_RANKS, _LINKS = "ranks", "links"
_SHOWN = 8  # maximum number of nodes listed in one line
# Packages whose files or messages ranks exchange.
_PACKAGES = ("numpy", "safetensors", "xxhash", "zstandard", "megatron-core", "accelerate", "transformers", "lightning")
_MAY_DIFFER = "accelerators"
# Variables that may differ between ranks without harm.
_OF_ONE_RANK = {
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "CUDA_HOME"),
}
_LOCAL_PATHS = ("_PATH", "_FILE", "_DIR", "_DIRECTORY")  # name suffixes of variables that contain paths on one machine
_ROUNDS, _NUMEL = 7, 1 << 23  # timed all-reduces of a link, after one that does not count, and their fp32 elements


@dataclass(frozen=True)
class RankReport:
    """Values that one rank reports, which the first rank compares across ranks.

    Attributes:
        host: name and boot identifier of the machine.
        facts: values, keyed by name, that should be the same on all ranks.
        findings: problems and notes that this rank has found by itself.
    """

    host: str
    facts: dict[str, str]
    findings: tuple[Finding, ...]

    @classmethod
    def of_this_rank(cls, environment: Mapping[str, str], findings: Iterable[Finding]) -> RankReport:
        kind = default_device_type()
        facts = {
            "layerzero": layerzero.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "device": kind,
            _MAY_DIFFER: ", ".join(dict.fromkeys(device_names(kind))),
            **installed_versions(_PACKAGES),
            **relevant_variables(environment),
        }
        return cls(f"{socket.gethostname()} {boot_id()}", facts, tuple(findings))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "findings": tuple(Finding(**each) for each in fields["findings"])})


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must have the same value on all ranks."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name not in _OF_ONE_RANK
        and not name.endswith(_LOCAL_PATHS)
        and (name.startswith(PREFIXES) or name in {"OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
    }


def format_ranks(ranks: Iterable[int]) -> str:
    """Return text such as ``rank 3`` or ``ranks 0-3, 8``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    ranges = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' * (len(spans) > 1 or spans[0][0] != spans[0][1])} {', '.join(ranges)}"


def _ranks_by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    ranks_of = defaultdict(list)
    for rank, value in sorted(values.items()):
        ranks_of[value].append(rank)
    return dict(ranks_of)


def merge_findings(reports: Mapping[int, RankReport]) -> list[Finding]:
    """Merge the findings of all ranks.

    Findings of level ``"ok"`` are kept only if the first rank has them. A note or problem that some ranks do not have
    starts with the names of the ranks that have it.
    """
    ranks_of = defaultdict(list)
    for rank, report in sorted(reports.items()):
        for finding in report.findings:
            ranks_of[finding].append(rank)
    merged = []
    for finding, ranks in ranks_of.items():
        if finding.level == "ok":
            merged += [finding] if ranks[0] == min(reports) else []
        elif len(ranks) == len(reports):
            merged.append(finding)
        else:
            merged.append(Finding(finding.group, finding.level, f"{format_ranks(ranks)}: {finding.text}", finding.fix))
    return merged


def check_facts(reports: Mapping[int, RankReport]) -> list[Finding]:
    """Compare versions and environment variables of all ranks."""
    findings = []
    for name in dict.fromkeys(name for report in reports.values() for name in report.facts):
        ranks_of = _ranks_by_value({rank: report.facts.get(name, "not set") for rank, report in reports.items()})
        if len(ranks_of) > 1:
            level: Level = "note" if name == _MAY_DIFFER else "problem"
            values = " and ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in ranks_of.items())
            fix = "" if level == "note" else f"Use the same {name} on all ranks"
            findings.append(Finding(_RANKS, level, f"{name} differs: {values}", fix))
    return findings or [Finding(_RANKS, "ok", "versions and environment variables are the same on all ranks")]


def node_size(reports: Mapping[int, RankReport]) -> int:
    """Return the number of ranks on each node, or 0 if nodes differ or their ranks are not consecutive."""
    nodes = list(_ranks_by_value({rank: report.host for rank, report in reports.items()}).values())
    size = len(nodes[0])
    is_regular = all(len(ranks) == size and ranks[-1] - ranks[0] == size - 1 for ranks in nodes)
    return size if is_regular else 0


def check_nodes(reports: Mapping[int, RankReport]) -> list[Finding]:
    """Check which ranks run on which node, and compare this with LOCAL_WORLD_SIZE."""
    nodes = _ranks_by_value({rank: report.host for rank, report in reports.items()})
    placements = [f"{format_ranks(ranks)} on {host.split()[0]}" for host, ranks in list(nodes.items())[:_SHOWN]]
    placements += [f"and {len(nodes) - _SHOWN} more nodes"] if len(nodes) > _SHOWN else []
    findings = [Finding(_RANKS, "ok", f"{len(nodes)} node{'s' * (len(nodes) > 1)}: {'; '.join(placements)}")]
    for host, ranks in nodes.items():
        name = host.split()[0]
        sizes = _ranks_by_value({rank: reports[rank].facts.get("LOCAL_WORLD_SIZE") for rank in ranks})
        for size, those in sizes.items():
            if size not in (None, str(len(ranks))):
                text = f"LOCAL_WORLD_SIZE is {size} on {format_ranks(those)}, but {name} has {format_ranks(ranks)}"
                fix = f"Start one torchrun per node with --nproc-per-node {len(ranks)}, or pass zero3_size"
                findings.append(Finding(_RANKS, "problem", text, fix))
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            names = format_ranks(ranks)
            text = f"{name} has {names}, but weights are sharded over consecutive ranks, so gathers cross nodes"
            findings.append(Finding(_RANKS, "problem", text, "Number the ranks node by node, as torchrun does"))
    return findings


def check_job(own_findings: list[Finding], timeout: timedelta, show: Callable[[list[Finding]], None]) -> list[Finding]:
    """Compare the ranks of this job, then measure their links. All ranks must call this function.

    Args:
        own_findings: findings of this rank about its machine.
        timeout: time to wait for another rank.
        show: function that shows findings. It is called before the links are measured, because a backend may end the
            process during the measurement, and again after it.

    Returns:
        All findings on the first rank. On other ranks, an empty list, unless the rendezvous failed.
    """
    try:
        job = _Job(timeout)
        findings, per_node = job.compare(RankReport.of_this_rank(os.environ, own_findings))
    except (RuntimeError, ValueError) as error:
        text = f"the rendezvous failed: {_first_line(error)}"
        fix = "Check MASTER_ADDR and MASTER_PORT, and read the output of the other ranks"
        findings, per_node = [*own_findings, Finding(_RANKS, "problem", text, fix)], 0
    show(findings)
    links = job.measure(per_node) if per_node else []
    show(links)
    return [*findings, *links]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


class _Job:
    """Ranks of this job, which exchange texts through the rendezvous store. Requests to the store have a timeout.

    Args:
        timeout: maximum time to wait for other ranks.

    Raises:
        RuntimeError: the store cannot be reached.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.store, self.rank, self.world = next(rendezvous("env://", timeout=timeout))
        self.store.set_timeout(timeout)
        self._texts = PrefixStore("layerzero doctor", self.store)

    def compare(self, mine: RankReport) -> tuple[list[Finding], int]:
        """Return the findings of all ranks on the first rank, and the number of ranks per node on every rank.

        All ranks must call this method. The number is 0 if the links cannot be measured.
        """
        messages = self._gather("report", mine.to_json(), range(self.world))
        findings: list[Finding] = []
        per_node = 0
        if self.rank == 0:
            reports = {rank: RankReport.from_json(text) for rank, text in messages.items()}
            findings = [*merge_findings(reports), *check_facts(reports)]
            if len(reports) == self.world:
                findings += check_nodes(reports)
                per_node = node_size(reports)
                if not per_node:
                    text = "links are not measured, because nodes have different numbers of ranks, or ranks alternate"
                    findings.append(Finding(_LINKS, "note", text))
            findings += self._late_ranks(messages, _RANKS)
            self._texts.set("ranks per node", str(per_node))
        self._texts.wait(["ranks per node"], 3 * self.timeout)  # the first rank itself waits for other ranks
        per_node = int(self._texts.get("ranks per node"))
        self._gather("read", "", messages)  # the first rank may be the process that serves the store
        return findings, per_node

    def measure(self, per_node: int) -> list[Finding]:
        """Connect the ranks, measure their links, and return the findings on the first rank.

        All ranks must call this method.

        Args:
            per_node: number of ranks per node.
        """
        error = ""
        speeds: dict[str, float] = {}
        try:
            speeds = self._measure(per_node)
        except Exception as raised:
            error = f"{type(raised).__name__}: {_first_line(raised)}"
        errors = self._gather("links", error, range(self.world))
        findings = check_speeds(speeds) if self.rank == 0 else []
        for text, ranks in _ranks_by_value(errors).items():
            if text:
                fix = "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects the nodes"
                fix += ", and let all ports through"
                findings.append(Finding(_LINKS, "problem", f"{format_ranks(ranks)} could not communicate: {text}", fix))
        return [*findings, *self._late_ranks(errors, _LINKS)]

    def _measure(self, per_node: int) -> dict[str, float]:
        """Return the bytes per second that each rank sends, along each axis of the mesh with several ranks."""
        kind = default_device_type()
        if kind != "cpu":
            local_rank = whole_number(os.environ, "LOCAL_RANK") or 0
            torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        dist.init_process_group(store=self.store, rank=self.rank, world_size=self.world, timeout=self.timeout)
        try:
            mesh = init_device_mesh(kind, (self.world // per_node, per_node), mesh_dim_names=("between", "inside"))
            axes = [axis for axis in ("inside", "between") if mesh[axis].size() > 1]
            return {axis: _bytes_per_second(mesh.get_group(axis), torch.device(kind)) for axis in axes}
        finally:
            dist.destroy_process_group()

    def _gather(self, name: str, text: str, ranks: Collection[int]) -> dict[int, str]:
        """Publish the text of this rank. On the first rank, return the texts that `ranks` publish within a timeout."""
        self._texts.set(f"{name}/{self.rank}", text)
        if self.rank:
            return {}
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        with suppress(RuntimeError):  # the timeout has expired
            self._texts.wait(list(keys.values()), 2 * self.timeout)  # other ranks may wait for a timeout themselves
        return {rank: self._texts.get(key).decode() for rank, key in keys.items() if self._texts.check([key])}

    def _late_ranks(self, messages: Collection[int], group: str) -> list[Finding]:
        """Return a problem that names the ranks without a message."""
        missing = set(range(self.world)) - set(messages) if self.rank == 0 else set()
        if not missing:
            return []
        text = f"{format_ranks(missing)} did not take part within {2 * self.timeout.total_seconds():g} s"
        fix = "Read the last output of each. If they need more time, pass --timeout"
        return [Finding(group, "problem", text, fix)]


def _bytes_per_second(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bytes per second that the slowest rank sends in an all-reduce, with all groups at work."""
    buffer, times = torch.zeros(_NUMEL, device=device), []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        buffer[0].item()  # wait for the device
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(median(times[1:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 2 * (group.size() - 1) / group.size() * buffer.nbytes / slowest.item()


def check_speeds(speeds: Mapping[str, float]) -> list[Finding]:
    """Compare the bytes per second that a rank sends inside its node with those that it sends between nodes."""
    places = {"inside": "inside a node", "between": "between nodes, with all ranks of a node at work"}
    findings = [
        Finding(_LINKS, "ok", f"{places[axis]}: {speed / 1e9:.3g} GB/s per rank") for axis, speed in speeds.items()
    ]
    if len(speeds) > 1 and speeds["between"] > speeds["inside"]:
        text = "a rank sends faster between nodes than inside its node, so sharding weights inside a node saves no time"
        findings.append(Finding(_LINKS, "note", text, "Measure a step with several values of zero3_size"))
    return findings
