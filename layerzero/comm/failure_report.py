"""Where ranks are, for the errors of those that wait for them in vain.

[Note: Word is left where something is wrong or rare]
A rank that is busy with something else cannot be asked where it is. So each rank leaves word in the store, in one key
of its own: when it comes to an agreement, when it compares the order of its gathers unforeseen, and when an exchange of
it fails. A loop that repeats itself leaves none. Who fails leaves word first, and then waits a moment for those of the
others. Whoever waits in the same exchange fails, too, and says so. Who says something else was elsewhere, and who says
nothing has not come, or has died.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["CollectiveError", "RankStatus", "diagnose", "publish_status", "read_statuses"]

_PAUSE = 0.05  # seconds between two looks at the words of others
_TO_ANSWER = 5.0  # seconds for a store that has much to do
_TIMED_OUT, _LOST = "timed out", "lost a connection"
_SILENT = "the store that the ranks meet in does not answer: its machine is stopped, or this one is cut off from it"
_HINT = (
    "Look for what not all ranks do (`if rank == 0: evaluate(model)`, one batch less), for the output of a rank that "
    "raised or was killed, and for one that needs longer than the timeout of the process group"
)


@dataclass(frozen=True)
class RankStatus:
    """What a rank has left word of."""

    doing: str  # "gather of 'layers.3'"
    failed: str = ""  # how; empty: it has not failed there
    passed: bool = False  # it has gone on since
    answer: str = ""  # a key of the store that is there once it could go on
    gathers: tuple[str, ...] = ()  # where it was about to gather: the last units, up to that one

    def __str__(self) -> str:
        order = f" ({' -> '.join(map(repr, self.gathers))})" if self.gathers else ""
        return f"{self.doing}{order}{f', which {self.failed}' if self.failed else ''}"


class CollectiveError(RuntimeError):
    """An exchange that failed because ranks did not come to it together.

    Attributes:
        word: of this rank.
        elsewhere: those of the ranks that were elsewhere; empty if a rank is missing altogether.
    """

    def __init__(self, message: str, word: RankStatus, elsewhere: dict[int, RankStatus]) -> None:
        super().__init__(message)
        self.status = word
        self.elsewhere = elsewhere


def publish_status(word: RankStatus) -> None:
    """One message to the store, with no answer that would have to be waited for."""
    _get_default_store().set(_key(dist.get_rank()), json.dumps(asdict(word)))


def read_statuses(ranks: Sequence[int], found: dict[int, RankStatus] | None = None) -> dict[int, RankStatus]:
    """The last word of each of `ranks` that has ever left one, added to `found` as it comes."""
    store = _get_default_store()
    found = {} if found is None else found
    for rank in ranks:
        if store.check([_key(rank)]):
            entry = json.loads(store.get(_key(rank)))
            word = RankStatus(**entry | {"gathers": tuple(entry["gathers"])})
            found[rank] = replace(word, passed=True) if word.answer and store.check([word.answer]) else word
    return found


def diagnose(word: RankStatus, error: Exception, *, ranks: Sequence[int], timeout: float) -> CollectiveError:
    """Leave word that an exchange has failed, hear from the others, and tell which of them did not come to it.

    Args:
        word: of this rank, without `failed`.
        error: what the backend raised.
        ranks: global ranks that take part.
        timeout: of the exchange, in seconds.
    """
    kind = _kind(str(error))
    word = replace(word, failed=kind or f"failed: {error}")
    others = [rank for rank in ranks if rank != dist.get_rank()]
    words, no_store = _asked(word, others, seconds=min(5.0, max(1.0, timeout / 10)))
    told, elsewhere = _tell(word, others, words, timeout)
    told += [text for text in (no_store, "" if kind else str(error)) if text]
    why = "; ".join(told) or "all ranks came to it"
    # Without `why`, which the message of another rank would report as the cause of its own failure.
    if not no_store and not _within(_TO_ANSWER, lambda: _leave_if_there(word)):
        why += f"; {_SILENT}"  # by now
    message = f"layerzero: {word.doing} failed on rank {dist.get_rank()}: {why}. {_HINT}"
    return CollectiveError(message, word, elsewhere)


def _kind(text: str) -> str:
    """How an exchange has failed, by the words of its backend; empty if it says something else."""
    if re.search(r"time[ds]?[ -]?out", text, re.IGNORECASE):
        return _TIMED_OUT
    return _LOST if re.search(r"connection|broken pipe|closed", text, re.IGNORECASE) else ""


def _within(seconds: float, do: Callable[[], None]) -> bool:
    """Do something with the store; whether it is done by then.

    A store on a machine that cannot be reached never answers, and nothing ends a question to it; whoever asks has the
    store's client meanwhile, and even a word that needs no answer waits for that. So each is left to a thread.
    """
    doing = threading.Thread(target=do, name="layerzero whereabouts", daemon=True)
    doing.start()
    doing.join(seconds)
    return not doing.is_alive()


def _leave_if_there(word: RankStatus) -> None:
    with suppress(RuntimeError):  # the store is gone
        publish_status(word)


def _asked(word: RankStatus, others: Sequence[int], *, seconds: float) -> tuple[dict[int, RankStatus], str]:
    """The words of others, and what is wrong with the store, if something is."""
    words: dict[int, RankStatus] = {}
    told = [_SILENT]

    def ask() -> None:
        try:
            publish_status(word)
            _get_default_store().check([_key(dist.get_rank())])
            told[0] = ""  # it answers
            _hear(others, words, seconds=seconds)
        except Exception:
            told[0] = "the store that the ranks meet in is gone, with the process that served it"

    _within(seconds + _TO_ANSWER, ask)
    return dict(words), told[0]


def _hear(others: Sequence[int], words: dict[int, RankStatus], *, seconds: float) -> None:
    """The words of all of them as soon as each has failed, or what there is by then."""
    deadline = time.monotonic() + seconds
    while True:
        read_statuses(others, words)
        if all(rank in words and words[rank].failed for rank in others) or time.monotonic() > deadline:
            return
        time.sleep(_PAUSE)


def _tell(
    word: RankStatus, others: Sequence[int], words: dict[int, RankStatus], timeout: float
) -> tuple[list[str], dict[int, RankStatus]]:
    """What is known of the other ranks; and the words of those that were elsewhere, if no rank is missing."""
    there = {rank: said for rank, said in words.items() if said.failed or not said.passed}
    elsewhere = {rank: said for rank, said in there.items() if said.doing != word.doing}
    same = {rank: said for rank, said in there.items() if rank not in elsewhere}
    gave_up = [rank for rank, said in same.items() if said.failed.startswith(_TIMED_OUT)]
    lost = word.failed == _LOST and not gave_up  # else those that gave up have closed the connection
    # One that came here, too, has failed by now as this rank has, unless it is dead.
    missing = [rank for rank in others if rank not in there or (lost and rank in same and not same[rank].failed)]
    told = []
    for rank in missing:
        if lost and len(missing) == 1:
            text = f"rank {rank} has died or has ended, its connection was closed"
        elif lost:
            text = f"rank {rank} is not heard of"
        else:
            text = f"rank {rank} did not take part within {timeout:g} s"
        told.append(text + (f" (it last left word at: {words[rank].doing})" if rank in words else ""))
    if lost and len(missing) > 1:
        told.append("at least one of them has died or has ended, its connection was closed")
    how = "waited in vain, too, in" if missing else "was elsewhere: in"
    told += [f"rank {rank} {how} {said}" for rank, said in elsewhere.items()]
    if gave_up and word.failed == _LOST and not missing and not elsewhere:
        told.append(f"rank {gave_up[0]} had waited for it so long that it gave up")
    return told, {} if missing else elsewhere


def _key(rank: int) -> str:
    return f"layerzero/word/{rank}"
