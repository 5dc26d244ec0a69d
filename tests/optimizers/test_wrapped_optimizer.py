"""Pass-through of the wrapper: methods that change masters, hooks, foreign parameters, and changes of groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import layerzero
from tests.support.models import (
    IntegerNet,
    assert_close,
    assert_same_bits,
    backward,
    different,
    exact_sgd,
    full_parameters,
    in_lockstep,
    integer_batch,
    integer_loss,
    integer_net,
)
from tests.support.ranks import mesh_of, on_ranks


class ScheduleFree(Optimizer):
    """SGD on z. Parameters are a mixture of z and the average x in training, and x in evaluation."""

    MIX = 0.5

    def __init__(self, params: Iterable[Any], lr: float, *, through_data: bool = False) -> None:
        super().__init__(params, {"lr": lr, "training": False, "k": 0})
        self.through_data = through_data
        self.loudness = 1

    def rate(self) -> float:
        return self.param_groups[0]["lr"]

    def train(self) -> None:
        self._show(training=True)

    def eval(self) -> None:
        self._show(training=False)

    @torch.no_grad()
    def _show(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] == training:
                continue
            group["training"] = training
            for parameter in group["params"]:
                if (z := self.state[parameter].get("z")) is not None:
                    shown = parameter.data if self.through_data else parameter
                    shown.lerp_(z, self.MIX if training else 1 - 1 / (1 - self.MIX))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"], "train() first"
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                x = parameter.lerp(z, 1 - 1 / (1 - self.MIX))
                z.sub_(parameter.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                parameter.copy_(x.lerp(z, self.MIX))


def _sharded(factory: Any, *, zero3_size: int = 2, net: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = layerzero.shard_model(net or integer_net(), mesh=mesh_of(zero3_size), units=IntegerNet.UNITS)
    return model, layerzero.shard_optimizer(factory(model.parameters()), model)


def _outputs(model: nn.Module, net: nn.Module, rank: int) -> None:
    """Assert that forwards match one process: the compute weights are those of the masters."""
    inputs, _ = integer_batch(step=9, rank=rank)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), net(inputs), rtol=1e-5, atol=1e-5)


@on_ranks()
def test_a_schedule_free_optimizer_shows_its_two_kinds_of_weights(rank: int) -> None:
    for zero3_size, through_data in ((2, False), (4, True), (1, False)):
        case = f"S={zero3_size} data={through_data}"
        net = integer_net()
        theirs = ScheduleFree(net.parameters(), 2**-4, through_data=through_data)
        model, optimizer = _sharded(
            lambda p, d=through_data: ScheduleFree(p, 2**-4, through_data=d), zero3_size=zero3_size
        )
        for epoch in range(2):
            for each in (optimizer, theirs):
                each.train()
            in_lockstep(rank, (model, optimizer), (net, theirs), [2 * epoch, 2 * epoch + 1])
            assert_close(full_parameters(model), dict(net.named_parameters()), f"{case} training")
            trained = full_parameters(model)
            for each in (optimizer, theirs):
                each.eval()
            _outputs(model, net, rank)
            assert_close(full_parameters(model), dict(net.named_parameters()), f"{case} evaluation")
            assert different(full_parameters(model), trained), "the two modes show different weights"
        assert optimizer.rate() == 2**-4 and optimizer.loudness == 1
        if rank == 0:
            optimizer.rate()  # changes nothing, so no other rank needs to know
        model(integer_batch(rank=rank)[0])
        optimizer.loudness = 2
        assert optimizer.inner.loudness == 2
        assert not hasattr(optimizer, "nonsense") and not hasattr(optimizer, "_step_supports_amp_scaling")
        with pytest.raises(RuntimeError, match="shard_optimizer returned"):
            optimizer.inner.train()


@on_ranks(world_size=2)
def test_a_method_that_changes_masters_is_refused_where_it_would_be_undone(rank: int) -> None:
    model, optimizer = _sharded(lambda p: ScheduleFree(p, 2**-4))
    optimizer.train()
    backward(model, rank)
    optimizer.step()
    ema = layerzero.EMA(model)
    ema.update()
    before = full_parameters(model)
    with ema.swapped():
        assert optimizer.rate() == 2**-4
        with pytest.raises(RuntimeError, match=r"eval\(\) was called inside EMA\.swapped"):
            optimizer.eval()
    assert not different(full_parameters(model), before)


@on_ranks(world_size=2)
def test_hooks_run_once_a_step_with_the_optimizer_that_the_user_holds(rank: int) -> None:
    seen: list[tuple[str, str]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(("global pre", type(optimizer).__name__))),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(("global post", type(optimizer).__name__))),
    ]
    early_net = integer_net()
    early = exact_sgd(early_net.parameters())
    schedule_of_early = LambdaLR(early, lambda epoch: 2.0**-epoch)
    model = layerzero.shard_model(early_net, mesh=mesh_of(2), units=IntegerNet.UNITS)
    cases = {"scheduled before": (model, layerzero.shard_optimizer(early, model)), "plain": _sharded(exact_sgd)}
    for case, (model, optimizer) in cases.items():
        late = LambdaLR(optimizer, lambda epoch: 2.0**-epoch) if case == "plain" else schedule_of_early
        optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", "")))
        optimizer.register_step_post_hook(lambda *_: seen.append(("post", "")))
        optimizer.inner.register_step_pre_hook(
            lambda optimizer, *_: seen.append(("inner pre", type(optimizer).__name__))
        )
        optimizer.inner.register_step_post_hook(lambda *_: seen.append(("inner post", "")))
        backward(model, rank)
        seen.clear()
        with torch.profiler.profile(acc_events=True) as profile:
            optimizer.step()
        with warnings.catch_warnings():  # an lr_scheduler.step() before the optimizer's would warn
            warnings.simplefilter("error")
            late.step()
        assert seen == [
            ("global pre", "ShardedOptimizer"),
            ("pre", ""),
            ("inner pre", "SGD"),
            ("inner post", ""),
            ("post", ""),
            ("global post", "ShardedOptimizer"),
        ], f"{case}: {seen}"
        steps = [event.name for event in profile.events() if event.name.startswith("Optimizer.step#")]
        assert steps == ["Optimizer.step#ShardedOptimizer.step"], steps
        assert optimizer.param_groups[0]["lr"] == 2**-5
    for handle in handles:
        handle.remove()


class Scaled(nn.Module):
    """Net with a parameter that another framework has made a DTensor, if there is a mesh."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        scale = torch.tensor([1.0, 2.0, 4.0])
        self.net = integer_net()
        self.scale = nn.Parameter(scale if mesh is None else distribute_tensor(scale, mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (self.scale.to_local() if isinstance(self.scale, DTensor) else self.scale)


@on_ranks()
def test_dtensors_of_another_framework_are_stepped_beside_sharded_parameters(rank: int) -> None:
    made = {}
    for case in ("together", "own group, foreach", "own optimizer"):
        source, alone = Scaled(init_device_mesh("cpu", (dist.get_world_size(),))), Scaled()
        model = layerzero.shard_model(source, mesh=mesh_of(2), ignored_params=[source.scale])
        ours = [p for p in model.parameters() if p is not source.scale]
        settings = {"lr": 2**-4, "momentum": 0.5}
        own: list[Optimizer] = []
        if case == "together":
            optimizer = torch.optim.SGD([*ours, source.scale], **settings)
        elif case == "own optimizer":
            optimizer, own = torch.optim.SGD(ours, **settings), [torch.optim.SGD([source.scale], **settings)]
        else:
            optimizer = torch.optim.SGD([{"params": ours}, {"params": [source.scale]}], **settings, foreach=True)
        sharded = layerzero.shard_optimizer(optimizer, model)
        theirs = torch.optim.SGD(alone.parameters(), **settings)
        for step in range(2):
            for net in (model, alone):
                integer_loss(net, integer_batch(step=step)).backward()  # the same on all ranks
            norm = layerzero.clip_grad_norm_(model, 1e9)
            expected = torch.stack([p.grad.norm() for p in alone.net.parameters()]).norm()
            torch.testing.assert_close(norm, expected)
            for each in (sharded, *own, theirs):
                each.step()
                each.zero_grad(set_to_none=step == 1)
            assert step == 1 or not source.scale.grad.to_local().any()
        assert isinstance(source.scale, DTensor)
        values = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert not different(values, {name: p.detach() for name, p in alone.named_parameters()}), case
        made[case] = sharded
    state = made["together"].state_dict_by_name()
    buffer = state["state"]["scale"]["momentum_buffer"]
    assert isinstance(buffer, DTensor) and buffer.to_local().any()
    made["together"].load_state_dict(state)
    assert torch.equal(
        made["together"].state[source_of(made["together"])]["momentum_buffer"].to_local(), buffer.to_local()
    )
    way_out = "separate parameter group, or to a separate optimizer"
    *others, last = model.parameters()
    for one_call in ({"foreach": True}, {"fused": True}):
        with pytest.raises(ValueError, match=way_out):
            layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), **settings, **one_call), model)
        late = layerzero.shard_optimizer(torch.optim.SGD([last], **settings), model)
        with pytest.raises(ValueError, match=way_out):
            late.add_param_group({"params": others, **one_call})
        late.add_param_group({"params": others})
        late.param_groups[1].update(one_call)
        integer_loss(model, integer_batch()).backward()
        with pytest.raises(RuntimeError, match=way_out):
            late.step()
        late.zero_grad()


