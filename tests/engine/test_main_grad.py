"""Kernels that add weight gradients to ``main_grad``: nothing is added twice or lost."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import Offload, PrecisionPolicy
from tests.support.graphs import boom
from tests.support.late_threads import late_reductions, late_threads
from tests.support.late_transfers import LateTransfers
from tests.support.models import different, full_gradients
from tests.support.ranks import mesh_of, on_ranks

WORLD = 4


# Accumulation settings and sizes of ZeRO-3 groups without main_grad.
MODES_WITHOUT = (("sharded", 2), ("local", 2), ("local", 1))


class Fused(torch.autograd.Function):
    """``x @ weight.T`` whose backward adds the weight's gradient to ``main_grad`` and returns a dummy value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, early: bool, raises_flag: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.early = weight.main_grad if early else None
        ctx.raises_flag = raises_flag
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        main_grad = weight.main_grad if ctx.early is None else ctx.early
        assert main_grad.dtype == torch.float32 and main_grad.shape == weight.shape
        main_grad.add_(grad.flatten(0, -2).t().float() @ x.flatten(0, -2).float())
        if not ctx.raises_flag:
            return grad @ weight, None, None, None
        weight.grad_added_to_main_grad = True
        rubbish = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        returned = rubbish(weight.shape, dtype=weight.dtype)
        if not getattr(weight, "zero_out_wgrad", False):
            returned.fill_(torch.nan)
        return grad @ weight, returned, None, None


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-2, 3, (width, width)).float())
        self.bias = nn.Parameter(torch.randint(-2, 3, (width,)).float())
        self.fused, self.early, self.raises_flag = True, False, True

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return F.linear(x, self.weight, self.bias)
        return Fused.apply(x, self.weight, self.early, self.raises_flag) + self.bias


def net(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(4) for _ in range(count)))


