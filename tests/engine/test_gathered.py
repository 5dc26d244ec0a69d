"""`layerzero.gathered`: weights used outside their unit's forward, as in fused and chunked losses."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import layerzero
from tests.support.graphs import message_of
from tests.support.launches import by_communicator, launches_of
from tests.support.models import Batch, assert_same_bits, different, exact_sgd, full_gradients, union, update
from tests.support.ranks import BOTH, mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

WORLD, VOCABULARY, WIDTH, STEPS, MICRO_BATCHES = 4, 5, 6, 2, 2


class Net(nn.Module):
    """Language model of integers whose loss applies the head; see [Note: Exact arithmetic] in models.py."""

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
    """Return tokens [2] and weights of the logits [2, VOCABULARY]."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    weights = torch.randint(-1, 2, (2, VOCABULARY), generator=generator).float()
    return torch.randint(0, VOCABULARY, (2,), generator=generator), weights


def loss_of(model: nn.Module, hidden: Tensor, weights: Tensor) -> Tensor:
    """Return a loss of the logits, computed from the head's weight in chunks of one sample."""
    chunks = zip(hidden.split(1), weights.split(1), strict=True)
    return 8 / len(hidden) * torch.stack([(F.linear(h, model.head.weight) * w).sum() for h, w in chunks]).sum()


# --- ways to use a weight: each runs forward and backward of one micro-batch ---


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
    """Run the forward between two contexts, which use a part of the body and a parameter of the root."""
    with layerzero.gathered(model.body), layerzero.gathered(model):
        scale = model.body[0].weight.sum() + model.embedding.weight.sum()
    hidden = model(data[0])
    with layerzero.gathered(model.body[0]), layerzero.gathered(model.head):
        loss = loss_of(model, F.linear(hidden, model.body[0].weight), data[1])
    (loss + scale).backward()


def beside_forward(model: nn.Module, data: Batch) -> None:
    """Also call the head's unit inside the context, where it may also be the root's, and outside."""
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
    """Run one backward per chunk, and one of the model, which alone reduces."""
    hidden = model(data[0])
    leaf = hidden.detach().requires_grad_()
    silent = layerzero.no_sync(model) if hasattr(model, "no_sync") else contextlib.nullcontext()
    with layerzero.gathered(model.head), silent:
        for h, w in zip(leaf.split(1), data[1].split(1), strict=True):
            (8 / len(hidden) * (F.linear(h, model.head.weight) * w).sum()).backward()
    hidden.backward(leaf.grad)


def recomputed(model: nn.Module, data: Batch, *, reentrant: bool) -> None:
    """Recompute each chunk of the loss in a backward after the context."""

    def chunk(h: Tensor, w: Tensor) -> Tensor:
        return (F.linear(h, model.head.weight) * w).sum()

    hidden = model(data[0])
    with layerzero.gathered(model.head):
        chunks = zip(hidden.split(1), data[1].split(1), strict=True)
        losses = [checkpoint(chunk, h, w, use_reentrant=reentrant) for h, w in chunks]
    (8 / len(hidden) * torch.stack(losses).sum()).backward()


def recomputed_around(model: nn.Module, data: Batch) -> None:
    """Enter the context again in the backward."""

    def loss(hidden: Tensor) -> Tensor:
        with layerzero.gathered(model.head):
            return loss_of(model, hidden, data[1])

    checkpoint(loss, model(data[0]), use_reentrant=False).backward()


def unequal(model: nn.Module, data: Batch) -> None:
    """Use the head for some samples only; the backward inside the context needs no gather of it."""
    hidden = model(data[0])
    with layerzero.gathered(model.head):
        used = data[1][:, 0] > 0
        loss = 8 / len(hidden) * hidden.sum()
        if used.any():
            loss = loss + 4 / len(hidden) * loss_of(model, hidden[used], data[1][used]) * used.sum()
        loss.backward()


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
    "unequal": unequal,
}


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
        update(ours, theirs)
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


@pytest.mark.sample(3)
@BOTH
@pytest.mark.parametrize("way", ["inside", "after"])
def test_gradients_and_weights_are_those_of_one_process(way: str, shared_memory: str | None) -> None:
    run_ranks(_several_settings, way, 0, 1, world_size=WORLD, shared_memory=shared_memory)


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("inside", "after")])
@on_ranks(world_size=WORLD)
def test_so_they_are_in_each_way_to_use_a_weight(rank: int, way: str) -> None:
    """Run half of the settings for one way and half for the next."""
    _several_settings(rank, way, list(WAYS).index(way) % 2, 2)


@on_ranks(world_size=WORLD, shared_memory="auto")
def test_a_recomputed_loss_reads_shared_weights(rank: int) -> None:
    for way in ("recomputed", "in_flight"):
        _same_as_alone(rank, way, tied=True)


