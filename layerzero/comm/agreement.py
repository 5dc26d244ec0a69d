"""Check through the store that the ranks agree on an operation before they start it.

Collectives abort or hang if sizes or dtypes differ between ranks. The check therefore uses the store, whose waits time
out with an error. Every rank publishes an entry that describes its next operation, the first rank compares the entries,
and every rank reads the verdict. Loads of checkpoints instead pass a function that gathers the entries.

[Note: Lifetime of store keys]
Only the first rank reads the entries of all ranks, before it publishes its verdict. Each rank deletes its entry after
it has read the verdict. The ranks read the verdict at different times. Once all ranks take part in the next agreement,
they must have read the previous verdict, so the first rank deletes that verdict. After a failed agreement, only the
verdict with the reason remains.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from layerzero.comm.failure_report import RankStatus, format_ranks, publish_status, read_statuses
from layerzero.comm.waits import NonCollectiveWait, WaitCycleError, raise_verdict, waiting
from layerzero.utils.torch_compat import default_store

_AGREED = "agreed"
_COMPARE = "compare"
_ALL = ""  # name of the group of all ranks
_OTHER_OPERATION = "ranks disagree on the operation: "
_CALL_ON_ALL = (
    "All ranks must make this call. Look for `if rank == 0:` around the call, and for an error, a signal or a slow "
    "step in the output of each rank"
)


def has_peers(ranks: Sequence[int]) -> bool:
    """Return whether an agreement among `ranks` involves other processes.

    With torch's fake process group, the process simulates a single rank, and the other ranks do not exist.
    """
    return len(ranks) > 1 and dist.get_backend() != "fake"


def require_equal(
    subject: str,
    fields: Mapping[str, object],
    *,
    ranks: Sequence[int],
    groups: Mapping[str, Mapping[str, object]] | None = None,
    failure: Exception | None = None,
    gather: Callable[[str], Sequence[str]] | None = None,
    advice: str = "",
    detail: str = "",
) -> None:
    """Raise an error on every rank unless all `ranks` publish the same `fields` for `subject` and no rank has failed.

    Args:
        subject: description of the operation, which starts the error message.
        fields: JSON-serializable values by name.
        ranks: global ranks that call this function together, in the same order on every rank. Successive calls with
            the same `ranks` must also have the same order on every rank.
        groups: additional fields by group name. They must be the same on all ranks that publish fields for that group.
        failure: error to raise on this rank, or None. The other ranks then raise an error that quotes this error.
        gather: function that returns the texts of all `ranks`, for the text of this rank, without the store.
        advice: advice for the user, appended to the message if the ranks disagree. It is separate from `subject`,
            because other messages also quote the subject.
        detail: what this rank's operation is about, which may differ between ranks. The message contains it if the
            ranks publish different subjects.

    Raises:
        ValueError: the ranks disagree. The message names each differing field, its values and their ranks.
        RuntimeError: another rank did not take part, or another rank failed while this rank did not.
    """
    if not has_peers(ranks):
        if failure is not None:
            raise failure
        return
    try:
        verdict = _exchange_fields(subject, detail, {**(groups or {}), _ALL: fields}, ranks, failure, gather)
    except RuntimeError as error:
        if failure is None:
            raise
        # This rank's own error takes precedence over errors of the agreement.
        raise failure from failure.__cause__ or failure.__context__ or error
    if failure is not None:
        raise failure
    if verdict != _AGREED:
        if verdict.startswith("layerzero:"):
            raise RuntimeError(verdict)
        if verdict.startswith(_OTHER_OPERATION):
            advice = "Make the same calls and the same changes, in the same order, on all ranks"
        raise ValueError(f"{verdict}. {advice}" if advice else verdict)


@contextmanager
def agreed(
    subject: str,
    fields: Mapping[str, object],
    *,
    ranks: Sequence[int],
    groups: Mapping[str, Mapping[str, object]] | None = None,
    advice: str = "",
) -> Iterator[None]:
    """Run the body on all `ranks`, and then call :func:`require_equal`. An error of the body is this rank's failure.

    The body may add entries to `fields` and `groups`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # reported to the other ranks, then raised here
        failure = error
    require_equal(subject, fields, ranks=ranks, groups=groups, failure=failure, advice=advice)


