"""Check that all ranks of a ZeRO-3 group gather the same units in the same order.

[Note: Predicted gathers]
Each rank of the ZeRO-3 group contributes a part of the result of a gather. If one rank gathers unit A while another
rank gathers unit B, the result has the right size but wrong contents, or the backend aborts. A comparison before each
gather would cost one round trip per gather. Instead, each rank predicts its next gather from its history of gathers.
The rank compares the latest gathers with those before each of the last times at which it gathered the same unit. It
selects the longest equal sequence and, among sequences of equal length, the most recent one. It predicts the gather
that followed this sequence. The time for a prediction does not depend on the length of the history. Equal histories
lead to equal predictions. If two ranks gather different units, the prediction of at least one of them is therefore
wrong. A rank whose prediction is wrong or missing compares its next gather with those of the other ranks before it
gathers. A loop with identical steps needs no comparisons after the first step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.comm.agreement import has_peers
from layerzero.comm.collectives import Collective, Communicator, all_gather
from layerzero.comm.failure_report import CollectiveError, format_order, order_difference, publish_status

_REMEMBERED = 4096  # minimum length of the history that is kept
_TRIED = 512  # number of earlier gathers of the same unit whose contexts are compared
_CONTEXT = 64  # maximum length of a matching context
_SHOWN = 6  # number of gathers that an error message lists for each rank


class GatherOrderCheck:
    """Comparison of the order in which this rank gathers the units of a model with the orders of the other `ranks`.

    Every rank has its own instance.

    Args:
        names: names of the gathers, by index.
        comms: communicators that together reach all `ranks`. Consecutive all-gathers over these communicators return
            results in the order of `ranks`.
        ranks: global ranks that take part in the gathers.
        note: text appended to error messages.
    """

    def __init__(
        self, names: Sequence[str], comms: Sequence[Communicator], ranks: Sequence[int], *, note: str = ""
    ) -> None:
        self._note = note
        self._names = tuple(names)
        self._comms = tuple(comms)
        self._history: list[int] = []  # past gathers, as indices into names
        # By gather: numbers of the gathers that followed it.
        self._followers: defaultdict[int, deque[int]] = defaultdict(partial(deque, maxlen=_TRIED + 1))
        self._repeats = -1  # index of the predicted next gather in the history, or -1 if there is no prediction
        self._count = 0  # number of gathers so far
        self._ranks = tuple(ranks)
        self._compares = has_peers(self._ranks)

    def check(self, unit: int) -> None:
        """Raise if another rank gathers a different unit next. Call this method before each gather.

        Args:
            unit: index of this rank's next gather in the names.

        Raises:
            RuntimeError: the orders differ. The message lists the order of each rank.
        """
        if not self._compares:
            return
        predicted = self._repeats >= 0 and self._history[self._repeats] == unit
        if not predicted:
            self._compare(unit)
        self._count += 1
        self._history.append(unit)
        self._followers[unit].append(self._count)
        self._repeats = self._repeats + 1 if predicted else self._predicted_index()
        if len(self._history) >= 2 * _REMEMBERED:
            self._drop_old_history()

    def explain_failure(self, error: CollectiveError) -> CollectiveError | RuntimeError:
        """Return the error to raise for a failed gather or comparison.

        If the other ranks have published their gather orders, the returned error lists these orders. Otherwise return
        `error`.
        """
        orders = {rank: status.gathers for rank, status in error.elsewhere.items()}
        if not orders or not all(orders.values()):
            return error
        orders[dist.get_rank()] = error.status.gathers
        listed = {rank: format_order(order) for rank, order in orders.items()}
        return RuntimeError(order_difference(listed) + self._note)

    def _compare(self, unit: int) -> None:
        message = gathered = torch.tensor([self._count, unit])
        for comm in self._comms:
            gathered = self._gather_positions(comm, gathered, self._names[unit])
        if gathered.view(-1, 2).ne(message).any():
            counts, units = gathered.view(-1, 2).unbind(1)
            orders = {
                rank: format_order([self._names[unit] for unit in (*self._history[-_SHOWN + 1 :], peer_unit)])
                + ("" if count == self._count else ", later")
                for rank, count, peer_unit in zip(self._ranks, counts.tolist(), units.tolist(), strict=True)
            }
            raise RuntimeError(order_difference(orders) + self._note)

    def _gather_positions(self, comm: Communicator, sent: Tensor, name: str) -> Tensor:
        gathered = torch.empty(comm.size * sent.numel(), dtype=torch.int64)
        comparison = all_gather(comm, Collective.GATHER_ORDER, gathered, sent, name=name)
        status = comparison.launched.status if self._repeats >= 0 else None  # without a prediction, all ranks compare
        if status is not None:
            publish_status(status)
        try:
            comparison.wait()
        except CollectiveError as error:
            raise self.explain_failure(error) from error.__cause__
        if status is not None:
            publish_status(replace(status, passed=True))
        return gathered

    def _predicted_index(self) -> int:
        """Return the index of the gather that followed the best match of the latest gathers, or -1 without a match.

        The best match is the longest one and, among equals, the most recent one.
        """
        history, end = self._history, len(self._history)
        best, longest = -1, 0
        for number in islice(reversed(self._followers[history[-1]]), 1, None):  # the first one is the next gather
            index, length = number - self._count + end, 0
            limit = min(index, _CONTEXT)
            while length < limit and history[index - 1 - length] == history[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = index, length
                if length == _CONTEXT:
                    break
        return best

    def _drop_old_history(self) -> None:
        num_dropped = len(self._history) - _REMEMBERED
        del self._history[:num_dropped]
        self._repeats = self._repeats - num_dropped if self._repeats >= num_dropped else self._predicted_index()
