"""`layerzero.gathered`: weights that are used outside of their unit's forward, as fused and chunked losses do."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from tests.support.models import Batch, assert_same_bits, different, exact_sgd, full_gradients, union
from tests.support.ranks import BOTH, mesh_of, run_ranks, run_sharing

WORLD, VOCABULARY, WIDTH, STEPS, MICRO_BATCHES = 4, 5, 6, 2, 2


class Net(nn.Module):
    """A language model of integers, whose head is left to the loss; see [Note: Exact arithmetic] in models.py."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.body(self.embedding(tokens))
        return hidden


def batch(step: int, micro_batch: int, rank: int) -> Batch:
    """Tokens [2] and weights of the logits [2, VOCABULARY]."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    weights = torch.randint(-1, 2, (2, VOCABULARY), generator=generator).float()
    return torch.randint(0, VOCABULARY, (2,), generator=generator), weights


def loss_of(model: nn.Module, hidden: Tensor, weights: Tensor) -> Tensor:
    """A loss of the logits, which the weight of the head gives in chunks of one sample."""
    chunks = zip(hidden.split(1), weights.split(1), strict=True)
    return 8 / len(hidden) * torch.stack([(F.linear(h, model.head.weight) * w).sum() for h, w in chunks]).sum()


# --- ways to use a weight: each runs a forward and a backward of one micro-batch ---


def inside(model: nn.Module, data: Batch) -> None:
    hidden = model(data[0])
    with layerzero.gathered(model.head):
        loss_of(model, hidden, data[1]).backward()


def after(model: nn.Module, data: Batch) -> None:
    hidden = model(data[0])
    with layerzero.gathered(model.head):
        loss = loss_of(model, hidden, data[1])
    loss.backward()


def around_forward(model: nn.Module, data: Batch) -> None:
    with layerzero.gathered(model.head):
        loss = loss_of(model, model(data[0]), data[1])
    loss.backward()


def of_all(model: nn.Module, data: Batch) -> None:
    """The forward runs between uses of a part of it, and of what the root holds."""
    with layerzero.gathered(model.body), layerzero.gathered(model):
        scale = model.body[0].weight.sum() + model.embedding.weight.sum()
    hidden = model(data[0])
    with layerzero.gathered(model.body[0]), layerzero.gathered(model.head):
        loss = loss_of(model, F.linear(hidden, model.body[0].weight), data[1])
    (loss + scale).backward()


def beside_forward(model: nn.Module, data: Batch) -> None:
    """The unit of the head is called, too: inside, where it may also be the root's, and outside."""
    hidden, other = model(data[0]), data[1].flip(1)
    with layerzero.gathered(model.head):
        loss = loss_of(model, hidden, data[1]) + 8 / len(hidden) * (model.head(hidden) * other).sum()
    if model.head.weight is not model.embedding.weight:
        loss = loss + 8 / len(hidden) * (model.head(hidden) * other).sum()
    loss.backward()


def in_flight(model: nn.Module, data: Batch) -> None:
    first, second = model(data[0]), model(VOCABULARY - 1 - data[0])
    with layerzero.gathered(model.head):
        loss = loss_of(model, first, data[1])
    with layerzero.gathered(model.head):
        other = loss_of(model, second, data[1])
    loss.backward()
    other.backward()


def twice(model: nn.Module, data: Batch) -> None:
    hidden = model(data[0])
    with layerzero.gathered(model.head):
        loss = loss_of(model, hidden, data[1])
    loss.backward(retain_graph=True)
    loss.backward()


def chunk_by_chunk(model: nn.Module, data: Batch) -> None:
    """One backward for each chunk, and one of the model, which alone reduces."""
    hidden = model(data[0])
    leaf = hidden.detach().requires_grad_()
    with layerzero.gathered(model.head), silent(model):
        for h, w in zip(leaf.split(1), data[1].split(1), strict=True):
            (8 / len(hidden) * (F.linear(h, model.head.weight) * w).sum()).backward()
    hidden.backward(leaf.grad)