def _exchange_fields(
    subject: str,
    detail: str,
    groups: Mapping[str, Mapping[str, object]],
    ranks: Sequence[int],
    failure: Exception | None,
    gather: Callable[[str], Sequence[str]] | None,
) -> str:
    """Exchange the fields of all ranks, and return the verdict."""
    error = None if failure is None else f"{type(failure).__name__}: {failure}"
    entry = json.dumps({"error": error, "subject": subject, "detail": detail, "groups": groups}, sort_keys=True)
    # Send digests first. The full text follows only if they differ.
    own_digests = {name: _digest([subject, fields]) for name, fields in groups.items()}
    digests = "failed" if failure else json.dumps(own_digests)
    if gather is None:
        return _exchange_in_store(subject, digests, entry, ranks)
    verdict = _verdict_from_digests(dict(zip(ranks, gather(digests), strict=True)))
    if verdict == _COMPARE:
        verdict = _describe_difference(subject, dict(zip(ranks, gather(entry), strict=True)))
    return verdict


def _exchange_in_store(subject: str, own_digests: str, entry: str, ranks: Sequence[int]) -> str:
    """Publish the texts of this rank and return the first rank's verdict. See [Note: Lifetime of store keys]."""
    store = default_store()
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    rank = dist.get_rank()
    scope = "layerzero/" + hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    try:
        # The store counts the calls by this rank, so the process needs no counter of its own.
        call_number = store.add(f"{scope}/turn/{rank}", 1)
        prefix = f"{scope}/{call_number}"
        publish_status(RankStatus(subject, answer=f"{prefix}/first"))
        store.set(f"{prefix}/digest/{rank}", own_digests)
        if rank == ranks[0]:
            digests = _collect_texts(store, f"{prefix}/digest", ranks, timeout, subject)
            store.set(f"{prefix}/first", _verdict_from_digests(digests))
            if not isinstance(digests, str):
                _delete_key(store, f"{scope}/{call_number - 1}/first")
        verdict = _read_verdict(store, f"{prefix}/first", timeout, subject, ranks[0])
        _delete_key(store, f"{prefix}/digest/{rank}")
        if verdict == _COMPARE:
            store.set(f"{prefix}/full/{rank}", entry)
            if rank == ranks[0]:
                full = _collect_texts(store, f"{prefix}/full", ranks, timeout, subject)
                store.set(f"{prefix}/second", full if isinstance(full, str) else _describe_difference(subject, full))
            verdict = _read_verdict(store, f"{prefix}/second", timeout, subject, ranks[0])
            _delete_key(store, f"{prefix}/full/{rank}")
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"layerzero: {subject}: the rendezvous store does not exist any more, because the process that served it "
            "has died or ended. This process is rank 0 or the launcher. Read its last output"
        ) from error
    return verdict


def _delete_key(store: Store, key: str) -> None:
    """Delete a key that is no longer needed, if the store can delete keys."""
    try:
        store.delete_key(key)
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # this type of store cannot delete keys
        pass


def _collect_texts(
    store: Store, prefix: str, ranks: Sequence[int], timeout: timedelta, subject: str
) -> dict[int, str] | str:
    """Return the text that each rank published, or an error message that names the ranks that did not publish one."""
    keys = {rank: f"{prefix}/{rank}" for rank in ranks}
    if error := _wait_for_keys(store, keys, timeout, subject):
        return error
    return {rank: text.decode() for rank, text in zip(ranks, store.multi_get(list(keys.values())), strict=True)}


