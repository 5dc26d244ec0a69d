"""Report which ranks have not joined a late collective. `failure_report` describes collectives that have failed.

[Note: Detection of absent ranks]
The monitor of waits (waits.py) looks for collectives that are late. A rank with a late collective asks all ranks of the
model, through the store, for their launches, and sends its report to all of them. All ranks of a group launch the same
collectives in the same order. If a rank has launched fewer collectives than the number of the late one, it has not
joined. A rank that does not answer has stopped, has exited, or cannot reach the store. If this rank itself cannot reach
the store, its questions remain unanswered and cannot be canceled. The monitor notices this, because a separate thread
asks them. While no collective is late, no rank sends a request.

[Note: Completion on a device]
With NCCL, the host's `wait` never raises. If a rank is absent, torch's watchdog kills the process when the timeout of
the group expires, without naming the rank. Therefore layerzero starts its watchdog by default on devices.

A collective completes on the device after `wait` returns to the host. The work object of a collective keeps the
collective's outputs alive, so the watchdog stores only weak references to work objects. After `wait`, the watchdog
instead stores an event that it has recorded on the waiting stream. The event keeps no memory alive.

Querying an event or a work object is cheap, but a query from another thread may invalidate a CUDA graph while it is
being captured. Therefore the monitor's threads query a launch only if the launch is older than the limit, or if
another rank asks because it waits. Otherwise the thread that launches collectives removes the oldest completed launches
once more than `_MOST` entries exist. The results of queries only decide which entries are removed; they do not affect
launches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from layerzero.comm.collectives import LaunchedCollective, PendingCollective
from layerzero.comm.failure_report import format_ranks
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.observers import StepObserver
from layerzero.comm.waits import Answers, ModelState, WaitMonitor, has_joined
from layerzero.device.accelerator import device_module
from layerzero.utils.torch_compat import default_store

_LOG = logging.getLogger("layerzero")
_MOST = 1024  # number of recorded launches above which the oldest are queried


def default_limit(timeout: float) -> float:
    """Return the limit of the default watchdog, in seconds.

    The report appears at most 5 s after the limit has passed. The limit is half the timeout, so the report appears well
    before torch ends the process. A step rarely takes 5 minutes, so a longer limit would only delay the report.

    Args:
        timeout: timeout of the process group, in seconds.
    """
    return min(timeout / 2, 300.0)


@dataclass(frozen=True)
class Scope:
    """Namespace of the keys that one watchdog uses in the store.

    Attributes:
        prefix: prefix of the keys.
        ranks: global ranks of the model.
        number: number of watchdogs created for these ranks so far, which distinguishes models on the same ranks.
    """

    prefix: str
    ranks: tuple[int, ...]
    number: int


def new_scope(ranks: tuple[int, ...]) -> Scope:
    """Return the scope of a new watchdog. All `ranks` must call this function, in the same order."""
    prefix = f"layerzero/late/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    number = default_store().add(f"{prefix}/turn/{dist.get_rank()}", 1)
    return Scope(f"{prefix}/{number}", ranks, number)


class Launch:
    """Launched collective, tracked until it completes. See [Note: Completion on a device]."""

    __slots__ = ("_mark", "_module", "_over", "_works", "launched", "since", "step")

    def __init__(self, works: PendingCollective, step: int, module: Any) -> None:
        self.launched = works.launched
        self.step = step
        self.since = time.monotonic()
        self._works = weakref.ref(works)
        self._module = None if self.launched.communicator.is_gloo else module  # gloo's wait returns after completion
        self._mark: Any = None
        self._over = False

    @property
    def age(self) -> float:
        """Number of seconds since the launch."""
        return time.monotonic() - self.since

    @property
    def on_device(self) -> bool:
        return self._module is not None

    def record_wait_end(self) -> None:
        """Record that the wait for the collective has returned or failed."""
        if self._module is None:
            self._over = True
        elif self._mark is None:
            self._mark = self._module.current_stream().record_event()

    def is_over(self, *, query: bool) -> bool:
        """Return whether the collective is known to be over. Query the device only if `query` is True."""
        works = self._works()  # read first, because `record_wait_end` sets the mark before the works are dropped
        if self._over:
            return True
        if self._mark is None:
            return works is None or (query and works.done())  # None: dropped without a wait
        self._over = query and bool(self._mark.query())
        return self._over


class Watchdog(StepObserver):
    """Watchdog for late collectives of one model. Started by :func:`layerzero.watchdog` or by ``shard_model``.

    Attributes:
        limit: number of seconds after its launch at which an incomplete collective counts as late.
        is_default: True if ``shard_model`` has started the watchdog.
        reports: lines that the watchdog of this rank has logged.
        scope: prefix of the keys in the store.
    """

    def __init__(self, mesh_info: MeshInfo, scope: Scope, limit: float, *, is_default: bool = False) -> None:
        self.limit, self.is_default = limit, is_default
        self.reports: list[str] = []
        self.scope, self._ranks = scope.prefix, scope.ranks
        self._counters, self._module = mesh_info.counters, device_module(mesh_info.device)
        self._rank = dist.get_rank()
        self._removal_lock = threading.Lock()  # held while entries are removed from `_in_flight`
        self._in_flight: deque[Launch] = deque()  # in launch order
        self._last: Launch | None = None
        self._steps = 0
        self._counted: weakref.ref[Optimizer] | None = None  # optimizer whose steps are counted: the first that steps
        self._started = time.monotonic()
        self._incident = 0  # number of the next report, which is the same on all ranks
        self._reported: Launch | None = None  # late launch at the time of the last report
        self._counters.watchdog = self

    def close(self) -> None:
        """Stop the watchdog. It also ends when the model is garbage collected."""
        if self._counters.watchdog is self:
            self._counters.watchdog = None
        self._counters.observers.remove(self)
        self._in_flight.clear()

    def after_update(self, optimizer: Optimizer) -> None:
        """Count the steps of one of the model's optimizers as steps of the model."""
        if self._counted is None or self._counted() is None:
            self._counted = weakref.ref(optimizer)
        self._steps += self._counted() is optimizer

    def launched(self, works: PendingCollective) -> None:
        """Record that a collective has been launched.

        This method is called for each collective, so it usually takes no lock and does not query the device.
        """
        self._last = launch = works.records[self] = Launch(works, self._steps, self._module)
        self._in_flight.append(launch)
        if len(self._in_flight) > _MOST and self._removal_lock.acquire(blocking=False):
            try:
                while len(self._in_flight) > _MOST and self._in_flight[0].is_over(query=True):
                    self._in_flight.popleft()
            finally:
                self._removal_lock.release()

    def done(self, works: PendingCollective) -> None:
        if (launch := works.records.get(self)) is not None:  # None: it was launched before this watchdog started
            launch.record_wait_end()

    def _oldest_pending(self, *, older_than: float) -> Launch | None:
        """Return the oldest launch that is not over, or None. Query only launches older than `older_than` seconds."""
        with self._removal_lock:
            while self._in_flight:
                oldest = self._in_flight[0]
                if not oldest.is_over(query=oldest.age > older_than):
                    return oldest
                self._in_flight.popleft()
        return None

    def late_on_device(self, seconds: float) -> LaunchedCollective | None:
        """Return the oldest collective on the device if it has been pending for `seconds`, otherwise None."""
        self._oldest_pending(older_than=seconds)  # removes completed launches
        late = (each for each in self._in_flight.copy() if each.age > seconds)
        return next((each.launched for each in late if each.on_device and not each.is_over(query=True)), None)

    # Reports. The threads of the monitor call these methods.

    def unreported(self) -> Launch | None:
        """Return a late collective that no report has followed yet, or None if there is none."""
        launch = self._oldest_pending(older_than=self.limit)
        return launch if launch is not None and launch.age > self.limit and launch is not self._reported else None

    def state(self) -> ModelState:
        """Return the state of the model on this rank."""
        launch, last = self._oldest_pending(older_than=0), self._last
        return ModelState(
            step=self._steps,
            last="nothing" if last is None else last.launched.status.doing,
            ago=time.monotonic() - (self._started if last is None else last.since),
            late=None if launch is None else launch.launched.state(),
            seconds=0.0 if launch is None else launch.age,
        )

    def report(self, monitor: WaitMonitor) -> None:
        """Ask all ranks of the model for their states, and send a report to all of them, as the first rank to do so."""
        alarm = f"{self.scope}/alarm/{self._incident}"
        if monitor.connection.add(alarm, 1) > 1:
            return  # another rank reports
        description, seconds = _describe_late_ranks(monitor.ask(self._ranks), self.scope, self.limit)
        if not description:  # the collective has completed in the meantime
            monitor.connection.delete_key(alarm)
            return
        message = json.dumps([self._incident, f"layerzero: late by {seconds:.1f} s: {description}"])
        for rank in self._ranks:
            if rank != self._rank:
                monitor.deliver(rank, f"{self.scope}/report/{rank}", message)
        self.accept(message)

    def accept(self, message: str) -> None:
        """Log the report of a rank."""
        incident, text = json.loads(message)
        self._incident = incident + 1
        self._log(text, self._oldest_pending(older_than=self.limit / 2))

    def report_silence(self, launch: Launch, seconds: float) -> None:
        """Log that the store has not answered for `seconds` while `launch` is late."""
        self._log(
            f"layerzero: late by {launch.age:.1f} s: {launch.launched.status.doing}, step {launch.step}, is pending on "
            f"rank {self._rank}: the store has not answered for {seconds:.1f} s. The machine that serves it (of rank 0 "
            "or of the launcher) has stopped, or this machine cannot reach it",
            launch,
        )

    def _log(self, text: str, launch: Launch | None) -> None:
        self._reported = launch
        self.reports.append(text)
        _LOG.error("%s", text)


