"""Schedule refreshes, which copy masters to the compute weights of all replicas.

An optimizer step launches the refreshes of the masters that it updates, part by part or at its end. If a pipeline
schedule defers refreshes, or if more optimizers are expected to step before the next forward pass, the refreshes are
launched later, at the latest by that forward pass. It also launches the refreshes of masters that were changed outside
of steps. The next gather or use of a handle's weights waits for the refresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from layerzero.comm.agreement import require_equal
from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.traffic_counters import Observers
from layerzero.comm.transport.base import Transport
from layerzero.engine.handle import Handle
from layerzero.engine.passes import GatheredUse

_ALL_ALIKE = (
    "Change the parameters on every rank, to the same values (layerzero.load_full_state_dict sends the values of the "
    "first rank), or call layerzero.refresh(model) on every rank afterwards"
)


class WeightRefresher:
    """Object that launches the refreshes of handles. The next gather of a handle waits for its refresh.

    Args:
        handles: handles of the model.
        model_ranks: all ranks of the model.
        uses: active uses of weights outside of forward passes, during which weights must not change.
        transports: transports of all meshes of the model.

    Attributes:
        deferred: True if steps do not launch refreshes because a pipeline schedule calls :meth:`launch_due`.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        model_ranks: ModelRanks,
        uses: Sequence[GatheredUse],
        transports: Collection[Transport],
    ) -> None:
        self.deferred = False
        self._uses = uses
        self._precedes_forward = True  # before the first forward pass, no rank reads weights that other ranks write
        self._steps = 0  # number of optimizer steps since the last forward pass
        # Number of steps in the last interval between two forward passes that contained a step.
        self._expected_steps = 1
        self._handles = handles
        self._transports = tuple(transports)
        self._model_ranks = model_ranks

    def launch(self, handles: Sequence[Handle] | None = None, *, outside_step: bool = True) -> None:
        """Launch the refreshes of `handles`, or of all handles if `handles` is None. All ranks must call this method.

        Args:
            outside_step: False if only optimizer steps have changed the masters. Otherwise, encoded refreshes send the
                weights instead of differences, and the errors of encoded gradients are dropped.
        """
        handles = self._handles if handles is None else handles
        if handles:
            self.require_no_active_use("changing weights")
        self._new_round(handles, outside_step=outside_step).end()

    def record_pass(self) -> None:
        """Record that this rank begins a forward pass."""
        for transport in self._transports:
            transport.record_pass()

    def before_master_write(self, handles: Sequence[Handle] | None = None, *, outside_step: bool = True) -> None:
        """Prepare for a write to the masters of `handles`, or of all handles if `handles` is None.

        All ranks must call this method before the write, and :meth:`launch` after it, with the same `outside_step`.
        """
        self.require_no_active_use("changing weights")
        for handle in self._handles if handles is None else handles:
            handle.weights.finish_refresh()  # an in-flight refresh may read the masters
            if handle.weights.peers_read_master and outside_step:
                handle.tracker.record_write()
            elif handle.weights.peers_read_master:
                handle.tracker.prepare_write()

    def require_no_active_use(self, what: str) -> None:
        """Raise RuntimeError inside :func:`layerzero.gathered` and while a weight stream is active.

        `what` names the operation in the message.
        """
        if self._uses:
            raise RuntimeError(f"{what} is not possible {self._uses[0].reason_not_writable}")

    @contextmanager
    def step(self) -> Iterator[RefreshRound | None]:
        """Context manager for an optimizer step. On exit, it launches the refreshes of the updated masters.

        On entry, it frees the full buffers of handles that may be updated, if their units stayed gathered until the
        step.
        If several optimizers step before a forward pass, the last step launches the refreshes for all of them.

        Yields:
            Refresh round, which can launch the refreshes of handles as soon as the handles are updated. None if the
            refreshes are launched later.
        """
        self.require_no_active_use("optimizer.step()")
        self._steps += 1
        updated = [handle for handle in self._handles if handle.may_be_updated]
        for handle in updated:
            handle.reshard()
            if handle.weights.peers_read_master or handle.weights.refresher is not None:
                handle.weights.finish_refresh()  # an in-flight refresh may read the masters
            if handle.weights.peers_read_master:
                handle.tracker.prepare_write()
        later, done = self.deferred or self._steps < self._expected_steps, False
        refresh = None if later else self._new_round(updated, outside_step=False)
        try:
            yield refresh
            done = True
        finally:
            if not done:
                self._steps -= 1  # only this rank may have raised, and it may repeat the step
                for handle in updated:
                    handle.weights.request_full_refresh(agreed=False)
            # A refresh that has begun must be completed, because the other ranks take part in all of its collectives.
            # If the optimizer raised before the refresh, the updated masters are refreshed before the next forward.
            if refresh is not None and (done or refresh.left is not None):
                refresh.end()
            else:
                for handle in updated:
                    handle.defer_refresh()

    def _new_round(self, handles: Sequence[Handle], *, outside_step: bool) -> RefreshRound:
        waits, observers = not self._precedes_forward, self._model_ranks.mesh_info.counters.observers
        return RefreshRound(handles, self._transports, observers, waits=waits, outside_step=outside_step)

    def pre_forward(self) -> None:
        """Launch all pending refreshes before a forward pass."""
        self._expected_steps, self._steps = self._steps or self._expected_steps, 0
        if not self._precedes_forward:
            self.launch_due()
            return
        self._launch_due("first forward, in which ranks compare changes of parameters", always_compares=True)
        self._precedes_forward = False
        for handle in self._handles:
            handle.guard_master_writes()

    def launch_due(self) -> None:
        """Launch the refreshes of masters that steps or the user have changed. Raise if the user's changes differ."""
        self._launch_due("refresh of parameters that were changed outside optimizer.step()")

    def _launch_due(self, subject: str, *, always_compares: bool = False) -> None:
        edited = [handle for handle in self._handles if handle.edited]
        if edited or always_compares:
            self._require_equal_edits(subject, edited)
        for handle in edited:
            handle.weights.request_full_refresh(agreed=True)
        self.launch([handle for handle in self._handles if handle.refresh_due], outside_step=False)

    def _require_equal_edits(self, subject: str, edited: Sequence[Handle]) -> None:
        groups: dict[str, dict[str, object]] = {}
        for handle in edited:
            fields = groups.setdefault(f"{handle.holders(self._model_ranks).ranks}", {})
            for name, loaded_digest in handle.tracker.loaded_digests.items():
                fields[f"digest of the full tensor for {name!r}"] = loaded_digest
            its_parameters = f"{handle.members[0].name!r} and the other parameters of its handle"
            groups.setdefault(f"handles of {handle.mesh_info.ranks}", {})[its_parameters] = "changed"
        # A unit may have different numbers of handles on model-parallel ranks, so list each handle name only once.
        changed = list(dict.fromkeys(handle.name for handle in edited))
        require_equal(subject, {"changed": changed}, ranks=self._model_ranks.ranks, groups=groups, advice=_ALL_ALIKE)


