"""User hooks and autograd functions: they fire as in one process, and see the same values."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

import layerzero
from tests.support.graphs import (
    IN_FLIGHT,
    MODES,
    WIDTH,
    WORLD,
    Block,
    Case,
    Chain,
    assert_same_gradients,
    batch,
    blocks,
    compare,
    loss_of,
    message_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.models import full_gradients, update
from tests.support.ranks import on_ranks


class _Product(torch.autograd.Function):
    """``x @ w``; `keep` says how a view of the weight is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, keep: str) -> Tensor:
        ctx.keep = keep
        if keep == "saved":
            ctx.save_for_backward(x, w.t())
        else:
            ctx.save_for_backward(x)
            ctx.weight = w.t() if keep == "attribute" else w.detach()[:]
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.keep == "saved":
            x, turned = ctx.saved_tensors
        else:
            (x,) = ctx.saved_tensors
            turned = ctx.weight if ctx.keep == "attribute" else ctx.weight.t()
        return gradient @ turned, x.t() @ gradient, None


class Custom(nn.Module):
    UNIT = True

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(_Product.apply(x, self.weight, self.keep))


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_an_autograd_function_may_keep_a_view_of_a_weight(rank: int) -> None:
    for keep in ("saved", "attribute", "detached slice"):
        for settings in MODES:
            compare(rank, keep, Case(lambda k=keep: Chain(Custom(k), Block(), Custom(k)), IN_FLIGHT), **settings)


# --- hooks on modules and tensors ---

Log = Counter[str]


def _log_modules(model: nn.Module, log: Log) -> None:
    """Log every kind of module hook on a unit, on a module inside one, and on the root; some change values."""

    def note(name: str, kind: str, result: Any = None) -> Any:
        def hook(module: nn.Module, *args: Any) -> Any:
            log[f"{name} {kind}"] += 1
            if kind == "forward pre":
                assert not any(isinstance(p, DTensor) for p in module.parameters(recurse=False)), "not gathered yet"
            return None if result is None else result(*args)

        return hook

    for name in ("units.1", "units.1.linear", "units.2", ""):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(note(name, "forward pre"))
        module.register_forward_hook(note(name, "forward", lambda args, output: output * 2))
        module.register_full_backward_pre_hook(note(name, "backward pre"))
        module.register_full_backward_hook(note(name, "backward", lambda gin, gout: tuple(g / 2 for g in gin)))


def _log_tensors(model: nn.Module, log: Log) -> None:
    def watch(name: str, output: Tensor) -> None:
        def hook(gradient: Tensor) -> Tensor:
            log[f"{name} tensor"] += 1
            return gradient / 4

        output.register_hook(hook)

    for name in ("units.0", "units.1.linear"):
        model.get_submodule(name).register_forward_hook(lambda m, args, output, n=name: watch(n, output))


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("attach", [_log_modules, _log_tensors])
@on_ranks(world_size=WORLD)
def test_module_and_tensor_hooks_fire_as_in_one_process(
    rank: int, when: str, attach: Callable[[nn.Module, Log], None]
) -> None:
    for settings in MODES:
        torch.manual_seed(0)
        alone, logs = blocks(), (Counter(), Counter())
        model = copy.deepcopy(alone)
        if when == "before":
            attach(model, logs[0])
        shard(model, **settings)
        if when == "after":
            attach(model, logs[0])
        attach(alone, logs[1])
        optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
        for step in range(2):
            IN_FLIGHT(model, rank, step)
            for r in range(WORLD):
                IN_FLIGHT(alone, r, step)
            assert_same_gradients(model, alone, (when, settings, step))
            update(*optimizers)
        assert logs[0] and {key: count * WORLD for key, count in logs[0].items()} == dict(logs[1]), (when, settings)


# --- hooks on parameters ---


