"""Discrete-event simulation of a program on a machine.

Only one rank is simulated, because all ranks run the same program at the same speed. The rank has a processor, a link
inside its node, and a share of its node's link to other nodes. Concurrent users of a resource get equal shares of it.
The collectives of one communicator run one after the other. Each collective first waits for its latency. Then it uses
the links and the processor at the same time. Copies between device and host memory use a separate link.

[Note: Traffic between nodes]
Ranks are numbered consecutively within a node. The data of a ring or hierarchical collective over entire nodes enters
and leaves each node once, regardless of the number of ranks per node. A collective over replicas runs in one replica
group per ZeRO-3 rank. If a ZeRO-3 group fills a node, each replica group has one rank on each node. If a ZeRO-3 group
fills only a part of a node, each replica group has several ranks on each node. All replica groups that have ranks on a
node share the node's link.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.simulation.program import (
    ComputeKey,
    Operation,
    SimCollective,
    SimCompute,
    SimLaunch,
    SimWait,
    StartReduction,
    StepEnd,
    WaitReductions,
)
from layerzero.engine.reduction_queue import IN_FLIGHT

__all__ = ["SimMachine", "SimResult", "SimSpan", "simulate"]

_ALL_REDUCES = ("all-reduce", "scalar_reduce")
_IN_FLIGHT = dict(enumerate(IN_FLIGHT))  # by index of a collective in its reduction; later collectives have no limit


@dataclass(frozen=True)
class SimMachine:
    """Speeds of a simulated machine, in bytes and seconds.

    Attributes:
        node_size: number of ranks per node.
        inside: bandwidth at which a rank sends inside its node, in bytes per second.
        between: bandwidth at which a node sends to other nodes, in bytes per second.
        inside_latency, between_latency: time that one step of a collective takes inside a node and between nodes, in
            seconds.
        steps: number of steps in a collective over n ranks. The value ``"direct"`` means 1 step, ``"log"`` means
            log2(n) steps, and ``"ring"`` means n - 1 steps. An all-reduce takes twice as many steps.
        launch: time that the host needs to launch a collective, in seconds.
        processor_per_byte: processor time that a rank needs per byte that it sends, in seconds. If ranks on a CPU
            communicate over sockets, collectives compete with the model for the cores.
        zero3_size: number of ranks over which the weights are sharded. The value 0 means the number of ranks per node.
        host: speed of a rank's copies between device and host memory, in bytes per second.
    """

    node_size: int
    inside: float
    between: float
    inside_latency: float = 0.0
    between_latency: float = 0.0
    steps: str = "direct"
    launch: float = 0.0
    processor_per_byte: float = 0.0
    zero3_size: int = 0
    host: float = math.inf

    def crosses(self, collective: SimCollective) -> bool:
        """Return whether the collective sends data to other nodes."""
        stride = (self.zero3_size or self.node_size) if collective.axis == "replica" else 1
        return collective.ranks * stride > self.node_size

    def sent_between(self, collective: SimCollective) -> float:
        """Return the number of bytes that a node sends to other nodes when all of its ranks run this collective."""
        if not self.crosses(collective):
            return 0.0
        groups = min(self.zero3_size or self.node_size, self.node_size) if collective.axis == "replica" else 1
        return groups * collective.bytes

    def latency(self, collective: SimCollective) -> float:
        n = collective.ranks
        if collective.axis == "host":
            return 0.0
        steps = {"direct": min(1, n - 1), "log": math.ceil(math.log2(n)), "ring": n - 1}[self.steps]
        passes = 2 if collective.kind in _ALL_REDUCES else 1
        return passes * steps * (self.between_latency if self.crosses(collective) else self.inside_latency)

    def demands(self, collective: SimCollective) -> dict[str, float]:
        """Return the time in seconds for which a collective uses each resource if no other task uses it.

        See [Note: Traffic between nodes].
        """
        if not collective.bytes:
            return {}
        if collective.axis == "host":
            return {"host": collective.bytes / self.host} if math.isfinite(self.host) else {}
        demands = {"processor": collective.bytes * self.processor_per_byte + collective.coding}
        demands["between"] = self.sent_between(collective) / self.between
        is_alone = collective.axis == "replica" and (self.zero3_size or self.node_size) >= self.node_size
        if not (self.crosses(collective) and is_alone):  # skip if no other rank on the node is in the group
            demands["inside"] = collective.bytes / self.inside
        return {resource: seconds for resource, seconds in demands.items() if seconds > 0.0}


class SimSpan(NamedTuple):
    """Time span of a computation or a collective, in seconds since the start of the simulation."""

    what: str  # phase of a computation, "compute" if there is no phase, or kind of a collective
    name: str
    start: float
    end: float


@dataclass
class SimResult:
    seconds: float = 0.0  # time at which the host's program ends
    step_ends: list[float] = field(default_factory=list)
    waits: list[Counter[str]] = field(default_factory=list)  # per step: seconds waited, by kind of collective
    spans: list[SimSpan] = field(default_factory=list)  # ordered by end time
    computed: float = 0.0  # time of all computations in seconds, as if no other task used the processor
    waited: float = 0.0  # time in seconds that the host waited for collectives
    busy: Counter[str] = field(default_factory=Counter)  # by resource: time of use in seconds
    calls: Counter[str] = field(default_factory=Counter)  # by kind of collective: number of launches
    bytes: Counter[str] = field(default_factory=Counter)  # by kind of collective: number of bytes that the rank sent

    @property
    def step(self) -> float:
        """Duration of the last step in seconds, including waits for collectives that the previous step launched."""
        return self.step_ends[-1] - self.step_start

    @property
    def step_start(self) -> float:
        """Time at which the last step began."""
        return self.step_ends[-2] if len(self.step_ends) > 1 else 0.0


def simulate(program: Iterable[Operation], machine: SimMachine) -> SimResult:
    """Simulate a program on a machine. The result is deterministic."""
    host = _Host(machine)
    for operation in program:
        host.run_operation(operation)
    host.outcome.seconds = host.world.now
    return host.outcome


@dataclass(eq=False)
class _SimTask:
    """Simulated task. The task waits for its latency, and then uses several resources at the same time."""

    latency: float
    demands: dict[str, float]
    what: str = "compute"
    name: str = ""
    began: float = 0.0
    then: Callable[[], None] | None = None  # callback for the end of the task
    queue: deque[_SimTask] | None = None  # tasks of the same communicator or thread, if any

    @property
    def done(self) -> bool:
        return not self.latency and not self.demands


class _Simulation:
    """State of a simulation: the virtual time, the active tasks and the queued tasks."""

    def __init__(self, machine: SimMachine, outcome: SimResult) -> None:
        self.now = 0.0
        self._machine = machine
        self._outcome = outcome
        self._active: list[_SimTask] = []
        self._ended: list[_SimTask] = []  # completed tasks that `_finish_done_tasks` has not processed yet
        self._comms: defaultdict[str, deque[_SimTask]] = defaultdict(deque)

    def launch(self, collective: SimCollective, then: Callable[[], None] | None = None) -> _SimTask:
        self._outcome.calls[collective.kind] += 1
        self._outcome.bytes[collective.kind] += collective.bytes  # type: ignore[assignment]
        latency, demands = self._machine.latency(collective), self._machine.demands(collective)
        task = _SimTask(latency, demands, collective.kind, collective.unit, then=then)
        self._queue(collective.comm, task)
        return task

    def compute(self, seconds: float, what: ComputeKey = ("", "")) -> None:
        task = _compute_task(seconds, what)
        self._begin(task)
        self.run_until(lambda: task.done)

    def compute_in_background(self, thread: str, seconds: float, what: ComputeKey, then: Callable[[], None]) -> None:
        """Queue a computation in a background thread, after the thread's earlier computations."""
        task = _compute_task(seconds, what)
        task.then = then
        self._queue(thread, task)

    def _queue(self, comm: str, task: _SimTask) -> None:
        task.queue = self._comms[comm]
        task.queue.append(task)
        if len(task.queue) == 1:
            self._begin(task)
            self._finish_done_tasks()

    def _begin(self, task: _SimTask) -> None:
        task.began = self.now
        (self._ended if task.done else self._active).append(task)

    def run_until(self, done: Callable[[], bool]) -> None:
        self._finish_done_tasks()
        while not done():
            self._advance_time()

    def _advance_time(self) -> None:
        """Advance the time until the next latency has passed or the next demand for a resource is met."""
        users: dict[str, int] = {}
        for task in self._active:
            if not task.latency:
                for resource in task.demands:
                    users[resource] = users.get(resource, 0) + 1
        span = math.inf
        for task in self._active:
            if task.latency:
                span = min(span, task.latency)
            else:
                for resource, seconds in task.demands.items():
                    span = min(span, seconds * users[resource])
        threshold = span * (1 + 1e-12)  # tasks that differ only by rounding end together
        for task in self._active:
            if task.latency:
                task.latency = task.latency - span if task.latency > threshold else 0.0
            else:
                for resource, seconds in list(task.demands.items()):
                    if seconds * users[resource] <= threshold:
                        del task.demands[resource]
                    else:
                        task.demands[resource] = seconds - span / users[resource]
            if task.done:
                self._ended.append(task)
        if self._ended:
            self._active = [task for task in self._active if not task.done]
        for resource in users:
            self._outcome.busy[resource] += span  # type: ignore[assignment]
        self.now += span
        self._finish_done_tasks()

    def _finish_done_tasks(self) -> None:
        """Finish completed tasks, start the next task of each communicator or thread, and run the callbacks."""
        while self._ended:
            ended, self._ended = self._ended, []
            for task in ended:
                if self.now > task.began:
                    self._outcome.spans.append(SimSpan(task.what, task.name, task.began, self.now))
            for task in ended:
                if task.queue is not None:
                    task.queue.popleft()
                    if task.queue:
                        self._begin(task.queue[0])
            for task in ended:
                callback, task.then = task.then, None
                if callback is not None:
                    callback()


