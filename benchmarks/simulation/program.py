"""Define programs for the simulator. A program lists the operations that one rank's host executes in a run.

[Note: Machine-dependent times]
When the parts of a reduction are added, when hop 2 is launched, and how long the host waits for either hop, depends on
the machine. The simulator computes these times by the rules in ``engine/reduction_queue.py``. :class:`StartReduction`
starts a reduction, which then proceeds without the host. :class:`WaitReductions` waits for all reductions.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ComputeKey",
    "Operation",
    "SimCollective",
    "SimCompute",
    "SimLaunch",
    "SimWait",
    "StartReduction",
    "StepEnd",
    "WaitReductions",
]


ComputeKey = tuple[str, str]  # phase and unit


@dataclass(frozen=True)
class SimCollective:
    kind: str  # "gather", "hop1", "hop2", "refresh", "metadata", ...
    unit: str
    axis: str  # "zero3", "replica" or "control"
    comm: str  # name of the communicator; its collectives run one after the other
    ranks: int
    bytes: float  # number of bytes that this rank sends
    coding: float = 0.0  # processor time in seconds in which this rank encodes and decodes messages


@dataclass(frozen=True)
class SimCompute:
    """Computation that the rank performs."""

    seconds: float
    what: ComputeKey = ("", "")  # phase and unit, such as ("forward", "blocks.0")
    span: int = 0  # index of the forward pass, backward pass, ... in the program


@dataclass(frozen=True)
class SimLaunch:
    collective: SimCollective
    number: int


@dataclass(frozen=True)
class SimWait:
    number: int


@dataclass(frozen=True)
class StartReduction:
    """Start of a reduction. In the reduction, an addition follows each collective.

    See [Note: Machine-dependent times].
    """

    collectives: tuple[SimCollective, ...]
    additions: tuple[SimCompute, ...]


@dataclass(frozen=True)
class WaitReductions:
    pass


@dataclass(frozen=True)
class StepEnd:
    """End of the optimizer's update."""


Operation = SimCompute | SimLaunch | SimWait | StartReduction | WaitReductions | StepEnd