def _wait_for_keys(store: Store, keys: Mapping[int, str], timeout: timedelta, subject: str) -> str:
    """Wait for the key of each rank. Return an error message that names the ranks without a key, or ""."""
    names = list(keys.values())
    try:
        with waiting(NonCollectiveWait(subject, lambda connection: _ranks_without_key(keys, connection), names)):
            store.wait(names, timeout)
            raise_verdict()
    except (dist.DistNetworkError, WaitCycleError):
        raise
    except RuntimeError:  # DistStoreError; FileStore raises another subclass
        if missing := _ranks_without_key(keys, store):
            wait_text = _format_wait(missing, timeout)
            return f"layerzero: {subject}: ranks {missing} did not take part within {wait_text}. {_CALL_ON_ALL}"
    return ""


def _ranks_without_key(keys: Mapping[int, str], store: Store) -> list[int]:
    return [rank for rank, key in keys.items() if not store.check([key])]


def _format_wait(missing: Sequence[int], timeout: timedelta) -> str:
    """Return a phrase that states the timeout and the last known status of each rank in `missing`."""
    ranks_by_status: dict[str, list[int]] = defaultdict(list)
    for rank, status in read_statuses(missing).items():
        ranks_by_status[str(status)].append(rank)
    statuses = [
        f"the last published status of {format_ranks(ranks)}: {text}" for text, ranks in ranks_by_status.items()
    ]
    waited = f"{timeout.total_seconds():g} s"
    if not statuses:
        return waited
    return f"{waited} ({'; '.join(statuses)}. Few operations publish a status, so a rank may be in another one now)"


def _verdict_from_digests(digests: dict[int, str] | str) -> str:
    if isinstance(digests, str):
        return digests
    if "failed" in digests.values():
        return _COMPARE
    group_digests = {pair for text in digests.values() for pair in json.loads(text).items()}
    return _AGREED if len(group_digests) == len({name for name, _ in group_digests}) else _COMPARE


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read_verdict(store: Store, key: str, timeout: timedelta, subject: str, first_rank: int) -> str:
    # The first rank itself may wait for the other ranks for up to the full timeout.
    if error := _wait_for_keys(store, {first_rank: key}, 2 * timeout, subject):
        raise RuntimeError(error)
    text: str = store.get(key).decode()
    return text


def _describe_difference(subject: str, texts: Mapping[int, str]) -> str:
    entries = {rank: json.loads(text) for rank, text in texts.items()}
    failed = {rank: entry["error"] for rank, entry in entries.items() if entry["error"]}
    if failed:
        return f"layerzero: {subject}: " + "; ".join(f"rank {rank} failed with {e}" for rank, e in failed.items())
    if len({entry["subject"] for entry in entries.values()}) > 1:
        operations = {rank: ": ".join(filter(None, (e["subject"], e["detail"]))) for rank, e in entries.items()}
        return _OTHER_OPERATION + format_values(_ranks_by_value(operations))
    lines = []
    for group in sorted({group for entry in entries.values() for group in entry["groups"]}):
        fields = {rank: entry["groups"][group] for rank, entry in entries.items() if group in entry["groups"]}
        lines += _describe_fields(fields)
    listed = lines[:8] + ([f"and {len(lines) - 8} more fields"] if len(lines) > 8 else [])
    return f"{subject}: ranks disagree: " + "; ".join(listed)


def _describe_fields(fields: Mapping[int, Mapping[str, object]]) -> list[str]:
    """Return a line for each name whose values differ between ranks. `fields` is keyed by rank."""
    lines = []
    for name in sorted({name for each in fields.values() for name in each}):
        values = _ranks_by_value({rank: each.get(name) for rank, each in fields.items()})
        if len(values) > 1:
            lines.append(f"{name} is {format_values(values)}")
    return lines


def _ranks_by_value(values: Mapping[int, object]) -> dict[str, list[int]]:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks_of["absent" if value is None else json.dumps(value)].append(rank)
    return dict(ranks_of)


def format_values(ranks_of: Mapping[str, Sequence[int]]) -> str:
    """Return text such as ``2 on ranks 0, 1 and 4 on rank 2`` for the ranks that have each value."""
    return " and ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in ranks_of.items())
