"""Report which ranks have not joined a late collective. `failure_report` describes collectives that have failed.

[Note: Detection of absent ranks]
All ranks of a group launch the same collectives in the same order, and each rank counts its launches. If the count of a
rank is less than the number of the late collective, the rank has not joined the collective. A rank that waits in a
collective cannot answer, so each rank has a thread that answers. The thread periodically reads a number in the store. A
rank with a late collective increments this number, and then each rank publishes its state. A rank that does not answer
has stopped, has exited, or cannot reach the store. If this rank itself cannot reach the store, its request remains
unanswered and cannot be canceled. Therefore a second thread measures the duration of requests.

[Note: Completion on a device]
With NCCL, the host's `wait` never raises. If a rank is absent, torch's watchdog kills the process when the timeout of
the group expires, without naming the rank. Therefore layerzero starts its watchdog by default on devices.

A collective completes on the device after `wait` returns to the host. The work object of a collective keeps the
collective's outputs alive, so the watchdog stores only weak references to work objects. After `wait`, the watchdog
instead stores an event that it has recorded on the waiting stream. The event keeps no memory alive.

Querying an event or a work object is cheap, but a query from another thread may invalidate a CUDA graph while it is
being captured. Therefore the watchdog's thread queries a launch only if the launch is older than the limit, or if
another rank reports a late collective. Otherwise the thread that launches collectives removes the oldest completed
launches once more than `_MOST` entries exist. The results of queries only decide which entries are removed; they do
not affect launches.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.optim import Optimizer

from layerzero.comm.collectives import LaunchedCollective, PendingCollective
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.observers import StepObserver
from layerzero.comm.process_groups import launch_counts
from layerzero.comm.traffic_counters import display_name
from layerzero.device.accelerator import CurrentStream

__all__ = ["Scope", "Watchdog", "default_limit", "new_scope"]

_T = TypeVar("_T")
_LOG = logging.getLogger("layerzero")
_SILENT = 3.5  # seconds after which the store counts as not answering
_MOST = 1024  # number of recorded launches above which the oldest are queried
_SCOPE = "layerzero/late"


def default_limit(timeout: float) -> float:
    """Return the limit of the default watchdog, in seconds.

    The report appears at most 5 s, or a tenth of the limit if that is longer, after the limit has passed. The limit is
    half the timeout, so the report appears well before torch ends the process. A step rarely takes 5 minutes, so a
    longer limit would only delay the report.

    Args:
        timeout: timeout of the process group, in seconds.
    """
    return min(timeout / 2, 300.0)


def _request_period(limit: float) -> float:
    """Return the time between two requests to the store, in seconds.

    One process serves the store to all ranks, so requests are less frequent if the limit is long.
    """
    return min(limit / 4, max(1.0, limit / 30), 10.0)


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
    prefix = f"{_SCOPE}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    number = _get_default_store().add(f"{prefix}/turn/{dist.get_rank()}", 1)
    return Scope(f"{prefix}/{number}", ranks, number)


class Launch:
    """Launched collective, tracked until it completes. See [Note: Completion on a device]."""

    __slots__ = (
        "_mark",
        "_order",
        "_over",
        "_works",
        "collective",
        "group",
        "launched",
        "name",
        "number",
        "ranks",
        "since",
        "step",
    )

    def __init__(self, works: PendingCollective, step: int, order: CurrentStream | None) -> None:
        launched, group = works.launched, works.launched.communicator.held_group
        self.collective, self.name = launched.collective, launched.name
        self.group, self.ranks = group.name, group.ranks
        self.number = launched.number
        self.launched = launched
        self.step = step
        self.since = time.monotonic()
        self._works = weakref.ref(works)
        self._order = None if launched.communicator.is_gloo else order  # gloo's wait returns after completion
        self._mark: Any = None
        self._over = False

    @property
    def doing(self) -> str:
        """Name of the collective, for messages."""
        return display_name(self.collective, self.name)

    @property
    def on_device(self) -> bool:
        return self._order is not None

    @property
    def wait_has_ended(self) -> bool:
        """True if the host's wait for the collective has returned."""
        return self._over or self._mark is not None

    @property
    def is_over(self) -> bool:
        """True if the collective is known to be over. The property does not query the device."""
        works = self._works()  # read first, because `record_wait_end` sets the mark before the works are dropped
        return self._over or (works is None and self._mark is None)  # dropped without a wait

    def record_wait_end(self) -> None:
        """Record that the wait for the collective has returned or failed."""
        if self._order is None:
            self._over = True
        elif self._mark is None:
            self._mark = self._order.record_event()

    def query_is_over(self) -> bool:
        """Return whether the collective is over, and query the device if necessary."""
        works = self._works()
        if not self._over:
            self._over = bool(self._mark.query()) if self._mark is not None else works is None or works.done()
        return self._over


