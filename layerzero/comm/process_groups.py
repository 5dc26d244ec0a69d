"""Process groups that layerzero makes, and when they are released.

[Note: Groups of their members alone]
Groups are made by their members only: a model may live on some of the ranks, and the others need not know of it. After
``init_process_group(device_id=...)`` torch would split the world's communicator for each new group instead of making
one, which takes all ranks of the world, and hang where some are not asked. So while a group is made here, the world is
not bound to a device.

[Note: Names of groups]
torch names a group that only its members make after its ranks and the number of groups that the process is in. Groups
that end make that number fall: names would return whose keys are still in the store, or that a living group has. And
ranks that collect garbage at different times would name one group differently, and wait for each other. So a group has
a name of our own here: its ranks, and how many groups of these ranks have been made. The groups of a model are not in
torch's table of names either, as long as they need none of what that is for (see the next note): the names that torch
gives to other groups do not depend on how many models are alive.

[Note: Release of groups]
A model's groups belong to its :class:`ModelGroups`, which lives as long as anything that could use them: the model, or
a sharded parameter that somebody has kept. They are released when it is garbage collected, or by ``layerzero.close``.

gloo ends locally: a group's threads and sockets go with the last reference to it. But its destructor waits for what is
in flight, and garbage is collected in any thread, in the middle of anything, at another moment on each rank. So the
finaliser only hands the groups to a thread, which drops each one when nothing is in flight on it. A rank that has
dropped a group lets the others' exchanges on it fail, which ends them, so that no two ranks wait for each other.

On other backends, destroying a communicator may be a collective (``ncclCommAbort`` was one). There the groups of a
model that was collected are kept until the next ``shard_model`` or ``close`` on all of their ranks, which compares what
is gone on all of them, and shuts that down in one order. Such groups stay in torch's tables, so that
``destroy_process_group()`` shuts down what is left.

[Note: Groups of meshes]
The groups of a mesh are made once for the same ranks, backend and timeout, and stay until ``destroy_process_group()``,
as those of torch's ``init_device_mesh`` do. DTensor's caches compare meshes by their ranks and return specs that hold
the mesh of an earlier model, whose groups must then still work.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _unregister_process_group
from torch.distributed.distributed_c10d import (
    Backend,
    Store,
    _get_default_store,
    _get_default_timeout,
    _new_process_group_helper,
)

__all__ = [
    "CLOSED",
    "HeldGroup",
    "ModelGroups",
    "groups_so_far",
    "kept_for_release",
    "known_to_torch",
    "mesh_group",
    "new_group_like",
    "released_everywhere",
    "settle_releases",
]

CLOSED = (
    "the model was closed: layerzero.close has released its process groups, threads and memory. Close a model after "
    "its last use, or shard a new one"
)
_PATIENCE = 5.0  # seconds
_PERIOD = 0.02  # seconds between two looks at what is in flight
_LOCAL = {"gloo", "fake"}  # backends that end without other ranks


class Ending(Protocol):
    """Something that uses a group until it is done."""

    def done(self) -> bool: ...


class HeldGroup:
    """A process group until it is released.

    Attributes:
        in_flight: by id, what must end before the group may go.
    """

    def __init__(self, group: dist.ProcessGroup, *, store: Store | None = None) -> None:
        self._group: dist.ProcessGroup | None = group
        self._store = store  # where the members have met, of a group that is released
        self._world = weakref.ref(dist.group.WORLD)
        self._closed = False
        self.in_flight: dict[int, Ending] = {}
        self.name: str = group.group_name
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.is_local = {each.split(":")[1] for each in dist.get_backend_config(group).split(",")} <= _LOCAL

    @property
    def group(self) -> dist.ProcessGroup:
        """Raises RuntimeError where it was released."""
        self.require_open()
        assert self._group is not None
        return self._group

    def require_open(self) -> None:
        """Raise where it was released."""
        if self._closed:
            raise RuntimeError(CLOSED)

    @property
    def is_idle(self) -> bool:
        return all(each.done() for each in list(self.in_flight.values()))

    def track(self, ending: Ending) -> None:
        """Keep the group until `ending` is done."""
        if len(self.in_flight) >= 8:
            self.forget_done()
        self.in_flight[id(ending)] = ending

    def forget_done(self) -> None:
        """Let go of what is done and was not waited for, and so of its tensors."""
        for key, each in list(self.in_flight.items()):
            if each.done():
                self.in_flight.pop(key, None)

    def close(self) -> None:
        """Allow no further use."""
        self._closed = True

    def forget_store(self) -> None:
        """Leave in the store what other ranks may still read."""
        self._store = None

    def drop(self) -> None:
        """Give up the last reference. Of a group that is not local, all of its ranks must call this."""
        self._closed = True
        group, self._group = self._group, None
        self.in_flight.clear()
        if group is None:
            return
        world = dist.distributed_c10d._world
        if not self.is_local:
            if group in world.pg_map:
                dist.destroy_process_group(group)
            return
        for table in (world.pg_group_ranks, world.pg_backend_config):
            table.pop(group, None)
        # In another world on the same store the key may be that of another group.
        if self._store is not None and dist.group.WORLD is self._world():
            with suppress(RuntimeError):  # gone, with the process that served it
                self._store.delete_key(f"cpu//0/{group.rank()}")  # where gloo has told its address


class ModelGroups:
    """The process groups that a model makes for itself; see [Note: Release of groups]."""

    def __init__(self) -> None:
        self._held: list[HeldGroup] = []
        _RELEASES.expect()
        self._finalizer = weakref.finalize(self, _hand_over, self._held)
        self._finalizer.atexit = False  # the process ends, and all of it

    def new(self, ranks: Sequence[int], *, like: dist.ProcessGroup, device_type: str, backend: str = "") -> HeldGroup:
        """A group that ends with the model. Only the members call this, each in the same order as its peers."""
        group, store = _make(ranks, like=like, device_type=device_type, backend=backend)
        held = HeldGroup(group, store=store)
        self._held.append(held)
        if held.is_local:
            _leave_tables(group)
        return held

    def abandon(self) -> None:
        """Release what is local, where the model could not be made; other ranks may still be connecting."""
        for held in self._held:
            held.forget_store()
            held.close()
        self._finalizer()

    def release(self) -> None:
        """Release all groups. Of groups that are not local, all of their ranks must call this."""
        if not self._finalizer.alive:
            return
        for held in self._held:
            held.close()
        for held in sorted(self._held, key=lambda each: each.name):
            if not held.is_local:
                held.drop()
        self._finalizer()
        settle_releases()


def mesh_group(ranks: Sequence[int], *, like: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """The group of these ranks for meshes, made when it is first asked for. See [Note: Groups of meshes]."""
    key = (tuple(sorted(ranks)), dist.get_backend_config(like), _timeout_of(like, device_type))
    found = _MESH_GROUPS.get(key)
    if found is None or found not in dist.distributed_c10d._world.pg_map:
        found = _MESH_GROUPS[key] = new_group_like(ranks, like=like, device_type=device_type)
    return found


def new_group_like(
    ranks: Sequence[int], *, like: dist.ProcessGroup, device_type: str, backend: str = ""
) -> dist.ProcessGroup:
    """A group with the backend and the timeout of another one, which torch keeps until ``destroy_process_group()``.

    Only the members call this, each in the same order as its peers. See [Note: Groups of their members alone].
    """
    return _make(ranks, like=like, device_type=device_type, backend=backend)[0]


def groups_so_far(*members: Sequence[int]) -> dict[str, dict[str, object]]:
    """Numbers that the members of groups must agree on before they make one, as `groups` of :func:`agree`.

    See [Note: Names of groups].
    """
    names = _names()
    return {
        f"groups of the ranks {list(ranks)}": {"number of process groups made so far": names[tuple(sorted(ranks))]}
        for ranks in members
    }


def released_everywhere(told: Sequence[str], ranks: Sequence[int]) -> None:
    """Drop the groups that all of their ranks have handed in. All `ranks` must call this, with the same `told`.

    Args:
        told: by rank, what :func:`kept_for_release` has returned there.
    """
    said = {rank: json.loads(text) for rank, text in zip(ranks, told, strict=True)}
    for name in sorted(_KEPT):
        if all(name in said.get(rank, ()) for rank in _KEPT[name].ranks):
            _KEPT.pop(name).drop()


def kept_for_release() -> str:
    """Names of the groups that wait for their other ranks; see [Note: Release of groups]."""
    world = dist.distributed_c10d._world
    for name, held in list(_KEPT.items()):
        if held._group not in world.pg_map:  # of a world that was destroyed
            del _KEPT[name]
    return json.dumps(sorted(_KEPT))


def settle_releases() -> None:
    """Wait, for a few seconds at most, for groups that were handed over and have nothing in flight."""
    _RELEASES.settle()


@contextmanager
def known_to_torch(group: dist.ProcessGroup) -> Iterator[None]:
    """Let torch's object collectives, and so torch.distributed.checkpoint, use a group that is not in its tables."""
    groups = dist.distributed_c10d._world.pg_map
    is_known = group in groups
    if not is_known:
        groups[group] = (dist.get_backend_config(group).split(",")[0].split(":")[1], _get_default_store())
    try:
        yield
    finally:
        if not is_known:
            groups.pop(group, None)


