"""The reference implementation equals one process, and the engine equals the reference implementation."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from layerzero import reference
from layerzero.reference import ReferenceModel, plan_layout
from tests.support.models import (
    IntegerNet,
    TiedTransformer,
    different,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    train_alone,
    union,
)
from tests.support.ranks import BOTH_SHARED_SLOW, mesh_of, on_ranks

ZERO3_SIZES = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}  # by number of ranks
STEPS = 3  # as many as are exact in fp32, see end_to_end/test_parity.py
# Per micro-batch of a step, whether its backward reduces across replicas. In the last case step() does.
GRADIENT_SYNCS = {
    "one micro-batch": (True,),
    "no_sync": (False, False, True),
    "every micro-batch": (True, True),
    "no_sync only": (False, False),
}

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, eps=1e-6)


def make_reference(net: nn.Module, zero3_size: int, dtype: torch.dtype = torch.float32) -> ReferenceModel:
    mesh = mesh_of(zero3_size)
    groups = {"zero3_group": mesh.get_group("zero3"), "replica_group": mesh.get_group("replica")}
    return ReferenceModel(net, net.UNITS, **groups, compute_dtype=dtype)


def run_step(
    model: Callable[[Tensor], Tensor],
    no_sync: Callable[[], AbstractContextManager[None]],
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    syncs: Sequence[bool],
    loss_of: Callable[..., Tensor],
) -> list[Tensor]:
    """Run forward and backward of the micro-batches of one step; return the losses."""
    losses = []
    for batch, sync in zip(micro_batches, syncs, strict=True):
        with nullcontext() if sync else no_sync():
            losses.append(loss_of(model, batch))
            losses[-1].backward()
    return [loss.detach() for loss in losses]


def train_reference(
    model: ReferenceModel,
    make_optimizer: MakeOptimizer,
    steps: Sequence[Sequence[tuple[Tensor, Tensor]]],
    syncs: Sequence[bool],
    loss_of: Callable[..., Tensor],
) -> Iterator[tuple[list[Tensor], dict[str, Tensor]]]:
    """Yield the losses and the full parameters of each step."""
    optimizer = make_optimizer(model.masters.values())
    for micro_batches in steps:
        losses = run_step(model, model.no_sync, micro_batches, syncs, loss_of)
        model.step(optimizer)
        optimizer.zero_grad()
        yield losses, model.full_parameters()


def train_engine(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    steps: Sequence[Sequence[tuple[Tensor, Tensor]]],
    syncs: Sequence[bool],
    loss_of: Callable[..., Tensor],
) -> Iterator[tuple[list[Tensor], dict[str, Tensor]]]:
    """Yield the losses and the full parameters of each step."""
    optimizer = layerzero.shard_optimizer(make_optimizer(model.parameters()), model)
    for micro_batches in steps:
        losses = run_step(model, functools.partial(layerzero.no_sync, model), micro_batches, syncs, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        yield losses, full_parameters(model)


def batches_of(
    rank: int, micro_batches: int, batch_of: Callable[..., tuple[Tensor, Tensor]] = integer_batch
) -> list[list[tuple[Tensor, Tensor]]]:
    return [[batch_of(step=step, micro_batch=i, rank=rank) for i in range(micro_batches)] for step in range(STEPS)]


def batches_of_all(micro_batches: int, batch_of: Callable[..., tuple[Tensor, Tensor]] = integer_batch):
    """Return the batches of all ranks together, for one process."""
    by_rank = [batches_of(rank, micro_batches, batch_of) for rank in range(dist.get_world_size())]
    return [[union(same) for same in zip(*step, strict=True)] for step in zip(*by_rank, strict=True)]


# The layout, without processes


SHAPES = {"bias": (6,), "weight": (6, 5), "conv": (4, 3, 2), "one": (1,), "wide": (2, 7)}


@pytest.mark.parametrize(("replicas", "zero3_size"), [(1, 1), (4, 1), (2, 2), (1, 4), (3, 5), (16, 8)])
def test_shards_hold_every_row_once_and_split_none(replicas: int, zero3_size: int) -> None:
    layout = plan_layout(SHAPES, replicas=replicas, zero3_size=zero3_size)
    coordinates = itertools.product(range(zero3_size), range(replicas))
    ranges = [layout.zero1_range(r, s) for s, r in coordinates]
    assert [i for elements in ranges for i in elements] == list(layout.full_range), "k = s*R + r is the flat order"
    assert {slot.name: slot.shape for slot in layout.slots} == SHAPES
    for slot in layout.slots:
        row = torch.Size(slot.shape[1:]).numel()
        parts = [slot.elements_in(elements) for elements in ranges]
        assert not [part for part in parts if (part.stop - part.start) % row]
        held = [range(e.start + p.start, e.start + p.stop) for e, p in zip(ranges, parts, strict=True)]
        first = slot.offset
        assert [i for part in held for i in part] == list(range(first, first + torch.Size(slot.shape).numel()))


def test_slots_do_not_overlap() -> None:
    slots = plan_layout(SHAPES, replicas=2, zero3_size=2).slots
    elements = [i for slot in slots for i in range(slot.offset, slot.offset + torch.Size(slot.shape).numel())]
    assert len(set(elements)) == len(elements) == sum(torch.Size(shape).numel() for shape in SHAPES.values())


def test_the_reference_imports_torch_alone() -> None:
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in imported if name.startswith("layerzero")]
    assert {name for name in imported if name.startswith("torch")} == {"torch", "torch.distributed"}


# Exact arithmetic: SGD on integers


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("world_size", ZERO3_SIZES)
@on_ranks()
def test_the_reference_equals_one_process_bit_for_bit(rank: int, world_size: int) -> None:
    for zero3_size, (case, syncs) in itertools.product(ZERO3_SIZES[dist.get_world_size()], GRADIENT_SYNCS.items()):
        net = integer_net()
        alone = train_alone(net, batches_of_all(len(syncs)), exact_sgd(net.parameters()))
        model = make_reference(integer_net(), zero3_size)
        steps = batches_of(rank, len(syncs))
        trained = train_reference(model, exact_sgd, steps, syncs, integer_loss)
        for step, ((losses, parameters), expected) in enumerate(zip(trained, alone, strict=True)):
            at = f"S={zero3_size}, {case}, step {step}"
            mean = torch.stack(losses)
            dist.all_reduce(mean)
            assert (mean / dist.get_world_size()).tolist() == torch.stack(expected.losses).tolist(), at
            assert not (wrong := different(parameters, expected.parameters)), f"{at}: {wrong}"


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("world_size", ZERO3_SIZES)
@BOTH_SHARED_SLOW
@on_ranks()
def test_the_engine_equals_the_reference_bit_for_bit(rank: int, world_size: int, shared_memory: str | None) -> None:
    for zero3_size, (case, syncs) in itertools.product(ZERO3_SIZES[dist.get_world_size()], GRADIENT_SYNCS.items()):
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(zero3_size), units=IntegerNet.UNITS)
        run = (exact_sgd, batches_of(rank, len(syncs)), syncs, integer_loss)
        both = zip(
            train_engine(model, *run), train_reference(make_reference(integer_net(), zero3_size), *run), strict=True
        )
        for step, ((losses, ours), (expected_losses, expected)) in enumerate(both):
            at = f"S={zero3_size}, {case}, step {step}"
            assert losses == expected_losses, at
            assert not (wrong := different(ours, expected)), f"{at}: {wrong}"


# Floating point: AdamW on a transformer with tied weights


@pytest.mark.default_sample(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]
)
@pytest.mark.parametrize("world_size", ZERO3_SIZES)
@BOTH_SHARED_SLOW
@on_ranks()
def test_adamw_in_the_engine_equals_the_reference(
    rank: int, dtype: torch.dtype, world_size: int, shared_memory: str | None
) -> None:
    world = dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for zero3_size, syncs in itertools.product(ZERO3_SIZES[world], [(True,), (False, False, True)]):
        mesh = mesh_of(zero3_size)
        model = layerzero.shard_model(TiedTransformer(), mesh=mesh, units=TiedTransformer.UNITS, mp_policy=policy)
        run = (adamw, batches_of(rank, len(syncs), TiedTransformer.batch), syncs, TiedTransformer.loss)
        theirs = train_reference(make_reference(TiedTransformer(), zero3_size, dtype), *run)
        # A sum of two has the same bits in either order. To an accumulator, the engine adds one rank after the other,
        # but the reference adds their sum.
        is_exact = max(zero3_size, world // zero3_size) <= 2 and (len(syncs) == 1 or zero3_size == 1)
        for step, (ours, expected) in enumerate(zip(train_engine(model, *run), theirs, strict=True)):
            at = f"D={world}, S={zero3_size}, A={len(syncs)}, step {step}"
            if is_exact:
                assert ours[0] == expected[0], f"{at}: losses"
                assert not (wrong := different(ours[1], expected[1])), f"{at}: {wrong}"
            else:
                rounding = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
                torch.testing.assert_close(ours, expected, **rounding, msg=lambda m, at=at: f"{at}: {m}")


@on_ranks()
def test_adamw_in_the_reference_follows_one_process(rank: int) -> None:
    syncs = (False, False, True)
    net = TiedTransformer()
    alone = train_alone(
        net, batches_of_all(len(syncs), TiedTransformer.batch), adamw(net.parameters()), TiedTransformer.loss
    )
    steps = batches_of(rank, len(syncs), TiedTransformer.batch)
    for zero3_size in ZERO3_SIZES[dist.get_world_size()]:
        model = make_reference(TiedTransformer(), zero3_size)
        trained = train_reference(model, adamw, steps, syncs, TiedTransformer.loss)
        for (_, parameters), expected in zip(trained, alone, strict=True):
            torch.testing.assert_close(parameters, expected.parameters, rtol=1e-4, atol=1e-5)


# Memory, collectives, errors


@on_ranks()
def test_the_replica_group_is_used_once_per_step(rank: int) -> None:
    model = make_reference(integer_net(), 2)
    zero3_group, replica_group = model.units[0].zero3_group, model.units[0].replica_group
    gather, reduce = reference._all_gather_into, reference._reduce_scatter_into
    with (
        mock.patch.object(reference, "_all_gather_into", side_effect=gather) as gathers,
        mock.patch.object(reference, "_reduce_scatter_into", side_effect=reduce) as reductions,
    ):
        optimizer = exact_sgd(model.masters.values())
        run_step(model, model.no_sync, batches_of(rank, 3)[0], (False, False, True), integer_loss)
        assert any(master.grad is not None for master in model.masters.values()), "the last backward reduces them"
        model.step(optimizer)
    units = len(IntegerNet.UNITS) + 1
    groups = [[call.kwargs["group"] for call in calls.call_args_list] for calls in (gathers, reductions)]
    counts = [[used.count(group) for group in (zero3_group, replica_group)] for used in groups]
    assert counts == [[2 * 3 * units, units], [3 * units, units]], "gather, refresh; hop 1, hop 2"


@on_ranks()
def test_between_passes_a_rank_holds_its_shards_only(rank: int) -> None:
    model = make_reference(integer_net(), 2, torch.bfloat16)
    for _ in train_reference(model, exact_sgd, batches_of(rank, 2), (False, True), integer_loss):
        for unit in model.units:
            assert unit.full_buffer.untyped_storage().nbytes() == 0
            assert not any(leaf.untyped_storage().nbytes() for leaf in unit.gathered.values())
            masters = [torch.empty_like(unit.master) for _ in range(unit.replica_group.size())]
            dist.all_gather(masters, unit.master, group=unit.replica_group)
            assert unit.zero3_shard.equal(torch.cat(masters).bfloat16()), (
                "the shard is the cast masters of its replicas"
            )


@on_ranks(world_size=1)
def test_unsupported_uses_raise(rank: int) -> None:
    frozen = integer_net()
    frozen.first.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"first.bias.*frozen"):
        make_reference(frozen, 1)
    net = integer_net()
    model = make_reference(net, 1)
    inputs, _ = integer_batch()
    net.first.bias = None  # the leaf stays in the unit, but gets no gradient
    model(inputs).sum().backward()
    with pytest.raises(RuntimeError, match="did not use all parameters"):
        model.step(exact_sgd(model.masters.values()))
