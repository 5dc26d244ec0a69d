"""Calls that replace the memory of a sharded parameter: ``.data``, ``model.to(...)`` and others; ``forward``."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import layerzero
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    backward,
    exact_sgd,
    full_gradients,
    full_parameters,
    in_lockstep,
    integer_net,
    train,
    update,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks

WORLD = 4


def _net(size: int = 2, **settings: object) -> nn.Module:
    return layerzero.shard_model(integer_net(), mesh=mesh_of(size), units=IntegerNet.UNITS, **settings)


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_a_sharded_tensor_assigned_to_data_is_what_the_next_forward_computes_with(rank: int) -> None:
    """Average weights between steps with p.data = ..., as many scripts do."""
    for size in (1, 2, 4):
        ours, alone = _net(size), integer_net()
        optimizer = layerzero.shard_optimizer(exact_sgd(ours.parameters()), ours)
        theirs = exact_sgd(alone.parameters())
        kept = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in (ours, alone)]
        in_lockstep(rank, (ours, optimizer), (alone, theirs), range(2))
        for model, old in zip((ours, alone), kept, strict=True):
            for name, parameter in model.named_parameters():
                parameter.data = (parameter.data + old[name]) * 0.5
        assert_same_bits(ours, alone, "assigned")
        in_lockstep(rank, (ours, optimizer), (alone, theirs), [2])
        assert_same_bits(ours, alone, "trained on")
        for parameter in (*ours.parameters(), *alone.parameters()):
            parameter.data = parameter.data.clone().zero_()
        x = torch.ones(2, 5)
        assert torch.equal(ours(x), alone(x)) and not ours(x).any()
        backward(ours, rank)
        for parameter in ours.parameters():
            parameter.grad.data = torch.ones_like(parameter.grad)
        assert all(gradient.eq(1).all() for gradient in full_gradients(ours).values())


@on_ranks(world_size=WORLD)
def test_clones_of_weights_and_gradients_have_full_tensors(rank: int) -> None:
    for size in (1, 2, 4):
        model = _net(size)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        backward(model, rank)
        weights, gradients = full_parameters(model), full_gradients(model)
        kept = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
        update(optimizer)
        changed = full_parameters(model)
        for name, (weight, gradient) in kept.items():
            assert torch.equal(weight.full_tensor(), weights[name]), name
            assert torch.equal(gradient.full_tensor(), gradients[name]), name
            replicated = [Replicate()] * weight.device_mesh.ndim
            assert torch.equal(weight.redistribute(placements=replicated).to_local(), weights[name]), name
            same_mesh = gradient.redistribute(gradient.device_mesh, replicated)
            assert torch.equal(same_mesh.to_local(), gradients[name]), name
            weight.zero_()  # has memory of its own
        assert any(not torch.equal(changed[name], weights[name]) for name in weights)
        assert all(torch.equal(value, changed[name]) for name, value in full_parameters(model).items())


def _assign_to(model: nn.Module, value: Tensor) -> None:
    model.first.weight.data = value


@on_ranks(world_size=WORLD)
def test_what_does_not_fit_the_rows_is_not_taken_for_data(rank: int) -> None:
    model, other = _net(2), _net(1)
    before = full_parameters(model)
    weight = model.first.weight
    wrong = {
        "whole": torch.zeros(6, 5),
        "rows": torch.zeros(weight.to_local().shape),
        "nothing": torch.zeros(0),
        "uninitialized rows": torch.empty_like(weight).to_local(),
        "dtype": weight.detach().double(),
        "other shape": model.second.bias.detach(),
        "other split": other.first.weight.detach(),
        "parameter": nn.Parameter(torch.zeros(6, 5)),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError) as caught:
            _assign_to(model, value)
        message = str(caught.value)
        assert all(text in message for text in ("first.weight", str(list(value.shape)), "unsharded")), (
            f"{name}: {message}"
        )
    with pytest.raises(ValueError, match="vector_to_parameters"):
        vector_to_parameters(torch.zeros(200), model.parameters())
    assert not [n for n, value in full_parameters(model).items() if not torch.equal(value, before[n])]

    with layerzero.unsharded(model, writeback=True):  # text of the error
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector * 2, model.parameters())
    assert not [n for n, value in full_parameters(model).items() if not torch.equal(value, before[n] * 2)]


@on_ranks(world_size=WORLD)
def test_what_was_empty_is_taken_once_it_is_written(rank: int) -> None:
    """Write to results of ``empty_like`` in every way; before that they count as uninitialized."""
    writes: dict[str, Callable[[nn.Parameter, torch.Tensor], object]] = {
        "copy_ of a whole one": lambda p, e: e.copy_(torch.arange(p.numel() * 1.0).view(p.shape)),
        "drawn": lambda p, e: e.normal_(),
        "by an alias": lambda p, e: e.detach().fill_(3),
        "its rows": lambda p, e: e.to_local().fill_(5),
        "in place": lambda p, e: e.zero_().add_(2),
    }
    for name, write in writes.items():
        ours = _net()
        parameter = ours.first.weight
        before = parameter.full_tensor().clone()
        with torch.no_grad():
            empty = torch.empty_like(parameter)
            parameter.data = empty  # nothing to copy
            assert torch.equal(parameter.full_tensor(), before), name
            write(parameter, empty)
            expected = empty.full_tensor()
            parameter.data = empty
        assert torch.equal(parameter.full_tensor(), expected) and not torch.equal(expected, before), name
    with pytest.raises(TypeError, match="other memory"):
        ours._apply(lambda t: torch.empty_like(t).fill_(7))


STAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to device": lambda m: m.to("cpu"),
    "to device and dtype": lambda m: m.to(device=torch.device("cpu"), dtype=torch.float32),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "type": lambda m: m.type(torch.float32),
    "of a layer": lambda m: m.first.float() and m,
    "requires_grad_": lambda m: m.requires_grad_(),
    "train": lambda m: m.eval().train(),
    "to_empty": lambda m: m.to_empty(device="cpu"),  # has memory there, and keeps its contents
}
MOVES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "half": (lambda m: m.half(), "torch.float16"),
    "bfloat16": (lambda m: m.bfloat16(), "torch.bfloat16"),
    "double": (lambda m: m.double(), "torch.float64"),
    "to dtype": (lambda m: m.to(torch.bfloat16), "torch.bfloat16"),
    "type": (lambda m: m.type(torch.float64), "torch.float64"),
    "to meta": (lambda m: m.to("meta"), "meta"),
    "to_empty on meta": (lambda m: m.to_empty(device="meta"), "meta"),
    "into other strides": (lambda m: m._apply(lambda t: t.clone()), "other memory"),
    "of a layer": (lambda m: m.first.half(), "torch.float16"),
    "share_memory": (lambda m: m.share_memory(), r"share_memory.*full_state_dict"),
    "share_memory of a layer": (lambda m: m.first.share_memory(), r"share_memory.*full_state_dict"),
}


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_moves_that_change_nothing_pass_and_others_are_refused_before_they_do(rank: int) -> None:
    ours, alone = _net(), integer_net()
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(ours.parameters(), lr=2**-4), ours)
    both = (ours, optimizer), (alone, torch.optim.SGD(alone.parameters(), lr=2**-4))
    parameters = list(ours.parameters())
    in_lockstep(rank, *both, [0])
    for step, (name, move) in enumerate(STAYS.items(), start=1):
        layerzero.load_full_state_dict(ours, integer_net(step).state_dict())  # many steps have many digits
        alone.load_state_dict(integer_net(step).state_dict())
        assert move(ours) is ours, name
        backward(ours, rank, step)
        move(ours)  # with gradients there
        optimizer.zero_grad()
        in_lockstep(rank, *both, [step])
        assert all(now is before for now, before in zip(ours.parameters(), parameters, strict=True)), name
        assert_same_bits(ours, alone, name)
    with layerzero.no_sync(ours):
        backward(ours, rank)
    ours.to("cpu")  # with gradients that cannot be read
    ours.zero_grad()
    for step, (name, (move, pattern)) in enumerate(MOVES.items(), start=10):
        layerzero.load_full_state_dict(ours, integer_net(step).state_dict())
        alone.load_state_dict(integer_net(step).state_dict())
        with pytest.raises(TypeError) as caught:
            move(ours)
        assert re.search(r"parameter '(shift|first\.weight)'", str(caught.value)), f"{name}: {caught.value}"
        assert re.search(pattern, str(caught.value)), f"{name}: {caught.value}"
        in_lockstep(rank, *both, [step])
        assert_same_bits(ours, alone, name)


def _swap(rank: int) -> list[str]:
    model = _net()
    messages = []
    for setting in ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion"):
        getattr(torch.__future__, f"set_{setting}")(True)
        try:
            model.float()
        except TypeError as error:
            messages.append(str(error))
        finally:
            getattr(torch.__future__, f"set_{setting}")(False)
    train(model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model), rank, [0])
    return messages


def test_moves_that_would_replace_parameters_name_the_setting() -> None:
    for messages in run_ranks(_swap, world_size=2):
        assert len(messages) == 2 and all("torch.__future__" in message for message in messages), messages


@on_ranks(world_size=2)
def test_recurrent_layers_and_mixed_precision_may_be_moved_to_where_they_are(rank: int) -> None:
    """Move an LSTM, which keeps weak references to its weights, and a model with bf16 compute weights."""
    torch.manual_seed(0)
    model = layerzero.shard_model(nn.LSTM(3, 4), mesh=mesh_of(2)).to("cpu")
    model(torch.ones(2, 3))[0].sum().backward()
    model.float()
    assert all(parameter.grad is not None for parameter in model.parameters())
    low = _net(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).float()
    assert low(torch.ones(2, 5)).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="mp_policy"):
        low.bfloat16()


@on_ranks(world_size=2)
def test_forward_called_by_its_name_says_what_to_call(rank: int) -> None:
    cases = [
        (nn.Linear(3, 4), torch.ones(2, 3)),
        (nn.Embedding(5, 4), torch.tensor([1, 2])),
        (nn.LayerNorm(3), torch.ones(2, 3)),
        (nn.LSTM(3, 4), torch.ones(2, 3)),
    ]
    for module, x in cases:
        model = layerzero.shard_model(module, mesh=mesh_of(2))
        with pytest.raises(RuntimeError, match=r"model\(x\), not model\.forward\(x\)"):
            model.forward(x)
        model(x)
