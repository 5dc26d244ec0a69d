"""Estimate the step time of training at several sites with outer steps; see ``docs/sites.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from layerzero.comm.codecs import ParamRows
from layerzero.config.yaml_file import HOP2_CODECS
from layerzero.estimates.specs import UnitSpec
from layerzero.layout.fragments import divide_into_fragments
from layerzero.layout.shard_grid import Extent
from layerzero.planning.estimator import Estimate
from layerzero.utils.text_tables import seconds_text, si_text, size_text, table

__all__ = ["SiteEstimate", "SitePlan", "average_step", "estimate_sites", "sites_text"]

_FP32 = 4  # bytes
_PERIODS = 16  # number of periods of `every` steps in a simulated run; the last half is measured
_TOLERANCE = 1e-3  # a delay hides exchanges if steps are longer than without exchanges by at most this fraction


@dataclass(frozen=True)
class SitePlan:
    """Description of the training at several sites.

    Attributes:
        sites: number of sites, at least 2.
        between: bandwidth from a site to the other sites, in Gbit/s.
        every: number of steps between two exchanges of a fragment.
        fragments: number of parts in which the model is exchanged, at most `every`. None means 4, or fewer if `every`
            or the number of trainable handles is smaller.

    Raises:
        ValueError: a value is out of range.
    """

    sites: int
    between: float
    every: int = 16
    fragments: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("sites", self.sites, 2),
            ("every", self.every, 1),
            ("fragments", self.fragments, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} is not supported. Use at least {least}")
        if not self.between > 0:
            raise ValueError(f"a bandwidth of {self.between} Gbit/s between sites is not supported. Use a positive one")
        if self.fragments is not None and self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments} is more than every={self.every}. Use at most {self.every} fragments"
            )

    def num_fragments(self, handles: int) -> int:
        """Return the number of fragments of a model with this number of trainable handles."""
        if self.fragments is not None and self.fragments > handles:
            raise ValueError(
                f"fragments={self.fragments} is more than the {handles} trainable units. Use at most {handles}"
            )
        return min(4, self.every, handles) if self.fragments is None else self.fragments


@dataclass(frozen=True)
class SiteEstimate:
    """Estimated cost of :func:`layerzero.outer` with one codec. All sites have the cluster and the settings of `row`.

    Exchanges run while the ranks compute.

    Attributes:
        row: estimate of a step in one site.
        plan: number of sites, and their link.
        codec: name of the codec, or None.
        sent: number of bytes that a site sends per exchange of each fragment.
        outer_bytes: memory of anchors and momentum per rank, in bytes. It is host memory with `offload_optimizer`.
        temporary_bytes: additional memory per rank during an exchange and its outer step, in bytes.
    """

    row: Estimate
    plan: SitePlan
    codec: str | None
    sent: tuple[float, ...]
    outer_bytes: int
    temporary_bytes: int

    @cached_property
    def exchanges(self) -> tuple[float, ...]:
        """Time in which each fragment is exchanged, in seconds, if the link carries nothing else."""
        return tuple(sent * 8 / (self.plan.between * 1e9) for sent in self.sent)

    @cached_property
    def delay(self) -> int:
        """Smallest `delay` with which steps are as short as with the largest, ``every - 1``."""
        step, every = self.row.step, self.plan.every
        longest_allowed = average_step(step, self.exchanges, every, every - 1) * (1 + _TOLERANCE)
        low, high = 0, every - 1
        while low < high:
            middle = (low + high) // 2
            if average_step(step, self.exchanges, every, middle) <= longest_allowed:
                high = middle
            else:
                low = middle + 1
        return low

    @cached_property
    def step(self) -> float:
        """Average duration of a step with this `delay`, in seconds, with waits for exchanges."""
        return average_step(self.row.step, self.exchanges, self.plan.every, self.delay)

    @property
    def hides_exchanges(self) -> bool:
        """True if steps are about as short as without exchanges."""
        return self.step <= self.row.step * (1 + _TOLERANCE)

    @property
    def tokens(self) -> float:
        """Number of tokens per second at all sites."""
        return self.plan.sites * self.row.tokens_per_step / self.step

    @property
    def fits(self) -> bool:
        """True if anchors, momentum and temporary tensors fit into the memory that the settings of `row` leave."""
        row, added = self.row, self.outer_bytes + self.temporary_bytes
        if row.choice.offload_optimizer:
            return (row.host + added) * row.cluster.accelerators <= row.cluster.host_memory * 1e9
        return row.peak + added <= row.room

    def as_dict(self) -> dict[str, Any]:
        """Return the settings and the estimate as strings and numbers, for JSON."""
        return {
            "codec": self.codec,
            "fragments": len(self.sent),
            "delay": self.delay,
            "hides_exchanges": self.hides_exchanges,
            "exchange_seconds": max(self.exchanges),
            "step_seconds": self.step,
            "tokens_per_second": self.tokens,
            "sent_bytes": sum(self.sent) / self.plan.every,
            "outer_bytes": self.outer_bytes,
            "temporary_bytes": self.temporary_bytes,
            "fits": self.fits,
        }


def average_step(step: float, exchanges: Sequence[float], every: int, delay: int) -> float:
    """Return the average duration of a step of a site, with waits for exchanges.

    Fragment f of F is sent after step ``every * (f + 1) // F`` of each period of `every` steps, and its outer step is
    taken `delay` steps later. The link carries one exchange after the other.

    Args:
        step: duration of a step without exchanges, in seconds.
        exchanges: time in seconds in which each fragment is exchanged.
        every: number of steps of a period.
        delay: number of steps between the start of an exchange and its outer step, less than `every`.
    """
    now = link_is_free = measured_from = 0.0
    arrivals: dict[int, float] = {}  # by step of the outer step
    starts = {every * (index + 1) // len(exchanges) % every: seconds for index, seconds in enumerate(exchanges)}
    for number in range(1, every * _PERIODS + 1):
        now = max(now + step, arrivals.pop(number, 0.0))
        if (seconds := starts.get(number % every)) is not None:
            link_is_free = max(now, link_is_free) + seconds
            if delay:
                arrivals[number + delay] = link_is_free
            else:
                now = link_is_free
        if number == every * _PERIODS // 2:
            measured_from = now
    simulated = (now - measured_from) / (every * _PERIODS - every * _PERIODS // 2)
    return max(simulated, sum(exchanges) / every)  # the queue of a link that is slightly too slow grows for long


def estimate_sites(row: Estimate, units: Sequence[UnitSpec], plan: SitePlan) -> Iterator[SiteEstimate]:
    """Yield the estimates without a codec and with each codec.

    Args:
        row: estimate of the cluster of one site.
        units: specs of the units for the settings of `row`.
        plan: number of sites, and their link.

    Raises:
        ValueError: the model has fewer trainable units than `plan` has fragments.
    """
    handles = [(unit.traits.grid, handle) for unit in units for handle in unit.handles if handle.trainable]
    sizes = [handle.layout.numel for _, handle in handles]
    own_sizes = [grid.numel(handle.layout, Extent.ZERO1) for grid, handle in handles]
    groups = divide_into_fragments(sizes, plan.num_fragments(len(handles)))
    numels = [sum(sizes[index] for index in group) for group in groups]
    largest = max(sum(own_sizes[index] for index in group) for group in groups)
    for codec in (None, *HOP2_CODECS):
        block = ParamRows(start=0, rows=1, length=2**20)
        width = _FP32 if codec is None else HOP2_CODECS[codec].nbytes([block], torch.float32) / block.numel
        yield SiteEstimate(
            row,
            plan,
            codec,
            sent=tuple((plan.sites - 1) * numel * width for numel in numels),
            outer_bytes=2 * _FP32 * sum(own_sizes),
            temporary_bytes=round(largest * (plan.sites * width + 4 * _FP32)),
        )


def sites_text(estimates: Sequence[SiteEstimate]) -> str:
    """Return a table with a row for each codec."""
    first = estimates[0]
    cluster, plan = first.row.cluster, first.plan
    lines = [
        (
            each.codec or "none",
            str(each.delay) if each.hides_exchanges else "-",
            seconds_text(max(each.exchanges)),
            seconds_text(each.step),
            si_text(each.tokens),
            size_text(sum(each.sent) / plan.every),
            size_text(each.outer_bytes),
            "" if each.fits else "does not fit",
        )
        for each in estimates
    ]
    header = ("codec", "delay", "exchange", "step", "tokens/s", "sent by a site", "outer", "")
    memory = "host memory" if first.row.choice.offload_optimizer else "memory"
    return (
        f"{plan.sites} sites, each with {cluster.nodes} x {cluster.accelerators} accelerators and the recommended "
        f"settings, with {plan.between:,.4g} Gbit/s from a site to the others:\n"
        f"layerzero.outer(every={plan.every}, fragments={len(first.sent)}). A step of one site takes "
        f"{seconds_text(first.row.step)}.\n{table(header, lines, left=1)}\n"
        "delay: smallest delay that hides the exchanges, or - if the link is too slow for that;\n"
        "exchange: time for the largest fragment; "
        f"sent by a site: bytes per step; outer: additional {memory} per rank.\n"
        "The warm-up is not estimated. Losses differ from those of synchronous training."
    )
