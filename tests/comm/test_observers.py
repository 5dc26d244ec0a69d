"""Observers are told of the events of a step, in the order in which they were attached."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

import layerzero
from layerzero.extend import PendingCollective, StepObserver, attach
from tests.support.models import IntegerNet, exact_sgd, integer_batch, integer_loss, integer_net, train
from tests.support.ranks import mesh_of, on_ranks, run_ranks


class Log(StepObserver):
    """Observer that writes each event to a list, which several observers may share."""

    hears_parts = True

    def __init__(self, events: list[Any], name: str = "", *, vetoes: bool = False) -> None:
        self.events, self.name, self.vetoes = events, name, vetoes

    def launched(self, works: PendingCollective) -> None:
        self.events.append(("launched", works.launched.collective.value, works.launched.name))
        works.records[self] = len(self.events)

    def done(self, works: PendingCollective) -> None:
        assert works.records.get(self, 0) <= len(self.events)
        self.events.append(("done", works.launched.collective.value, works.launched.name))

    def begun(self, phase: str, name: str) -> None:
        self.events.append(("begun", phase, name))

    def ended(self, phase: str, name: str) -> None:
        self.events.append(("ended", phase, name))

    def gradients_final(self, optimizer: Optimizer) -> None:
        self.events.append(("gradients final", self.name))

    def before_update(self, optimizer: Optimizer) -> bool:
        self.events.append(("before update", self.name))
        return not self.vetoes

    def after_update(self, optimizer: Optimizer) -> None:
        self.events.append(("after update", self.name))

    def refreshed(self, names: Any) -> None:
        self.events.append(("refreshed", *names))

    def kept_bytes(self) -> dict[str, int]:
        return {"log": 8}

    def close(self) -> None:
        self.events.append(("closed", self.name))


def _model(zero3_size: int = 2) -> nn.Module:
    return layerzero.shard_model(
        integer_net(), mesh=mesh_of(zero3_size), units=IntegerNet.UNITS, shared_memory="off", prefetch=0
    )


def _sees_a_step(rank: int) -> list[Any]:
    model = _model()
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    train(model, optimizer, rank, [0])
    log = attach(model, Log([]))
    train(model, optimizer, rank, [0])
    return log.events


def test_an_observer_is_told_of_a_step() -> None:
    events, other = run_ranks(_sees_a_step, world_size=4)[:2]
    launched = [sorted(each for each in log if each[0] == "launched") for log in (events, other)]
    assert launched[0] == launched[1], "threads of the engine also launch"
    unit = IntegerNet.UNITS[0]
    order = [
        ("launched", "gather", unit),
        ("done", "gather", unit),
        ("begun", "forward", unit),
        ("ended", "forward", unit),
        ("begun", "backward", unit),
        ("launched", "hop1", unit),
        ("launched", "hop2", unit),
        ("gradients final", ""),
        ("before update", ""),
        ("begun", "update", "optimizer"),
        ("launched", "refresh", unit),
        ("ended", "update", "optimizer"),
        ("after update", ""),
    ]
    places = [events.index(each) for each in order]
    assert places == sorted(places), [each for each in events if each[-1] in (unit, "optimizer", "")]
    assert [each for each in events if each[0] == "refreshed"]


@on_ranks(world_size=2)
def test_observers_are_called_in_order_and_one_may_veto_a_step(rank: int) -> None:
    model, events = _model(), []
    _, veto, last = (attach(model, Log(events, name, vetoes=name == "veto")) for name in ("one", "veto", "other"))
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    integer_loss(model, integer_batch(rank=rank)).backward()
    before = {name: each.full_tensor().clone() for name, each in model.named_parameters()}

    def told() -> list[Any]:
        return [each for each in events if each[-1] in ("one", "veto", "other")]

    optimizer.step()
    names = ("one", "veto", "other")
    assert told() == [*(("gradients final", name) for name in names), *(("before update", n) for n in names[:2])]
    assert all((each.full_tensor() == before[name]).all() for name, each in model.named_parameters()), "vetoed"
    veto.detach()
    events.clear()
    optimizer.step()
    events_of = ("gradients final", "before update", "after update")
    assert told() == [(event, name) for event in events_of for name in ("one", "other")]
    assert layerzero.memory(model).measured["log"] == 16
    events.clear()
    layerzero.close(model)
    assert told() == [("closed", "other"), ("closed", "one")]
    last.detach()


class _Fails(StepObserver):
    def after_update(self, optimizer: Optimizer) -> None:
        raise LookupError("from an observer")


@on_ranks(world_size=2)
def test_errors_of_observers_are_raised_and_observers_end_with_the_model(rank: int) -> None:
    model = _model()
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    failing = attach(model, _Fails())
    with pytest.raises(LookupError, match="from an observer"):
        train(model, optimizer, rank, [0])
    failing.detach()
    train(model, optimizer, rank, [0])
    freed, seen = weakref.ref(model), weakref.ref(attach(model, Log([])))
    gc.disable()  # the model and its observers are freed without the garbage collector
    try:
        del model, optimizer, failing
        assert freed() is None and seen() is None
    finally:
        gc.enable()