def _names() -> Counter[tuple[int, ...]]:
    world = dist.group.WORLD
    assert world is not None
    return _NAMES.setdefault(world, Counter())


def _make(
    ranks: Sequence[int], *, like: dist.ProcessGroup, device_type: str, backend: str
) -> tuple[dist.ProcessGroup, Store]:
    """A new group of `ranks`, and its part of the store."""
    members = sorted(ranks)
    names = _names()
    names[tuple(members)] += 1
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    chosen = Backend(backend or dist.get_backend_config(like))
    with _nothing_to_split():
        group, store = _new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            chosen,
            _get_default_store(),
            f"layerzero/{digest}/{names[tuple(members)]}",  # type: ignore[arg-type]
            timeout=_timeout_of(like, device_type) or _get_default_timeout(chosen),
        )
    assert isinstance(group, dist.ProcessGroup) and store is not None
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    return group, store


def _leave_tables(group: dist.ProcessGroup) -> None:
    """Take a group out of torch's tables of names, which are for shutting down and for compiled collectives."""
    world = dist.distributed_c10d._world
    world.pg_map.pop(group, None)
    world.pg_names.pop(group, None)
    tag = world.pg_to_tag.pop(group, "")
    for each in {tag, ""}:
        if group in (groups := world.tags_to_pg.get(each, [])):
            groups.remove(group)
    if tag:
        world.tags_to_pg.pop(tag, None)
    _unregister_process_group(group.group_name)


