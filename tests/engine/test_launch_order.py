"""All ranks launch the same collectives in the same order over all communicators, whichever parameters they use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import Offload
from tests.support.late_device import NAME, Device, Stream, register
from tests.support.launches import launches_of
from tests.support.models import different, exact_sgd, full_parameters, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks
from tests.support.wrapped_gloo import mesh_on

pytestmark = pytest.mark.slow


class Sometimes(nn.Module):
    """Layer with two parameters, the second of which only ranks with odd numbers use.

    Activations are sums of parameters, so that all results are exact.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.extra = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = x + self.shift if other is None else x + self.shift - other
        return y - self.extra if dist.get_rank() % 2 else y


class Outer(nn.Module):
    """Unit that contains units; its forward uses its own parameters last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Sometimes() for _ in range(2))
        self.extra = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x)
        x = x - self.shift
        return x + self.extra if dist.get_rank() % 2 else x


class Net(nn.Module):
    """Units in a row, nested, with several inputs, called twice, and in both kinds of checkpoints."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = Sometimes()
        self.outer = Outer()
        self.twice = Sometimes()
        self.joined = Sometimes()
        self.last = Sometimes()
        self.shift = nn.Parameter(torch.ones(4))  # of the root, used last

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[..., Tensor] = lambda layer, *x: layer(*x)  # noqa: E731
        if self.recompute != "none":
            run = lambda layer, *x: checkpoint(layer, *x, use_reentrant=self.recompute == "reentrant")  # noqa: E731
        x = self.first(x)
        x = run(self.outer, x)
        y = self.twice(self.twice(x) - 1)
        y = run(self.joined, x, y)
        return run(self.last, y) - self.shift


UNITS = {Sometimes, Outer}
# These cases cover every pair of values.
SETTINGS = [
    {"recompute": recompute, "prefetch": prefetch, "accumulation": mode, "offload": Offload(grads=offload)}
    for recompute, prefetch, mode, offload in (
        ("none", 0, "sharded", False),
        ("none", 1, "full", True),
        ("reentrant", 1, "sharded", False),
        ("reentrant", 0, "full", True),
        ("other", 0, "full", False),
        ("other", 1, "sharded", True),
    )
]


def _shard(mesh: Any, *, recompute: str, **settings: Any) -> nn.Module:
    return layerzero.shard_model(Net(recompute), mesh=mesh, units=UNITS, **settings)


@contextmanager
def _side_stream(device: Device) -> Any:
    before, side = device.current_stream(), Stream(computes=True)
    side.wait_stream(before)
    with device.stream(side):
        yield
    before.wait_stream(side)


def _train(model: nn.Module, rank: int, device: Device | None = None) -> tuple[list[str], dict[str, Tensor]]:
    """Return the launches of this rank in two steps of two micro-batches, and the weights after them."""
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    launches = launches_of(model)
    for step in range(2):
        with _side_stream(device) if device is not None and step == 1 else nullcontext():
            for micro_batch in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
                x = torch.randint(-1, 2, (2, 4), generator=generator).float()
                with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                    (model(x).square().sum() / 4).backward()
            update(optimizer)
    log = launches.names
    return log, full_parameters(model)


def _compare(rank: int, zero3_size: int, settings: list[dict[str, Any]]) -> list[list[str]]:
    register()
    mesh = mesh_on(NAME, zero3_size)
    expected: dict[str, Tensor] = {}
    logs = []
    for each in settings:
        if not expected:
            _, expected = _train(_shard(mesh_of(zero3_size), **{**each, "offload": Offload(grads=False)}), rank)
        with Device(one_at_a_time=True).installed() as device:
            log, found = _train(_shard(mesh, **each), rank, device)
        assert not different(found, expected), each
        logs.append(log)
    return logs


@pytest.mark.parametrize(
    ("world_size", "zero3_size"),
    [(4, 2), *(pytest.param(*grid, marks=pytest.mark.exhaustive) for grid in [(2, 2), (4, 1)])],
)
def test_launches_are_alike_where_ranks_use_different_parameters(world_size: int, zero3_size: int) -> None:
    settings = [each for each in SETTINGS if zero3_size > 1 or each["accumulation"] == "full"]
    by_rank = run_ranks(_compare, zero3_size, settings, world_size=world_size, pg_timeout=30)
    for each, *logs in zip(settings, *by_rank, strict=True):
        assert sum(entry.startswith("hop") for entry in logs[0]) >= 2 * 8, each
        for rank, log in enumerate(logs):
            apart = next(
                (place for place, pair in enumerate(zip(log, logs[0], strict=False)) if len({*pair}) > 1), None
            )
            assert log == logs[0], f"{each}, rank {rank}, launch {apart}: {log[apart]} instead of {logs[0][apart]}"


class Skipping(nn.Module):
    """Net whose second of three units is left out in the second step, on the ranks of the last node."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skips = False
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        for index, unit in enumerate(self.units):
            if not (self.skips and index == 1):
                x = unit(x)
        return x


@pytest.mark.parametrize(("world_size", "zero3_size"), [(2, 1), (4, 2)])
@on_ranks(pg_timeout=10)
def test_a_unit_that_is_used_again_is_reduced_once(rank: int, world_size: int, zero3_size: int) -> None:
    model, alone = Skipping(), Skipping()
    layerzero.shard_model(model, mesh=mesh_of(zero3_size), units={nn.Linear})
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=2**-12), model)
    plain = torch.optim.SGD(alone.parameters(), lr=2**-12)
    for step in range(5):
        layerzero.traffic(model, reset=True)
        model.skips = step in (1, 3) and rank >= world_size - zero3_size
        model(torch.full((1, 4), float(rank + 1))).sum().backward()
        for each in range(world_size):
            alone.skips = step in (1, 3) and each >= world_size - zero3_size
            (alone(torch.full((1, 4), float(each + 1))).sum() / world_size).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=f"step {step}, {name}")
        assert layerzero.traffic(model).calls["hop2"] == 3, f"step {step}: one reduction for each unit"
        update(optimizer, plain)
