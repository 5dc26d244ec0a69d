"""Contestants of the benchmarks, by name.

A contestant's module is imported only in the processes that run it. A missing package therefore does not affect other
contestants, and no process loads the library of another contestant.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contestants.base import Contestant
from benchmarks.task import Task

__all__ = ["ENTRIES", "Contestant", "Entry", "why_missing"]

NODE, WORLD = "node_size", "ranks"  # fields of Task, for settings that depend on the task


@dataclass(frozen=True)
class Entry:
    """Label, class and settings of a contestant.

    Attributes:
        label: plain text for tables and plots.
        family: ``"ours"``, ``"sites"`` (ours, not synchronous), ``"compute"``, or the kind of sharding of a peer:
            ``"full"``, ``"hybrid"``, ``"hpz"`` (weights inside a node, gradients across nodes), ``"optimizer"`` (only
            optimizer state), ``"replicated"`` (nothing).
        target: ``module:class`` in this package.
        settings: keyword arguments of the class; the values NODE and WORLD are replaced by fields of the task.
        needs: package that must be installed.
        reduces: whether gradients are sent, so that the reduce dtype matters.
    """

    label: str
    family: str
    target: str
    settings: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None
    reduces: bool = True

    def load(self) -> Callable[[Task], Contestant]:
        """Import the contestant and return a function that builds it."""
        module, _, name = self.target.partition(":")
        factory = getattr(importlib.import_module(f"{__name__}.{module}"), name)

        def build(task: Task) -> Contestant:
            sizes = {NODE: task.node_size, WORLD: task.ranks}
            return factory(task, **{key: sizes.get(value, value) for key, value in self.settings.items()})

        return build


def _ours(
    label: str,
    zero3_size: object,
    accumulation: str,
    shared_memory: str = "auto",
    *,
    hop2: str | None = None,
    refresh_codec: str | None = None,
    reshard_after_forward: object = True,
    accumulate_in_bf16: bool = False,
) -> Entry:
    settings = {
        "zero3_size": zero3_size,
        "accumulation": accumulation,
        "shared_memory": shared_memory,
        "hop2": hop2,
        "refresh_codec": refresh_codec,
        "reshard_after_forward": reshard_after_forward,
        "accumulate_in_bf16": accumulate_in_bf16,
    }
    return Entry(label, "ours", "ours:LayerZero", settings)


def _fsdp2(label: str, family: str, **settings: object) -> Entry:
    return Entry(f"FSDP2 {label}", family, "fsdp:FSDP2", {"replicas": family == "hybrid", **settings})


def _deepspeed(label: str, family: str, **settings: object) -> Entry:
    return Entry(f"DeepSpeed {label}", family, "deepspeed_zero:DeepSpeed", settings, needs="deepspeed")


ENTRIES: dict[str, Entry] = {
    "layerzero": _ours('layerzero hybrid, "sharded"', NODE, "sharded"),
    "layerzero-int8": _ours('layerzero hybrid, "sharded", hop 2 in int8', NODE, "sharded", hop2="int8"),
    "layerzero-int4": _ours('layerzero hybrid, "sharded", hop 2 in int4', NODE, "sharded", hop2="int4"),
    "layerzero-lossless": _ours(
        'layerzero hybrid, "sharded", lossless refresh', NODE, "sharded", refresh_codec="lossless"
    ),
    "layerzero-int4-lossless": _ours(
        'layerzero hybrid, "sharded", hop 2 in int4, lossless refresh',
        NODE,
        "sharded",
        hop2="int4",
        refresh_codec="lossless",
    ),
    "layerzero-int4-int4": _ours(
        'layerzero hybrid, "sharded", hop 2 and refresh in int4', NODE, "sharded", hop2="int4", refresh_codec="int4"
    ),
    "layerzero-sites": Entry(
        "layerzero, a site per node, H=16, 4 fragments, int4",
        "sites",
        "ours:Sites",
        {"every": 16, "fragments": 4, "delay": 3},
    ),
    "layerzero-sites-apart": Entry(
        "layerzero, a site per node, no exchange", "sites", "ours:Sites", {"every": 10**9, "fragments": 1, "delay": 0}
    ),
    "layerzero-full": _ours('layerzero hybrid, "full"', NODE, "full"),
    "layerzero-exchanges": _ours('layerzero hybrid, "sharded", shared memory off', NODE, "sharded", "off"),
    "layerzero-full-exchanges": _ours('layerzero hybrid, "full", shared memory off', NODE, "full", "off"),
    "layerzero-full-exchanges-keep": _ours(
        "layerzero hybrid, weights kept, fp32 accumulators, shared memory off",
        NODE,
        "full",
        "off",
        reshard_after_forward="step",
    ),
    "layerzero-full-exchanges-keep-bf16": _ours(
        "layerzero hybrid, weights kept, shared memory off",
        NODE,
        "full",
        "off",
        reshard_after_forward="step",
        accumulate_in_bf16=True,
    ),
    "layerzero-zero1": _ours("layerzero, zero3_size=1", 1, "full"),
    # To the kernel, emulated nodes are one machine: with shared memory, their ranks would bypass the emulated link.
    "layerzero-zero3": _ours('layerzero, zero3_size=D, "sharded", shared memory off', WORLD, "sharded", "off"),
    "layerzero-zero3-full": _ours('layerzero, zero3_size=D, "full", shared memory off', WORLD, "full", "off"),
    "fsdp2-full": _fsdp2("full sharding", "full"),
    "fsdp2-full-no-sync": _fsdp2("full sharding, no sync", "full", accumulate="everything"),
    "fsdp2-hsdp": _fsdp2("HSDP, all-reduce in the last", "hybrid", accumulate="all_reduce"),
    "fsdp2-hsdp-keep": _fsdp2(
        "HSDP, all-reduce in the last, weights kept", "hybrid", accumulate="all_reduce", keep=True
    ),
    "fsdp2-hsdp-no-sync": _fsdp2("HSDP, no sync", "hybrid", accumulate="everything"),
    "fsdp1-hybrid": Entry("FSDP1 HYBRID_SHARD, no sync", "hybrid", "fsdp:FSDP1", {"strategy": "HYBRID_SHARD"}),
    "fsdp1-hybrid-zero2": Entry(
        "FSDP1 _HYBRID_SHARD_ZERO2, no sync", "hybrid", "fsdp:FSDP1", {"strategy": "_HYBRID_SHARD_ZERO2"}
    ),
    "ddp": Entry("DDP", "replicated", "ddp:DDP"),
    "ddp-zero": Entry("DDP with ZeroRedundancyOptimizer", "optimizer", "ddp:DDPZero"),
    "deepspeed-zero1": _deepspeed("ZeRO-1, accumulates fp32", "optimizer", stage=1, accumulate="fp32"),
    "deepspeed-zero1-bf16": _deepspeed("ZeRO-1, accumulates bf16", "optimizer", stage=1, accumulate="bf16"),
    "deepspeed-zero3": _deepspeed("ZeRO-3", "full", stage=3),
    "deepspeed-hpz": _deepspeed("ZeRO-3, hpZ", "hpz", stage=3, hpz=True),
    "compute": Entry("compute alone", "compute", "ours:ComputeAlone", reduces=False),
}


def why_missing(name: str) -> str | None:
    """Return the reason why a contestant cannot run here, or None."""
    needs = ENTRIES[name].needs
    if needs is not None and importlib.util.find_spec(needs) is None:
        return f"{needs} is not installed"
    return None
