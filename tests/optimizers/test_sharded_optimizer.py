"""The wrapped optimizer gives the results of one process, or refuses.

No gradient is lost or counted twice, and both copies of a weight always agree.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import layerzero
from tests.support.models import (
    GlobalScaling,
    IntegerNet,
    assert_close,
    assert_same_bits,
    backward,
    backward_alone,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    in_lockstep,
    integer_batch,
    integer_loss,
    integer_net,
    train,
    update,
)
from tests.support.ranks import on_ranks

Factory = Callable[[Iterable[Tensor]], Optimizer]


def shard(net: nn.Module | None = None, mesh: DeviceMesh | None = None) -> nn.Module:
    return layerzero.shard_model(net or integer_net(), mesh=mesh or layerzero.init_mesh(2), units=IntegerNet.UNITS)


def shard_with_sgd(net: nn.Module | None = None) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    model = shard(net)
    return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)


def alone(seed: int = 0) -> tuple[nn.Module, Optimizer]:
    net = integer_net(seed)
    return net, exact_sgd(net.parameters())


# Adam divides by the gradient's magnitude: eps is far above the rounding noise of a gradient that cancels.
OPTIMIZERS: dict[str, Factory] = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=2**-4, momentum=0.5, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=2**-4, momentum=0.5, weight_decay=0.25, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, eps=0.1, amsgrad=True, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, eps=0.1, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.1, maximize=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, eps=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, eps=0.1),
}
KINDS_OF_STATE = ("SGD fused", "Adam foreach", "Adagrad", "RMSprop", "NAdam")


@on_ranks()
def test_every_element_wise_optimizer_follows_one_process_built_before_or_after_sharding(rank: int) -> None:
    mesh = layerzero.init_mesh(2)
    for name, factory in OPTIMIZERS.items():
        net, unsharded = integer_net(), integer_net()
        theirs, built_before = factory(net.parameters()), factory(unsharded.named_parameters())
        before, after = shard(unsharded, mesh), shard(mesh=mesh)
        optimizer = layerzero.shard_optimizer(built_before, before)
        in_lockstep(rank, (before, optimizer), (net, theirs), range(3))
        train(after, layerzero.shard_optimizer(factory(after.parameters()), after), rank, range(3))
        ours = full_parameters(before)
        assert not different(full_parameters(after), ours), f"{name}: built before and after shard_model"
        assert_close(ours, dict(net.named_parameters()), name)


@on_ranks()
def test_state_from_before_sharding_is_cut_and_continued(rank: int) -> None:
    for name, factory in {"exact": exact_sgd, **{name: OPTIMIZERS[name] for name in KINDS_OF_STATE}}.items():
        net, source = integer_net(), integer_net()
        theirs, gathered = factory(net.parameters()), factory(source.parameters())
        for whole, stepper in ((net, theirs), (source, gathered)):
            backward_alone(whole)
            update(stepper)
        model = shard(source)
        optimizer = layerzero.shard_optimizer(gathered, model)
        for parameter, values in optimizer.state_dict_by_name()["state"].items():
            for key, expected in theirs.state[net.get_parameter(parameter)].items():
                value = values[key].full_tensor() if torch.is_tensor(expected) and expected.ndim else values[key]
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected)), f"{name} {parameter} {key}"
        in_lockstep(rank, (model, optimizer), (net, theirs), (1, 2))
        assert_close(full_parameters(model), dict(net.named_parameters()), name)
        if name == "exact":
            assert_same_bits(model, net, name)


@on_ranks()
def test_learning_rate_schedulers_work_on_wrapper_and_inner_optimizer(rank: int) -> None:
    halving_schedule = functools.partial(LambdaLR, lr_lambda=lambda epoch: 2.0**-epoch)
    for where in ("wrapper", "inner", "before shard_optimizer"):
        (net, theirs), (source, original) = alone(), alone()
        their_schedule = halving_schedule(theirs)
        model = shard(source)
        early = halving_schedule(original) if where == "before shard_optimizer" else None
        optimizer = layerzero.shard_optimizer(original, model)
        schedule = early or halving_schedule(optimizer if where == "wrapper" else optimizer.inner)
        for step in range(3):
            in_lockstep(rank, (model, optimizer), (net, theirs), [step])
            schedule.step()
            their_schedule.step()
            rates = (optimizer.param_groups[0]["lr"], optimizer.inner.param_groups[0]["lr"], *schedule.get_last_lr())
            assert rates == (2.0 ** (-5 - step),) * 3, f"scheduler on {where}, step {step}: {rates}"
        assert_same_bits(model, net, f"scheduler on {where}")


@on_ranks()
def test_a_closure_runs_once_a_step(rank: int) -> None:
    (net, theirs), (model, optimizer), events = alone(), shard_with_sgd(), []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        events.append("closure")
        optimizer.zero_grad()
        return backward(model, rank, 0)

    assert optimizer.step(closure).item() == integer_loss(integer_net(), integer_batch(rank=rank)).item()
    assert events == ["closure"], events
    backward_alone(net, 0)
    theirs.step()
    assert_same_bits(model, net, "closure")
    assert optimizer.step() is None


@on_ranks()
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(rank: int) -> None:
    model = shard()
    optimizer = layerzero.shard_optimizer(OPTIMIZERS["Adam fused"](model.parameters()), model)
    train(model, optimizer, rank, [0])
    saved = optimizer.state_dict_by_name()
    before = {n: v["exp_avg"].to_local().clone() for n, v in saved["state"].items()}
    (group,), weight = saved["param_groups"], saved["state"]["first.weight"]
    for bad, culprit in (
        (saved | {"state": saved["state"] | {"stranger": weight}}, "stranger"),
        (saved | {"state": saved["state"] | {"first.weight": weight | {"exp_avg": torch.zeros(5, 6)}}}, "first.weight"),
        (saved | {"param_groups": [group | {"lr": 7.0, "params": group["params"][:-1]}]}, group["params"][-1]),
    ):
        with pytest.raises(ValueError, match=culprit):
            optimizer.load_state_dict(bad)
        assert optimizer.param_groups[0]["lr"] == group["lr"], culprit
        after = optimizer.state_dict_by_name()["state"]
        assert all(after[n]["exp_avg"].to_local().equal(v) for n, v in before.items()), culprit


@on_ranks(world_size=2)
def test_add_param_group_takes_names(rank: int) -> None:
    model = shard()
    optimizer = layerzero.shard_optimizer(exact_sgd(model.first.named_parameters()), model)
    optimizer.add_param_group({"params": model.head.named_parameters(), "lr": 0.5})
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight", "bias"]] * 2
    assert optimizer.param_groups[1]["params"][0] is model.head.weight
    train(model, optimizer, rank, [0])


@on_ranks()
def test_groups_from_before_and_after_sharding_are_added_and_remain_the_groups(rank: int) -> None:
    for build_first in (True, False):
        net, source = integer_net(), integer_net()
        theirs = exact_sgd(net.first.parameters())
        early, others = exact_sgd(source.first.parameters()), [*source.second.parameters(), *source.head.parameters()]
        model = shard(source)
        if not build_first:
            early, others = exact_sgd(model.first.parameters()), [*model.second.parameters(), *model.head.parameters()]
        groups, first_group, added = early.param_groups, early.param_groups[0], {"params": iter(others)}
        optimizer = layerzero.shard_optimizer(early, model)
        in_lockstep(rank, (model, optimizer), (net, theirs), [0])
        optimizer.add_param_group(added)
        optimizer.add_param_group({"params": model.shift})
        assert groups is optimizer.param_groups and groups[0] is first_group and groups[1] is added
        theirs.add_param_group({"params": [*net.second.parameters(), *net.head.parameters()]})
        theirs.add_param_group({"params": net.shift})
        first_group["lr"] = theirs.param_groups[0]["lr"] = 0.0
        added["lr"] = theirs.param_groups[1]["lr"] = 2**-5
        in_lockstep(rank, (model, optimizer), (net, theirs), (1, 2))
        assert_same_bits(model, net, f"built first: {build_first}")
        shown = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert {id(parameter) for parameter in shown} == {id(parameter) for parameter in model.parameters()}
        with pytest.raises(ValueError, match="twice"):
            optimizer.add_param_group(again := {"params": [model.shift], "lr": 1.0})
        assert list(again) == ["params", "lr"] and again["params"][0] is model.shift


@on_ranks()
def test_an_optimizer_of_other_parameters_is_refused_and_left_alone(rank: int) -> None:
    (model, wrapped), stranger = shard_with_sgd(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.first.parameters(), *stranger.parameters()], lr=0.5)
    plain = torch.optim.SGD(stranger.parameters(), lr=0.5, momentum=0.5)
    stranger(torch.ones(1, 2)).sum().backward()
    plain.step()
    for theirs in (optimizer, plain, exact_sgd(shard().parameters())):
        with pytest.raises(ValueError, match="that was not in the model when it was sharded"):
            layerzero.shard_optimizer(theirs, model)
    for kind, reason in ((torch.optim.LBFGS, "inner products"), (GlobalScaling, "matrix")):
        with pytest.raises(ValueError, match=f"{kind.__name__} is not element-wise.*{reason}"):
            layerzero.shard_optimizer(kind(model.parameters()), model)
    with pytest.raises(TypeError, match="Optimizer"):
        layerzero.shard_optimizer(model, model)
    with pytest.raises(ValueError, match="shard_model"):
        layerzero.shard_optimizer(plain, stranger)
    with pytest.raises(ValueError, match="already"):
        layerzero.shard_optimizer(wrapped, model)
    # Refused optimizers are unchanged: this one continues with its momentum.
    before = stranger.weight.detach().clone()
    plain.step()
    assert torch.equal(stranger.weight, before - 0.5 * 1.5)


@on_ranks()
def test_an_optimizer_that_has_not_been_sharded_raises_when_it_steps_the_model(rank: int) -> None:
    source, inner_to_be = alone()
    built_before = exact_sgd(source.parameters())
    model = shard(source)
    built_after = exact_sgd(model.parameters())
    optimizer = layerzero.shard_optimizer(inner_to_be, model)
    before = full_parameters(model)
    backward(model, rank, 0)
    gradients = full_gradients(model)
    for forgotten in (built_before, built_after, torch.optim.Adam([model.shift]), inner_to_be, optimizer.inner):
        with pytest.raises(RuntimeError, match="shard_optimizer"):
            forgotten.step()
    assert not different(full_parameters(model), before) and not different(full_gradients(model), gradients)

    other = nn.Linear(2, 2)
    others = torch.optim.SGD(other.parameters(), lr=1.0)
    expected = other.weight.detach() - 1.0
    other(torch.ones(1, 2)).sum().backward()
    others.step()
    assert torch.equal(other.weight, expected), "an optimizer of another model keeps working"
    second, second_optimizer = shard_with_sgd(integer_net(seed=1))
    optimizer.zero_grad()
    for seed, ours in enumerate([(model, optimizer), (second, second_optimizer)]):
        reference = alone(seed)
        in_lockstep(rank, ours, reference, range(2))
        assert_same_bits(ours[0], reference[0], f"model {seed}")


@on_ranks()
def test_a_model_may_be_freed_while_any_optimizer_steps(rank: int) -> None:
    # A deleted model is a cycle, which Python may free at any time, even inside torch's global hooks.
    ours, reference = shard_with_sgd(), alone()
    gc.collect()
    gc.disable()
    collecting = register_optimizer_step_pre_hook(lambda *_: [gc.collect(), None][1])
    doomed = weakref.ref(shard())
    in_lockstep(rank, ours, reference, [0])
    collecting.remove()
    gc.enable()
    assert doomed() is None
    assert_same_bits(ours[0], reference[0], "a model was freed during a step")
