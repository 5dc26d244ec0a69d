"""The estimate for several sites follows the schedule of exchanges, and its memory is what a run holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero.layout.fragments import divide_into_fragments
from layerzero.planning import Cluster, Plan, SiteEstimate, SiteSettings, TransformerShape, plan
from layerzero.planning.site_estimate import average_step, sites_text
from tests.support.ranks import run_ranks

SMALL = TransformerShape(layers=4, hidden=64, vocab=1000, heads=4)


def _plan(**options: object) -> Plan:
    return plan(SMALL, Cluster(nodes=2, accelerators=2, **options), zero3_sizes=[2], micro_batches=[2])


@pytest.mark.parametrize(
    ("exchanges", "every", "delay", "expected"),
    [
        ([0.5], 4, 0, (4 + 0.5) / 4),  # every exchange is waited for
        ([0.5], 4, 1, 1.0),
        ([2.5], 4, 2, (4 + 0.5) / 4),
        ([2.5], 4, 3, 1.0),
        ([9.0], 4, 3, (9 + 1) / 4),  # a single fragment cannot be exchanged in the step after its outer step
        ([5.0, 5.0], 4, 3, 10 / 4),  # two fragments take turns, and the link is always busy
        ([1.0, 1.0], 2, 1, 1.0),
        ([4.04] * 4, 16, 15, 1.01),  # the queue of the link grows slowly
        ([1.0, 3.0], 8, 1, (8 + 2) / 8),  # the larger fragment is waited for
        ([1.0, 3.0], 8, 3, 1.0),
        ([2.0, 2.0], 3, 1, 5 / 3),  # starts after steps 1 and 3 of each 3
    ],
)
def test_steps_wait_for_exchanges_that_take_longer_than_the_delay(
    exchanges: list[float], every: int, delay: int, expected: float
) -> None:
    assert average_step(1.0, exchanges, every, delay) == pytest.approx(expected)


@pytest.mark.parametrize("every", [1, 7, 16])
@pytest.mark.parametrize("seconds", [0.1, 0.9, 2.5, 4.1, 40.0])
def test_the_delay_is_the_smallest_that_hides_exchanges(every: int, seconds: float) -> None:
    found = _plan()
    assert found.best is not None
    row = replace(found.best, simulated=lambda: replace(found.best._cost, step=1.0))
    for fragments in {1, min(4, every), min(6, every)}:
        settings = SiteSettings(2, 8.0, every, fragments)
        estimate = SiteEstimate(row, settings, None, tuple(seconds * 1e9 for _ in range(fragments)), 0, 0)
        assert estimate.exchanges == pytest.approx([seconds] * fragments)
        steps = [average_step(1.0, estimate.exchanges, every, delay) for delay in range(every)]
        assert estimate.step == steps[estimate.delay] <= min(steps) * 1.002
        assert not estimate.delay or steps[estimate.delay - 1] > min(steps) * 1.0005
        assert estimate.hides_exchanges == (estimate.step < 1.002)
        assert estimate.tokens == pytest.approx(2 * row.tokens_per_step / estimate.step)


def test_bytes_are_those_of_the_formula() -> None:
    found = _plan()
    estimates = found.at_sites(SiteSettings(3, 0.5, every=8, fragments=2))
    numel = sum(parameter.numel() for parameter in SMALL.build().parameters())
    for estimate, bits in zip(estimates, (32, 8 + 16 / 128, 4 + 16 / 128), strict=True):
        assert sum(estimate.sent) == pytest.approx(2 * numel * bits / 8, rel=0.01), "padding"
        assert estimate.exchanges == pytest.approx([sent * 8 / 0.5e9 for sent in estimate.sent])
        assert estimate.as_dict()["sent_bytes"] == sum(estimate.sent) / 8
    assert found.best is not None
    sizes = [sum(h.layout.numel for h in unit.handles) for unit in found.estimator.unit_specs(found.best.choice)]
    groups = divide_into_fragments(sizes, 2)
    assert list(estimates[0].sent) == [2 * 4 * sum(sizes[index] for index in group) for group in groups]
    text = sites_text(estimates)
    assert text.startswith("3 sites, each with 2 x 2 accelerators") and "int4_blocks" in text
    assert "does not fit" not in text and "additional memory" in text


def test_memory_of_sites_may_not_fit() -> None:
    found = _plan()
    assert found.best is not None
    (exact, *_) = found.at_sites(SiteSettings(2, 1.0))
    added = exact.outer_bytes + exact.temporary_bytes
    for spare in (0, -1):
        full = replace(exact, row=replace(found.best, peak=int(found.best.room) - added - spare))
        assert full.fits == (spare == 0) and ("does not fit" in sites_text([full])) == (spare != 0)
    choice = replace(found.best.choice, offload_optimizer=True)
    small = replace(found.best.cluster, host_memory=1.0)
    for spare in (0, -1):
        host = int(1e9 / 2) - added - spare
        full = replace(exact, row=replace(found.best, choice=choice, host=host, cluster=small))
        assert full.fits == (spare == 0) and "additional host memory" in sites_text([full])


def test_wrong_descriptions_of_sites_are_refused() -> None:
    for wrong, message in (
        ({"sites": 1, "between": 1.0}, "sites=1 is not supported. Use at least 2"),
        ({"sites": 2, "between": 0.0}, "a bandwidth of 0.0 Gbit/s between sites"),
        ({"sites": 2, "between": 1.0, "every": 0}, "every=0 is not valid"),
        ({"sites": 2, "between": 1.0, "every": 2, "fragments": 4}, "fragments=4 is more than every=2"),
    ):
        with pytest.raises(ValueError, match=message):
            SiteSettings(**wrong)
    found = _plan()
    with pytest.raises(ValueError, match=r"fragments=16 is more than the \d trainable units"):
        found.at_sites(SiteSettings(2, 1.0, fragments=16))
    assert len(plan(nn.Linear(4, 4), Cluster(nodes=1)).at_sites(SiteSettings(2, 1.0))[0].sent) == 1, "there is one unit"
    assert replace(found, best=None).at_sites(SiteSettings(2, 1.0)) == []


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


def test_memory_is_what_ranks_hold() -> None:
    found = plan(_Net, Cluster(nodes=1, accelerators=2), units={nn.Linear}, zero3_sizes=[2], param_dtype="fp32")
    (first, *_) = found.at_sites(SiteSettings(2, 1.0, every=4, fragments=2))
    assert set(run_ranks(_outer_bytes)) == {first.outer_bytes}