def batch(rank: int, step: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randint(-1, 2, (3, 4), generator=generator).float()


def gradients_alone(make: Any, step: int, micro_batches: int) -> dict[str, Tensor]:
    alone = make()
    for module in alone.modules():
        module.fused = False
    for rank, micro_batch in itertools.product(range(WORLD), range(micro_batches)):
        alone(batch(rank, step, micro_batch)).sum().backward()
    return {name: p.grad / WORLD for name, p in alone.named_parameters() if p.grad is not None}


def run(model: nn.Module, rank: int, step: int, micro_batches: int = 3) -> None:
    for micro_batch in range(micro_batches):
        with layerzero.no_sync(model) if micro_batch + 1 < micro_batches else nullcontext():
            model(batch(rank, step, micro_batch)).sum().backward()


def shard(model: nn.Module, size: int = 2, **settings: Any) -> nn.Module:
    return layerzero.shard_model(model, mesh=mesh_of(size), **({"accumulation": "full", "units": Layer} | settings))


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_what_kernels_add_counts_once_in_every_micro_batch(rank: int) -> None:
    for size, early, offload in itertools.product((1, 2, 4), (False, True), (False, True)):
        if early and offload:
            continue
        with mock.patch("layerzero.sharding.shared_resources.HostDeviceCopies", LateTransfers):
            model = shard(net(), size, offload=Offload(grads=offload))
        for layer in model:
            layer.early = early
        model[1].fused = False  # fused and ordinary layers side by side
        for step in range(3):
            run(model, rank, step)
            wrong = different(full_gradients(model), gradients_alone(net, step, 3))
            assert not wrong, (size, early, offload, step, wrong)
            model.zero_grad(set_to_none=step != 1)


@on_ranks(world_size=WORLD)
def test_what_kernels_add_for_a_late_reduction_leaves_its_slab(rank: int) -> None:
    """The root's layer is the first whose gradient arrives, and the last that is reduced."""
    with mock.patch("layerzero.sharding.shared_resources.HostDeviceCopies", LateTransfers):
        model = shard(net(), units=["0", "1", "2"], offload=Offload(grads=True))
    for step in range(2):
        run(model, rank, step)
        assert not different(full_gradients(model), gradients_alone(net, step, 3)), step
        report = layerzero.memory(model)
        assert report.measured["accumulator"] == report.predicted["accumulator"] > 0
        model.zero_grad()


class Twice(nn.Module):
    """Calls each layer twice inside reentrant checkpoints.

    The gradients of each nested backward pass are reduced separately.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        for layer in self.layers:
            layer.bias.requires_grad_(False)  # its gradient would arrive, and wait, before the kernel runs

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # otherwise a reentrant checkpoint computes no gradients
        return sum(checkpoint(layer, x * scale, use_reentrant=True) for layer in self.layers for scale in (1, 2))


@pytest.mark.slow
@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_kernel_adds_only_after_the_late_reduction_of_an_earlier_part(rank: int) -> None:
    for offload in (False, True):
        with mock.patch("layerzero.sharding.shared_resources.HostDeviceCopies", LateTransfers):
            model = shard(Twice(), offload=Offload(grads=offload))
        with late_reductions(rank), late_threads(0.02):
            run(model, rank, 0, micro_batches=1)
        wrong = different(full_gradients(model), gradients_alone(Twice, 0, 1))
        assert not wrong, (offload, wrong)


class Tied(nn.Module):
    """One weight in two fused layers, and in an ordinary product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(2)
        self.second.weight = self.first.weight
        self.first.weight.zero_out_wgrad = True

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + x @ self.first.weight


@on_ranks(world_size=WORLD)
def test_a_weight_that_is_also_used_elsewhere(rank: int) -> None:
    model = layerzero.shard_model(Tied(), zero3_size=2, accumulation="full")
    for step in range(2):
        run(model, rank, step)
        assert not different(full_gradients(model), gradients_alone(Tied, step, 3)), step
        model.zero_grad()


@on_ranks(world_size=WORLD)
def test_what_was_zeroed_or_only_looked_at_does_not_count(rank: int) -> None:
    model = shard(net())
    for step in range(2):
        with layerzero.no_sync(model):
            model(batch(rank, 7, 7)).sum().backward()
        model.zero_grad()
        model[0].early = bool(step)
        run(model, rank, step, 1)
        assert not different(full_gradients(model), gradients_alone(net, step, 1)), step
        model.zero_grad()
    # A read is not a gradient.
    model[2].fused = False
    model[2].register_forward_pre_hook(look_at_main_grad)
    run(model, rank, 0)
    assert not different(full_gradients(model), gradients_alone(net, 0, 3))
    # Frozen after its forward, so torch drops the gradient that the kernel has added.
    model = shard(net())
    loss = model(batch(rank, 0, 0)).sum()
    model[1].weight.requires_grad_(False)
    loss.backward()
    expected = gradients_alone(net, 0, 1)
    del expected["1.weight"]
    assert not different(full_gradients(model), expected)


def look_at_main_grad(module: nn.Module, _: object) -> None:
    main_grad = module.weight.main_grad
    assert main_grad.shape == module.weight.shape
    module.weight.main_grad = main_grad  # Megatron's linear layers do this
    with pytest.raises(AttributeError, match="cannot be replaced"):
        module.weight.main_grad = torch.zeros_like(module.weight)


@on_ranks(world_size=WORLD)
def test_what_cannot_be_counted_is_refused(rank: int) -> None:
    model = shard(net())
    model[1].raises_flag = False
    with pytest.raises(RuntimeError, match=r"main_grad of '1.weight' was written, but autograd received no gradient"):
        model(batch(rank, 0, 0)).sum().backward()
    with torch.no_grad():
        model(batch(rank, 0, 0))  # completes the failed backward
    bf16 = {"mp_policy": PrecisionPolicy(accumulation_dtype=torch.bfloat16)}
    for settings in (bf16, *({"accumulation": mode, "size": size} for mode, size in MODES_WITHOUT)):
        without = shard(net(), **settings)
        with pytest.raises(AttributeError, match="main_grad"):
            without(batch(rank, 0, 0)).sum().backward()
        with torch.no_grad():
            without(batch(rank, 0, 0))
    with mock.patch("layerzero.sharding.shared_resources.HostDeviceCopies", LateTransfers):
        offloaded = shard(net(), offload=Offload(grads=True))
    offloaded[3].early = True
    with pytest.raises(RuntimeError, match=r"was read outside of the backward. With Offload.grads=True"):
        offloaded(batch(rank, 0, 0))


@on_ranks(world_size=WORLD)
def test_the_main_grad_of_another_framework_is_forgotten(rank: int) -> None:
    model = net(2)
    model[0].weight.main_grad = torch.zeros(4, 4)  # of another framework
    model[0].weight.sequence_parallel = True
    expected = copy.deepcopy(model[0].weight.detach())
    model = shard(model)
    assert model[0].weight.sequence_parallel and not hasattr(model[0].weight, "main_grad")
    assert torch.equal(model[0].weight.full_tensor(), expected)
    run(model, rank, 0)
    assert not different(full_gradients(model), gradients_alone(lambda: net(2), 0, 3))


@on_ranks(world_size=WORLD)
def test_a_view_that_was_kept_too_long_is_refused_and_failures_leave_nothing(rank: int) -> None:
    """Run a kernel that takes ``main_grad`` in its forward, with various calls before its backward."""
    for disturb in ("reduce", "zero", "fail"):
        model = shard(net())
        for layer in model:
            layer.early = True
        optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        x = batch(rank, 0, 0)
        if disturb == "reduce":
            first, second = model(x).sum(), model(x).sum()
            first.backward()
        elif disturb == "zero":
            with layerzero.no_sync(model):
                model(x).sum().backward()
            second = model(x).sum()
            model.zero_grad()
        else:
            handle = model[1].weight.register_hook(boom)
            with pytest.raises(LookupError):
                model(x).sum().backward()
            handle.remove()
            model.zero_grad()
            run(model, rank, 0, 1)
            assert not different(full_gradients(model), gradients_alone(net, 0, 1)), "nothing is left of the failure"
            continue
        with pytest.raises(
            RuntimeError, match="was read in a forward, but its contents have been reduced or zeroed since"
        ):
            second.backward()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