# --- gathered memory over time ---


def _gathers(model: nn.Module, use: Callable[[nn.Module, Batch], None], rank: int) -> int:
    layerzero.traffic(model, reset=True)
    use(model, batch(0, 0, rank))
    return layerzero.traffic(model).calls["gather"]


def _counted(rank: int) -> None:
    """Count gathers: body and root for the forward and for the backward, the head once or twice."""
    for settings, expected in (({}, (5, 6)), ({"reshard_after_forward": False}, (3, 3))):
        model = sharded(Net(tied=False), units=["body", "head"], **settings)
        assert (_gathers(model, inside, rank), _gathers(model, after, rank)) == expected, settings
        assert layerzero.memory(model).measured["full_buffer"] == 0


def _freed_in_the_backward(rank: int) -> None:
    """Free the head when the backward reaches the model or, without gradients, when the context ends."""
    model = sharded(Net(tied=False))
    tokens, weights = batch(0, 0, rank)
    seen: list[int] = []

    def full_buffers() -> int:
        return layerzero.memory(model).measured["full_buffer"]

    model.embedding.weight.register_hook(lambda gradient: seen.append(full_buffers()))
    after(model, (tokens, weights))
    inside(model, (tokens, weights))
    root, head = WIDTH * VOCABULARY * 4, WIDTH * VOCABULARY * 4
    assert root <= seen[0] < root + head + root, seen  # padding included; the body has been freed
    assert seen[1] >= seen[0] + head, seen
    with torch.no_grad():
        hidden = model(tokens)
        with layerzero.gathered(model.head):
            assert type(model.head.weight) is not type(model.embedding.weight)
            assert not loss_of(model, hidden, weights).requires_grad
            assert full_buffers() > 0
        assert full_buffers() == 0
    with pytest.raises(RuntimeError, match=r"mixes a plain tensor.*layerzero\.gathered"):
        loss_of(model, hidden, weights)


def _graph_goes_with_its_loss(rank: int) -> None:
    model = sharded(Net(tied=False))
    tokens, weights = batch(0, 0, rank)
    hidden = model(tokens)
    gc.collect()
    gc.disable()
    try:
        with layerzero.gathered(model.head):
            output = F.linear(hidden, model.head.weight).exp()  # its backward needs its own output
            loss = (output * weights).sum()
        graph = weakref.ref(output)
        del output, loss
        assert graph() is None
    finally:
        gc.enable()


@on_ranks(world_size=WORLD)
def test_weights_are_gathered_and_freed_where_they_should_be(rank: int) -> None:
    _counted(rank)
    _freed_in_the_backward(rank)
    _graph_goes_with_its_loss(rank)


def _launches(rank: int) -> list[dict[str, list[tuple[str, str]]]]:
    logs = []
    for prefetch in (0, 2):
        model = sharded(Net(tied=True), prefetch=prefetch)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        launches = launches_of(model)
        for step, way in enumerate((of_all, in_flight, recomputed_around, unequal, unequal)):
            way(model, batch(step, 0, rank))
            update(optimizer)
        logs.append(by_communicator(launches))
    return logs


def test_all_ranks_launch_in_one_order() -> None:
    by_rank = run_ranks(_launches, world_size=WORLD)
    for first, *others in zip(*by_rank, strict=True):
        assert first.keys() >= {"zero3 gather", "zero3 reduce", "replica"}, first.keys()
        for comm, launched in first.items():
            assert all(other[comm] == launched for other in others), comm


# --- precision and compilation ---


@on_ranks(world_size=WORLD)
def test_weights_are_in_the_compute_dtype_and_a_compiled_loss_takes_them(rank: int) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch.compile inspects it
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(Net(tied=False), mp_policy=policy)
    hidden = model(batch(0, 0, rank)[0])
    compiled = torch.compile(loss_of, backend="aot_eager")
    with layerzero.gathered(model.head):
        assert model.head.weight.dtype is hidden.dtype is torch.bfloat16
        loss = compiled(model, hidden, batch(0, 0, rank)[1].bfloat16())
    loss.backward()
    net = Net(tied=False)
    for r in range(WORLD):
        inside(net, batch(0, 0, r))
    expected = {name: p.grad / WORLD for name, p in net.named_parameters()}  # small integers, which bf16 has
    assert not different(full_gradients(model), expected)


# --- refusals and failures ---