@dataclass(frozen=True)
class _Answer:
    """State of a rank, which the rank publishes when a collective is late."""

    counts: Mapping[str, int]  # number of launches, by group
    step: int
    last: str  # name of the rank's last launch
    ago: float  # seconds since that launch
    late: tuple[str, str, int, tuple[int, ...], float] | None  # doing, group, number, ranks, seconds

    @classmethod
    def of(cls, entry: dict[str, Any]) -> _Answer:
        late = entry["late"]
        return cls(**entry | {"late": None if late is None else (*late[:3], tuple(late[3]), late[4])})


class Watchdog(StepObserver):
    """Watchdog for late collectives of one model. Started by :func:`layerzero.watchdog` or by ``shard_model``.

    Attributes:
        limit: number of seconds after its launch at which an incomplete collective counts as late.
        is_default: True if ``shard_model`` has started the watchdog.
        reports: lines that the watchdog of this rank has logged.
    """

    def __init__(
        self, mesh_info: MeshInfo, scope: Scope, limit: float, *, owner: object, is_default: bool = False
    ) -> None:
        self.limit, self.is_default = limit, is_default
        self.reports: list[str] = []
        self._period = _request_period(limit)
        self._counters, self._order = mesh_info.counters, CurrentStream.of(mesh_info.device)
        self._rank, self._ranks = dist.get_rank(), scope.ranks
        self._world = weakref.ref(dist.group.WORLD)
        # A separate connection, because a pending request on the default connection blocks other threads.
        self._store: Store = _get_default_store().clone()  # type: ignore[attr-defined]
        self._scope = scope.prefix
        self._alarms = self._reported = self._store.add(f"{self._scope}/alarms", 0)
        self._last_report = ""  # text of the last report
        self._raised: set[tuple[str, int]] = set()  # (group, number) of the late collectives that raised an alarm
        self._removal_lock = threading.Lock()  # held while entries are removed from `_in_flight`
        self._in_flight: deque[Launch] = deque()  # in launch order
        self._last: Launch | None = None
        self._steps = 0
        self._counted: weakref.ref[Optimizer] | None = None  # optimizer whose steps are counted: the first that steps
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._request_started: float | None = None  # start time of the pending request to the store
        # (group, number) of the late collectives that were reported while the store did not answer
        self._reported_silences: set[tuple[str, int]] = set()
        self._threads = [
            threading.Thread(target=target, name="layerzero watchdog", daemon=True)
            for target in (self._watch, self._monitor_store)
        ]
        self._counters.watchdog = self
        for thread in self._threads:
            thread.start()
        # The watchdog ends with the model. The watchdog's threads hold this object, so it must not hold the model.
        self._finalizer = weakref.finalize(owner, self._stop)
        self._finalizer.atexit = False
        _RUNNING.add(self)

    def close(self) -> None:
        """Stop the watchdog. It also stops when the model is garbage collected."""
        self._finalizer()
        for thread in self._threads:
            thread.join(_SILENT)  # a thread may wait for a store that does not answer

    def _stop(self) -> None:
        self._counters.watchdog = None
        self._counters.observers.remove(self)
        self._ended.set()
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
        self._last = launch = works.records[self] = Launch(works, self._steps, self._order)
        self._in_flight.append(launch)
        if len(self._in_flight) > _MOST and self._removal_lock.acquire(blocking=False):
            try:
                while (
                    len(self._in_flight) > _MOST
                    and self._in_flight[0].wait_has_ended
                    and self._in_flight[0].query_is_over()
                ):
                    self._in_flight.popleft()
            finally:
                self._removal_lock.release()

    def done(self, works: PendingCollective) -> None:
        if (launch := works.records.get(self)) is not None:  # None: it was launched before this watchdog started
            launch.record_wait_end()

    def _watch(self) -> None:
        try:
            while not self._ended.wait(self._period) and self._has_world():
                self._check_and_report()
        except (dist.DistNetworkError, dist.DistStoreError):  # the process that served the store exited
            pass
        except Exception:
            _LOG.exception("layerzero: the watchdog of rank %d has failed and has stopped", self._rank)
        finally:
            self._ended.set()  # also ends the other thread
            self._delete_store_keys()
            del self._store  # closes the connection

    def _has_world(self) -> bool:
        """Return whether the default process group from the start of the watchdog still exists."""
        world = self._world()
        return world is not None and dist.group.WORLD is world

    def _delete_store_keys(self) -> None:
        """Delete this rank's keys from the store. The last watchdog that stops also deletes the shared keys."""
        try:
            self._store.delete_key(f"{self._scope}/{self._rank}")
            if self._store.add(f"{self._scope}/ended", 1) == len(self._ranks):
                for key in ("alarms", "ended"):
                    self._store.delete_key(f"{self._scope}/{key}")
        except RuntimeError:  # the process that served the store exited, or the store cannot delete keys
            pass

    def _monitor_store(self) -> None:
        """Report late collectives while the store does not answer. This is the loop of the second thread."""
        while not self._ended.wait(self._period):
            asking_since = self._request_started
            silence = 0.0 if asking_since is None else time.monotonic() - asking_since
            launch = self._oldest_pending(older_than=self.limit) if silence > _SILENT else None
            if launch is None or time.monotonic() - launch.since <= self.limit:
                continue
            if (launch.group, launch.number) in self._reported_silences:
                continue
            self._reported_silences.add((launch.group, launch.number))
            self._log_report(
                f"{launch.doing}, step {launch.step}, is pending on rank {self._rank}: the store has not answered for "
                f"{silence:.1f} s. The machine that serves it (of rank 0 or of the launcher) has stopped, or this "
                "machine cannot reach it",
                time.monotonic() - launch.since,
            )

    def _check_and_report(self) -> None:
        launch = self._oldest_pending(older_than=self.limit)
        if (
            launch is not None
            and time.monotonic() - launch.since > self.limit
            and (launch.group, launch.number) not in self._raised
        ):
            self._raised.add((launch.group, launch.number))
            self._request(lambda: self._store.add(f"{self._scope}/alarms", 1))
        if self._answer_new_alarm():
            deadline = time.monotonic() + self._period + 1  # by then, all ranks have read the alarm
            while time.monotonic() < deadline and not self._ended.wait(0.25):
                self._answer_new_alarm()  # other ranks may raise alarms meanwhile
            self._report()
            self._reported = self._alarms

    def _request(self, question: Callable[[], _T]) -> _T:
        """Send a request to the store and return the answer. Record the start time while the request is pending."""
        self._request_started = time.monotonic()
        try:
            return question()
        finally:
            self._request_started = None

    def _answer_new_alarm(self) -> bool:
        alarms: int = self._request(lambda: self._store.add(f"{self._scope}/alarms", 0))
        is_new: bool = alarms > self._alarms
        if is_new:
            self._alarms = alarms
            answer = {"alarm": alarms, **asdict(self._answer(self._oldest_pending(older_than=0)))}
            self._request(lambda: self._store.set(f"{self._scope}/{self._rank}", json.dumps(answer)))
        return is_new

    def _oldest_pending(self, *, older_than: float) -> Launch | None:
        """Return the oldest launch that is not over, or None. Query only launches older than `older_than` seconds."""
        with self._removal_lock:
            while self._in_flight:
                oldest = self._in_flight[0]
                is_old = time.monotonic() - oldest.since > older_than
                if not (oldest.query_is_over() if is_old else oldest.is_over):
                    return oldest
                self._in_flight.popleft()
        return None

    def late_on_device(self, seconds: float) -> LaunchedCollective | None:
        """Return the oldest collective on the device if it has been pending for `seconds`, otherwise None."""
        self._oldest_pending(older_than=seconds)  # removes completed launches
        late = (each for each in self._in_flight.copy() if time.monotonic() - each.since > seconds)
        return next((each.launched for each in late if each.on_device and not each.query_is_over()), None)

    def _answer(self, launch: Launch | None) -> _Answer:
        now, last = time.monotonic(), self._last
        entry = (
            None if launch is None else (launch.doing, launch.group, launch.number, launch.ranks, now - launch.since)
        )
        if last is None:
            return _Answer(launch_counts(), self._steps, "nothing", now - self._started, entry)
        return _Answer(launch_counts(), self._steps, last.doing, now - last.since, entry)

    def _report(self) -> None:
        answers: dict[int, _Answer] = {}

        def check(keys: Sequence[str]) -> bool:
            return self._request(lambda: self._store.check(list(keys)))

        keys = existing_keys(check, [f"{self._scope}/{rank}" for rank in self._ranks])
        texts = self._request(lambda: self._store.multi_get(keys)) if keys else ()
        for key, text in zip(keys, texts, strict=True):
            entry: dict[str, Any] = json.loads(text)
            if entry.pop("alarm") > self._reported:  # otherwise it belongs to an earlier incident
                answers[int(key.rpartition("/")[2])] = _Answer.of(entry)
        description, longest_wait = _describe_late_ranks(answers, self.limit)
        if description and description != self._last_report:
            self._log_report(description, longest_wait)

    def _log_report(self, description: str, longest_wait: float) -> None:
        self._last_report = description
        self.reports.append(f"layerzero: late by {longest_wait:.1f} s: {description}")
        _LOG.error("%s", self.reports[-1])


