"""Find ranks that wait for each other, and report where a rank is for which others wait.

The watchdog (watchdog.py) uses the same questions and answers for its reports.

[Note: Ranks that wait for each other]
A thread that waits for other ranks records its wait, which costs one entry in a dictionary. A monitor looks at the
recorded waits. Once a wait is `_ASK_AFTER` seconds old, the monitor asks the ranks of the awaited collective, through
the store, for their own waits and for the number of collectives that they have launched on each group. A rank that has
launched fewer collectives than the number of the awaited one is absent from it. The monitor then asks the absent ranks,
and so on. While nothing waits, no rank sends a request: a second thread is blocked in the store until its rank is
asked.

A rank is stuck if all of its threads that launch collectives wait for ranks or for each other. Such a rank continues
only if one of its waits ends. Therefore the ranks of the largest set of stuck ranks in which each wait of each rank
needs an absent rank of the same set can never continue. The monitor finds the set twice, the second time after all
first answers have arrived. If the waits are the same, all of them lasted at the same time, and no launch was missed.
A rank that computes, loads data or writes a file is not stuck, however long it takes.

On a device, the host does not wait for a collective. There, a collective that is pending for `_ASK_AFTER` seconds
counts as a wait. The host launches all collectives in one order, which is the same on all ranks. Therefore ranks that
are absent from each other's collectives have diverged, even if their hosts are running.

A wait inside torch.distributed, such as ``dist.barrier()``, is not recorded. It is found on the Python stack of the
thread, and the group's own count of collectives tells which ranks are absent. gloo cannot abort a collective, so such a
wait ends when the process of another rank ends. Waits of layerzero end within `SLICE`.
"""

from __future__ import annotations

import atexit
import itertools
import json
import linecache
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from layerzero.comm.failure_report import (
    HINT,
    CollectiveError,
    RankStatus,
    format_order,
    format_ranks,
    order_difference,
)
from layerzero.comm.process_groups import Reservation, current_groups, logged_groups
from layerzero.comm.traffic_counters import TrafficCounters
from layerzero.device.streams import StreamThread
from layerzero.utils.torch_compat import TCPStore, default_store, launches_of
from layerzero.utils.torch_compat import current_groups as torch_groups

SLICE = 0.5  # seconds after which a waiting thread looks for a verdict
_ASK_AFTER, _WARN_AFTER = 10.0, 60.0  # seconds
_TICK, _PERIOD = 0.5, 4.0  # seconds between two looks at the recorded waits, and between two questions about a wait
_TO_ANSWER, _POLL, _FOREVER = 3.0, 0.05, timedelta(days=30)
_SILENT = 3.5  # seconds after which the store counts as not answering
_SCOPE = "layerzero/waits"
_SYNCHRONIZING = ("barrier", "all_", "_all_", "reduce_scatter", "_reduce_scatter", "monitored_barrier")
_STANDARD_LIBRARY, _TORCH, _LAYERZERO = (
    str(path) for path in (Path(threading.__file__).parent, Path(torch.__file__).parent, Path(__file__).parents[1])
)
_WAIT_FOR_STREAMS = {StreamThread.run.__code__.co_filename, Reservation.wait.__code__.co_filename}
_LOG = logging.getLogger("layerzero")


@dataclass(frozen=True)
class WaitState:
    """Wait of a thread as other ranks see it.

    Attributes:
        doing: name of the operation, for messages.
        ranks: ranks of the collective. If `group` is empty, the ranks that are absent.
        group: name of the group of the collective.
        number: number of collectives that a rank has launched on the group once it has joined the collective. If
            `group` is empty, number of the wait in its process.
        collective: purpose of the collective.
        gathers: for a gather, names of the last gathered units.
    """

    doing: str
    ranks: Sequence[int]
    group: str = ""
    number: int = 0
    collective: str = ""
    gathers: Sequence[str] = ()


class Wait(Protocol):
    """Recorded wait of a thread for other ranks."""

    @property
    def verdict(self) -> str:
        """Message of the error to raise if the wait cannot end, otherwise an empty string."""

    def state(self, store: Store) -> WaitState:
        """Return the state of the wait."""


@dataclass
class NonCollectiveWait:
    """Wait for ranks that is not a wait for a collective.

    Attributes:
        absent: function that returns the ranks for which this rank waits.
        keys: keys for which the thread waits in the store.
    """

    doing: str
    absent: Callable[[Store], Iterable[int]]
    keys: Sequence[str] = ()
    verdict: str = ""
    number: int = field(default_factory=itertools.count(1).__next__)

    def state(self, store: Store) -> WaitState:
        return WaitState(self.doing, tuple(self.absent(store)), number=self.number)