@on_ranks(world_size=WORLD)
def test_what_would_change_weights_is_refused_and_old_graphs_are(rank: int) -> None:
    model = sharded(Net(tied=False))
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    average = layerzero.EMA(model)
    state = layerzero.full_state_dict(model, rank0_only=False)
    data = batch(0, 0, rank)
    inside(model, data)
    changes: dict[str, Callable[[], object]] = {
        r"optimizer\.step\(\) is not possible inside layerzero\.gathered": optimizer.step,
        "changing weights is not possible inside layerzero.gathered": lambda: layerzero.load_full_state_dict(
            model, state
        ),
        "changing weights is not possible inside": lambda: layerzero.refresh(model),
        "layerzero.unsharded is not possible inside": lambda: layerzero.unsharded(model).__enter__(),
        r"weights is not possible inside layerzero.gathered.*weights of head\.": lambda: average.swapped().__enter__(),
    }
    with layerzero.gathered(model.head):
        for text, change in changes.items():
            with pytest.raises(RuntimeError, match=text):
                change()
        assert model.head.weight.shape == (VOCABULARY, WIDTH) and not hasattr(model.head.weight, "device_mesh")
    update(optimizer)
    hidden = model(data[0])
    with layerzero.gathered(model.head):
        loss = loss_of(model, hidden, data[1])
        with pytest.raises(RuntimeError, match="create_graph"):
            loss.backward(create_graph=True)
    optimizer.zero_grad()
    hidden = model(data[0])
    with layerzero.gathered(model.head):
        loss = loss_of(model, hidden, data[1])
        saved = F.linear(hidden, model.head.weight).exp()
    with pytest.raises(RuntimeError, match="read outside of a backward"):
        _ = saved.grad_fn._saved_result
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1, expected version 0"):
        saved.sum().backward()
    optimizer.zero_grad()
    inside(model, data)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*optimizer.step\(\) or a load"):
        loss.backward()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="all parameters of this ModuleList are in units inside it"):
        layerzero.gathered(sharded(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), units=["0.0"])[0]).__enter__()
    with pytest.raises(TypeError, match="got RowShardedTensor"):
        layerzero.gathered(model.head.weight).__enter__()
    with layerzero.unsharded(model), torch.no_grad(), layerzero.gathered(model.head):  # already full
        expected = loss_of(model, model(data[0]), data[1])
    with torch.no_grad(), layerzero.gathered(model.head):
        assert torch.equal(loss_of(model, model(data[0]), data[1]), expected)


class _Failure(Exception):
    pass


def _fail(gradient: Tensor) -> None:
    raise _Failure


@on_ranks(world_size=WORLD)
def test_after_an_exception_the_model_goes_on(rank: int) -> None:
    net = Net(tied=False)
    for settings in ({}, {"reshard_after_forward": False}, {"size": 4, "reshard_after_forward": 2}):
        model = sharded(net, **settings)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        data = batch(0, 0, rank)
        hidden = model(data[0])
        with pytest.raises(_Failure), layerzero.gathered(model.head):  # before a backward
            loss_of(model, hidden, data[1])
            raise _Failure
        assert type(model.head.weight) is type(model.embedding.weight)
        for leave_first in (False, True):  # in a backward inside the context, and after it
            hidden = model(data[0])
            hidden.register_hook(_fail)
            with contextlib.ExitStack() as context:
                context.enter_context(layerzero.gathered(model.head))
                loss = loss_of(model, hidden, data[1])
                if leave_first:
                    context.close()
                with pytest.raises(_Failure):
                    loss.backward()
            optimizer.zero_grad()
        inside(model, data)
        assert layerzero.memory(model).measured["full_buffer"] == 0
        theirs = copy.deepcopy(net)
        inside(theirs, union([batch(0, 0, r) for r in range(WORLD)]))
        assert not different(full_gradients(model), {name: p.grad for name, p in theirs.named_parameters()}), settings


def _other_units(model: nn.Module, data: Batch, is_odd: bool) -> None:
    hidden = model(data[0])
    with layerzero.gathered(model.body if is_odd else model.head):
        (hidden.sum() if is_odd else loss_of(model, hidden, data[1])).backward()
    model(data[0])


def _other_graphs(model: nn.Module, data: Batch, is_odd: bool) -> None:
    hidden = model(data[0])
    with layerzero.gathered(model.head):
        loss = loss_of(model, hidden, data[1]) if is_odd else hidden.sum()
    loss.backward()


@pytest.mark.parametrize(("use", "differ"), [(inside, _other_units), (after, _other_graphs)])
@on_ranks(world_size=WORLD, pg_timeout=20)
def test_ranks_that_disagree_get_an_error_that_names_both_orders(
    rank: int, use: Callable[[nn.Module, Batch], None], differ: Callable[[nn.Module, Batch, bool], None]
) -> None:
    model, data = sharded(Net(tied=False)), batch(0, 0, rank)
    use(model, data)
    text = message_of(lambda: differ(model, data, rank % 2 == 1))
    assert "gather units in different orders" in text and "'head'" in text, text