def _compute_task(seconds: float, compute_key: ComputeKey) -> _SimTask:
    return _SimTask(
        0.0, {"processor": seconds} if seconds > 0.0 else {}, *(compute_key if any(compute_key) else ("compute", ""))
    )


class _InFlightReduction:
    """Reduction that proceeds without the host; see [Note: Machine-dependent times] in program.py.

    Attributes:
        num_added: number of the reduction's collectives whose addition has finished.
        collectives: collectives in the reduction, in order.
    """

    def __init__(self, reduction: StartReduction, world: _Simulation, launch: float) -> None:
        self.num_added = 0
        self.collectives = reduction.collectives
        self._additions = reduction.additions
        self._world = world
        self._launch = launch
        self._send()

    def _send(self) -> None:
        self._world.launch(self.collectives[self.num_added], self._queue_addition)

    def _queue_addition(self) -> None:
        collective, addition = self.collectives[self.num_added], self._additions[self.num_added]
        last = self.num_added + 1 == len(self.collectives)
        seconds = addition.seconds + (0.0 if last else self._launch)
        self._world.compute_in_background(f"{collective.axis} sums", seconds, addition.what, self._record_addition)

    def _record_addition(self) -> None:
        self.num_added += 1
        if self.num_added < len(self.collectives):
            self._send()


