"""The estimate for several sites follows the schedule of exchanges, and its memory is what a run holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero.planning import Cluster, TransformerShape, plan
from layerzero.planning.plan_report import Plan
from layerzero.planning.site_estimate import SiteEstimate, sites_text
from tests.support.ranks import run_ranks

SMALL = TransformerShape(layers=4, hidden=64, vocab=1000, heads=4)


def _plan() -> Plan:
    return plan(SMALL, Cluster(nodes=2, accelerators=2), zero3_sizes=[2], micro_batches=[2])


def _duration(step: float, exchange: float, every: int, fragments: int, delay: int, exchanges: int = 400) -> float:
    """Return the average step in a run in which each event happens in its turn.

    Fragment f is sent after each step whose index is f * every / fragments modulo `every`, and applied `delay` steps
    later. The link sends one fragment after the other.
    """
    now, link_free, arrivals = 0.0, 0.0, {}
    starts = [fragment * every // fragments for fragment in range(fragments)]
    total = every * exchanges
    for index in range(total):
        now += step
        if index % every in starts:
            link_free = max(now, link_free) + exchange
            arrivals[index + delay] = link_free
        if index in arrivals:
            now = max(now, arrivals.pop(index))
    return now / total


@pytest.mark.parametrize("fragments", [1, 2, 4])
@pytest.mark.parametrize("seconds", [0.1, 0.9, 2.5, 4.1, 15.5, 40.0])
def test_steps_last_as_long_as_in_a_run_of_the_schedule(fragments: int, seconds: float) -> None:
    found = _plan()
    assert found.best is not None
    row = replace(found.best)
    row.__dict__["_cost"] = replace(found.best._cost, step=1.0)
    estimate = SiteEstimate(row, 2, 8.0, 16, fragments, None, sent=seconds * 1e9, outer_bytes=0)
    assert estimate.exchange == pytest.approx(seconds)
    simulated = _duration(1.0, seconds, 16, fragments, estimate.delay)
    assert estimate.step == pytest.approx(simulated, rel=0.02)
    if estimate.step == 1.0:
        assert estimate.delay == 0 or _duration(1.0, seconds, 16, fragments, estimate.delay - 1) > 1.001, "the smallest"
    assert estimate.tokens == pytest.approx(2 * row.tokens_per_step / estimate.step)


def test_bytes_are_those_of_the_formula() -> None:
    found = _plan()
    estimates = found.at_sites(3, between=0.5, every=8, fragments=2)
    numel = sum(parameter.numel() for parameter in SMALL.build().parameters())
    for estimate, bits in zip(estimates, (32, 8 + 16 / 128, 4 + 16 / 128), strict=True):
        assert estimate.sent * estimate.fragments == pytest.approx(2 * numel * bits / 8, rel=0.01), "padding"
        assert estimate.exchange == pytest.approx(estimate.sent * 8 / 0.5e9)
        assert estimate.as_dict()["sent_bytes"] == estimate.sent * 2 / 8
    text = sites_text(estimates)
    assert text.startswith("3 sites, each with 2 x 2 accelerators") and "int4_blocks" in text
    for settings, message in (
        ({"sites": 1, "between": 1.0}, "sites=1 is not supported. Use at least 2"),
        ({"sites": 2, "between": 0.0}, "a bandwidth of 0.0 Gbit/s between sites"),
        ({"sites": 2, "between": 1.0, "every": 0}, "every=0 is not"),
        ({"sites": 2, "between": 1.0, "every": 2}, "fragments=4 is more than every=2"),
    ):
        with pytest.raises(ValueError, match=message):
            found.at_sites(**settings)
    assert replace(found, best=None).at_sites(2, between=1.0) == []


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _outer_bytes(rank: int) -> int:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("site", "replica", "zero3"))
    model = layerzero.shard_model(_Net(), mesh=mesh["replica", "zero3"], units={nn.Linear})
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    layerzero.outer(model, optimizer, sites=mesh["site"], every=4, warmup=0, fragments=2)
    return layerzero.memory(model).measured["outer"]


@pytest.mark.slow
def test_memory_is_what_ranks_hold() -> None:
    found = plan(_Net, Cluster(nodes=1, accelerators=2), units={nn.Linear}, zero3_sizes=[2], param_dtype="fp32")
    (first, *_) = found.at_sites(2, between=1.0, every=4, fragments=2)
    assert set(run_ranks(_outer_bytes)) == {first.outer_bytes}
