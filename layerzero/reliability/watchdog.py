"""Who is missing: an exchange that is late is told on every rank, with the ranks that have not come to it.

[Note: How ranks that do not come are known]
All ranks launch the same exchanges on a lane in the same order, so each counts its launches: who has counted less than
the late exchange's number has not come to it. A rank that waits cannot be asked, so a thread of each rank answers. It
looks at a number in the store once in a while, which a rank that is late raises; then each says where it is. Who does
not answer is stopped, dead, or cut off. One that is cut off from the store itself gets no answer, and cannot be kept
from waiting for it; so another thread minds the time, and says that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store, _get_default_store

from layerzero.comm.agreement import agree
from layerzero.comm.collectives import Issued, Works
from layerzero.engine.hooks import runtime_of
from layerzero.engine.runtime import Runtime

__all__ = ["Watchdog", "watchdog"]

_T = TypeVar("_T")
_LOG = logging.getLogger("layerzero")
_ANSWERS = 2.0  # seconds in which ranks answer
_SILENT = 3.5  # seconds that the store takes for no answer
_SCOPE = "layerzero/late"


def watchdog(model: nn.Module, limit: float = 60.0) -> Watchdog:
    """From here on, an exchange that is not done after `limit` seconds is told in the log of every rank.

    The line names the exchange, its unit, the step, and the ranks that have not come, with what each of them did last;
    it comes within 5 s. Nothing is ended: that is for the timeout of the process group. All ranks must call this; it
    costs two threads, and a look at the store each second.

    Args:
        model: from :func:`layerzero.shard_model`.
        limit: seconds from the launch of an exchange; longer than a step and a checkpoint take.

    Example::

        layerzero.watchdog(model, limit=120)
    """
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit!r}")
    runtime = runtime_of(model)
    ledger = runtime.topology.ledger
    failure = RuntimeError("the model is watched already; close() the first watchdog") if ledger.watching else None
    ranks = runtime.everyone.ranks
    scope = f"{_SCOPE}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    turn = _get_default_store().add(f"{scope}/turn/{dist.get_rank()}", 1)  # models on the same ranks are apart
    agree("watchdog", {"limit": limit, "watchdogs so far": turn}, ranks=ranks, failure=failure)
    return Watchdog(runtime, limit, f"{scope}/{turn}")


@dataclass(frozen=True)
class _Late:
    """An exchange in flight."""

    doing: str
    lane: str
    number: int  # of the exchange on its lane
    ranks: tuple[int, ...]  # that take part
    since: float  # time.monotonic()
    step: int


@dataclass(frozen=True)
class _Answer:
    """Where a rank is."""

    counts: Mapping[str, int]  # launches by lane
    step: int
    last: str  # what it launched last
    ago: float  # seconds
    late: tuple[str, str, int, tuple[int, ...], float] | None  # doing, lane, number, ranks, seconds

    @classmethod
    def of(cls, entry: dict[str, Any]) -> _Answer:
        late = entry["late"]
        return cls(**entry | {"late": None if late is None else (*late[:3], tuple(late[3]), late[4])})


class Watchdog:
    """Made by :func:`watchdog`.

    Attributes:
        reports: the lines that this rank has logged.
    """

    def __init__(self, runtime: Runtime, limit: float, scope: str) -> None:
        self.reports: list[str] = []
        self._limit = limit
        self._period = min(1.0, limit / 4)
        self._ledger, self._ranks = runtime.topology.ledger, runtime.everyone.ranks
        self._rank = dist.get_rank()
        self._store: Store = _get_default_store().clone()  # type: ignore[attr-defined]  # waiting in the other one keeps it from other threads
        self._scope = scope  # of the store
        self._alarms = self._reported = self._store.add(f"{self._scope}/alarms", 0)
        self._who = ""  # was told last
        self._told: set[tuple[str, int]] = set()  # lanes and numbers of what has been reported
        self._lock, self._looking = threading.Lock(), threading.Lock()  # of what is in flight, and of who looks at it
        self._flying: list[tuple[_Late, Works]] = []  # in the order of their launches, as far as is known
        self._counts: Counter[str] = Counter()
        self._last, self._when = "nothing", time.monotonic()
        self._steps = 0
        self._ended = threading.Event()
        first = next(iter(runtime.optimizers), None)  # with several, steps are counted once
        self._hook = None if first is None else first.register_step_post_hook(self._count_step)
        runtime.topology.ledger.watching = self.launched
        self._asking_since: float | None = None  # the store
        self._silences: set[tuple[str, int]] = set()  # late exchanges of which it was told that it does not answer
        self._threads = [
            threading.Thread(target=target, name="layerzero watchdog", daemon=True)
            for target in (self._watch, self._mind)
        ]
        for thread in self._threads:
            thread.start()
        # The watchdog ends with the model. Its threads hold this object, so it must not hold the model.
        self._finalizer = weakref.finalize(runtime, self._stop)
        self._finalizer.atexit = False
        runtime.on_close.append(self.close)

    def close(self) -> None:
        """End the watchdog. The end of the model does the same."""
        self._finalizer()
        for thread in self._threads:
            thread.join(_SILENT)  # one may wait for a store that does not answer

    def _stop(self) -> None:
        self._ledger.watching = None
        if self._hook is not None:
            self._hook.remove()
        self._ended.set()
        self._flying.clear()

    def _count_step(self, *_: object) -> None:
        self._steps += 1

    def launched(self, issued: Issued, works: Works) -> None:
        """An exchange has been launched."""
        lane, doing = issued.lane, issued.word.doing
        self._counts[lane.name] += 1
        now = time.monotonic()
        ranks = tuple(dist.get_process_group_ranks(lane.group))
        late = _Late(doing, lane.name, self._counts[lane.name], ranks, now, self._steps)
        with self._lock:
            self._flying.append((late, works))
        self._last, self._when = doing, now

    def _watch(self) -> None:
        try:
            while not self._ended.wait(self._period):
                self._look()
        except (dist.DistNetworkError, dist.DistStoreError):  # gone, with the process that served it: others say so
            pass
        except Exception:
            _LOG.exception("layerzero: the watchdog of rank %d has failed: it watches no more", self._rank)
        finally:
            self._ended.set()  # for the other thread, too
            self._forget()
            del self._store  # a connection

    def _forget(self) -> None:
        """Delete the keys of this rank from the store, and common keys if it is the last rank to end."""
        try:
            self._store.delete_key(f"{self._scope}/{self._rank}")
            if self._store.add(f"{self._scope}/ended", 1) == len(self._ranks):
                for key in ("alarms", "ended"):
                    self._store.delete_key(f"{self._scope}/{key}")
        except RuntimeError:  # the store has ended, or cannot delete keys
            pass

    def _mind(self) -> None:
        """Say, if it is so, that the store does not answer."""
        while not self._ended.wait(self._period):
            since = self._asking_since
            silent = 0.0 if since is None else time.monotonic() - since
            late = self._late() if silent > _SILENT else None
            if late is None or time.monotonic() - late.since <= self._limit:
                continue
            if (late.lane, late.number) in self._silences:
                continue
            self._silences.add((late.lane, late.number))
            self._tell(
                f"{late.doing}, step {late.step}, is waited for by rank {self._rank}: the store has not answered for "
                f"{silent:.1f} s: the machine that serves it, rank 0's or the launcher's, is stopped, or this one is "
                "cut off from it",
                time.monotonic() - late.since,
            )

    def _look(self) -> None:
        late = self._late()
        if (
            late is not None
            and time.monotonic() - late.since > self._limit
            and (late.lane, late.number) not in self._told
        ):
            self._told.add((late.lane, late.number))
            self._asked(lambda: self._store.add(f"{self._scope}/alarms", 1))
        if self._answered_alarm():
            deadline = time.monotonic() + _ANSWERS
            while time.monotonic() < deadline and not self._ended.wait(_ANSWERS / 8):
                self._answered_alarm()  # of others, meanwhile
            self._report()
            self._reported = self._alarms

    def _asked(self, question: Callable[[], _T]) -> _T:
        """What the store answers."""
        self._asking_since = time.monotonic()
        try:
            return question()
        finally:
            self._asking_since = None

    def _answered_alarm(self) -> bool:
        alarms: int = self._asked(lambda: self._store.add(f"{self._scope}/alarms", 0))
        is_new: bool = alarms > self._alarms
        if is_new:
            self._alarms = alarms
            answer = {"alarm": alarms, **asdict(self._answer(self._late()))}
            self._asked(lambda: self._store.set(f"{self._scope}/{self._rank}", json.dumps(answer)))
        return is_new

    def _late(self) -> _Late | None:
        """What has been in flight for longest."""
        with self._looking:
            with self._lock:
                flying, self._flying = self._flying, []
            flying = [(late, works) for late, works in flying if not works.done()]
            with self._lock:
                self._flying[:0] = flying
            return flying[0][0] if flying else None

    def _answer(self, late: _Late | None) -> _Answer:
        now = time.monotonic()
        entry = None if late is None else (late.doing, late.lane, late.number, late.ranks, now - late.since)
        return _Answer(dict(self._counts), self._steps, self._last, now - self._when, entry)

    def _report(self) -> None:
        answers: dict[int, _Answer] = {}
        for rank in self._ranks:
            key = f"{self._scope}/{rank}"
            if self._asked(partial(self._store.check, [key])):
                entry: dict[str, Any] = json.loads(self._asked(partial(self._store.get, key)))
                if entry.pop("alarm") > self._reported:  # else it is of an earlier incident
                    answers[rank] = _Answer.of(entry)
        who, longest = _told(answers, self._limit)
        if who and who != self._who:
            self._tell(who, longest)

    def _tell(self, who: str, longest: float) -> None:
        self._who = who
        self.reports.append(f"layerzero: late by {longest:.1f} s: {who}")
        _LOG.error("%s", self.reports[-1])


def _told(answers: Mapping[int, _Answer], limit: float) -> tuple[str, float]:
    """Who waits for whom, and for how long."""
    waits: dict[tuple[str, int], list[int]] = {}  # by exchange and step: who waits
    missing: dict[tuple[str, int], dict[int, None]] = {}
    longest = 0.0
    for rank, answer in answers.items():
        if answer.late is None or answer.late[4] <= limit / 2:
            continue
        doing, lane, number, members, seconds = answer.late
        longest = max(longest, seconds)
        waits.setdefault((doing, answer.step), []).append(rank)
        absent = missing.setdefault((doing, answer.step), {})
        for other in members:
            if other not in answers or answers[other].counts.get(lane, 0) < number:
                absent[other] = None
    told = []
    for (doing, step), waiting in waits.items():
        absent = missing[doing, step]
        who = (
            "; ".join(_where(rank, answers.get(rank)) for rank in absent)
            or "all of its ranks have come to it: the link is slow, or a device of theirs"
        )
        told.append(f"{doing}, step {step}, is waited for by rank{'s' * (len(waiting) > 1)} {_spell(waiting)}: {who}")
    return " | ".join(told), longest


def _where(rank: int, answer: _Answer | None) -> str:
    if answer is None:
        return f"rank {rank} has not come and does not answer: it is stopped, dead, or cut off"
    if answer.late is not None:
        return f"rank {rank} has not come: it waits in {answer.late[0]}, step {answer.step}"
    return (
        f"rank {rank} has not come: it waits for nothing; at step {answer.step}, {round(answer.ago)} s ago, it "
        f"launched {answer.last}"
    )


def _spell(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