def _mask_rows(model: nn.Module, log: Log) -> list[RemovableHandle]:
    """Register hooks that zero and scale parts of full gradients, as for embeddings."""
    handles = []
    for name, parameter in model.named_parameters():
        if not name.startswith("units.2"):
            mask = torch.ones(parameter.shape, dtype=torch.float64)
            mask[1::2] = 0

            def hook(gradient: Tensor, mask: Tensor = mask, name: str = name) -> Tensor:
                log[name] += 1
                return gradient * mask

            handles.append(parameter.register_hook(hook))
    return handles


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(world_size=WORLD)
def test_parameter_hooks_change_whole_gradients_once_a_backward_until_removed(rank: int, when: str) -> None:
    for settings in MODES:
        torch.manual_seed(0)
        alone, log = blocks(), Counter()
        model = copy.deepcopy(alone)
        ours = _mask_rows(model, log) if when == "before" else []
        shard(model, **settings)
        ours += _mask_rows(model, log) if when == "after" else []
        theirs = _mask_rows(alone, Counter())
        for removed in (False, True):
            if removed:
                for handle in (*ours, *theirs):
                    handle.remove()
            log.clear()
            one_pass(model, rank, 0)
            for r in range(WORLD):
                one_pass(alone, r, 0)
            assert_same_gradients(model, alone, (when, settings, removed))
            assert set(log.values()) == (set() if removed else {1}), log
            model.zero_grad()
            alone.zero_grad()


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(world_size=WORLD)
def test_post_accumulate_hooks_see_final_gradients_once(rank: int, when: str) -> None:
    """Step in post-accumulate hooks, which see the final gradient: after a reducing backward or in step()."""
    for settings in MODES:
        torch.manual_seed(0)
        model, seen = blocks(), []
        hook = seen.append
        parameters = dict(model.named_parameters())
        if when == "before":
            handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters.values()]
        shard(model, **settings)
        if when == "after":
            handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in model.parameters()]
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        with layerzero.no_sync(model):
            one_pass(model, rank, 0)
        assert seen == []
        one_pass(model, rank, 1)
        assert {id(p) for p in seen} == {id(p) for p in model.parameters()} and len(seen) == len(parameters)
        assert all(p.grad is not None for p in seen)
        assert full_gradients(model).keys() == parameters.keys()
        seen.clear()
        with layerzero.no_sync(model):
            one_pass(model, rank, 0)
        optimizer.step()
        assert len(seen) == len(parameters)
        for handle in handles:
            handle.remove()
        one_pass(model, rank, 1)
        assert len(seen) == len(parameters)


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@on_ranks(world_size=WORLD)
def test_post_accumulate_hooks_fire_only_for_what_a_backward_reached(rank: int) -> None:
    """Run two backwards of two losses: a hook fires for the parameters of each."""
    for settings in MODES:
        torch.manual_seed(0)
        alone = Chain(blocks(1), blocks(1), own=False)
        model = shard(copy.deepcopy(alone), **settings)
        for net in (model, alone):
            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(_halve)
        for step in range(2):
            for place in (0, 1, 1):
                x = batch(rank, step, place)
                loss_of(model.units[place](x)).backward()
                sum(loss_of(alone.units[place](batch(r, step, place))) for r in range(WORLD)).backward()
        assert_same_gradients(model, alone, settings)


# --- gradients of inputs, and of gradients ---


@on_ranks(world_size=WORLD)
def test_gradients_of_inputs_by_autograd_grad(rank: int) -> None:
    """Compute gradients of inputs between training steps; gradients of parameters are unaffected."""
    for settings in MODES:
        torch.manual_seed(0)
        alone = blocks()
        model = shard(copy.deepcopy(alone), **settings)
        for step in range(2):
            x, y = (batch(rank, step).requires_grad_() for _ in range(2))
            (ours,) = torch.autograd.grad(loss_of(model(x)), x)
            (theirs,) = torch.autograd.grad(loss_of(alone(y)), y)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            assert all(p.grad is None for p in model.parameters()) or step
            one_pass(model, rank, step)
            for r in range(WORLD):
                one_pass(alone, r, step)
        assert_same_gradients(model, alone, settings)
        assert layerzero.memory(model).measured["full_buffer"] == 0 or "reshard_after_forward" in settings


@pytest.mark.filterwarnings("default")
@on_ranks(world_size=WORLD)
def test_create_graph_is_an_error_that_says_what_to_do(rank: int) -> None:
    model = shard(blocks())
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    x = batch(rank, 0).requires_grad_()
    for call in (
        lambda: torch.autograd.grad(loss_of(model(x)), x, create_graph=True),
        lambda: loss_of(model(x)).backward(create_graph=True),
        lambda: model(x).sum().backward(create_graph=True),
    ):
        message = message_of(call)
        assert "create_graph=True" in message and "unsharded" in message and "unit" in message, message
        optimizer.zero_grad()
    one_pass(model, rank, 0)
    optimizer.step()


def _tagged(on_meta: bool) -> nn.Module:
    with torch.device("meta" if on_meta else "cpu"):
        model = blocks(2)
    model.units[0].linear.weight._no_weight_decay = True
    model.units[0].linear.weight.tags = tags = ["kept"]
    model.units[1].linear.weight.tags = tags
    return model


@on_ranks(world_size=WORLD)
def test_attributes_of_parameters_are_kept(rank: int) -> None:
    """Read attributes of parameters in the forward, as code that tags them for optimizer groups does."""
    for on_meta in (False, True):
        model = _tagged(on_meta)
        model.scale = None if on_meta else model.scale
        init = (lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None) if on_meta else None
        shard(model, param_init_fn=init)
        first, second = (unit.linear.weight for unit in model.units)
        assert first._no_weight_decay and first.tags == ["kept"] and first.tags is second.tags
        assert not hasattr(model.units[0].linear.bias, "tags")
        seen = []
        model.units[0].linear.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(m.weight.tags))
        model(batch(rank, 0))
        assert seen == [["kept"]]
