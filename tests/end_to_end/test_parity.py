"""Training with layerzero equals one process on the union of the batches, and all replicas hold the same bits."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.models import (
    IntegerNet,
    Step,
    TiedTransformer,
    different,
    exact_model,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    train_alone,
    union,
    update,
)
from tests.support.ranks import BOTH, BOTH_SHARED_SLOW, on_ranks, run_ranks

SHARDINGS = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}  # data-parallel ranks: ZeRO-3 sizes
MICRO_BATCHES = (1, 3)
STEPS = 3


def unions(data_parallel: int, micro_batches: int, batch_of: Callable[..., tuple[Tensor, Tensor]] = integer_batch):
    """Return the micro-batches of each step for one process: the union of those of all ranks."""
    return [
        [
            union([batch_of(step=step, micro_batch=index, rank=rank) for rank in range(data_parallel)])
            for index in range(micro_batches)
        ]
        for step in range(STEPS)
    ]


def exact_reference(data_parallel: int, micro_batches: int) -> list[Step]:
    net = integer_net()
    return train_alone(net, unions(data_parallel, micro_batches), exact_sgd(net.parameters()))


def mean_over_ranks(losses: Sequence[Tensor]) -> Tensor:
    mean = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def assert_replicas_agree(model: nn.Module, case: str) -> None:
    """Assert that each ZeRO-3 shard equals the cast masters of all replicas bitwise, hence is the same on all."""
    rank = dist.get_rank()
    for handle in get_state(model).handles:
        zero3_size = handle.layout.numel // handle.weights.zero3_shard.numel()
        handle.weights.finish_refresh()
        masters = [torch.empty_like(handle.weights.master) for _ in range(dist.get_world_size())]
        dist.all_gather(masters, handle.weights.master)
        inside = masters[rank % zero3_size :: zero3_size]  # of all replicas, in flat order
        assert handle.weights.zero3_shard.equal(torch.cat(inside).to(handle.weights.zero3_shard.dtype)), (
            f"{case}: {handle.name}"
        )


def assert_nothing_is_gathered(model: nn.Module, case: str) -> None:
    assert layerzero.memory(model).measured["full_buffer"] == 0, case
    for handle in get_state(model).handles:
        if handle.weights.needs_gather:
            assert handle.weights.full_buffer.untyped_storage().nbytes() == 0, f"{case}: {handle.name}"
            leaves = [member.gathered.untyped_storage().nbytes() for member in handle.members]
            assert not any(leaves), f"{case}: {handle.name} {leaves}"


def accumulate(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_of: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = integer_loss,
) -> Tensor:
    """Run each micro-batch, all but the last inside no_sync; return the losses averaged over ranks."""
    losses = []
    for index, batch in enumerate(batches):
        with layerzero.no_sync(model) if index + 1 < len(batches) else nullcontext():
            losses.append(loss_of(model, batch))
            losses[-1].backward()
    return mean_over_ranks(losses)


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("data_parallel", SHARDINGS)
def test_the_integer_net_is_exact_in_fp32(data_parallel: int, micro_batches: int) -> None:
    steps = unions(data_parallel, micro_batches)
    wide = [[(inputs.double(), targets.double()) for inputs, targets in step] for step in steps]
    net = integer_net().double()
    in_fp64 = train_alone(net, wide, exact_sgd(net.parameters()))
    for ours, expected in zip(exact_reference(data_parallel, micro_batches), in_fp64, strict=True):
        assert not different({k: v.double() for k, v in ours.gradients.items()}, expected.gradients)
        assert not different({k: v.double() for k, v in ours.parameters.items()}, expected.parameters)
        assert [loss.item() for loss in ours.losses] == [loss.item() for loss in expected.losses]
        assert all(gradient.any() for gradient in ours.gradients.values()), "the data exercise every parameter"


def train_exactly(rank: int, case: str, micro_batches: int, reference: Sequence[Step], **settings: object) -> None:
    """Train an integer net under `settings`; every result must be bitwise as in `reference`."""
    model, optimizer = exact_model(**settings)
    assert_nothing_is_gathered(model, case)
    for step, expected in enumerate(reference):
        at = f"{case}, step {step}"
        losses = accumulate(model, [integer_batch(step=step, micro_batch=i, rank=rank) for i in range(micro_batches)])
        if settings.get("reshard_after_forward") != "step":
            assert_nothing_is_gathered(model, at)
        assert losses.tolist() == [loss.item() for loss in expected.losses], at
        wrong = different(full_gradients(model), expected.gradients)
        assert not wrong, f"{at}: gradients of {wrong}"
        update(optimizer)
        wrong = different(full_parameters(model), expected.parameters)
        assert not wrong, f"{at}: parameters {wrong}"
        assert_replicas_agree(model, at)
        assert_nothing_is_gathered(model, at)


def _train_exactly(rank: int, zero3_sizes: tuple[int, ...]) -> None:
    world = dist.get_world_size()
    meshes = [layerzero.init_mesh(zero3_size) for zero3_size in zero3_sizes]
    for micro_batches in MICRO_BATCHES:
        reference = exact_reference(world, micro_batches)
        for mesh, accumulation in itertools.product(meshes, ("sharded", "full", "local")):
            case = f"{mesh}, A={micro_batches}, {accumulation}"
            train_exactly(rank, case, micro_batches, reference, mesh=mesh, accumulation=accumulation)


@pytest.mark.parametrize(
    "data_parallel", [pytest.param(each, marks=[pytest.mark.slow] * (each < max(SHARDINGS))) for each in SHARDINGS]
)
@BOTH_SHARED_SLOW
def test_integer_training_equals_one_process_bit_for_bit(data_parallel: int, shared_memory: str) -> None:
    run_ranks(_train_exactly, SHARDINGS[data_parallel], world_size=data_parallel, shared_memory=shared_memory)


@pytest.mark.default_sample(1)
@BOTH
@on_ranks()
def test_settings_of_speed_and_memory_change_no_bit(rank: int, shared_memory: str) -> None:
    mesh = layerzero.init_mesh(2)
    reference = exact_reference(4, 3)
    for settings in (
        {"prefetch": 0},
        {"prefetch": 3},
        {"reshard_after_forward": False},
        {"reshard_after_forward": "step", "accumulation": "full"},
        {"accumulation": lambda name, module: "full" if name == "second" else "sharded"},
    ):
        train_exactly(rank, str(settings), 3, reference, mesh=mesh, **settings)


def _call_in_backward(function: Callable[[], None], module: nn.Module, args: object, output: Tensor) -> None:
    output.register_hook(lambda gradient: function())


@pytest.mark.default_sample(1)
@BOTH
@on_ranks()
def test_a_late_rank_changes_nothing(rank: int, shared_memory: str) -> None:
    # The others launch their collective long before the late rank; a rank that does not wait computes with old bytes.
    # Nothing else may synchronize the ranks between two steps, so losses are compared without a collective.
    for late, accumulation in ((0, "sharded"), (3, "full")):
        nap = functools.partial(time.sleep, 0.03 if rank == late else 0.0)
        model, optimizer = exact_model(zero3_size=2, accumulation=accumulation)
        for unit in IntegerNet.UNITS:
            model.get_submodule(unit).register_forward_hook(functools.partial(_call_in_backward, nap))
        net = integer_net()
        theirs = exact_sgd(net.parameters())
        for step in range(STEPS):
            batch, case = integer_batch(step=step, rank=rank), f"rank {late} late, {accumulation}, step {step}"
            nap()
            loss = integer_loss(model, batch)
            assert loss.equal(integer_loss(net, batch)), f"{case}: loss"
            nap()
            loss.backward()
            nap()
            optimizer.step()
            train_alone(net, unions(4, 1)[step : step + 1], theirs)
            if step + 1 < STEPS:
                optimizer.zero_grad()
        assert not different(full_gradients(model), exact_reference(4, 1)[-1].gradients), case
        assert not different(full_parameters(model), dict(net.named_parameters())), case


def adamw(parameters: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, eps=1e-6)


def _train_transformer(rank: int) -> list[dict[str, Tensor]]:
    batch_of, loss_of = TiedTransformer.batch, TiedTransformer.loss
    net = TiedTransformer()
    reference = train_alone(net, unions(4, 3, batch_of), adamw(net.parameters()), loss_of)
    results = []
    for zero3_size, accumulation in ((1, "sharded"), (2, "sharded"), (2, "full"), (4, "full")):
        mesh = layerzero.init_mesh(zero3_size)
        for repetition in range(2 if zero3_size == 2 else 1):
            case = f"S={zero3_size} {accumulation}, repetition {repetition}"
            torch.manual_seed(rank)  # the bits must not depend on the generator's state
            model = layerzero.shard_model(
                TiedTransformer(seed=rank), mesh=mesh, units=TiedTransformer.UNITS, accumulation=accumulation
            )
            assert model.head.weight is model.embedding.weight, case
            optimizer = layerzero.shard_optimizer(adamw(model.parameters()), model)
            for step, expected in enumerate(reference):
                batches = [batch_of(step=step, micro_batch=i, rank=rank) for i in range(3)]
                losses = accumulate(model, batches, loss_of)
                # fp32 has 1.2e-7 of relative rounding; sums of some tens of terms in another order lose a digit or so
                # of it. AdamW divides by the gradient's magnitude, so eps is chosen well above that noise.
                torch.testing.assert_close(
                    losses, torch.stack(expected.losses), rtol=1e-5, atol=1e-5, msg=lambda m, c=case: f"{c}: {m}"
                )
                gradients = full_gradients(model)
                update(optimizer)
                parameters = full_parameters(model)
                assert gradients.keys() == expected.gradients.keys(), case
                for name, gradient in expected.gradients.items():
                    torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
                    torch.testing.assert_close(parameters[name], expected.parameters[name], rtol=1e-4, atol=1e-5)
                assert_replicas_agree(model, f"{case}, step {step}")
                assert_nothing_is_gathered(model, f"{case}, step {step}")
            if repetition:
                assert not different(parameters, results[-1]), f"{case}: the same run gave other bits"
            results.append(parameters)
    return results


@BOTH_SHARED_SLOW
def test_a_tied_transformer_under_adamw_follows_one_process_and_repeats_its_bits(shared_memory: str) -> None:
    first, *others = run_ranks(_train_transformer, shared_memory=shared_memory)
    for rank, result in enumerate(others, start=1):
        for ours, expected in zip(result, first, strict=True):
            assert not different(ours, expected), f"ranks 0 and {rank} show different parameters"


@pytest.mark.default_sample(1)
@BOTH
@on_ranks()
def test_bf16_compute_shards_are_the_cast_masters_on_every_replica(rank: int, shared_memory: str) -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for zero3_size in (1, 2, 4):
        model = layerzero.shard_model(
            TiedTransformer(), zero3_size=zero3_size, units=TiedTransformer.UNITS, mp_policy=policy
        )
        optimizer = layerzero.shard_optimizer(adamw(model.parameters()), model)
        for step in range(STEPS):
            accumulate(model, [TiedTransformer.batch(step=step, rank=rank)], TiedTransformer.loss)
            update(optimizer)
            case = f"S={zero3_size}, step {step}"
            assert_replicas_agree(model, case)
            assert_nothing_is_gathered(model, case)
            assert all(p.dtype == torch.float32 for p in model.parameters()), case


@on_ranks()
def test_ignored_parameters_are_stepped_as_they_are(rank: int) -> None:
    source = integer_net()
    ignored = source.shift
    model, optimizer = exact_model(source, zero3_size=2, ignored_params=[ignored])
    net = integer_net()
    integer_loss(net, integer_batch(rank=rank)).backward()
    integer_loss(model, integer_batch(rank=rank)).backward()
    assert model.shift is ignored and torch.equal(ignored.grad, net.shift.grad), "whole, and not averaged"
    optimizer.step()
    assert torch.equal(ignored, net.shift - 2**-4 * net.shift.grad)
    assert torch.equal(optimizer.state_dict_by_name()["state"]["shift"]["momentum_buffer"], net.shift.grad)
