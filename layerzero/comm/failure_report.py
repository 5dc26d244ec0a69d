"""Publish the status of each rank in the store, and name the ranks that are missing from a failed collective.

If a rank dies, its collectives with other ranks fail, at the latest after their timeout. With gloo, `wait` raises an
error, and each of the other ranks then raises an error that names the missing ranks, unless the store died with them.
With NCCL, `wait` never raises. layerzero's watchdog then logs which ranks are late (watchdog.py), and
torch's watchdog ends the process after the timeout. If ranks share memory, a rank that waits for a process that has
exited raises an error at once (shared_memory/counters.py).

The diagnosis runs after a collective has failed. Before that, `watchdog` reports late ranks.

[Note: Published rank status]
A busy rank cannot answer a query about its state. Therefore each rank publishes its status in the store, under its own
key. A rank does so before an agreement, before an unexpected comparison of gather orders, and when one of its
collectives fails. In the steady state, no status is published. A rank whose collective fails first publishes its own
status and then waits briefly for the statuses of the other ranks. Ranks that wait in the same collective also fail, and
report the same collective. A rank that reports another collective was waiting in that collective. A rank that reports
nothing has not reached the collective, or has exited.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from layerzero.utils.torch_compat import default_store

_PAUSE = 0.05  # seconds between two reads of the statuses of other ranks
_TO_ANSWER = 5.0  # seconds that a busy store may need to answer
_TIMED_OUT, _LOST = "timed out", "lost a connection"
_SILENT = "the rendezvous store does not answer: its machine has stopped, or this machine cannot reach it"
HINT = (
    "Look for calls that only some ranks make (`if rank == 0: evaluate(model)`, one batch fewer), for the output of a "
    "rank that raised or was killed, and for a rank that needs longer than the timeout of the process group"
)
_KEPT = (
    ". A unit marked '(kept)' is gathered among the ranks of reshard_after_forward=k only. The other ranks gather this "
    "unit in the full ZeRO-3 group, because their last forward ran without gradients or one of their passes failed. "
    "Run the same passes on every rank, or use reshard_after_forward=True"
)


@dataclass(frozen=True)
class RankStatus:
    """Status that a rank publishes in the store, for the error messages of other ranks."""

    doing: str  # for example "gather of 'layers.3'"
    failed: str = ""  # kind of failure; empty: no failure
    passed: bool = False  # True if the rank has since continued
    answer: str = ""  # key that exists in the store once the rank can continue
    gathers: tuple[str, ...] = ()  # for a gather: names of the last gathered units, up to this one

    def __str__(self) -> str:
        order = f" ({format_order(self.gathers)})" if self.gathers else ""
        return f"{self.doing}{order}{f', in which it {self.failed}' if self.failed else ''}"

    @property
    def is_unfinished(self) -> bool:
        return bool(self.failed) or not self.passed


class CollectiveError(RuntimeError):
    """Error of a collective that has failed because not all ranks took part in it.

    Attributes:
        status: status of this rank.
        elsewhere: statuses of the ranks that were in another collective, by rank. Empty if any rank is missing.
    """

    def __init__(self, message: str, status: RankStatus, elsewhere: dict[int, RankStatus]) -> None:
        super().__init__(message)
        self.status = status
        self.elsewhere = elsewhere


def publish_status(status: RankStatus) -> None:
    """Publish the status of this rank in the store, without waiting for an answer."""
    default_store().set(_status_key(dist.get_rank()), json.dumps(asdict(status)))


def read_statuses(ranks: Sequence[int], found: dict[int, RankStatus] | None = None) -> dict[int, RankStatus]:
    """Return the last published status of each rank in `ranks`, by rank. Omit ranks that have published no status.

    If `found` is not None, each status is added to `found` as soon as it has been read.
    """
    store = default_store()
    found = {} if found is None else found
    for rank in ranks:
        if store.check([_status_key(rank)]):
            entry = json.loads(store.get(_status_key(rank)))
            status = RankStatus(**entry | {"gathers": tuple(entry["gathers"])})
            found[rank] = replace(status, passed=True) if status.answer and store.check([status.answer]) else status
    return found


def diagnose(status: RankStatus, error: Exception, *, ranks: Sequence[int], timeout: float) -> CollectiveError:
    """Publish that a collective has failed, read the statuses of the other ranks, and return an error that lists them.

    Args:
        status: status of this rank, with `failed` not yet set.
        error: error that the backend raised.
        ranks: global ranks of the collective.
        timeout: timeout of the collective in seconds.
    """
    kind = _failure_kind(str(error))
    status = replace(status, failed=kind or f"failed: {error}")
    others = [rank for rank in ranks if rank != dist.get_rank()]
    statuses, no_store = _query_store(status, others, seconds=min(5.0, max(1.0, timeout / 10)))
    sentences, elsewhere = _describe_statuses(status, others, statuses, timeout)
    sentences += [text for text in (no_store, "" if kind else str(error)) if text]
    why = "; ".join(sentences) or "all of its ranks joined it, so one of them may wait for another collective"
    message = f"layerzero: {status.doing} failed on rank {dist.get_rank()}: {why}. {HINT}"
    return CollectiveError(message, status, elsewhere)


def transfer_error(status: RankStatus, error: Exception, *, rank: int, peer: int, timeout: float) -> CollectiveError:
    """Return the error of a transfer between `rank`, which is this rank, and `peer`. Ask no other rank.

    Args:
        error: error that the backend raised.
        timeout: timeout of the transfer in seconds.
    """
    kind = _failure_kind(str(error))
    why = _describe_peers({peer: ""}, {}, timeout if kind == _TIMED_OUT else None)[0] if kind else str(error)
    return CollectiveError(f"layerzero: {status.doing} failed on rank {rank}: {why}", status, {})


def _failure_kind(text: str) -> str:
    """Return the kind of failure that a backend's message describes, or "" if the message is not recognized."""
    if re.search(r"time[ds]?[ -]?out", text, re.IGNORECASE):
        return _TIMED_OUT
    return _LOST if re.search(r"connection|broken pipe|closed", text, re.IGNORECASE) else ""