def source_of(optimizer: Any) -> Tensor:
    return optimizer.param_groups[0]["params"][-1]


@on_ranks()
def test_groups_that_were_edited_behind_the_wrapper_are_noticed_and_add_param_group_is_the_way_out(rank: int) -> None:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    net, others = integer_net(), [*model.second.parameters(), *model.head.parameters(), model.shift]
    theirs = exact_sgd([*net.first.parameters()])
    optimizer = layerzero.shard_optimizer(exact_sgd(model.first.parameters()), model)
    groups, (group,) = optimizer.param_groups, optimizer.param_groups
    params, saved = group["params"], optimizer.state_dict()
    uses: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.state_dict,
        optimizer.state_dict_by_name,
        optimizer.full_state_dict,
        lambda: optimizer.load_state_dict(saved),
    ]

    def refused(text: str) -> None:
        add = [lambda: optimizer.add_param_group({"params": [model.shift]})] if optimizer.param_groups is groups else []
        for use in (*uses, *add):
            with pytest.raises(RuntimeError, match=f"{text}.*add_param_group"):
                use()

    groups.append({"params": others})
    refused("the groups in param_groups were edited")
    groups.pop()
    params.append(model.shift)
    refused("the parameters of group 0 in param_groups were edited")
    params.pop()
    removed = params.pop()
    refused("the parameters of group 0 in param_groups were edited")
    params.append(torch.zeros(3))
    refused("the parameters of group 0 in param_groups were edited")
    params[-1] = removed
    group["params"] = others[:2]
    refused("the parameters of group 0")
    group["params"] = list(params)  # another list of the same parameters
    optimizer.param_groups = [group]
    refused("the groups in param_groups were edited")
    optimizer.param_groups = groups
    optimizer.add_param_group({"params": others})
    theirs.add_param_group({"params": [*net.second.parameters(), *net.head.parameters(), net.shift]})
    in_lockstep(rank, (model, optimizer), (net, theirs), range(2))
    assert_same_bits(model, net, "after the way out")