def _describe_late_ranks(answers: Answers, scope: str, limit: float) -> tuple[str, float]:
    """Return a sentence that names the waiting and the missing ranks, and the longest wait in seconds."""
    states = {rank: answer.models[scope] for rank, answer in answers.items() if scope in answer.models}
    waits: dict[tuple[str, int], list[int]] = {}  # waiting ranks, by (collective, step)
    missing: dict[tuple[str, int], dict[int, None]] = {}
    longest_wait = 0.0
    for rank, state in states.items():
        if state.late is None or state.seconds <= limit / 2:
            continue
        longest_wait = max(longest_wait, state.seconds)
        key = state.late.doing, state.step
        waits.setdefault(key, []).append(rank)
        absent = (each for each in state.late.ranks if each not in states or not has_joined(state.late, answers[each]))
        missing.setdefault(key, {}).update(dict.fromkeys(absent))
    sentences = []
    for (collective, step), waiting in waits.items():
        cause = (
            "; ".join(_describe_rank(rank, states) for rank in missing[collective, step])
            or "all of its ranks have joined: the link is slow, or one of their devices"
        )
        sentences.append(f"{collective}, step {step}, is pending on {format_ranks(waiting)}: {cause}")
    return " | ".join(sentences), longest_wait


def _describe_rank(rank: int, states: Mapping[int, ModelState]) -> str:
    if rank not in states:
        return f"rank {rank} has not joined and does not answer: it has stopped, has died, or cannot reach the store"
    state = states[rank]
    if state.late is not None:
        return f"rank {rank} has not joined: it waits in {state.late.doing}, step {state.step}"
    return (
        f"rank {rank} has not joined, and waits in no collective: at step {state.step}, {round(state.ago)} s ago, it "
        f"launched {state.last}"
    )