class WaitCycleError(CollectiveError):
    """Error of a wait that cannot end, because ranks wait for each other."""

    def __init__(self, message: str) -> None:
        super().__init__(message, RankStatus(""), {})


_waits: dict[threading.Thread, waiting | None] = {}  # current wait of each thread that launches collectives


class waiting:
    """Context manager in which the calling thread waits for other ranks. A generator would take three times as long."""

    __slots__ = ("_outer", "_thread", "since", "wait")

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        self.since = time.monotonic()

    def __enter__(self) -> None:
        self._thread = thread = threading.current_thread()
        self._outer = _waits.get(thread)
        _waits[thread] = self

    def __exit__(self, *_: object) -> None:
        _waits[self._thread] = self._outer


def may_wait() -> None:
    """Record that the calling thread launches collectives, so that its rank is not stuck while the thread runs."""
    _waits.setdefault(threading.current_thread(), None)


def raise_verdict() -> None:
    """Raise WaitCycleError if the recorded wait of the calling thread cannot end."""
    current = _waits.get(threading.current_thread())
    if current is not None and current.wait.verdict:
        raise WaitCycleError(current.wait.verdict)


@dataclass(frozen=True)
class ModelState:
    """State of a model with a watchdog on a rank."""

    step: int
    last: str  # name of the rank's last launch
    ago: float  # seconds since that launch
    late: WaitState | None  # oldest collective that is not complete
    seconds: float  # since the launch of that collective


@dataclass(frozen=True)
class RankWaits:
    """Answer of a rank that was asked for its waits."""

    asked: int  # number of requests to this rank before the answer was made
    stuck: bool  # see [Note: Ranks that wait for each other]
    at: str  # line of the program that the rank is running
    waits: Sequence[WaitState]
    launches: Mapping[str, tuple[int, Sequence[str]]]  # by group: number of launches, purposes of the latest
    failed: Mapping[str, str]  # by group: message of the error that has ended its waits
    models: Mapping[str, ModelState] = field(default_factory=dict)  # by scope of the watchdog

    @classmethod
    def parse(cls, text: str | bytes) -> RankWaits:
        entry = json.loads(text)
        entry["waits"] = [WaitState(**wait) for wait in entry["waits"]]
        for state in entry["models"].values():
            state["late"] = state["late"] and WaitState(**state["late"])
        entry["models"] = {scope: ModelState(**state) for scope, state in entry["models"].items()}
        return cls(**entry)


Answers = Mapping[int, RankWaits]


def _absent(wait: WaitState, answers: Answers) -> set[int]:
    """Return the ranks that are known to be absent from the collective of `wait`."""
    if not wait.group:
        return set(wait.ranks)
    return {rank for rank in wait.ranks if rank in answers and not has_joined(wait, answers[rank])}


def has_joined(wait: WaitState, answer: RankWaits) -> bool:
    """Return whether a rank has launched the collective of `wait`, and no other collective in its place."""
    launches, recent = answer.launches.get(wait.group, (0, ()))
    later = launches - wait.number
    return later >= 0 and (later >= len(recent) or recent[-1 - later] == wait.collective)


def find_stuck(answers: Answers) -> set[int]:
    """Return the ranks that can never continue; see [Note: Ranks that wait for each other]."""
    stuck = {rank for rank, answer in answers.items() if answer.stuck and answer.waits}
    while free := {rank for rank in stuck if not all(_absent(wait, answers) & stuck for wait in answers[rank].waits)}:
        stuck -= free
    return stuck


def _describe_cycle(answers: Answers, stuck: set[int]) -> str:
    """Return the message for ranks that can never continue. It names those for which others of them wait."""
    core = set(stuck)
    while needed := {rank for each in core for wait in answers[each].waits for rank in _absent(wait, answers)} & core:
        if needed == core:
            break
        core = needed
    waits = {
        rank: max((wait for wait in answers[rank].waits if _absent(wait, answers) & core), key=lambda w: len(w.gathers))
        for rank in sorted(core)
    }
    if all(wait.gathers for wait in waits.values()):
        return order_difference({rank: format_order(wait.gathers) for rank, wait in waits.items()})
    parts = []
    for rank, wait in waits.items():
        order = f" ({format_order(wait.gathers)})" if wait.gathers else ""
        absent = sorted(_absent(wait, answers) & core)
        parts.append(f"rank {rank} waits in {wait.doing}{order} for {format_ranks(absent)}")
    return f"layerzero: ranks wait for each other, so none of them can continue: {'; '.join(parts)}. {HINT}"


