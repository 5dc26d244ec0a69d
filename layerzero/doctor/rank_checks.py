"""Compare the reports of a job's ranks, and group the ranks by node. This module does not communicate."""

from __future__ import annotations

import json
import platform
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from typing import Any

import torch

from layerzero.device.accelerator import default_device_type
from layerzero.doctor.environment_checks import relevant_variables, whole_number
from layerzero.doctor.findings import Finding, Level
from layerzero.doctor.host_checks import device_names
from layerzero.doctor.package_checks import installed_versions
from layerzero.utils.machine import boot_id

__all__ = ["RankReport", "check_nodes", "check_ranks", "format_ranks", "merge_findings", "node_size"]

_GROUP = "ranks"
_SHOWN = 8  # maximum number of nodes listed in one line
# Packages whose files or messages ranks exchange.
_PACKAGES = (
    *("numpy", "safetensors", "xxhash", "zstandard"),
    *("megatron-core", "accelerate", "transformers", "lightning", "torchtitan"),
)
_MAY_DIFFER = "accelerators"


@dataclass(frozen=True)
class RankReport:
    """Values that one rank reports, which the first rank compares across ranks.

    Attributes:
        host: name and boot identifier of the machine.
        local_world_size: value of LOCAL_WORLD_SIZE, or None.
        device: identifier of the accelerator of this rank, or an empty string.
        facts: values, keyed by name, that should be the same on all ranks.
        findings: problems and notes that this rank has found by itself.
    """

    host: str
    local_world_size: int | None
    device: str
    facts: dict[str, str]
    findings: tuple[Finding, ...]

    @classmethod
    def of_this_rank(cls, version: str, environment: Mapping[str, str], findings: Iterable[Finding]) -> RankReport:
        """Return the report of this rank.

        Args:
            version: version of layerzero.
        """
        kind = default_device_type()
        packages = installed_versions(distributions())
        facts = {
            "layerzero": version,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "device": kind,
            _MAY_DIFFER: ", ".join(dict.fromkeys(device_names(kind))),
            **{name: packages[name] for name in _PACKAGES if name in packages},
            **relevant_variables(environment),
        }
        local_rank = whole_number(environment, "LOCAL_RANK") or 0
        return cls(
            f"{socket.gethostname()} {boot_id()}",
            whole_number(environment, "LOCAL_WORLD_SIZE"),
            _device_uuid(kind, local_rank),
            facts,
            tuple(findings),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "findings": tuple(Finding(**each) for each in fields["findings"])})


def _device_uuid(kind: str, local_rank: int) -> str:
    if kind == "cpu":
        return ""
    index = local_rank % torch.accelerator.device_count()
    properties: Any = torch.get_device_module(kind).get_device_properties(index)
    return str(getattr(properties, "uuid", "") or "")


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


def check_ranks(reports: Mapping[int, RankReport]) -> list[Finding]:
    """Compare versions and environment variables of all ranks."""
    findings = []
    for name in dict.fromkeys(name for report in reports.values() for name in report.facts):
        ranks_of = _ranks_by_value({rank: report.facts.get(name, "not set") for rank, report in reports.items()})
        if len(ranks_of) > 1:
            level: Level = "note" if name == _MAY_DIFFER else "problem"
            values = " and ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in ranks_of.items())
            fix = "" if level == "note" else f"Use the same {name} on all ranks"
            findings.append(Finding(_GROUP, level, f"{name} differs: {values}", fix))
    return findings or [Finding(_GROUP, "ok", "versions and environment variables are the same on all ranks")]


def _ranks_by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    ranks_of = defaultdict(list)
    for rank, value in sorted(values.items()):
        ranks_of[value].append(rank)
    return dict(ranks_of)


def node_size(reports: Mapping[int, RankReport]) -> int | None:
    """Return the number of ranks on each node, or None if nodes differ or their ranks are not consecutive."""
    nodes = list(_ranks_by_value({rank: report.host for rank, report in reports.items()}).values())
    size = len(nodes[0])
    is_regular = all(len(ranks) == size and ranks[-1] - ranks[0] == size - 1 for ranks in nodes)
    return size if is_regular else None


def check_nodes(reports: Mapping[int, RankReport]) -> list[Finding]:
    """Check which ranks run on which node, and compare this with LOCAL_WORLD_SIZE and with the devices."""
    nodes = _ranks_by_value({rank: report.host for rank, report in reports.items()})
    placements = [f"{format_ranks(ranks)} on {host.split()[0]}" for host, ranks in list(nodes.items())[:_SHOWN]]
    placements += [f"and {len(nodes) - _SHOWN} more nodes"] if len(nodes) > _SHOWN else []
    findings = [Finding(_GROUP, "ok", f"{len(nodes)} node{'s' * (len(nodes) > 1)}: {'; '.join(placements)}")]
    sizes = _ranks_by_value({rank: report.local_world_size for rank, report in reports.items()})
    if len(sizes) > 1:
        sizes_text = " and ".join(f"{size or 'not set'} on {format_ranks(ranks)}" for size, ranks in sizes.items())
        fix = "Start the same number of ranks on each node, or pass one zero3_size on all ranks"
        findings.append(Finding(_GROUP, "problem", f"LOCAL_WORLD_SIZE differs: {sizes_text}", fix))
    for host, ranks in nodes.items():
        name = host.split()[0]
        local_sizes = {reports[rank].local_world_size for rank in ranks}
        if len(sizes) == 1 and local_sizes != {len(ranks)} and local_sizes != {None}:
            text = f"LOCAL_WORLD_SIZE is {local_sizes.pop()}, but {name} has {len(ranks)}: {format_ranks(ranks)}"
            fix = f"Start one torchrun per node with --nproc-per-node {len(ranks)}, or pass zero3_size={len(ranks)}"
            findings.append(Finding(_GROUP, "problem", text, fix))
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            names = format_ranks(ranks)
            text = f"{name} has {names}, but weights are sharded over consecutive ranks, so gathers cross nodes"
            findings.append(Finding(_GROUP, "problem", text, "Number the ranks node by node, as torchrun does"))
        devices = _ranks_by_value({rank: reports[rank].device for rank in ranks if reports[rank].device})
        for shared in (sharing for sharing in devices.values() if len(sharing) > 1):
            text = f"{format_ranks(shared)} use the same device of {name}"
            fix = "Start one rank per device, and call torch.accelerator.set_device_index(LOCAL_RANK)"
            findings.append(Finding(_GROUP, "problem", text, fix))
    return findings


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