def existing_keys(check: Callable[[Sequence[str]], bool], keys: Sequence[str]) -> list[str]:
    """Return the keys that exist in a store, with few requests to the store if few keys are missing.

    Args:
        check: function that returns whether the store has all keys in a sequence.
    """
    if not keys or check(keys):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return existing_keys(check, keys[:half]) + existing_keys(check, keys[half:])


def _describe_late_ranks(answers: Mapping[int, _Answer], limit: float) -> tuple[str, float]:
    """Return a sentence that names the waiting and the missing ranks, and the longest wait in seconds."""
    waits: dict[tuple[str, int], list[int]] = {}  # waiting ranks, by (collective, step)
    missing: dict[tuple[str, int], dict[int, None]] = {}
    longest_wait = 0.0
    for rank, answer in answers.items():
        if answer.late is None or answer.late[4] <= limit / 2:
            continue
        collective, group, number, members, seconds = answer.late
        longest_wait = max(longest_wait, seconds)
        waits.setdefault((collective, answer.step), []).append(rank)
        missing_ranks = missing.setdefault((collective, answer.step), {})
        for peer in members:
            if peer not in answers or answers[peer].counts.get(group, 0) < number:
                missing_ranks[peer] = None
    sentences = []
    for (collective, step), waiting in waits.items():
        missing_ranks = missing[collective, step]
        cause = (
            "; ".join(_describe_rank(rank, answers.get(rank)) for rank in missing_ranks)
            or "all of its ranks have joined: the link is slow, or one of their devices"
        )
        sentences.append(
            f"{collective}, step {step}, is pending on rank{'s' * (len(waiting) > 1)} {_rank_numbers(waiting)}: {cause}"
        )
    return " | ".join(sentences), longest_wait


def _describe_rank(rank: int, answer: _Answer | None) -> str:
    if answer is None:
        return f"rank {rank} has not joined and does not answer: it has stopped, has died, or cannot reach the store"
    if answer.late is not None:
        return f"rank {rank} has not joined: it waits in {answer.late[0]}, step {answer.step}"
    return (
        f"rank {rank} has not joined, and waits in no collective: at step {answer.step}, {round(answer.ago)} s ago, it "
        f"launched {answer.last}"
    )


def _rank_numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


_RUNNING: weakref.WeakSet[Watchdog] = weakref.WeakSet()  # their threads hold them


@atexit.register
def _end_watchdogs() -> None:
    for watchdog in list(_RUNNING):  # at the exit of the process, no thread may be inside the store
        watchdog.close()