class RefreshRound:
    """Round of refreshes of some handles, which are launched in order, all at once or in parts.

    See [Note: Write rounds] in comm/transport/base.py.

    Args:
        handles: handles to refresh, in order.
        transports: transports of all meshes of the model.
        observers: observers of the model.
        waits: True if the round must wait for peers that may still read the weights.
        outside_step: as in :meth:`WeightRefresher.launch`.

    Attributes:
        left: handles whose refreshes have not been launched, or None before the first launch.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        transports: Sequence[Transport],
        observers: Observers,
        *,
        waits: bool,
        outside_step: bool,
    ) -> None:
        self._handles = handles
        self.left: deque[Handle] | None = None
        self._transports = transports if handles else ()
        self._observers = observers
        self._waits = waits
        self._outside_step = outside_step

    def launch(self, ready: Collection[Handle]) -> None:
        """Launch the refreshes of the next handles in order, up to the first handle that is not in `ready`."""
        if self.left is None:
            self.left = deque(self._handles)
            for handle in self._handles:
                handle.reshard()
            for transport in self._transports if self._waits else ():
                transport.begin_write()
        while self.left and self.left[0] in ready:
            self.left.popleft().launch_refresh(outside_step=self._outside_step)

    def end(self) -> None:
        """Launch the refreshes of the remaining handles, and end the round."""
        self.launch(self._handles)
        for transport in self._transports:
            transport.end_write()
        for observer in self._observers if self._handles else ():
            observer.refreshed([handle.name for handle in self._handles])
