"""That the ranks of a node gather the same units in the same order.

[Note: Surprises are announced]
A gather takes a part of its result from each rank of the ZeRO-3 group. If one rank gathers unit A where another gathers
B, the result is garbage of the right size, or the backend aborts. To ask before each gather would cost a round trip
each. Instead every rank predicts its next gather from those before it, by looking for the last place in the history
that looked like the present. While all histories are equal, so are all predictions. So whenever two ranks differ, at
least one of them is surprised by itself; a surprised rank compares with the others before it gathers. After the first
step, a loop that repeats itself is never surprised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.comm.agreement import has_peers
from layerzero.comm.collectives import Collective, Communicator, all_gather
from layerzero.comm.failure_report import CollectiveError, publish_status

__all__ = ["GatherOrderCheck"]

_REMEMBERED = 4096  # gathers in which a repetition is looked for
_CONTEXT = 64  # gathers that must look alike at most
_SHOWN = 6  # gathers before a difference that its error names
_KEPT = (
    ". '(kept)' is gathered among the few ranks of reshard_after_forward; others, which gather it among all, have run "
    "their last forward without gradients, or a pass of theirs has failed: let all do the same, or use "
    "reshard_after_forward=True"
)


class GatherOrderCheck:
    """The gathers of one model on one rank, compared with its node's where they are not foreseen.

    Args:
        lanes: that reach all `ranks` which gather together, one after the other, in the order of `ranks`.
        note: ends the message of an error.
    """

    def __init__(
        self, names: Sequence[str], lanes: Sequence[Communicator], ranks: Sequence[int], *, note: str = ""
    ) -> None:
        self._note = note
        self._names = tuple(names)
        self._lanes = tuple(lanes)
        self._history: list[int] = []  # indices into names
        self._repeats = -1  # history[_repeats] is what came next in the last place that looked like this one; -1: none
        self._count = 0  # gathers so far
        self._ranks = tuple(ranks)
        self._compares = has_peers(self._ranks)

    def check(self, unit: int) -> None:
        """Raise unless the other ranks of the node gather the same unit next; to be called before each gather.

        Raises:
            RuntimeError: the orders differ; names both.
        """
        if not self._compares:
            return
        foreseen = self._repeats >= 0 and self._history[self._repeats] == unit
        if not foreseen:
            self._compare(unit)
        self._count += 1
        self._history.append(unit)
        if foreseen:
            self._repeats += 1
            if len(self._history) >= 2 * _REMEMBERED:
                self._forget()
        else:
            self._repeats = self._place_like_this()

    def explain_failure(self, error: CollectiveError) -> CollectiveError | RuntimeError:
        """What to raise for a gather, or a comparison, that has failed: says so if other ranks gather other units."""
        orders = {rank: word.gathers for rank, word in error.elsewhere.items()}
        if not orders or not all(orders.values()):
            return error
        told = {rank: " -> ".join(map(repr, order)) for rank, order in orders.items()}
        own = " -> ".join(map(repr, error.status.gathers))
        return RuntimeError(_difference({dist.get_rank(): own} | told) + self._note)

    def _compare(self, unit: int) -> None:
        own = everyone = torch.tensor([self._count, unit])
        for lane in self._lanes:
            everyone = self._gather(lane, everyone, self._names[unit])
        if everyone.view(-1, 2).ne(own).any():
            counts, units = everyone.view(-1, 2).unbind(1)
            orders = {
                rank: self._spell([*self._history[-_SHOWN + 1 :], there]) + ("" if count == self._count else ", later")
                for rank, count, there in zip(self._ranks, counts.tolist(), units.tolist(), strict=True)
            }
            raise RuntimeError(_difference(orders) + self._note)

    def _gather(self, lane: Communicator, sent: Tensor, name: str) -> Tensor:
        everyone = torch.empty(lane.size * sent.numel(), dtype=torch.int64)
        comparison = all_gather(lane, Collective.GATHER_ORDER, everyone, sent, name=name)
        word = comparison.issued.status if self._repeats >= 0 else None  # with no prediction all ranks come here
        if word is not None:
            publish_status(word)
        try:
            comparison.wait()
        except CollectiveError as error:
            raise self.explain_failure(error) from error.__cause__
        if word is not None:
            publish_status(replace(word, passed=True))
        return everyone

    def _spell(self, units: Sequence[int]) -> str:
        return " -> ".join(repr(self._names[unit]) for unit in units)

    def _place_like_this(self) -> int:
        """Where in the history the longest context like the present one ended last; -1 if nowhere."""
        history, end = self._history, len(self._history)
        best, longest = -1, 0
        for place in range(end - 1, 0, -1):  # history[place - 1] is compared with the present gather
            length = 0
            limit = min(place, _CONTEXT)
            while length < limit and history[place - 1 - length] == history[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == _CONTEXT:
                    break
        return best

    def _forget(self) -> None:
        dropped = len(self._history) - _REMEMBERED
        del self._history[:dropped]
        self._repeats = self._repeats - dropped if self._repeats >= dropped else self._place_like_this()


def _difference(orders: dict[int, str]) -> str:
    told = "; ".join(f"rank {rank}: {order}" for rank, order in sorted(orders.items()))
    return (
        f"layerzero: the ranks of a node gather units in different orders: {told}. Every rank of a ZeRO-3 group must "
        "call the same units in the same order. If which one is called depends on data (experts, early exits, a random "
        "depth with a seed of each rank), make the module that chooses the unit instead, or use zero3_size=1. What one "
        "rank does alone (`if rank == 0: evaluate(model)`) is such a difference, too: let all of them do it"
        + (_KEPT if "(kept)" in told else "")
    )
