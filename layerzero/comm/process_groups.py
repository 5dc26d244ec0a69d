"""Create and release process groups.

[Note: Group creation by members only]
Only the members of a group create the group. A model may use only some of the ranks, and the other ranks then make no
calls. After ``init_process_group(device_id=...)``, torch would split the world's communicator for each new group. A
split needs all ranks of the world, and would hang if only the members called it. Therefore the world is not bound to a
device while this module creates a group.

[Note: Names of groups]
If only the members create a group, torch derives its name from its ranks and from the number of groups in the process.
That number decreases when groups are released. torch could then reuse a name while the keys of the previous group are
still in the store, or while another group has this name. Ranks that collect garbage at different times would also use
different names for the same group, and deadlock. Therefore layerzero names a group after its ranks and the number of
groups created for these ranks so far. Groups that are created together get their names before the first of them
connects, so the ranks still agree on the numbers if one of them fails to connect. Local groups of a model are also
removed from torch's tables (see the next note). Therefore the names of torch's other groups do not depend on the number
of live models.

[Note: Release of groups]
A model's groups belong to its :class:`ModelGroups`. This object lives as long as the model, and as long as user code
refers to one of the model's sharded parameters. The groups are released by ``layerzero.close``, or when this object is
garbage collected.

The garbage collector may run in any thread, at any point in the program, at different times on each rank. Therefore the
finalizer only puts the groups into a queue. The next ``shard_model`` or ``close`` drops the groups in the queue.

A gloo group is dropped locally: its threads and sockets end with the last reference to the group. Its destructor waits
for in-flight collectives, so a group with such a collective stays in the queue. After a rank has dropped a group,
collectives that other ranks launch on the group fail instead of waiting, so the ranks do not deadlock.

At the end of the process, too, no collective of a gloo group may be in flight, such as the refresh after the last step.
gloo's threads release its tensors, for which they need the interpreter's lock, and a thread that asks for this lock
while the interpreter finalizes aborts the process. Therefore the process waits for such collectives, for a few seconds.

On other backends, destroying a communicator may be a collective (as ``ncclCommAbort`` was). Therefore groups of such
backends stay in the queue until all of their ranks have released them, and are then dropped in the same order on all
ranks. Until then they stay in torch's tables, so ``destroy_process_group()`` destroys any that are left.

[Note: Groups of meshes]
The groups of a mesh are created once for each combination of ranks, backends, timeout and options. These groups exist
until ``destroy_process_group()``, like the groups of torch's ``init_device_mesh``. DTensor's caches compare meshes by
their ranks and may return specs that contain the mesh of an earlier model, so the groups of that mesh must still work.

[Note: Backends and options of groups]
After ``init_process_group("cpu:gloo,cuda:nccl")``, a group has a backend for each device type, and gloo connects all
pairs of ranks when the group is created. Therefore a group of a model has only the backend of its messages. The groups
of a mesh also run collectives of the user and of DTensor, and keep all backends. A group of a model copies the options
(such as NCCL's ``max_ctas``) of the mesh's group along the same axis.

[Note: Groups for transfers]
The ranks of some gloo groups only send messages to each other, with a long timeout. A rank that cannot continue must
therefore end the waits of the others. It replaces its address in the store by the reason, and then closes its
connections. The transfers of the other ranks fail at once, and these ranks find the reason in the store. A rank that is
still connecting finds it instead of the address (:class:`_AddressStore`). gloo closes all connections of a group when a
wait times out. While it connects, gloo tries to reach a process that has ended until a timeout, which is shorter.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from layerzero.device.streams import Waitable
from layerzero.utils.torch_compat import (
    backend_timeout,
    copy_options,
    create_group,
    default_store,
    forget_group,
    hide_group,
    is_known_group,
)

CLOSED = (
    "the model was closed: layerzero.close has released its process groups, threads and memory. Close a model after "
    "its last use, or shard a new model"
)
_PATIENCE, _POLL = 5.0, 0.005  # seconds to wait for in-flight collectives when the process exits, and between looks
_SHORT_ADDRESSES = "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"  # variable that gloo reads; see docs/scale.md
_LOCAL = {"gloo", "fake"}  # backends whose groups can be released without other ranks
_ADDRESS = "cpu//0/{}"  # key of gloo's address of a rank, in the group's part of the store
_GAVE_UP = "layerzero gave up: "  # start of a reason that replaces an address
_TO_CONNECT = timedelta(minutes=1)  # timeout of gloo while it connects a group for transfers; it tries five times
_UNUSED_TAG = 2**31 - 1  # tag of a message that no rank sends


class Reservation:
    """Reservation of process groups by one thread.

    Other threads launch collectives on these groups only after that thread has made its launches.
    """

    def __init__(self) -> None:
        self._made = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Context manager in which the calling thread makes the reserved launches."""
        self._thread = threading.current_thread()
        try:
            yield
        finally:
            self._made.set()

    def wait(self) -> None:
        """Wait until the reserved launches have been made. In the thread that makes them, return immediately."""
        if threading.current_thread() is not self._thread:
            self._made.wait()


