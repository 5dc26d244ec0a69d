"""layerzero.optimizers matches torch, uses the fastest available kernel, and reports which."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from layerzero import optimizers
from layerzero.engine.hooks import get_state
from layerzero.optimizers import kernels
from tests.support.models import (
    IntegerNet,
    assert_close,
    different,
    exact_sgd,
    full_parameters,
    in_lockstep,
    integer_batch,
    integer_loss,
    integer_net,
    train,
    union,
)
from tests.support.ranks import mesh_of, on_ranks

Factory = Callable[[Iterable[Tensor]], Optimizer]


def by_decay(parameters: Iterable[Tensor]) -> list[dict[str, object]]:
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": (p for p in parameters if p.ndim < 2), "weight_decay": 0.0, "lr": 0.05},
    ]


# layerzero's and torch's. Adam divides by the gradient's magnitude: eps is far above the rounding noise.
PAIRS: dict[str, tuple[Factory, Factory]] = {
    "AdamW": (
        lambda p: optimizers.adamw(p, lr=0.1, betas=(0.8, 0.9), eps=0.1, weight_decay=0.25),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=0.1, weight_decay=0.25, foreach=False),
    ),
    "AdamW of groups, amsgrad, maximize": (
        lambda p: optimizers.adamw(by_decay(p), lr=0.1, eps=0.1, amsgrad=True, maximize=True),
        lambda p: torch.optim.AdamW(by_decay(p), lr=0.1, eps=0.1, amsgrad=True, maximize=True, foreach=False),
    ),
    "SGD": (
        lambda p: optimizers.sgd(p, lr=2**-4, momentum=0.5, nesterov=True, weight_decay=0.25),
        lambda p: torch.optim.SGD(p, lr=2**-4, momentum=0.5, nesterov=True, weight_decay=0.25, foreach=False),
    ),
    "SGD with dampening, maximize": (
        lambda p: optimizers.sgd(p, lr=2**-4, momentum=0.5, dampening=0.5, maximize=True),
        lambda p: torch.optim.SGD(p, lr=2**-4, momentum=0.5, dampening=0.5, maximize=True, foreach=False),
    ),
}


def shard(net: nn.Module, zero3_size: int = 2) -> nn.Module:
    return layerzero.shard_model(net, mesh=mesh_of(zero3_size), units=IntegerNet.UNITS)


@pytest.mark.slow
@on_ranks()
def test_both_follow_torch_in_one_process_built_before_or_after_sharding(rank: int) -> None:
    for name, (ours, theirs) in PAIRS.items():
        net, source = integer_net(), integer_net()
        reference, early = theirs(net.parameters()), ours(source.parameters())
        before, after = shard(source), shard(integer_net())
        optimizer = layerzero.shard_optimizer(early, before)
        in_lockstep(rank, (before, optimizer), (net, reference), range(3))
        train(after, layerzero.shard_optimizer(ours(after.parameters()), after), rank, range(3))
        assert not different(full_parameters(after), full_parameters(before)), f"{name}: built before and after"
        assert_close(full_parameters(before), dict(net.named_parameters()), name)
        assert optimizers.implementation(optimizer) == "fused", "seen through shard_optimizer"


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_parameter_may_get_its_first_gradient_later_than_others(dampening: float) -> None:
    settings = {"lr": 2**-4, "momentum": 0.5, "weight_decay": 0.25, "dampening": dampening}
    results = []
    for make in (optimizers.sgd, lambda p, **given: torch.optim.SGD(p, **given, foreach=False)):
        early, late = (nn.Parameter(torch.arange(4.0)) for _ in range(2))
        optimizer = make([early, late], **settings)
        for used in ([early], [early, late], [late], [early, late]):
            optimizer.zero_grad()
            for parameter in used:
                parameter.grad = parameter.detach() + 1.0
            optimizer.step()
        results.append([early.detach(), late.detach()])
    torch.testing.assert_close(*results)


def test_defaults_are_those_of_torch() -> None:
    choice = {"fused": None, "foreach": None}
    for ours, theirs in ((optimizers.adamw, torch.optim.AdamW), (optimizers.sgd, torch.optim.SGD)):
        parameter = nn.Parameter(torch.ones(2))
        assert ours([parameter]).defaults | choice == theirs([parameter]).defaults | choice


def test_one_line_says_what_was_taken(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="layerzero")
    parameters = [nn.Parameter(torch.ones(2))]
    assert optimizers.implementation(optimizers.adamw(parameters)) == "fused"
    (record,) = caplog.records
    assert record.name == "layerzero" and record.levelno == logging.INFO
    assert (
        record.getMessage() == "AdamW on cpu: torch's fused kernels, because NVIDIA Apex needs all parameters on CUDA"
    )
    caplog.clear()
    monkeypatch.setattr(kernels, "fused_kernel_devices", lambda: ["elsewhere"])
    assert optimizers.implementation(optimizers.sgd(parameters)) == "foreach"
    assert "SGD on cpu: torch's foreach kernels" in caplog.text and len(caplog.records) == 1


def test_the_implementation_of_any_optimizer_can_be_asked_for() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert optimizers.implementation(torch.optim.Adam(parameters)) == "torch's choice"
    assert optimizers.implementation(torch.optim.Adagrad(parameters, foreach=True)) == "foreach"
    with pytest.raises(TypeError, match="Optimizer"):
        optimizers.implementation(nn.Linear(1, 1))


def test_bad_settings_raise_what_torch_raises() -> None:
    for bad in (lambda: optimizers.adamw([]), lambda: optimizers.sgd([nn.Parameter(torch.ones(1))], lr=-1.0)):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(TypeError):
        optimizers.adamw(nn.Parameter(torch.ones(1)))


def apex_and_cuda() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("amp_C") is not None


@pytest.mark.gpu
@pytest.mark.skipif(not apex_and_cuda(), reason="needs NVIDIA Apex and CUDA")
def test_apex_follows_torch() -> None:
    for ours, theirs in (PAIRS["AdamW"], PAIRS["SGD"]):
        nets = [integer_net().cuda() for _ in range(2)]
        pair = [factory(net.parameters()) for factory, net in zip((ours, theirs), nets, strict=True)]
        assert optimizers.implementation(pair[0]) == "apex"
        for step in range(3):
            for net, optimizer in zip(nets, pair, strict=True):
                for index, parameter in enumerate(net.parameters()):
                    parameter.grad = torch.full_like(parameter, float(index + step - 3))
                optimizer.step()
        assert_close(*({name: p.detach() for name, p in net.named_parameters()} for net in nets), "Apex")


@on_ranks()
def test_state_that_is_sharded_in_another_order_is_refused(rank: int) -> None:
    saved = {}
    for zero3_size in (2, 4):  # two rows of the weight on each rank, but different ones
        model = layerzero.shard_model(nn.Linear(2, 8, bias=False), zero3_size=zero3_size)
        optimizer = layerzero.shard_optimizer(optimizers.sgd(model.parameters(), momentum=0.5), model)
        (model(torch.ones(1, 2)) * torch.arange(8.0)).sum().backward()
        optimizer.step()
        saved[zero3_size] = optimizer.state_dict()
    with pytest.raises(ValueError, match="not sharded like the parameter"):
        optimizer.load_state_dict(saved[2])
    optimizer.load_state_dict(saved[4])


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@on_ranks(world_size=4)
def test_two_optimizers_that_step_in_turn_refresh_once(rank: int, shared_memory: str) -> None:
    """Step two optimizers: one refresh for both from the second step on, unless one is skipped or a value is read.

    A step that raises on one rank and is repeated there does not count.
    """
    net = integer_net()
    model = layerzero.shard_model(integer_net(), zero3_size=2, units=IntegerNet.UNITS, shared_memory=shared_memory)
    alone = [exact_sgd(parameters) for parameters in _halves(net)]
    ours = [layerzero.shard_optimizer(exact_sgd(parameters), model) for parameters in _halves(model)]
    handles = len(get_state(model).handles)
    failures = [InterruptedError()] if rank == 0 else []

    def fail(*_: object) -> None:
        if step == 2 and failures:
            raise failures.pop()

    ours[0].inner.register_step_pre_hook(fail)
    for step, (stepping, refreshes) in enumerate(((2, 2), (2, 1), (2, 1), (1, 1), (2, 2), (2, 1))):
        layerzero.traffic(model, reset=True)
        integer_loss(model, integer_batch(step=step, rank=rank)).backward()
        integer_loss(net, union([integer_batch(step=step, rank=r) for r in range(4)])).backward()
        for index in range(stepping):
            if step == 2 and index == 0 and rank == 0:
                with pytest.raises(InterruptedError):
                    ours[index].step()
            ours[index].step()
            alone[index].step()
            assert not different(full_parameters(model), dict(net.named_parameters())), (step, index)
        for optimizer in (*ours, *alone):
            optimizer.zero_grad()
        with torch.no_grad():  # a forward refreshes the rest
            x = integer_batch(step=step, rank=0)[0]
            assert torch.equal(model(x), net(x)), step
        assert layerzero.traffic(model).calls["refresh"] == refreshes * handles, step


def _halves(model: nn.Module) -> list[list[Tensor]]:
    parameters = list(model.parameters())
    return [parameters[::2], parameters[1::2]]
