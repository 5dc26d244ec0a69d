"""layerzero.verify with the schemes of torch and with set-up code of a user, right and wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import layerzero
from layerzero import VerifyReport
from layerzero.verification.schemes import accumulating
from tests.support.ranks import run_ranks

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)


class Net(nn.Module):
    """Two layers that return their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def test_after_a_micro_batch_that_fails_the_model_reduces_gradients_again() -> None:
    model = mock.Mock(spec=["set_requires_gradient_sync"])
    with pytest.raises(KeyError), accumulating(model):
        raise KeyError
    assert model.mock_calls == [mock.call.set_requires_gradient_sync(each) for each in (False, True)]


NAMES = {name for name, _ in Net().named_parameters()}
WEIGHTS = {"first.weight", "second.weight"}


class TiedByData(Net):
    """Net whose weights share memory in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.data = self.first.weight.data


def make_batch(index: int, rank: int) -> Tensor:
    return torch.randn(6, 4)


class HalfNet(Net):
    """Net in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


def half_batch(index: int, rank: int) -> Tensor:
    return make_batch(index, rank).bfloat16()


# Right programs


def shard(model: nn.Module) -> None:
    fully_shard(model.first)
    fully_shard(model)


_syncs: list[bool] = []  # calls on this rank


def watched(model: Any) -> tuple[nn.Module, Optimizer]:
    """Shard a model and record the calls that its micro-batches make."""
    shard(model)
    synchronize = model.set_requires_gradient_sync
    model.set_requires_gradient_sync = lambda value: (_syncs.append(value), synchronize(value))
    return model, SGD(model.parameters())


