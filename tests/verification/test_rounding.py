"""layerzero.verify with tiny updates: rounding to the next number is no difference, everything else is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import layerzero
from layerzero.engine.reduction_spec import ReductionStage
from tests.support.ranks import run_ranks


class Gains(nn.Module):
    """Weights of a norm, 1.0 at first, whose gradient on each rank is that rank's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def tiny_batch(index: int, rank: int) -> Tensor:
    """Return a batch for which 1.0 minus the ranks' mean is a tie except for the mean's last bit (order of sums)."""
    return torch.tensor([4 * 2.0**-25 if rank == 0 else 4 * 2.0**-49, 0.0])


def small_batch(index: int, rank: int) -> Tensor:
    return torch.tensor([2.0**-20, 0.0])


def _sgd_with_rate_one(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _sgd_that_skips_sharded(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.0 if isinstance(parameters[0], DTensor) else 1.0)


_init = ReductionStage.__init__


def _init_off_by_a_thousandth(self: ReductionStage, *args: Any) -> None:
    path, scale, codec = args[:4], args[4], args[5:]
    _init(self, *path, scale if scale == 1.0 else scale * 1.001, *codec)


def _verify_norms(rank: int) -> dict[str, layerzero.VerifyReport]:
    once = {"zero3_sizes": [2], "steps": 1, "micro_batches": 1, "tolerance": 3e-6, "optimizer_fn": _sgd_with_rate_one}
    reports = {"an ulp": layerzero.verify(Gains, tiny_batch, **once)}
    reports["skipped"] = layerzero.verify(Gains, small_batch, **{**once, "optimizer_fn": _sgd_that_skips_sharded})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReductionStage, "__init__", _init_off_by_a_thousandth)
        reports["scaled"] = layerzero.verify(Gains, tiny_batch, **once)
    return reports


def test_a_weight_of_a_norm_may_be_one_ulp_off_and_no_more() -> None:
    reports = run_ranks(_verify_norms)[0]
    (row,) = reports["an ulp"].rows
    assert row.ok
    assert row.gradient > 0, (
        "the ranks' gradients were added in the order of the unsharded run, so nothing was compared"
    )
    assert not reports["skipped"].ok
    assert reports["skipped"].rows[0].gradient == 0
    assert not reports["scaled"].ok