def _query_store(status: RankStatus, others: Sequence[int], *, seconds: float) -> tuple[dict[int, RankStatus], str]:
    """Publish `status`; return the statuses of the other ranks, and an error message about the store.

    The error message is empty if the store answers. A store on an unreachable machine never answers, and a pending
    request cannot be canceled. A thread therefore makes the requests.
    """
    statuses: dict[int, RankStatus] = {}
    store_error = [_SILENT]

    def query() -> None:
        try:
            publish_status(status)
            _receive_statuses(others, statuses, seconds=seconds)
            default_store().check([_status_key(dist.get_rank())])
            store_error[0] = ""  # the store answers
        except Exception:
            store_error[0] = (
                "the rendezvous store does not exist any more, because the process that served it has ended"
            )

    thread = threading.Thread(target=query, name="layerzero publish status", daemon=True)
    thread.start()
    thread.join(seconds + _TO_ANSWER)
    return dict(statuses), store_error[0]


def _receive_statuses(others: Sequence[int], statuses: dict[int, RankStatus], *, seconds: float) -> None:
    """Read statuses into `statuses` until all of `others` have reported a failure, or `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while True:
        for rank in others:
            read_statuses([rank], statuses)
            if time.monotonic() > deadline:
                return
        if all(rank in statuses and statuses[rank].failed for rank in others):
            return
        time.sleep(_PAUSE)


def _describe_statuses(
    status: RankStatus, others: Sequence[int], statuses: dict[int, RankStatus], timeout: float
) -> tuple[list[str], dict[int, RankStatus]]:
    """Return sentences about the other ranks, and the statuses of the ranks that were in another collective.

    If any rank is missing, the second value is empty.
    """
    unfinished = {rank: peer_status for rank, peer_status in statuses.items() if peer_status.is_unfinished}
    elsewhere = {rank: peer_status for rank, peer_status in unfinished.items() if peer_status.doing != status.doing}
    gave_up = [
        rank
        for rank, peer_status in unfinished.items()
        if rank not in elsewhere and peer_status.failed.startswith(_TIMED_OUT)
    ]
    connection_lost = status.failed == _LOST and not gave_up  # otherwise, ranks that timed out have closed it
    # A rank that joined the same collective has also failed by now, unless it is dead.
    alive = {
        rank
        for rank, peer_status in unfinished.items()
        if rank in elsewhere or peer_status.failed or not connection_lost
    }
    missing = {rank: _last_status(statuses.get(rank)) for rank in others if rank not in alive}
    sentences = _describe_peers(missing, elsewhere, None if connection_lost else timeout)
    if gave_up and status.failed == _LOST and not sentences:
        sentences.append(f"rank {gave_up[0]} waited until its timeout and closed the connection")
    return sentences, {} if missing else elsewhere


def _describe_peers(
    missing: Mapping[int, str], elsewhere: Mapping[int, RankStatus], timeout: float | None
) -> list[str]:
    """Return sentences about missing ranks and about ranks in another collective.

    Args:
        missing: text about the last published status of each missing rank, by rank.
        timeout: timeout of the collective in seconds, or None if a connection was lost before.
    """
    if timeout is not None:
        text = f"did not take part within {timeout:g} s"
    elif len(missing) == 1:
        text = "has died or has exited: its connection was closed"
    else:
        text = "has not reported a status"
    sentences = [f"rank {rank} {text}{last_status}" for rank, last_status in missing.items()]
    if timeout is None and len(missing) > 1:
        sentences.append("at least one of them has died or has exited: its connection was closed")
    relation = "also waited without success in" if missing else "was in another operation:"
    return sentences + [f"rank {rank} {relation} {peer_status}" for rank, peer_status in elsewhere.items()]


def _last_status(status: RankStatus | None) -> str:
    if status is None:
        return ""
    return (
        f" (its last published status: {status.doing}; few operations publish a status, so the rank may be in another "
        "operation now)"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Return text such as ``rank 2`` or ``ranks 0, 1``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def format_order(gathers: Sequence[str]) -> str:
    """Return the names of gathered units, with arrows between them."""
    return " -> ".join(map(repr, gathers))


def order_difference(orders: Mapping[int, str]) -> str:
    """Return the message for ranks that gather units in different orders.

    Args:
        orders: order of each rank, by rank.
    """
    listed = "; ".join(f"rank {rank}: {order}" for rank, order in sorted(orders.items()))
    return (
        f"layerzero: the ranks of a ZeRO-3 group gather units in different orders: {listed}. Every rank of the group "
        "must call the same units in the same order. If the called units depend on data (experts, early exits, random "
        "depth with a different seed on each rank), shard the module that selects them as one unit, or use "
        "zero3_size=1. If only some ranks run a call (`if rank == 0: evaluate(model)`), run the call on every rank"
        + (_KEPT if "(kept)" in listed else "")
    )


def _status_key(rank: int) -> str:
    return f"layerzero/word/{rank}"
