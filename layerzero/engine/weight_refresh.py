"""When masters are carried to the compute weights of all replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from layerzero.comm.agreement import require_equal
from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.transport.shared_memory import WriteBarrier
from layerzero.engine.handle import Handle
from layerzero.engine.passes import Use

__all__ = ["RefreshRound", "WeightRefresher"]

_ALL_ALIKE = (
    "Change them on every rank, to the same values (layerzero.load_full_state_dict sends the first rank's), or call "
    "layerzero.refresh(model) on every rank afterwards"
)


class WeightRefresher:
    """Launches the refresh of handles; it is awaited where each is next gathered.

    Args:
        uses: active uses of weights outside of forwards, during which weights must not change.

    Attributes:
        deferred: a step leaves the refresh to :meth:`launch_due`, which a pipeline's schedule calls.
    """

    def __init__(self, handles: Sequence[Handle], everyone: ModelRanks, uses: Sequence[Use]) -> None:
        self.deferred = False
        self._uses = uses
        self._comes_first = True  # a forward of which all ranks know; before it nobody reads what others write
        self._steps = 0  # of optimizers, since the last forward
        self._expected_steps = 1  # as many as there were between the two forwards before
        self._handles = handles
        self._hand_over = next((handle.shared.barrier for handle in handles if handle.shared is not None), None)
        self._everyone = everyone

    def launch(self, handles: Sequence[Handle] | None = None) -> None:
        """The refresh of `handles`; None: of all. Every rank must call this."""
        handles = self._handles if handles is None else handles
        if handles:
            self.refuse_uses("changing weights")
        RefreshRound(handles, self._hand_over, waits=not self._comes_first).end()

    def before_master_write(self, handles: Sequence[Handle] | None = None) -> None:
        """The masters of `handles` (None: of all) are about to be written, and then launched; on every rank."""
        self.refuse_uses("changing weights")
        for handle in self._handles if handles is None else handles:
            handle.finish_refresh()  # it may read what is written
            if handle.shared is not None and handle.shares_master:
                handle.tracker.record_write()

    def refuse_uses(self, what: str) -> None:
        """Raise inside :func:`layerzero.gathered`; `what` would change weights or show other ones."""
        if self._uses:
            raise RuntimeError(
                f"{what} is not possible inside layerzero.gathered, which shows the current weights of "
                f"{self._uses[0].label}. Leave the context first"
            )

    @contextmanager
    def step(self) -> Iterator[RefreshRound | None]:
        """An optimizer updates masters, and then their refresh is launched: one for all that step before a forward.

        Yields the refresh, for the parts of the masters that are updated before others; None if it will come later.
        """
        self.refuse_uses("optimizer.step()")
        self._steps += 1
        if self._hand_over is not None:
            self.before_master_write(
                [handle for handle in self._handles if handle.shares_master and handle.may_be_updated]
            )
        updated = [handle for handle in self._handles if handle.may_be_updated or handle.refresh_due]
        later, done = self.deferred or self._steps < self._expected_steps, False
        refresh = None if later else RefreshRound(updated, self._hand_over, waits=not self._comes_first)
        try:
            yield refresh
            done = True
        finally:
            # Once it is begun, the other ranks take part in all of it. What an optimizer that raised has updated before
            # is refreshed before the next forward.
            if refresh is not None and (done or refresh.left is not None):
                refresh.end()
            else:
                for handle in updated:
                    handle.bump_version()

    def launch_deferred(self) -> None:
        """The refresh that a step has left."""
        self.launch([handle for handle in self._handles if handle.refresh_due])

    def launch_edited(self) -> None:
        """The refresh of masters that were edited outside of a step; an error where ranks edited different ones."""
        edited = [handle for handle in self._handles if handle.tracker.dirty]
        if edited:
            self._agree("refresh of parameters that were changed outside optimizer.step()", edited)
            self.launch(edited)

    def pre_forward(self) -> None:
        """What is left, at the latest."""
        self._expected_steps, self._steps = self._steps or self._expected_steps, 0
        self.launch_deferred()
        if self._comes_first:
            edited = [handle for handle in self._handles if handle.tracker.dirty]
            self._agree("first forward, after changes of parameters if there are any", edited)
            self.launch(edited)
            self._comes_first = False
            for handle in self._handles:
                handle.order_writes()
        self.launch_edited()

    def _agree(self, subject: str, edited: Sequence[Handle]) -> None:
        groups: dict[str, dict[str, object]] = {}
        for handle in edited:
            with_same, with_same_handle = (
                f"{handle.holding_ranks(self._everyone)}",
                f"handles of {handle.topology.ranks}",
            )
            fields = groups.setdefault(with_same, {})
            fields |= {
                f"digest of the whole tensor for {name!r}": said for name, said in handle.tracker.loaded_digests.items()
            }
            groups.setdefault(with_same_handle, {})[f"{handle.members[0].name!r} and what lies with it"] = "changed"
        # Ranks with other parts of a unit may have it in another number of handles.
        changed = list(dict.fromkeys(handle.name for handle in edited))
        require_equal(subject, {"changed": changed}, ranks=self._everyone.ranks, groups=groups, advice=_ALL_ALIKE)


class RefreshRound:
    """One refresh of some handles, launched in their order, at once or bit by bit; see [Note: Rounds of writing].

    Args:
        waits: other ranks may still read what is going to be written.

    Attributes:
        left: what is to be launched; None before the first.
    """

    def __init__(self, handles: Sequence[Handle], hand_over: WriteBarrier | None, *, waits: bool) -> None:
        self._handles = handles
        self.left: deque[Handle] | None = None
        self._hand_over = hand_over
        self._waits = waits

    def launch(self, ready: Collection[Handle]) -> None:
        """The refresh of those that are `ready` and have none before them that is not."""
        if self.left is None:
            self.left = deque(self._handles)
            for handle in self._handles:
                handle.reshard()
            if self._handles and self._hand_over is not None and self._waits:
                self._hand_over.arrive()
        while self.left and self.left[0] in ready:
            self.left.popleft().launch_refresh()

    def end(self) -> None:
        """The refresh of all that are left."""
        self.launch(self._handles)
        if self._handles and self._hand_over is not None:
            self._hand_over.end_round()