class SlowWeights(Optimizer):
    """Optimizer that wraps another one and exposes its groups, like Lookahead."""

    def __init__(self, fast: Optimizer) -> None:
        self.fast = fast
        self.steps = 0
        self.slow = {p: p.detach().clone() for group in fast.param_groups for p in group["params"]}
        self.state, self.defaults = fast.state, fast.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.fast.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.fast.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for parameter, slow in self.slow.items():
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.fast.zero_grad(set_to_none)


@on_ranks()
def test_an_optimizer_around_an_optimizer_belongs_around_the_sharded_one(rank: int) -> None:
    net = integer_net()
    theirs = SlowWeights(exact_sgd(net.parameters()))
    model, fast = _sharded(exact_sgd)
    around_unsharded = SlowWeights(exact_sgd(model.parameters()))
    with pytest.raises(ValueError, match=r"SlowWeights\(layerzero.shard_optimizer\(SGD\(...\), model\), ...\)"):
        layerzero.shard_optimizer(around_unsharded, model)
    backward(model, rank)
    with pytest.raises(RuntimeError, match="shard_optimizer"):
        around_unsharded.step()
    model.zero_grad()
    in_lockstep(rank, (model, SlowWeights(fast)), (net, theirs), range(4))
    assert_same_bits(model, net, "around a sharded optimizer")
    _outputs(model, net, rank)


class Rounded(torch.optim.SGD):
    """Rounds after the step of its base class, which runs torch's global hooks once an SGD exists in the process."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.round_()


@on_ranks()
def test_a_step_may_call_the_step_of_a_base_class_that_has_an_instance(rank: int) -> None:
    net, other = integer_net(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = Rounded(net.parameters(), lr=0.5)
    model, optimizer = _sharded(lambda parameters: Rounded(parameters, lr=0.5))
    in_lockstep(rank, (model, optimizer), (net, theirs), range(3))
    assert_same_bits(model, net, "base class")
    other.step()
