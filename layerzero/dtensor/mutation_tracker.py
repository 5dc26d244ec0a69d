"""Track user writes to the rows of sharded parameters.

[Note: Tracking of user writes]
Every operation that a user runs on ``p``, ``p.data``, ``p.detach()`` or ``p.to_local()`` of a sharded parameter reaches
the local tensor. This tensor is a :class:`layerzero.dtensor.local_shard.LocalShard`, which reports writes to its
:class:`MutationTracker`. Version counters would miss writes through ``p.data``. The engine writes through plain views
of the same storage, which are not tracked.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from layerzero.dtensor.lazy_grad import LazyGrad


class MasterState(enum.Enum):
    """Relation of masters to compute weights. A launched refresh leads to REFRESHED, a step or an edit away from it."""

    REFRESHED = "refreshed"  # compute weights are current, or a refresh in flight makes them current
    STEPPED = "stepped"  # an optimizer step has changed the masters on all ranks, and its refresh is launched later
    EDITED = "edited"  # the user has changed the masters since the last step; ranks compare edits before the refresh


class MutationTracker:
    """Tracker of user writes to the storage behind one or more :class:`LocalShard` tensors."""

    def __init__(self) -> None:
        self.masters = MasterState.REFRESHED  # if the storage belongs to masters
        self.uninitialized = False  # True if empty_like has created the tensor and nothing has been written to it
        self.write_count = 0  # number of writes; compare two counts to detect a write between them
        self.before_write: Callable[[], None] | None = None  # called before the first write since the last refresh
        self.lazy_grad: LazyGrad | None = None  # resolved before .grad is read or set
        self.on_read: Callable[[], object] | None = None  # called before the values are read or saved, until a write
        self.access_error: str | None = None  # if set, any use of the values raises RuntimeError with this message
        self.loaded_digests: dict[str, str] = {}  # by name: digest of the full tensor from which rows were copied
        self.zero_requested = False  # True if zero_() was called while `access_error` was set
        self.was_zeroed = False  # True after zero_(), until the code that reads it resets it

    def replace_for_new_storage(self) -> MutationTracker:
        """Return a tracker for the rows' new storage. Any later use of the old storage raises RuntimeError."""
        self.access_error = (
            "these rows were read from a parameter before shard_optimizer moved rows to the owners of full parameters, "
            "or before the first forward after fully_shard. Read them from the parameter again"
        )
        new = MutationTracker()
        new.before_write, new.lazy_grad = self.before_write, self.lazy_grad
        new.masters, new.write_count, new.loaded_digests = self.masters, self.write_count, self.loaded_digests
        return new

    def prepare_read(self) -> None:
        """Raise RuntimeError if there is an access error. Otherwise call `on_read`."""
        if self.access_error is not None:
            raise RuntimeError(self.access_error)
        if self.on_read is not None:
            self.on_read()

    def prepare_write(self) -> None:
        """Call `before_write`, unless a write since the last refresh or step has already called it."""
        if self.masters is not MasterState.EDITED and self.before_write is not None:
            self.before_write()

    def record_write(self) -> None:
        """Record a write to the storage. Call this method before the write."""
        self.prepare_write()
        self.uninitialized, self.on_read = False, None
        self.write_count += 1
        self.masters = MasterState.EDITED

    def record_step(self) -> None:
        """Record that a step has changed masters, and that its refresh was not launched."""
        self.masters = MasterState.STEPPED

    def record_refresh(self) -> None:
        """Record that a refresh of the masters was launched."""
        self.masters = MasterState.REFRESHED
        self.loaded_digests.clear()
