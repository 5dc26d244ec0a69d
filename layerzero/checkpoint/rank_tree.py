"""Exchange small values between all ranks of a model, also in background threads.

[Note: Tree of ranks]
gloo connects all pairs of ranks of a group, and each rank reads the addresses of all others from the rendezvous store.
Values are therefore passed along a tree. Four consecutive ranks form a group, the first ranks of four such groups form
a group on the next level, and so on. A rank has at most three connections on each level to which it belongs, whatever
the number of ranks. The ranks below a member of a group are consecutive, so lists of values need no keys.

[Note: Tags]
A save and a snapshot may exchange values at the same time, in two threads that are not synchronized between ranks.
Their messages have different tags, so both can use the same connections.

[Note: Errors of a tree]
A rank waits only for its neighbors in the tree. If an exchange ends early on a rank, the rank therefore publishes the
reason and closes all its connections, so that the exchanges of its neighbors fail, and then those of their neighbors. A
rank whose neighbor has published a reason publishes the same reason. If there is none, the neighbor's process has
ended.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from layerzero.checkpoint.errors import CheckpointError, RankLostError
from layerzero.extend import Communicator, ModelGroups, ModelRanks, receive, send

FILES = 0  # tag of the messages of saves and loads, which do not overlap
_MESSAGE = "values of a checkpoint"
_FAN_OUT = 4  # maximum number of ranks in a group
_TO_ANSWER = 5.0  # seconds that a busy store may need to answer


class FailedRanksError(Exception):
    """Error of :meth:`RankTree.map_and_merge`.

    Attributes:
        failures: for each rank that has failed, the rank, the class name of its error, and the message.
    """

    def __init__(self, failures: Sequence[tuple[int, str, str]]) -> None:
        super().__init__("; ".join(f"rank {rank}: {kind}: {message}" for rank, kind, message in failures))
        self.failures = failures


class _Level(NamedTuple):
    comm: Communicator
    below: int  # number of ranks below each member, including the member; fewer below the last


class RankTree:
    """Connections between all ranks of a model. See [Note: Tree of ranks]. All ranks must create it together.

    Values are those that JSON can represent. All ranks must call each method. Calls with the same `tag` must have the
    same order on all ranks; see [Note: Tags].

    Attributes:
        failure: reason why the ranks must create another tree, or an empty string. See [Note: Errors of a tree].
    """

    def __init__(self, subject: str, ranks: ModelRanks) -> None:
        self.failure = ""
        self._ranks, self._rank = ranks, ranks.ranks[ranks.rank]
        self._is_first, self._size = ranks.is_first, ranks.size
        self._failing = threading.Lock()
        self._owners = weakref.WeakSet[ModelGroups]()  # of all groups that are closed if an exchange fails
        members, widths = list[Sequence[int]](), []
        for start, width in _group_starts(ranks.rank, ranks.size):
            group = ranks.ranks[start : start + _FAN_OUT * width : width]
            if len(group) > 1:
                members.append(group)
                widths.append(width)
        self._groups = ModelGroups(deferred=True)  # released with the tree, which may outlive the model
        comms = self.connect(subject, members, self._groups)
        self._levels = [_Level(*each) for each in zip(comms, widths, strict=True)]  # of this rank, lowest first

    def connect(self, subject: str, members: Sequence[Sequence[int]], groups: ModelGroups) -> list[Communicator]:
        """Create communicators whose transfers fail with the tree; see :meth:`ModelRanks.new_control_comms`."""
        self._owners.add(groups)
        with self.failing_together():
            return self._ranks.new_control_comms(subject, members, groups)

    def gather(self, tag: int, value: object) -> list[Any]:
        """Gather values on the first rank, in rank order. On other ranks, the result is a part of the values."""
        values = [value]
        with self.failing_together():
            for comm, _ in self._levels:
                if comm.rank:
                    self._send(comm, 0, tag, values)
                    break
                for member in range(1, comm.size):
                    values += self._receive(comm, member, tag)
        return values

    def scatter(self, tag: int, values: list[Any]) -> Any:
        """Return this rank's value. The first rank passes the values of all ranks, other ranks any list."""
        return self._pass_down(tag, values, lambda of_all, below: of_all[below])[0]

    def all_gather(self, tag: int, value: object) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        return self._pass_down(tag, self.gather(tag, value), lambda of_all, below: of_all)

    def map_and_merge(self, tag: int, map_rank: Callable[[], Any], merge: Callable[[list[Any]], list[Any]]) -> Any:
        """Call `map_rank` on each rank, and `merge` on the first rank; return this rank's part of the result.

        Args:
            map_rank: function that returns the value of this rank.
            merge: function that returns a value for each rank, from the values of all ranks.

        Raises:
            FailedRanksError: a function has raised an error on any rank. Raised on all ranks.
        """
        with self.failing_together():
            outcomes = self.gather(tag, _outcome(map_rank))
            if self._is_first:
                failures = [(rank, *error) for rank, (_, error) in enumerate(outcomes) if error]
                if not failures:
                    parts, error = _outcome(lambda: merge([value for value, _ in outcomes]))
                    failures = [(0, *error)] if error else []
                outcomes = [[None, failures]] * self._size if failures else [[part, []] for part in parts]
            part, failures = self.scatter(tag, outcomes)
        if failures:
            raise FailedRanksError(failures)
        return part

    def _pass_down(self, tag: int, values: list[Any], select: Callable[[list[Any], slice], list[Any]]) -> list[Any]:
        """Return what this rank receives from above, after it has passed on parts to the ranks below.

        Args:
            values: on the first rank, the values to pass on; on other ranks any list.
            select: function that returns the values for a member, from the values of this rank, and the ranks below the
                member as a slice.
        """
        with self.failing_together():
            for comm, width in reversed(self._levels):
                if comm.rank:
                    values = self._receive(comm, 0, tag)
                else:
                    for member in range(1, comm.size):
                        below = slice(member * width, (member + 1) * width)
                        self._send(comm, member, tag, select(values, below))
        return values

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Context manager for exchanges. If the body ends early on this rank, exchanges fail on all ranks.

        Raises:
            RankLostError: an exchange has failed, here or on another rank. The message names the rank where it began.
        """
        if self.failure:
            raise self.error()
        try:
            yield
        except (FailedRanksError, CheckpointError):  # raised on all ranks
            raise
        except BaseException as error:
            self.fail(error)
            if isinstance(error, Exception):
                raise self.error() from error
            raise

    def fail(self, error: BaseException) -> None:
        """End the exchanges of all ranks, because of `error` on this rank. See [Note: Errors of a tree]."""
        groups = [held for owner in list(self._owners) for held in owner.held]
        reason = str(error)
        if not reason.startswith("layerzero: "):
            reason = f"rank {self._rank} failed with {type(error).__name__}: {reason}"
        found = [reason]

        def publish() -> None:
            with suppress(RuntimeError):  # the process that served the store has ended
                found[0] = next(filter(None, (held.find_reason() for held in groups)), reason)
            for held in groups:
                held.publish_reason(found[0])

        with self._failing:
            if self.failure:  # another thread was first
                return
            # A store on an unreachable machine never answers.
            thread = threading.Thread(target=publish, name="layerzero publish reason", daemon=True)
            with suppress(RuntimeError):  # the interpreter ends and starts no more threads
                thread.start()
                thread.join(_TO_ANSWER)
            self.failure = found[0]
            for held in groups:
                held.close_connections()

    def error(self, subject: str = "") -> RankLostError:
        """Return the error to raise on this rank after an exchange has failed. Its message starts with `subject`."""
        return RankLostError(f"{subject}{self.failure}. Read the last output of that rank")

    def _send(self, comm: Communicator, member: int, tag: int, values: list[Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([text.numel()]), text):
            send(comm, tensor, member, name=_MESSAGE, tag=tag).wait()

    def _receive(self, comm: Communicator, member: int, tag: int) -> list[Any]:
        size = torch.zeros(1, dtype=torch.int64)
        receive(comm, size, member, name=_MESSAGE, tag=tag).wait()
        text = bytearray(int(size))
        receive(comm, torch.frombuffer(text, dtype=torch.uint8), member, name=_MESSAGE, tag=tag).wait()
        values: list[Any] = json.loads(text)
        return values


def _group_starts(rank: int, size: int) -> list[tuple[int, int]]:
    """Return the groups of a rank, lowest level first: the first member, and the distance between members."""
    groups, width = [], 1
    while width < size:
        start = rank - rank % (_FAN_OUT * width)
        groups.append((start, width))
        if start != rank:
            break
        width *= _FAN_OUT
    return groups


def _outcome(function: Callable[[], Any]) -> tuple[Any, tuple[str, str] | None]:
    """Return the result of `function`, and the class name and message of its error, if any.

    A result that JSON cannot represent, such as an int of more than 4,300 digits, is an error of the function.
    """
    try:
        result = function()
        json.dumps(result)
        return result, None
    except BaseException as error:  # the other ranks wait for this rank
        return None, (type(error).__name__, str(error))