@contextmanager
def _nothing_to_split() -> Iterator[None]:
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """Of its exchanges; None where its backend does not tell, for torch's default."""
    try:
        timeout: timedelta = group._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):  # the base class of backends raises where there are no options
        return None
    return timeout


def _hand_over(groups: list[HeldGroup]) -> None:
    """Have groups released. Called by finalisers, in any thread and in the middle of anything: takes no lock."""
    for held in groups:
        if held.is_local:
            held.forget_done()
    _RELEASES.put(groups)


class _Releases:
    """The thread that drops groups; see [Note: Release of groups]. It lives as long as there are any."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[HeldGroup] | threading.Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._owners = 0  # that are alive, or whose groups are not all dropped
        self._thread: threading.Thread | None = None

    def expect(self) -> None:
        """Something has been made whose groups will be put here. Never called by a finaliser."""
        with self._lock:
            self._owners += 1
            if self._thread is None or not self._thread.is_alive():  # a fork leaves threads behind
                self._thread = threading.Thread(target=self._run, name="layerzero release", daemon=True)
                self._thread.start()

    def put(self, groups: list[HeldGroup]) -> None:
        self._queue.put(groups)

    def settle(self) -> None:
        """Return when what was put here before is dropped, but for what has something in flight."""
        thread = self._thread
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            return
        passed = threading.Event()
        self._queue.put(passed)
        deadline = time.monotonic() + _PATIENCE
        while not passed.wait(_PERIOD) and thread.is_alive() and time.monotonic() < deadline:
            pass
        if self._thread is not thread:  # nothing is left to do: it ends
            thread.join(_PATIENCE)

    def end(self) -> None:
        """At the end of the process, in which no thread may be inside a backend."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(_PATIENCE)

    def _run(self) -> None:
        waiting: list[list[HeldGroup]] = []  # by owner
        while True:
            given: list[HeldGroup] | threading.Event | None = None
            try:
                given = self._queue.get(timeout=_PERIOD if waiting else None)
                if given is None:
                    return
            except Empty:
                pass
            if isinstance(given, list):
                waiting.append(given)
            ended = sum(not _drop_idle(groups) for groups in waiting)
            waiting = [groups for groups in waiting if groups]
            is_over = self._is_over(ended)
            if isinstance(given, threading.Event):
                given.set()
            if is_over:
                return

    def _is_over(self, ended: int) -> bool:
        with self._lock:
            self._owners -= ended
            if self._owners or not self._queue.empty():
                return False
            self._thread = None
            return True


def _drop_idle(groups: list[HeldGroup]) -> bool:
    """Drop those on which nothing is in flight; whether others are left in the list."""
    here = [held for held in groups if held.is_local and held.is_idle]
    if len(here) > 1:  # gloo closes one connection after the other, and waits a little for each
        threads = [threading.Thread(target=held.drop, daemon=True) for held in here]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for held in here:
            held.drop()
    for held in groups:
        if not held.is_local and held._group is not None:
            _KEPT[held.name] = held
    groups[:] = [held for held in groups if held.is_local and held._group is not None]
    return bool(groups)


_NAMES: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
_MESH_GROUPS: weakref.WeakValueDictionary[object, dist.ProcessGroup] = weakref.WeakValueDictionary()
_KEPT: dict[str, HeldGroup] = {}  # by name: see [Note: Release of groups]
_RELEASES = _Releases()
atexit.register(_RELEASES.end)
