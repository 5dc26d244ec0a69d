"""torch.compile, autocast, and modes that change between training steps."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import layerzero
from tests.support.graphs import WORLD
from tests.support.models import assert_close, full_gradients, update
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Three units and a head of the root; `autocasts` runs autocast inside."""

    def __init__(self, *, autocasts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.autocasts = autocasts

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.autocasts else contextlib.nullcontext():
            for layer in self.layers:
                x = layer(x)
        return self.head(x.float())


def _data(rank: int, step: int, samples: int = 4) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train_both(
    rank: int,
    model: nn.Module,
    alone: nn.Module,
    check: Callable[[int, dict[str, Tensor], dict[str, Tensor]], None],
    autocasts: bool = False,
) -> None:
    optimizers = layerzero.shard_optimizer(_sgd(model), model), _sgd(alone)
    outside = torch.autocast("cpu", torch.bfloat16) if autocasts else contextlib.nullcontext()
    for step in range(4):
        with outside:
            loss = model(_data(rank, step)).pow(2).mean()
            ranks = dist.get_world_size()
            theirs = sum(alone(_data(r, step)).pow(2).mean() for r in range(ranks)) / ranks
        loss.backward()
        theirs.backward()
        gradients = {name.replace("_orig_mod.", ""): grad for name, grad in full_gradients(model).items()}
        check(step, gradients, {name: p.grad for name, p in alone.named_parameters()})
        update(*optimizers)
    assert layerzero.memory(model).measured["full_buffer"] == 0


# --- torch.compile ---


def _compile_units(net: nn.Module, backend: str) -> None:
    for layer in net.layers:
        layer.compile(backend=backend)


def _wrap_units(net: nn.Module, backend: str) -> None:
    for index, layer in enumerate(net.layers):
        net.layers[index] = torch.compile(layer, backend=backend)


def _compile_whole(net: nn.Module, backend: str) -> None:
    net.compile(backend=backend)


WAYS: dict[str, tuple[str, Callable[[nn.Module, str], None]]] = {
    "units, before sharding": ("before", _compile_units),
    "units, after sharding": ("after", _compile_units),
    "units wrapped": ("before", _wrap_units),
    "the whole model": ("after", _compile_whole),
}


def _compile(rank: int, way: str, backend: str) -> None:
    warnings.simplefilter("ignore")  # torch's own, while it imports and lowers
    torch._dynamo.reset()
    counters.clear()
    when, compile_net = WAYS[way]
    torch.manual_seed(0)
    alone = Net()
    net = copy.deepcopy(alone)
    if when == "before":
        compile_net(net, backend)
    accumulation = "full" if way == "units, before sharding" else "sharded"  # their gathered classes differ
    model = layerzero.shard_model(net, zero3_size=2, units={Layer}, accumulation=accumulation)
    if when == "after":
        compile_net(net, backend)
    graphs = []

    def check(step: int, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
        assert_close(ours, theirs, f"{way} {step}")
        graphs.append(counters["stats"]["unique_graphs"])

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(_data(0, 9)), alone(_data(0, 9)), rtol=1e-4, atol=1e-5)
        model.train()

    try:
        _train_both(rank, model, alone, check)
        assert graphs[0] > 0, "nothing was compiled"
        assert graphs[1:] == [graphs[1]] * 3, f"compiled again: {graphs}"
        if rank == 0:
            assert not any("collective" in reason or "gloo" in reason for reason in counters["graph_break"])
        evaluate(0)
    finally:
        torch._dynamo.reset()
        warnings.simplefilter("error")


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_compiled_units_train_like_one_process_and_are_compiled_once(way: str) -> None:
    run_ranks(_compile, way, "aot_eager", world_size=WORLD)


@pytest.mark.exhaustive
def test_units_compiled_by_inductor_train_like_one_process() -> None:
    run_ranks(_compile, "units, before sharding", "inductor", world_size=2, timeout=240)  # each rank compiles


# --- autocast ---


@pytest.mark.sample(1)
@pytest.mark.parametrize(("inside", "outside"), [(True, False), (False, True), (True, True)])
@on_ranks(world_size=WORLD)
def test_autocast_inside_and_outside_the_model(rank: int, inside: bool, outside: bool) -> None:
    for settings in ({}, {"accumulation": "full"}, {"reshard_after_forward": False}):
        torch.manual_seed(0)
        alone = Net(autocasts=inside)
        model = layerzero.shard_model(copy.deepcopy(alone), zero3_size=2, units={Layer}, **settings)
        seen: list[Any] = []
        model.layers[0].linear.register_forward_hook(lambda m, args, output, seen=seen: seen.append(output.dtype))

        def check(step: int, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
            assert {grad.dtype for grad in ours.values()} == {torch.float32}
            for name, gradient in theirs.items():  # the same roundings to bf16, but sums over ranks in another order
                torch.testing.assert_close(
                    ours[name], gradient, rtol=2e-2, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
                )

        if not settings.get("reshard_after_forward", True):
            check_memory = contextlib.suppress(AssertionError)
        else:
            check_memory = contextlib.nullcontext()
        with check_memory:
            _train_both(rank, model, alone, check, autocasts=outside)
        assert set(seen) == {torch.bfloat16}
