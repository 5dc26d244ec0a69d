"""Estimate the step time of training at several sites with outer steps; see ``docs/sites.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from layerzero.comm.codecs import ParamRows
from layerzero.estimates.specs import UnitSpec
from layerzero.integrations.yaml_file import HOP2_CODECS
from layerzero.layout.fragments import divide_into_fragments, start_positions
from layerzero.layout.shard_grid import Extent
from layerzero.outer_steps import OuterSettings
from layerzero.planning.estimator import Estimate
from layerzero.utils.text_tables import seconds_text, si_text, size_text, table

__all__ = ["SiteEstimate", "SiteSettings", "average_step", "estimate_sites", "sites_text"]

_FP32 = 4  # bytes
_TEMPORARIES = 4  # number of fp32 tensors of the size of a fragment that a rank needs during an exchange
_PERIODS = 16  # number of periods of `every` steps in a simulated run; the last half is measured
_TOLERANCE = 1e-3  # a delay hides exchanges if steps are longer than without exchanges by at most this fraction


@dataclass(frozen=True)
class SiteSettings:
    """Settings of training at several sites.

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
        if self.sites < 2:
            raise ValueError(f"sites={self.sites} is not supported. Use at least 2")
        if not self.between > 0:
            raise ValueError(f"a bandwidth of {self.between} Gbit/s between sites is not supported. Use a positive one")
        self.num_fragments(self.fragments or 1)

    def num_fragments(self, handles: int) -> int:
        """Return the number of fragments of a model with `handles` trainable handles.

        Raises:
            ValueError: :func:`layerzero.outer` would refuse the settings for such a model.
        """
        fragments = min(4, self.every, handles) if self.fragments is None else self.fragments
        settings = OuterSettings(self.every, warmup=0, fragments=fragments, delay=0, lr=0.7, momentum=0.5, codec=None)
        settings.check(units=handles)
        return fragments


@dataclass(frozen=True)
class SiteEstimate:
    """Estimated cost of :func:`layerzero.outer` with one codec.

    Every site has a cluster like that of `row`, with the same settings. Exchanges run while the ranks compute.

    Attributes:
        row: estimate of a step at one site.
        settings: number of sites, their link, and how often they exchange fragments.
        codec: name of the codec, or None.
        sent: number of bytes that a site sends per exchange of each fragment.
        outer_bytes: memory of anchors and momentum per rank, in bytes. It is host memory with `offload_optimizer`.
        temporary_bytes: additional memory per rank during an exchange and its outer step, in bytes.
    """

    row: Estimate
    settings: SiteSettings
    codec: str | None
    sent: tuple[float, ...]
    outer_bytes: int
    temporary_bytes: int

    @cached_property
    def exchanges(self) -> tuple[float, ...]:
        """Time to exchange each fragment, in seconds, if the link carries no other traffic."""
        return tuple(sent * 8 / (self.settings.between * 1e9) for sent in self.sent)

    @cached_property
    def delay(self) -> int:
        """Smallest `delay` with which steps are about as short as with the largest `delay`, ``every - 1``."""
        step, every = self.row.step, self.settings.every
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
        """Average duration of a step with this `delay`, in seconds, including waits for exchanges."""
        return average_step(self.row.step, self.exchanges, self.settings.every, self.delay)

    @property
    def hides_exchanges(self) -> bool:
        """True if steps are about as short as without exchanges."""
        return self.step <= self.row.step * (1 + _TOLERANCE)

    @property
    def tokens(self) -> float:
        """Number of tokens per second at all sites."""
        return self.settings.sites * self.row.tokens_per_step / self.step

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
            "sent_bytes": sum(self.sent) / self.settings.every,
            "outer_bytes": self.outer_bytes,
            "temporary_bytes": self.temporary_bytes,
            "fits": self.fits,
        }