class LaunchLog:
    """Collectives that this rank has launched on a process group, which may belong to several models.

    Attributes:
        launches: their number.
        recent: purposes of the latest.
        in_flight: those that must be done before a gloo group may be dropped, by ``id`` of the object.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.recent: deque[str] = deque(maxlen=8)
        self.in_flight: dict[int, Any] = {}

    def append(self, collective: str) -> int:
        """Record a launch and return its number, which begins with 1."""
        self.recent.append(collective)
        self.launches += 1
        return self.launches

    def track(self, works: Any) -> None:
        """Keep `works`, which has the method ``done``, until it is done, also if its model no longer exists."""
        if len(self.in_flight) >= 8:
            self.forget_done()
        self.in_flight[id(works)] = works

    def forget_done(self) -> None:
        """Drop completed work without waiting. Dropping the work releases its tensors."""
        for key, works in list(self.in_flight.items()):
            if works.done():
                self.in_flight.pop(key, None)

    @property
    def is_idle(self) -> bool:
        return all(each.done() for each in list(self.in_flight.values()))


_LOGS: weakref.WeakKeyDictionary[dist.ProcessGroup, LaunchLog] = weakref.WeakKeyDictionary()


class _AddressStore(Store):
    """Store through which gloo connects a group for transfers. Its waits end if a rank gives up."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        if reason := _reason_in(value):
            raise RuntimeError(reason)
        return value

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _TO_CONNECT) -> None:
        self._store.wait(keys, 5 * timeout)  # as long as gloo tries to connect


def _reason_in(value: bytes) -> str:
    """Return the reason that has replaced an address, or an empty string if `value` is an address."""
    return value.decode().removeprefix(_GAVE_UP) if value.startswith(_GAVE_UP.encode()) else ""