def right(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard(model)
    return model, SGD(model.parameters())


def imported_from_layerzero(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    layerzero.fully_shard(model.first)
    layerzero.fully_shard(model)
    return model, layerzero.shard_optimizer(SGD(model.parameters()), model)


def wrapped(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    model.second = checkpoint_wrapper(model.second)
    model = DistributedDataParallel(model)
    return model, SGD(model.parameters())


def _verify_schemes(rank: int) -> dict[str, VerifyReport]:
    settings: dict[str, dict[str, Any]] = {
        "layerzero": {"units": ["first"]},
        "fsdp2": {"units": ["first"], "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "hsdp": {"units": [["first", "second"]]},
        "ddp": {},
    }
    reports = {
        scheme: layerzero.verify(Net, make_batch, scheme=scheme, steps=2, **given) for scheme, given in settings.items()
    }
    for scheme in (right, watched, imported_from_layerzero, wrapped):
        reports[scheme.__name__] = layerzero.verify(Net, make_batch, scheme=scheme, optimizer_fn=SGD, steps=2)
    assert _syncs == [False, True] * 2
    reports["bfloat16"] = layerzero.verify(HalfNet, half_batch, scheme="ddp", steps=2)
    return reports


def test_all_schemes_train_a_right_model_alike() -> None:
    reports = run_ranks(_verify_schemes)[0]
    for name, report in reports.items():
        assert report.ok, f"{name}:\n{report}"
        assert {row.name for row in report.rows} == NAMES
        exact = [row for row in report.rows if row.precision == "float32"]
        assert all(row.gradient < 1e-5 for row in exact), f"{name}: more than rounding\n{report}"
    runs = {name: {(row.zero3_size, row.precision) for row in report.rows} for name, report in reports.items()}
    assert runs == {
        "layerzero": {(1, "float32"), (2, "float32"), (4, "float32")},
        "fsdp2": {(4, "float32"), (4, "bfloat16")},
        "hsdp": {(1, "float32"), (2, "float32")},
        "ddp": {(1, "float32")},
        "bfloat16": {(1, "bfloat16")},
        "right": {(None, "float32")},
        "watched": {(None, "float32")},
        "imported_from_layerzero": {(None, "float32")},
        "wrapped": {(None, "float32")},
    }
    assert all(row.weight == 0.0 for row in reports["bfloat16"].rows), "masters are bf16, too"
    assert str(reports["hsdp"]).startswith("one process and hsdp: 4 ranks; zero3_size 1, 2; 2 steps of 2 micro-batches")
    assert str(reports["right"]).startswith("one process and right: 4 ranks; 2 steps of 2 micro-batches")


# Wrong programs


class Fault(NamedTuple):
    """A user's set-up that is wrong with FSDP2, and the parameters that it does not update as one process does."""

    set_up: Callable[[nn.Module], tuple[nn.Module, Optimizer]]
    wrong: set[str]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = SGD
    model: type[nn.Module] = Net


def with_new_parameters(optimizer: Optimizer, model: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return model, optimizer


def clipping(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer that limits weights through aliases of their memory."""
    parameters = list(parameters)
    aliases = [parameter.data for parameter in parameters]
    optimizer = SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: [alias.clamp_(-0.2, 0.2) for alias in aliases])
    return optimizer


def resumed(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer with state, as a checkpoint has it."""
    optimizer = SGD(parameters)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    return optimizer


def clipping_before(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer = clipping(model.parameters())
    shard(model)
    return with_new_parameters(optimizer, model)


def clipping_after(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard(model)
    return model, clipping(model.parameters())


def list_before(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    parameters = list(model.parameters())
    shard(model)
    return model, SGD(parameters)


def list_after_a_forward(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    return model, SGD(model.parameters())


def saved_before_the_first_step(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard(model)
    optimizer = ADAM(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    return model, optimizer


def adam_after(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard(model)
    return model, ADAM(model.parameters())


def resumed_before(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer = resumed(model.parameters())
    shard(model)
    return with_new_parameters(optimizer, model)


def resumed_after(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard(model)
    return model, resumed(model.parameters())


FAULTS = {
    "weights tied by .data": Fault(right, WEIGHTS, model=TiedByData),
    "aliases of .data": Fault(clipping_before, NAMES, clipping),
    "a list before sharding": Fault(list_before, NAMES),
    "a list of gathered parameters": Fault(list_after_a_forward, {"second.weight", "second.bias"}),
    "a save before the first step": Fault(saved_before_the_first_step, NAMES, ADAM),
    "state of full parameters": Fault(resumed_before, NAMES, resumed),
}
REPAIRED = {"clipping": (clipping_after, clipping), "adam": (adam_after, ADAM), "resumed": (resumed_after, resumed)}


def _verify_set_ups(rank: int) -> tuple[dict[str, VerifyReport], dict[str, VerifyReport]]:
    faults = {
        name: layerzero.verify(fault.model, make_batch, scheme=fault.set_up, optimizer_fn=fault.optimizer)
        for name, fault in FAULTS.items()
    }
    repaired = {
        name: layerzero.verify(Net, make_batch, scheme=set_up, optimizer_fn=optimizer)
        for name, (set_up, optimizer) in REPAIRED.items()
    }
    return faults, repaired


def test_published_faults_of_fsdp2_are_found_with_the_parameter_and_the_step() -> None:
    faults, repaired = run_ranks(_verify_set_ups, world_size=2)[0]
    for name, report in repaired.items():
        assert report.ok, f"{name}\n{report}"
    for name, fault in FAULTS.items():
        report = faults[name]
        at_once = {row.name for row in report.rows if row.weight > row.tolerance and row.weight_step == 0}
        assert at_once == fault.wrong, f"{name}\n{report}"
        assert min(row.gradient_step for row in report.rows if row.gradient > row.tolerance) == 1, f"{name}\n{report}"
        assert f"first difference: weights after step 0: {min(fault.wrong)!r}" in str(report), f"{name}\n{report}"
        assert "All gradients agree until then" in str(report)


def without_the_root(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    fully_shard(model.first)
    return model, SGD(model.parameters())


def fails_on_rank_1(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    if dist.get_rank() == 1:
        raise KeyError("a mistake of the user")
    return right(model)


def frozen_on_rank_1(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    model.first.bias.requires_grad_(dist.get_rank() != 1)
    return model, SGD(model.parameters())


def sharded_on_rank_1(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    if dist.get_rank() == 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        init_device_mesh("cpu", (2,))
    return model, SGD(model.parameters())


def another_model(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return right(Net())


def no_optimizer(model: nn.Module) -> nn.Module:
    return right(model)[0]


def _verify_without_the_root(rank: int) -> VerifyReport:
    return layerzero.verify(Net, make_batch, scheme=without_the_root, optimizer_fn=SGD)


def test_the_first_gradients_that_differ_are_named() -> None:
    report = run_ranks(_verify_without_the_root, world_size=2)[0]
    assert "first difference: gradients in step 0: 'second.bias', 'second.weight'\n" in str(report), report


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "one rank": ({"scheme": fails_on_rank_1}, "a mistake of the user"),
    "one gradient": (
        {"scheme": frozen_on_rank_1},
        "the unsharded run works, but frozen_on_rank_1 in float32 fails: ValueError: verify, gradients of step 0",
    ),
    "one shard": ({"scheme": sharded_on_rank_1}, "verify, set-up of the model"),
    "another model": ({"scheme": another_model}, "Return a tuple: the model that it was called with, or a wrapper"),
    "no optimizer": ({"scheme": no_optimizer}, "no_optimizer(model) returned FSDPNet("),
    "no optimizer_fn": ({"scheme": right, "optimizer_fn": None}, "Pass optimizer_fn, a function (parameters) -> "),
    "no scheme": ({"scheme": "fsdp"}, "one of ('layerzero', 'fsdp2', 'hsdp', 'ddp'), got 'fsdp'"),
    "units": ({"scheme": "ddp", "units": ["first"]}, "verify does not support units with ddp. Leave it out"),
    "accumulation": ({"scheme": "fsdp2", "accumulation": "full"}, "does not support accumulation with fsdp2"),
    "policy": (
        {"scheme": "hsdp", "mp_policy": layerzero.PrecisionPolicy(torch.bfloat16)},
        "with hsdp. Pass a torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    "unit": ({"scheme": "fsdp2", "units": ["third"]}, "units contains 'third', which this model does not have"),
    "size": (
        {"scheme": "hsdp", "zero3_sizes": [2]},
        "zero3_sizes=[2] is not possible with hsdp: sizes must divide the 2 ranks. Use values from [1]",
    ),
    "size of a function": ({"scheme": right, "zero3_sizes": [2]}, "zero3_sizes has no effect if scheme is a function"),
}


def _message(arguments: dict[str, Any]) -> str:
    try:
        layerzero.verify(Net, make_batch, **{"optimizer_fn": SGD, **arguments})
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def _fail(rank: int) -> dict[str, str]:
    return {name: _message(arguments) for name, (arguments, _) in FAILURES.items()}


def test_failures_are_errors_on_every_rank() -> None:
    for messages in run_ranks(_fail, world_size=2, pg_timeout=20):
        for name, (_, pattern) in FAILURES.items():
            assert pattern in messages[name], f"{name}: {messages[name]}"