class WaitMonitor:
    """Monitor of the waits of this process. It exists while a model of the current default process group exists."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._world = weakref.ref(dist.group.WORLD)
        self._default = base = default_store()
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        self._blocks = isinstance(base, TCPStore)  # other stores poll in `wait`
        # Separate connections, because a pending request blocks the other threads that use a connection.
        self._answering: Store = self._default.clone()  # type: ignore[attr-defined]
        self._asking: Store | None = None  # created when it is first needed
        self._questions: threading.Thread | None = None  # asks other ranks, and cannot be interrupted
        self._heard = 0.0  # time of the last answer of the store to this thread
        self._counters: list[weakref.ref[TrafficCounters]] = []
        self._users = 0
        self.ended = threading.Event()
        self._next, self._warned = 0.0, 0.0  # time of the next question; start of the oldest wait that was warned of
        _RUNNING.add(self)
        self._threads = [
            threading.Thread(target=target, name="layerzero wait monitor", daemon=True)
            for target in (self._answer_requests, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, owner: object, counters: TrafficCounters) -> Callable[[], object]:
        """Monitor until `owner` is garbage collected, or until the returned function is called."""
        self._users += 1
        self._counters.append(weakref.ref(counters))
        finalizer = weakref.finalize(owner, self._remove_user)
        finalizer.atexit = False
        return finalizer

    def _remove_user(self) -> None:
        self._users -= 1
        if not self._users:
            self.ended.set()

    def close(self) -> None:
        """End the threads. At the exit of the process, no thread may be inside the store."""
        self.ended.set()
        for thread in (*reversed(self._threads), self._questions):  # the second thread wakes the first
            if thread is not None:
                thread.join(_TO_ANSWER)

    def _key(self, kind: str, rank: int) -> str:
        return f"{_SCOPE}/{kind}/{rank}"

    # Answers

    def _answer_requests(self) -> None:
        store, wake, own_verdict = self._answering, self._key("wake", self._rank), self._key("verdict", self._rank)
        try:
            while not self.ended.is_set():
                if self._blocks:
                    with suppress(dist.DistStoreError):  # the wait has timed out
                        store.wait([wake], _FOREVER)
                elif self.ended.wait(_TICK):
                    break
                if not self.ended.is_set() and store.check([wake]):
                    store.delete_key(wake)
                    asked = store.add(self._key("asked", self._rank), 0)
                    if store.check([own_verdict]):
                        self._accept(store.get(own_verdict).decode(), store)
                        store.delete_key(own_verdict)
                    for watchdog in self._watchdogs():
                        if store.check([report := f"{watchdog.scope}/report/{self._rank}"]):
                            watchdog.accept(store.get(report).decode())
                            store.delete_key(report)
                    store.set(self._key("answer", self._rank), json.dumps(asdict(self._answer(asked, store))))
            for kind in ("asked", "verdict", "answer", "wake"):  # a later monitor must not read them
                store.delete_key(self._key(kind, self._rank))
        except (dist.DistNetworkError, dist.DistStoreError):  # the process that served the store has ended
            pass
        except Exception:
            _LOG.exception("layerzero: rank %d does not answer any more where it waits", self._rank)

    def _answer(self, asked: int, store: Store) -> RankWaits:
        frames, main = sys._current_frames(), threading.main_thread()
        del frames[threading.get_ident()]  # otherwise this frame would refer to itself and keep the others alive
        own = [thread for thread in threading.enumerate() if isinstance(thread, StreamThread)]
        waits, running = _waits_of(dict.fromkeys([main, *_waits.copy(), *own]), frames, store)
        on_device = [each.state(store) for each in self._late_on_device()]
        program = next((thread for thread in (*running, main) if thread not in own), main)
        groups = current_groups()
        logs = {h.name + channel: log for h in groups for channel, log in ({"": h.log} | h.channels).items()}
        launches = {name: (log.launches, tuple(log.recent)) for name, log in logs.items()}
        # A call of torch may wait on a group that is not in torch's tables.
        for group in {*torch_groups(), *logged_groups()}:
            launches[f"torch/{group.group_name}"] = launches_of(group), ()
        failed = {held.name: held.failure for held in groups if held.failure}
        at, stuck = _where(frames.get(program.ident or 0)), bool(on_device) or not running
        models = {watchdog.scope: watchdog.state() for watchdog in self._watchdogs()}
        return RankWaits(asked, stuck, at, (*waits, *on_device), launches, failed, models)

    def _watchdogs(self) -> list[Any]:
        """Return the watchdogs of the models that have one (watchdog.py)."""
        models = [counters for ref in self._counters if (counters := ref()) is not None]
        return [watchdog for model in models if (watchdog := model.watchdog) is not None]

    def _late_on_device(self) -> list[Wait]:
        return [late for each in self._watchdogs() if (late := each.late_on_device(_ASK_AFTER)) is not None]

    # Questions

    def _watch(self) -> None:
        try:
            while not self.ended.wait(_TICK) and dist.group.WORLD is not None and self._world() is dist.group.WORLD:
                self._check(time.monotonic())
        except (dist.DistNetworkError, dist.DistStoreError):
            pass
        except Exception:
            _LOG.exception("layerzero: the monitor of the waits of rank %d has failed and has stopped", self._rank)
        self.ended.set()
        if self._threads[0].is_alive():
            with suppress(RuntimeError):
                self._default.set(self._key("wake", self._rank), "")
        del self._default

    @property
    def connection(self) -> Store:
        """Connection of the thread that asks."""
        self._asking = self._asking or self._answering.clone()  # type: ignore[attr-defined]
        return self._asking

    def _check(self, now: float) -> None:
        """Ask other ranks, in a thread, if a wait of this rank is old or a collective of a watched model is late."""
        for thread in list(_waits):
            if not thread.is_alive():
                del _waits[thread]
        oldest = min((each.since for each in list(_waits.values()) if each is not None), default=now)
        late = [(watchdog, launch) for watchdog in self._watchdogs() if (launch := watchdog.unreported()) is not None]
        if self._questions is not None and self._questions.is_alive():
            for watchdog, launch in late if now - self._heard > _SILENT else ():
                watchdog.report_silence(launch, now - self._heard)
            return
        is_old = now - oldest >= _ASK_AFTER
        is_old = now >= self._next and (is_old or bool(self._late_on_device()))
        if is_old or late:
            target = partial(self._ask_and_report, [watchdog for watchdog, _ in late], oldest if is_old else None)
            self._heard = now
            self._questions = threading.Thread(target=target, name="layerzero wait monitor", daemon=True)
            self._questions.start()

    def _ask_and_report(self, watchdogs: Sequence[Any], oldest: float | None) -> None:
        try:
            for watchdog in watchdogs:
                watchdog.report(self)
            if oldest is not None:
                self._resolve(oldest)
        except (dist.DistNetworkError, dist.DistStoreError):
            self.ended.set()
        except Exception:
            _LOG.exception("layerzero: the monitor of the waits of rank %d has failed and has stopped", self._rank)
            self.ended.set()

    def _resolve(self, oldest: float) -> None:
        """Ask other ranks for their waits. End the waits of ranks that wait for each other, or log where a rank is.

        Args:
            oldest: start of the oldest wait of this rank.
        """
        answers = self._ask_all()
        self._next = time.monotonic() + _PERIOD
        own = answers[self._rank]
        failures = [answers[p].failed.get(w.group, "") for w in own.waits for p in w.ranks if p in answers]
        text = next(filter(None, failures), "")
        if not text and self._rank in (stuck := find_stuck(answers)):
            again = self.ask(stuck)
            if all(rank in again and again[rank].waits == answers[rank].waits for rank in stuck) and (
                find_stuck(again) == stuck
            ):
                text = _describe_cycle(again, stuck)
                for rank in stuck - {self._rank}:
                    self.deliver(rank, self._key("verdict", rank), text)
        if text:
            self._accept(text, self.connection)
        elif (seconds := time.monotonic() - oldest) >= _WARN_AFTER and self._warned != oldest:
            self._warned = oldest
            self._warn(answers, seconds)

    def deliver(self, rank: int, key: str, text: str) -> None:
        """Store a text under a key, and wake a rank, which reads it."""
        self.connection.set(key, text)
        self.connection.set(self._key("wake", rank), "")

    def _ask_all(self) -> dict[int, RankWaits]:
        """Ask the ranks for which this rank waits, the ranks for which these wait, and so on."""
        answers: dict[int, RankWaits] = {}
        asked, to_ask = set[int](), {self._rank}
        while to_ask:
            answers |= self.ask(to_ask)
            asked |= to_ask
            waits = [wait for rank in to_ask if rank in answers for wait in answers[rank].waits]
            to_ask = {rank for wait in waits for rank in wait.ranks} - asked
        return answers

    def ask(self, ranks: Iterable[int]) -> dict[int, RankWaits]:
        """Return answers that were made after the start of this call. Omit ranks that do not answer."""
        store = self.connection
        answers, numbers = {}, {}
        for rank in ranks:
            if rank == self._rank:
                answers[rank] = RankWaits.parse(json.dumps(asdict(self._answer(0, store))))
            else:
                numbers[rank] = store.add(self._key("asked", rank), 1)
                store.set(self._key("wake", rank), "")
                self._heard = time.monotonic()
        deadline = time.monotonic() + _TO_ANSWER
        while numbers and time.monotonic() < deadline and not self.ended.is_set():
            for rank, number in list(numbers.items()):
                key = self._key("answer", rank)
                if store.check([key]) and (answer := RankWaits.parse(store.get(key))).asked >= number:
                    answers[rank] = answer
                    del numbers[rank]
                self._heard = time.monotonic()
            time.sleep(_POLL if numbers else 0)
        return answers

    def _accept(self, text: str, store: Store) -> None:
        """End the waits of this rank with an error. No more collectives can be launched on its groups."""
        waits, groups = [each.wait for each in list(_waits.values()) if each is not None], current_groups()
        if not waits and not any(held.failure for held in groups):
            _LOG.error("%s", text)
        for held in groups:
            held.fail(text)
        for wait in waits:
            if isinstance(wait, NonCollectiveWait):
                wait.verdict = text
                for key in wait.keys:  # ends the wait in the store
                    store.set(key, text)

    def _warn(self, answers: Answers, seconds: float) -> None:
        """Log where the absent ranks are that do not wait themselves."""
        for wait in answers[self._rank].waits:
            absent = _absent(wait, answers)
            present = set(wait.ranks) - absent
            for rank in sorted(absent):
                answer = answers.get(rank)
                if (answer is None or not answer.waits) and self._rank == min(present, default=self._rank):
                    where = "does not answer" if answer is None else f"is at {answer.at}"
                    text = "layerzero: rank %d has waited for %.0f s in %s. Rank %d has not joined: it %s"
                    _LOG.warning(text, self._rank, seconds, wait.doing, rank, where)


def _waits_of(
    threads: Collection[threading.Thread], frames: Mapping[int, FrameType], store: Store
) -> tuple[list[WaitState], list[threading.Thread]]:
    """Return the waits of threads, and the threads that neither wait for ranks nor for each other."""
    waits, running = [], []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if (current := _waits.get(thread)) is not None:
            waits.append(current.wait.state(store))
        elif frame is not None and (foreign := _foreign_wait(frame)) is not None:
            waits.append(foreign)
        elif frame is not None and not _is_idle(frame, threads):
            running.append(thread)
    return waits, running


def _is_idle(frame: FrameType | None, threads: Collection[threading.Thread]) -> bool:
    """Return whether a thread waits, without a timeout, for operations of a stream or for the end of one of `threads`.

    A thread that waits for other threads, such as those of a data loader, may continue at any time.
    """
    code = frame.f_code if frame is not None else None
    if code is StreamThread.run.__code__:
        return True
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_locals.get("timeout", -1) not in (None, -1):
            return False
        if frame.f_code is threading.Thread.join.__code__:
            return frame.f_locals["self"] in threads
        frame = frame.f_back
    return frame is not None and frame.f_code is not code and frame.f_code.co_filename in _WAIT_FOR_STREAMS


def _foreign_wait(frame: FrameType) -> WaitState | None:
    """Return the wait of a thread that waits in a synchronizing function of torch.distributed, otherwise None."""
    code = frame.f_code
    if code.co_filename != dist.distributed_c10d.__file__ or not code.co_name.startswith(_SYNCHRONIZING):
        return None
    group: Any = frame.f_locals.get("group") or dist.group.WORLD
    ranks, name = tuple(dist.get_process_group_ranks(group)), f"torch/{group.group_name}"
    return WaitState(f"dist.{code.co_name} at {_where(frame)}", ranks, name, launches_of(group))


def _is_library(file: str) -> bool:
    is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return is_standard or file.startswith((_TORCH, _LAYERZERO, "<"))


def _where(frame: FrameType | None) -> str:
    """Return the line of the user's program that a thread is running."""
    innermost = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if (frame := frame or innermost) is None:
        return "an unknown place"
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line} {linecache.getline(file, line).strip()}".rstrip()


# Their threads hold them. A monitor may outlive its process group, because its threads notice the end only later.
_RUNNING: weakref.WeakSet[WaitMonitor] = weakref.WeakSet()


def monitor_waits(owner: object, counters: TrafficCounters) -> Callable[[], object]:
    """Monitor the waits of this process while `owner` exists. Return a function that ends this."""
    world = dist.group.WORLD
    running = (each for each in list(_RUNNING) if each._world() is world and not each.ended.is_set())
    monitor = next(running, None) or WaitMonitor()
    return monitor.add(owner, counters)


@atexit.register
def _end_monitors() -> None:
    for monitor in list(_RUNNING):
        monitor.close()
