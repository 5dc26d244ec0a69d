"""Estimate the step time of training at several sites with outer steps; see ``docs/sites.md``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.comm.codecs import ParamRows
from layerzero.config.yaml_file import HOP2_CODECS
from layerzero.estimates.specs import UnitSpec
from layerzero.layout.shard_grid import Extent
from layerzero.planning.estimator import Estimate
from layerzero.utils.text_tables import seconds_text, si_text, size_text, table

__all__ = ["SiteEstimate", "estimate_sites", "sites_text"]

_ANCHOR_AND_MOMENTUM = 8  # bytes per element
_FP32 = 4


@dataclass(frozen=True)
class SiteEstimate:
    """Estimated cost of :func:`layerzero.outer` with one codec. All sites have the cluster and the settings of `row`.

    Exchanges run while the ranks compute.

    Attributes:
        row: estimate of a step in one site.
        sites: number of sites.
        between: bandwidth from a site to the other sites, in Gbit/s.
        every: number of steps between two exchanges of a fragment.
        fragments: number of parts in which the model is exchanged.
        codec: name of the codec, or None.
        sent: number of bytes that a site sends per exchange of one fragment.
        outer_bytes: memory of anchors and momentum per rank, in bytes.
    """

    row: Estimate
    sites: int
    between: float
    every: int
    fragments: int
    codec: str | None
    sent: float
    outer_bytes: int

    @property
    def exchange(self) -> float:
        """Time in which a fragment is exchanged, in seconds, if the link carries nothing else."""
        return self.sent * 8 / (self.between * 1e9)

    @property
    def step(self) -> float:
        """Average duration of a step, in seconds, with waits for exchanges.

        A single fragment can be exchanged during all steps but one. Several fragments take turns, so that the link can
        always be in use.
        """
        if self.fragments == 1:
            return (self.row.step + max(self.exchange, (self.every - 1) * self.row.step)) / self.every
        return max(self.row.step, self.exchange * self.fragments / self.every)

    @property
    def delay(self) -> int:
        """Smallest `delay` that hides an exchange. If none does, the largest, which is ``every - 1``."""
        return min(math.ceil(self.exchange / self.step), self.every - 1)

    @property
    def tokens(self) -> float:
        """Number of tokens per second at all sites."""
        return self.sites * self.row.tokens_per_step / self.step

    def as_dict(self) -> dict[str, Any]:
        """Return the settings and the estimate as strings and numbers, for JSON."""
        return {
            "codec": self.codec,
            "delay": self.delay,
            "exchange_seconds": self.exchange,
            "step_seconds": self.step,
            "tokens_per_second": self.tokens,
            "sent_bytes": self.sent * self.fragments / self.every,
            "outer_bytes": self.outer_bytes,
        }


def estimate_sites(
    row: Estimate, units: Sequence[UnitSpec], *, sites: int, between: float, every: int, fragments: int
) -> Iterator[SiteEstimate]:
    """Yield the estimates without a codec and with each codec.

    Args:
        row: estimate of the cluster of one site.
        units: specs of the units for the settings of `row`.
        sites: number of sites, at least 2.
        between: bandwidth from a site to the other sites, in Gbit/s.
        every: number of steps between two exchanges of a fragment.
        fragments: number of parts in which the model is exchanged, at most `every`.

    Raises:
        ValueError: an argument is out of range.
    """
    for name, value, least in (("sites", sites, 2), ("every", every, 1), ("fragments", fragments, 1)):
        if value < least:
            raise ValueError(f"{name}={value} is not supported. Use at least {least}")
    if not between > 0:
        raise ValueError(f"a bandwidth of {between} Gbit/s between sites is not supported. Use a positive number")
    if fragments > every:
        raise ValueError(f"fragments={fragments} is more than every={every}. Use at most {every} fragments")
    trainable = [(unit.traits.grid, handle) for unit in units for handle in unit.handles if handle.trainable]
    owned = sum(grid.numel(handle.layout, Extent.ZERO1) for grid, handle in trainable)
    sent = sum(handle.layout.numel for _, handle in trainable) * (sites - 1) / fragments
    for codec in (None, *HOP2_CODECS):
        block = ParamRows(start=0, rows=1, length=2**20)
        width = _FP32 if codec is None else HOP2_CODECS[codec].nbytes([block], torch.float32) / block.numel
        memory = _ANCHOR_AND_MOMENTUM * owned
        yield SiteEstimate(row, sites, between, every, fragments, codec, sent * width, memory)


def sites_text(estimates: Sequence[SiteEstimate]) -> str:
    """Return a table with a row for each codec."""
    first = estimates[0]
    cluster = first.row.cluster
    lines = [
        (
            each.codec or "none",
            str(each.delay),
            seconds_text(each.exchange),
            seconds_text(each.step),
            si_text(each.tokens),
            size_text(each.sent * each.fragments / each.every),
            size_text(each.outer_bytes),
        )
        for each in estimates
    ]
    header = ("codec", "delay", "exchange", "step", "tokens/s", "sent by a site", "outer")
    return (
        f"{first.sites} sites, each with {cluster.nodes} x {cluster.accelerators} accelerators and the recommended "
        f"settings, with {first.between:,.4g} Gbit/s from a site to the others:\n"
        f"layerzero.outer(every={first.every}, fragments={first.fragments}). A step of one site takes "
        f"{seconds_text(first.row.step)}.\n{table(header, lines, left=1)}\n"
        "delay: smallest delay that hides an exchange; exchange: time for one fragment; sent by a site: bytes per "
        "step;\nouter: additional memory per rank. Losses differ from those of synchronous training."
    )