def recomputed(model: nn.Module, data: Batch, *, reentrant: bool) -> None:
    """Each chunk of the loss is computed again in a backward that runs after the context."""

    def chunk(h: Tensor, w: Tensor) -> Tensor:
        return (F.linear(h, model.head.weight) * w).sum()

    hidden = model(data[0])
    with layerzero.gathered(model.head):
        chunks = zip(hidden.split(1), data[1].split(1), strict=True)
        losses = [checkpoint(chunk, h, w, use_reentrant=reentrant) for h, w in chunks]
    (8 / len(hidden) * torch.stack(losses).sum()).backward()


def recomputed_around(model: nn.Module, data: Batch) -> None:
    """The context itself is entered again in the backward."""

    def loss(hidden: Tensor) -> Tensor:
        with layerzero.gathered(model.head):
            return loss_of(model, hidden, data[1])

    checkpoint(loss, model(data[0]), use_reentrant=False).backward()


WAYS: dict[str, Callable[[nn.Module, Batch], None]] = {
    "inside": inside,
    "after": after,
    "around_forward": around_forward,
    "of_all": of_all,
    "beside_forward": beside_forward,
    "in_flight": in_flight,
    "twice": twice,
    "chunk_by_chunk": chunk_by_chunk,
    "recomputed": lambda model, data: recomputed(model, data, reentrant=False),
    "recomputed_reentrant": lambda model, data: recomputed(model, data, reentrant=True),
    "recomputed_around": recomputed_around,
}


@contextlib.contextmanager
def silent(model: nn.Module) -> Iterator[None]:
    with layerzero.no_sync(model) if hasattr(model, "no_sync") else contextlib.nullcontext():
        yield


def sharded(net: nn.Module, size: int = 2, **settings: Any) -> nn.Module:
    return layerzero.shard_model(
        copy.deepcopy(net), **{"mesh": mesh_of(size), "units": ["body", "head"], "ignored_params": None, **settings}
    )


def _same_as_alone(rank: int, way: str, *, tied: bool, size: int = 2, **settings: Any) -> None:
    case, use = f"{way} {tied=} {size=} {settings}", WAYS[way]
    net = Net(tied=tied)
    model = sharded(net, size, **settings)
    theirs, ours = exact_sgd(net.parameters()), exact_sgd(model.parameters())
    ours = layerzero.shard_optimizer(ours, model)
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            is_last = micro_batch + 1 == MICRO_BATCHES
            with contextlib.nullcontext() if is_last else layerzero.no_sync(model):
                use(model, batch(step, micro_batch, rank))
            use(net, union([batch(step, micro_batch, r) for r in range(WORLD)]))
            assert layerzero.memory(model).measured["full_buffer"] == 0, (case, step)
        wrong = different(full_gradients(model), {name: p.grad for name, p in net.named_parameters()})
        assert not wrong, f"{case}, step {step}: gradients {wrong}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(model, net, case)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulation": "full", "prefetch": 0, "tied": True},
    {"size": 1, "tied": True},
    {"size": 1, "accumulation": "full"},
    {"size": 4, "prefetch": 2},
    {"size": 4, "accumulation": "full", "tied": True},
    {"reshard_after_forward": False, "tied": True},
    {"size": 4, "reshard_after_forward": 2},
]


def _several_settings(rank: int, way: str, first: int, every: int) -> None:
    for settings in SETTINGS[first::every]:
        _same_as_alone(rank, way, **{"tied": False, **settings})


@BOTH
@pytest.mark.parametrize("way", ["inside", "after"])
def test_gradients_and_weights_are_those_of_one_process(way: str, node_memory: str | None) -> None:
    run_ranks(_several_settings, way, 0, 1, world_size=WORLD, node_memory=node_memory)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("inside", "after")])
def test_so_they_are_in_each_way_to_use_a_weight(way: str) -> None:
    """Half of the settings for one way, half of them for the next."""
    run_ranks(_several_settings, way, list(WAYS).index(way) % 2, 2, world_size=WORLD)


def _recomputed_shared(rank: int) -> None:
    for way in ("recomputed", "in_flight"):
        _same_as_alone(rank, way, tied=True)


def test_a_recomputed_loss_reads_shared_weights() -> None:
    run_sharing(_recomputed_shared, world_size=WORLD)
