"""Observer that keeps what a model launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

import layerzero
from layerzero.extend import PendingCollective, StepObserver, attach
from tests.support.models import exact_sgd, full_parameters, integer_batch, integer_loss


class Event(NamedTuple):
    """Event of a step. `kind` is "launched", "done", "begun" or "ended"; a part of a step has a phase."""

    kind: str
    name: str  # of the unit, or "optimizer"
    collective: str = ""
    communicator: str = ""
    phase: str = ""
    sent: int = 0


class Launches(StepObserver):
    """Observer that keeps all events, in the order in which it is told of them."""

    hears_parts = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def launched(self, works: PendingCollective) -> None:
        self._keep("launched", works)

    def done(self, works: PendingCollective) -> None:
        self._keep("done", works)

    def begun(self, phase: str, name: str) -> None:
        self.events.append(Event("begun", name, phase=phase))

    def ended(self, phase: str, name: str) -> None:
        self.events.append(Event("ended", name, phase=phase))

    def _keep(self, kind: str, works: PendingCollective) -> None:
        of = works.launched
        self.events.append(Event(kind, of.name, of.collective.value, of.communicator.name, sent=of.sent))

    @property
    def names(self) -> list[str]:
        """Collectives and units, such as ``gather blocks.0``, in the order of their launches."""
        return [f"{event.collective} {event.name}" for event in self.events if event.kind == "launched"]


def launches_of(model: nn.Module) -> Launches:
    return attach(model, Launches())


def three_steps(
    model: nn.Module, rank: int, around: Callable[[int], AbstractContextManager[Any]] = nullcontext
) -> tuple[list[str], dict[str, Tensor]]:
    """Return the launches of this rank in three steps of two micro-batches, each inside `around`, and the weights."""
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    launches = launches_of(model)
    for step in range(3):
        with around(step):
            for number in range(2):
                with layerzero.no_sync(model) if number == 0 and step else nullcontext():
                    integer_loss(model, integer_batch(step=step, micro_batch=number, rank=rank)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 0)
    names = launches.names
    return names, full_parameters(model)


def by_communicator(launches: Launches) -> dict[str, list[tuple[str, str]]]:
    """Return collective and unit of each launch, by communicator."""
    log: dict[str, list[tuple[str, str]]] = {}
    for event in launches.events:
        if event.kind == "launched":
            log.setdefault(event.communicator, []).append((event.collective, event.name))
    return log