def average_step(step: float, exchanges: Sequence[float], every: int, delay: int) -> float:
    """Return the average duration of a step at a site, in seconds, including waits for exchanges.

    Fragments are sent at their :func:`~layerzero.layout.fragments.start_positions`, and their outer steps are taken
    `delay` steps later. The link carries one exchange after the other.

    Args:
        step: duration of a step without exchanges, in seconds.
        exchanges: time to exchange each fragment, in seconds.
        every: number of steps between two exchanges of a fragment.
        delay: number of steps between the start of an exchange and its outer step, less than `every`.
    """
    now = link_is_free = measured_from = 0.0
    arrivals: dict[int, float] = {}  # by number of the step that waits for an exchange: time at which the exchange ends
    starts = dict(zip(start_positions(every, len(exchanges)), exchanges, strict=True))
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
    # If the link is slightly too slow, its queue may still grow when the simulated run ends.
    return max(simulated, sum(exchanges) / every)


def estimate_sites(row: Estimate, units: Sequence[UnitSpec], settings: SiteSettings) -> Iterator[SiteEstimate]:
    """Yield the estimates of training at several sites, first without a codec, and then with each codec.

    Args:
        row: estimate of a step at one site.
        units: specs of the units for the settings of `row`.
        settings: number of sites, their link, and how often they exchange fragments.

    Raises:
        ValueError: the model has fewer trainable units than `settings` has fragments.
    """
    handles = [(unit.traits.grid, handle) for unit in units for handle in unit.handles if handle.trainable]
    if not handles:
        raise ValueError("all parameters are frozen, so sites have nothing to exchange. Unfreeze parameters")
    sizes = [handle.layout.numel for _, handle in handles]
    own_sizes = [grid.numel(handle.layout, Extent.ZERO1) for grid, handle in handles]
    groups = divide_into_fragments(sizes, settings.num_fragments(len(handles)))
    numels = [sum(sizes[index] for index in group) for group in groups]
    largest = max(sum(own_sizes[index] for index in group) for group in groups)
    for codec in (None, *HOP2_CODECS):
        block = ParamRows(start=0, rows=1, length=2**20)
        width = _FP32 if codec is None else HOP2_CODECS[codec].nbytes([block], torch.float32) / block.numel
        yield SiteEstimate(
            row,
            settings,
            codec,
            sent=tuple((settings.sites - 1) * numel * width for numel in numels),
            outer_bytes=2 * _FP32 * sum(own_sizes),
            temporary_bytes=round(largest * (settings.sites * width + _TEMPORARIES * _FP32)),
        )


def sites_text(estimates: Sequence[SiteEstimate]) -> str:
    """Return a table with a row for each codec."""
    first = estimates[0]
    cluster, settings = first.row.cluster, first.settings
    lines = [
        (
            each.codec or "none",
            str(each.delay) if each.hides_exchanges else "-",
            seconds_text(max(each.exchanges)),
            seconds_text(each.step),
            si_text(each.tokens),
            size_text(sum(each.sent) / settings.every),
            size_text(each.outer_bytes),
            "" if each.fits else "does not fit",
        )
        for each in estimates
    ]
    header = ("codec", "delay", "exchange", "step", "tokens/s", "sent by a site", "outer", "")
    memory = "host memory" if first.row.choice.offload_optimizer else "memory"
    return (
        f"{settings.sites} sites, each with {cluster.nodes} x {cluster.accelerators} {cluster.rank_text}s and the "
        f"recommended settings, with {settings.between:,.4g} Gbit/s from a site to the others:\n"
        f"layerzero.outer(every={settings.every}, fragments={len(first.sent)}). A step of one site takes "
        f"{seconds_text(first.row.step)}.\n{table(header, lines, left=1)}\n"
        "delay: smallest delay that hides the exchanges, or - if the link is too slow for that;\n"
        "exchange: time for the largest fragment; "
        f"sent by a site: bytes per step; outer: additional {memory} per rank.\n"
        "The warm-up is not estimated. Losses differ from those of synchronous training."
    )