class HeldGroup:
    """Reference to a process group that can be closed and released.

    Attributes:
        reserved: reservation of the launches that must precede all others on the group, or None.
        last_on_stream: event after the last collective that a stream of the engine has run, if no later collective has
            waited for it. See [Note: Collectives on streams of the engine] in collectives.py.
        last_launch: last collective on the backend's stream, if no later collective on a stream of the engine has
            waited for it. Only set on a device.
        name: name of the group, or an empty string until the group is created; see :class:`ModelGroups`.
        backends: backend of each device type, as in ``torch.distributed.get_backend_config``.
        log: collectives that this rank has launched on the group.
        channels: transfers between two ranks that this rank has launched on the group, by sender, receiver and tag.
        transfer_timeout: timeout of these transfers, or None if the group is not for transfers only. See [Note: Groups
            for transfers].
        failure: message of the error with which waits for collectives of the group have ended, or an empty string.
        last_encoded_reduction: event after the last encoded reduction, if no later collective on a stream of the engine
            has waited for it.
    """

    def __init__(self, ranks: Sequence[int], backends: str) -> None:
        self._group: dist.ProcessGroup | None = None
        self._store: Store | None = None  # the group's part of the rendezvous store; None for groups that torch keeps
        self._address = ""  # key of this rank's address in `_store`
        self._world = weakref.ref(dist.group.WORLD)
        self._closed = False
        self.reserved: Reservation | None = None
        self.last_on_stream: Waitable | None = None
        self.last_launch: weakref.ref[Any] | None = None
        self.last_encoded_reduction: Waitable | None = None
        self.log = LaunchLog()
        self.channels: defaultdict[str, LaunchLog] = defaultdict(LaunchLog)
        self.transfer_timeout: timedelta | None = None
        self.failure = ""
        self.name = ""
        self.ranks = tuple(ranks)
        self.backends = backends
        self.is_local = {each.split(":")[1] for each in backends.split(",")} <= _LOCAL

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> HeldGroup:
        """Return a reference to an existing group."""
        held = cls(dist.get_process_group_ranks(group), dist.get_backend_config(group))
        held.set_group(group)
        return held

    def set_name(self, name: str) -> None:
        """Set the name of a group that will be created, once."""
        self.name, self._store = name, PrefixStore(f"{name}/", default_store())
        self._address = _ADDRESS.format(self.ranks.index(dist.get_rank()))

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Set the process group, once."""
        assert self._group is None
        self._group = group
        self.log = _LOGS.setdefault(group, self.log)
        self.name = group.group_name
        _HELD.add(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError if the group has been closed or released, or does not exist yet."""
        if self._closed or self.failure:
            self.require_open()
        if self._group is None:
            raise RuntimeError(
                f"the process group of the ranks {list(self.ranks)} does not exist yet, because the model of this unit "
                "is not complete. Call the model, or layerzero.shard_optimizer, on all ranks first"
            )
        return self._group

    def require_open(self) -> None:
        """Raise RuntimeError if the group has failed, or has been closed or released."""
        if self._closed or self.failure:
            raise RuntimeError(CLOSED if self._closed else self.failure)

    def close(self) -> None:
        """Mark the group as closed, so that further use raises RuntimeError."""
        self._closed = True

    def fail(self, message: str) -> None:
        """Make all further use raise RuntimeError with `message`, and abort collectives in flight if the backend can.

        gloo cannot abort collectives. Threads that wait for them read `failure`.
        """
        self.failure = self.failure or message
        if self.transfer_timeout is not None:
            self.publish_reason(message)
            self.close_connections()
        if not self.is_local and self._group is not None:
            with suppress(RuntimeError):  # a backend that cannot abort collectives
                self._group.abort()  # type: ignore[attr-defined]

    def find_reason(self) -> str:
        """Return the reason why a rank has given up the group, or an empty string."""
        store, keys = self._store, [_ADDRESS.format(index) for index in range(len(self.ranks))]
        reasons = (_reason_in(store.get(key)) for key in keys if store is not None and store.check([key]))
        return next(filter(None, reasons), "")

    def publish_reason(self, reason: str) -> None:
        """Publish why this rank gives up the group. See [Note: Groups for transfers]."""
        store, self._store = self._store, None  # `drop` must not delete the reason
        if store is not None:
            with suppress(RuntimeError):  # the process that served the store has ended
                store.set(self._address, _GAVE_UP + reason)

    def close_connections(self) -> None:
        """End all transfers of the group, on all of its ranks. See [Note: Groups for transfers]."""
        group = self._group
        if group is None:
            return
        for index in range(group.size()):
            if index != group.rank():
                with suppress(RuntimeError):  # the wait times out, or that rank has closed the connection
                    group.recv([torch.empty(1)], index, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        self.log.in_flight.clear()

    def drop(self) -> None:
        """Release the process group. If the group is not local, all ranks of the group must call this method."""
        self._closed = True
        group, self._group = self._group, None
        self.log.in_flight.clear()
        if group is None:
            return
        if not self.is_local:
            if is_known_group(group):
                dist.destroy_process_group(group)
            return
        forget_group(group)
        # After another init_process_group on the same store, the key may belong to another group.
        if self._store is not None and dist.group.WORLD is self._world():
            with suppress(RuntimeError):  # the process that served the store has exited
                self._store.delete_key(self._address)


_HELD: weakref.WeakSet[HeldGroup] = weakref.WeakSet()


def current_groups() -> list[HeldGroup]:
    """Return the references to groups of the current default process group."""
    return [held for held in list(_HELD) if held._world() is dist.group.WORLD]


def logged_groups() -> list[dist.ProcessGroup]:
    """Return the groups that layerzero uses, also those that are not in torch's tables."""
    return list(_LOGS)


class ModelGroups:
    """Process groups that a model has created; see [Note: Release of groups].

    Args:
        deferred: if True, groups are created by :meth:`create_deferred`. Units can then be built before ranks
            communicate.
    """

    def __init__(self, *, deferred: bool = False) -> None:
        self.deferred = deferred
        self._waiting: list[tuple[HeldGroup, Callable[[str], dist.ProcessGroup]]] = []
        self._held: list[HeldGroup] = []
        self._finalizer = weakref.finalize(self, _enqueue, self._held)
        self._finalizer.atexit = False  # the end of the process releases all groups

    def new(
        self,
        ranks: Sequence[int],
        *,
        like: dist.ProcessGroup,
        device_type: str,
        backend: str = "",
        transfer_timeout: timedelta | None = None,
    ) -> HeldGroup:
        """Create a group that is released with the model.

        All members of the group must call this method, in the same order relative to other groups.

        Args:
            like: group from which the new group has its backend, timeout and options. See [Note: Backends and options
                of groups].
            device_type: device type of the tensors that the group sends.
            backend: another backend, which gets no options.
            transfer_timeout: if not None, the group is for transfers only, and their timeout is at least this long. See
                [Note: Groups for transfers].
        """
        config = backend or _config_on(like, device_type)
        held = HeldGroup(sorted(ranks), str(dist.BackendConfig(dist.Backend(config))))
        timeout = backend_timeout(like, device_type) or None
        if transfer_timeout is not None:
            held.transfer_timeout = max(timeout or transfer_timeout, transfer_timeout)
            timeout = min(timeout or _TO_CONNECT, _TO_CONNECT)
        options = None if backend else copy_options(like, device_type)
        create = partial(
            _create_group, held.ranks, config, timeout=timeout, options=options, gives_up=transfer_timeout is not None
        )
        self._waiting.append((held, create))
        if not self.deferred:
            self.create_deferred()
        return held

    def create_deferred(self) -> None:
        """Create the deferred groups. Later calls of :meth:`new` create groups immediately."""
        self.deferred = False
        for held, _ in self._waiting:  # see [Note: Names of groups]
            held.set_name(_new_name(held.ranks))
            self._held.append(held)
        while self._waiting:
            held, create = self._waiting.pop(0)
            held.set_group(create(held.name))
            if held.is_local:
                hide_group(held.group)

    @property
    def held(self) -> tuple[HeldGroup, ...]:
        """References to the groups, also to those that could not be created."""
        return tuple(self._held)

    def abandon(self) -> None:
        """Release the local groups of a model that could not be built. Other ranks may still be connecting to them."""
        for held in self._held:
            held._store = None  # keeps the group's keys in the store
            held.close()
        self._finalizer()
        drop_idle_groups()

    def release(self) -> None:
        """Release all groups. If some groups are not local, all ranks of these groups must call this method."""
        if not self._finalizer.alive:
            return
        for held in self._held:
            held.close()
        for held in sorted(self._held, key=lambda each: each.name):
            if not held.is_local:
                held.drop()
        self._finalizer()
        drop_idle_groups()


def _enqueue(groups: list[HeldGroup]) -> None:
    """Release groups. This function takes no lock, because finalizers may call it in any thread at any time."""
    for held in groups:
        held.log.forget_done()
        _RELEASED[held.name] = held


def drop_idle_groups() -> None:
    """Drop the released local groups on which no collective is in flight. See [Note: Release of groups]."""
    for log in list(_LOGS.values()):
        log.forget_done()
    idle = [name for name, held in list(_RELEASED.items()) if held.is_local and held.log.is_idle]
    for name in idle:
        _RELEASED.pop(name).drop()


def mesh_group(
    ranks: Sequence[int], *, like: dist.ProcessGroup, device_type: str, options: Any = None
) -> dist.ProcessGroup:
    """Return the group that meshes use for `ranks`; see [Note: Groups of meshes].

    The first call creates the group, with the backends and the timeout of `like`. Only the members of the group call
    this function, and they must create their groups in the same order. See [Note: Group creation by members only].

    Args:
        options: options of the group's backend for `device_type`. None: a copy of those of `like`.
    """
    config, timeout = dist.get_backend_config(like), backend_timeout(like, device_type)
    options = options or copy_options(like, device_type)
    key = (tuple(sorted(ranks)), config, timeout, repr(option_values(options)))
    group = _MESH_GROUPS.get(key)
    if group is None or not is_known_group(group):
        members = sorted(ranks)
        group = _create_group(members, config, _new_name(members), timeout=timeout, options=options)
        _MESH_GROUPS[key] = group
    return group


def option_values(options: Any) -> dict[str, object]:
    """Return the names and values of those options of a group that ranks can compare."""
    return {
        name: value
        for each in (options, getattr(options, "config", None))  # NCCL's configuration
        for name in dir(each)
        if not name.startswith(("_", "group_", "split_color")) and isinstance(value := getattr(each, name), (int, str))
    }


def _config_on(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the backends of a group, without those of other device types if these have others."""
    config = dist.get_backend_config(group)
    backends = dict(entry.split(":") for entry in config.split(","))
    return config if len(set(backends.values())) == 1 else f"{device_type}:{backends[device_type]}"


def group_count_fields(*members: Sequence[int]) -> dict[str, dict[str, object]]:
    """Return what the members of a group must agree on before they create another, as `groups` of `require_equal`.

    These are the number of groups created so far for the same `members` (see [Note: Names of groups]), and whether gloo
    leaves the numbers of connections out of its addresses. A rank that expects them would read beyond the address.

    Args:
        members: for each group, the ranks that are its members.
    """
    names = _name_counts()
    has_short_addresses = int(os.environ.get(_SHORT_ADDRESSES) in ("1", "True"))
    return {
        f"groups of the ranks {list(ranks)}": {
            "number of process groups created so far": names[tuple(sorted(ranks))],
            _SHORT_ADDRESSES: has_short_addresses,
        }
        for ranks in members
    }


def drop_released_groups(gather: Callable[[str], Sequence[str]], ranks: Sequence[int]) -> None:
    """Drop the groups that all of their ranks have released; see [Note: Release of groups].

    All `ranks` must call this function.

    Args:
        gather: function that returns the texts of all `ranks`, in their order, for the text of this rank.
    """
    kept = []
    for name, held in list(_RELEASED.items()):
        if not held.is_local and not is_known_group(held._group):  # destroyed with its default process group
            del _RELEASED[name]
        elif not held.is_local:
            kept.append(name)
    released = {rank: json.loads(text) for rank, text in zip(ranks, gather(json.dumps(kept)), strict=True)}
    for name in sorted(kept):
        if all(name in released.get(rank, ()) for rank in _RELEASED[name].ranks):
            _RELEASED.pop(name).drop()


def _name_counts() -> Counter[tuple[int, ...]]:
    world = dist.group.WORLD
    assert world is not None
    return _NAMES.setdefault(world, Counter())


def _new_name(members: Sequence[int]) -> str:
    """Return the name of another group of `members`, which are in ascending order. See [Note: Names of groups]."""
    names = _name_counts()
    names[tuple(members)] += 1
    digest = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
    return f"layerzero/{digest}/{names[tuple(members)]}"


def _create_group(
    members: Sequence[int],
    config: str,
    name: str,
    *,
    timeout: timedelta | None,
    options: Any,
    gives_up: bool = False,
) -> dist.ProcessGroup:
    """Create a group of `members`, which are in ascending order, with the backends `config`.

    Args:
        gives_up: whether a rank may give up the group while others connect. See [Note: Groups for transfers].
    """
    store = _AddressStore(default_store()) if gives_up else default_store()
    return create_group(members, name, store=store, backend=config, timeout=timeout, options=options)


_NAMES: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
_MESH_GROUPS: weakref.WeakValueDictionary[object, dist.ProcessGroup] = weakref.WeakValueDictionary()
_RELEASED: dict[str, HeldGroup] = {}  # by name: see [Note: Release of groups]


os.register_at_fork(after_in_child=_LOGS.clear)  # a child has none of gloo's threads


@atexit.register
def _await_in_flight() -> None:
    """Wait for the collectives in flight, which could abort the process. See [Note: Release of groups]."""
    deadline = time.monotonic() + _PATIENCE
    while not all(log.is_idle for log in list(_LOGS.values())) and time.monotonic() < deadline:
        time.sleep(_POLL)
