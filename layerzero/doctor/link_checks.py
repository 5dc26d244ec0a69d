"""Connect the ranks of a job, and measure the links inside a node and between nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from layerzero.device.accelerator import default_device_type
from layerzero.doctor.environment_checks import whole_number
from layerzero.doctor.findings import Finding
from layerzero.doctor.rank_checks import RankReport, check_nodes, check_ranks, format_ranks, merge_findings, node_size
from layerzero.planning.probe import ProbeResult, probe
from layerzero.reports.memory_and_traffic import traffic
from layerzero.sharding.closing import close
from layerzero.sharding.shard_model import shard_model
from layerzero.utils.text_tables import seconds_text, size_text

__all__ = ["Job", "check_speeds", "first_line"]

_GROUP = "links"


def first_line(error: Exception) -> str:
    """Return the first line of an error message."""
    return (str(error).strip() or "no message").splitlines()[0]


class Job:
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
            findings = [*merge_findings(reports), *check_ranks(reports)]
            if missing := set(range(self.world)) - reports.keys():
                findings.append(self._late_ranks_finding(missing, "ranks"))
            else:
                per_node = node_size(reports) or 0
                text = (
                    "links are not measured, because the nodes have different numbers of ranks, or the ranks on a node "
                    "are not consecutive"
                )
                findings += check_nodes(reports) + ([] if per_node else [Finding(_GROUP, "note", text)])
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
        error = transport = ""
        result = None
        try:
            result, transport = self._measure(per_node)
        except Exception as raised:
            error = f"{type(raised).__name__}: {first_line(raised)}"
        messages = self._gather("links", json.dumps([error, transport]), range(self.world))
        if self.rank:
            return []
        findings = check_speeds(result) if result is not None else []
        findings += _check_transports({rank: json.loads(text) for rank, text in messages.items()})
        if missing := set(range(self.world)) - messages.keys():
            findings.append(self._late_ranks_finding(missing, _GROUP))
        return findings

    def _measure(self, per_node: int) -> tuple[ProbeResult, str]:
        """Return the measured speeds and the weight transport.

        The transport is an empty string on accelerators and if a node has only one rank.
        """
        kind = default_device_type()
        if kind != "cpu":
            local_rank = whole_number(os.environ, "LOCAL_RANK") or 0
            torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        dist.init_process_group(store=self.store, rank=self.rank, world_size=self.world, timeout=self.timeout)
        try:
            result = probe(zero3_size=per_node)
            if kind != "cpu" or per_node == 1:
                return result, ""
            model = shard_model(nn.Linear(8, 8), zero3_size=per_node)
            transport = traffic(model).transport
            close(model)
            return result, transport
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

    def _late_ranks_finding(self, ranks: Collection[int], group: str) -> Finding:
        text = f"{format_ranks(ranks)} did not take part within {2 * self.timeout.total_seconds():g} s"
        return Finding(group, "problem", text, "Read the last output of each. If they need more time, pass --timeout")


def check_speeds(result: ProbeResult) -> list[Finding]:
    """Return findings about the measured speeds, and compare links inside a node with links between nodes."""
    findings, cluster = [], result.cluster
    if "inside" in result.measured:
        latency = seconds_text(1e-6 * cluster.inside_latency)
        text = f"inside a node: {size_text(1e9 * cluster.inside)}/s per rank, latency {latency}"
        findings.append(Finding(_GROUP, "ok", text))
    if "between" in result.measured:
        latency = seconds_text(1e-6 * cluster.between_latency)
        text = f"between nodes: {size_text(1e9 * cluster.node_link / 8)}/s per node, latency {latency}"
        findings.append(Finding(_GROUP, "ok", text))
    if {"inside", "between"} <= set(result.measured) and cluster.node_link / 8 / cluster.accelerators > cluster.inside:
        text = "a rank sends faster between nodes than inside its node, so sharding weights inside a node saves no time"
        findings.append(Finding(_GROUP, "note", text, "Measure a step with several values of zero3_size"))
    return findings


def _check_transports(outcomes: Mapping[int, tuple[str, str]]) -> list[Finding]:
    """Return findings about ranks that failed, and about shared memory.

    Args:
        outcomes: error and transport of each rank; empty strings if there is none.
    """
    findings = []
    for error in dict.fromkeys(error for error, _ in outcomes.values() if error):
        ranks = [rank for rank, (other, _) in outcomes.items() if other == error]
        fix = "Correct the problems above first. The network between the nodes must let all ports through"
        findings.append(Finding(_GROUP, "problem", f"{format_ranks(ranks)} could not communicate: {error}", fix))
    transports = {transport for _, transport in outcomes.values() if transport}
    if transports == {"shared_memory"}:
        findings.append(Finding(_GROUP, "ok", "the ranks of a node share memory for weights and gradients"))
    elif transports:
        ranks = [rank for rank, (_, transport) in outcomes.items() if transport != "shared_memory"]
        text = f"{format_ranks(ranks)} use collectives, because the ranks of a node cannot share memory"
        findings.append(Finding(_GROUP, "note", text, "The log of the first of these ranks has the reason"))
    return findings
