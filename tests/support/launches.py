"""Observer that keeps what a model launches."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from layerzero.extend import PendingCollective, StepObserver, attach


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


def by_communicator(launches: Launches) -> dict[str, list[tuple[str, str]]]:
    """Return collective and unit of each launch, by communicator."""
    log: dict[str, list[tuple[str, str]]] = {}
    for event in launches.events:
        if event.kind == "launched":
            log.setdefault(event.communicator, []).append((event.collective, event.name))
    return log