class _Host:
    def __init__(self, machine: SimMachine) -> None:
        self.outcome = SimResult()
        self.world = _Simulation(machine, self.outcome)
        self._machine = machine
        self._tasks: dict[int, _SimTask] = {}
        self._reductions: list[_InFlightReduction] = []
        self._waits: Counter[str] = Counter()

    def run_operation(self, operation: Operation) -> None:
        if isinstance(operation, SimCompute):
            self._compute(operation)
        elif isinstance(operation, SimLaunch):
            self.world.compute(self._machine.launch)
            self._tasks[operation.number] = self.world.launch(operation.collective)
        elif isinstance(operation, SimWait):
            task = self._tasks.pop(operation.number)
            self._wait(lambda: task.done, task.what)
        elif isinstance(operation, StartReduction):
            if operation.collectives[0].kind == "hop2":  # keep the order of launches on the communicator of hop 2
                self._wait_for([each for each in self._reductions_at(0) if each.collectives[0].kind != "hop2"], 0)
            self.world.compute(self._machine.launch)
            self._reductions.append(_InFlightReduction(operation, self.world, self._machine.launch))
            for index in range(len(operation.collectives)):
                self._make_room(index, _IN_FLIGHT.get(index, len(self._reductions)))
        elif isinstance(operation, WaitReductions):
            for index in range(max((len(reduction.collectives) for reduction in self._reductions), default=0)):
                self._make_room(index, 0)
            self._reductions.clear()
        elif isinstance(operation, StepEnd):
            self.outcome.step_ends.append(self.world.now)
            self.outcome.waits.append(self._waits)
            self._waits = Counter()

    def _compute(self, operation: SimCompute) -> None:
        self.outcome.computed += operation.seconds
        self.world.compute(operation.seconds, operation.what)

    def _wait(self, done: Callable[[], bool], kind: str) -> None:
        start = self.world.now
        self.world.run_until(done)
        self.outcome.waited += self.world.now - start
        self._waits[kind] += self.world.now - start  # type: ignore[assignment]

    def _reductions_at(self, index: int) -> list[_InFlightReduction]:
        """Return the reductions, oldest first, that have not added the result of their collective at index `index`."""
        return [each for each in self._reductions if each.num_added <= index < len(each.collectives)]

    def _make_room(self, index: int, limit: int) -> None:
        """Wait until at most `limit` reductions have not added the result of their collective at index `index`.

        When a reduction starts, the limits are `IN_FLIGHT` of engine/reduction_queue.py. To wait for all reductions,
        the limit is 0.
        """
        under_way = self._reductions_at(index)
        self._wait_for(under_way[: max(0, len(under_way) - limit)], index)

    def _wait_for(self, reductions: Iterable[_InFlightReduction], index: int) -> None:
        for each in reductions:
            self._wait(lambda each=each: each.num_added > index, each.collectives[index].kind)  # type: ignore[misc]
