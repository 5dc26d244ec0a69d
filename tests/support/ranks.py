"""Runner of functions on gloo ranks.

The ranks are processes that live as long as the test session, so that a test costs milliseconds instead of the seconds
that importing torch takes. Each call gets a new process group with a new store. If a call fails or hangs, the processes
are killed. The next call forks new ones from processes that have imported torch and the test modules run so far.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute, debug
from torch.distributed.tensor._collective_utils import MeshTopoInfo

import layerzero
from layerzero.device.buffer_pools import FullBufferPool

# The default of users, which is shared memory if S > 1; and collectives.
BOTH = pytest.mark.parametrize("shared_memory", [None, "off"], ids=["default", "off"])
# The same, but the test with shared memory is a slow one.
BOTH_SHARED_SLOW = pytest.mark.parametrize(
    "shared_memory", [pytest.param("off", id="off"), pytest.param(None, id="default", marks=pytest.mark.slow)]
)
# Both, but the test with shared memory is an exhaustive one.
BOTH_SHARED_EXHAUSTIVE = pytest.mark.parametrize(
    "shared_memory", [pytest.param("off", id="off"), pytest.param(None, id="default", marks=pytest.mark.exhaustive)]
)

needs_caching = pytest.mark.skipif(
    not FullBufferPool.can_cache,
    reason="needs a torch that moves memory between storages, as 2.13 does and 2.11 does not",
)


def every_nth_setting(n: int) -> pytest.MarkDecorator:
    """Parametrize a test that goes through a list of settings with `stride`: n, and 1 as an exhaustive test.

    Choose an n that has no factor in common with the number of values that the settings combine.
    """
    strides = [pytest.param(n, id=f"1 of {n}"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
    return pytest.mark.parametrize("stride", strides)


_HOST = "127.0.0.1"
_TO_MEET, _TO_LEAVE = timedelta(seconds=60), timedelta(seconds=10)
_ALL_LEAVE = "all ranks leave"
_TO_BE_BORN, _TO_END = 300, 10  # seconds


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    timeout: float = 120.0,
    pg_timeout: float = 60.0,
    store_file: Path | None = None,
    shared_memory: str | None = "off",
):
    """Call ``fn(rank, *args)`` on `world_size` ranks at once; return what they returned, by rank.

    Args:
        fn: a top-level function of a test module; it is called with the default process group initialized.
        timeout: seconds until the ranks are killed and the call fails.
        pg_timeout: seconds until a collective or the store gives up.
        store_file: file of a FileStore. None: a TCPStore that this process serves.
        shared_memory: default of ``shard_model`` on the ranks. None: its normal default.

    Raises:
        AssertionError: a rank raised or did not return in time; the message has every traceback.
    """
    return _pool.run(fn, args, world_size, timeout, _Setting(pg_timeout, shared_memory), store_file)


def run_sharing(fn: Callable[..., Any], *args: Any, **settings: Any):
    """Call :func:`run_ranks` with models that use shared memory."""
    return run_ranks(fn, *args, **{"shared_memory": "auto", **settings})


class _BodyOfTest:
    """Function that :func:`on_ranks` has made a test of. Ranks find it by the name of the test."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.__module__, self._name = body.__module__, body.__name__

    def __call__(self, rank: int, *args: Any) -> Any:
        return getattr(importlib.import_module(self.__module__), self._name).__wrapped__(rank, *args)


def on_ranks(**settings: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a function of a rank and of other arguments, so that it is a test with these other arguments.

    The test calls the function on all ranks. See :func:`run_ranks` for the settings. Arguments `shared_memory` and
    `world_size` of the test are settings, too.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        _, *parameters = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            more = {name: arguments[name] for name in ("shared_memory", "world_size") if name in arguments}
            run_ranks(_BodyOfTest(body), *(arguments[each.name] for each in parameters), **settings | more)

        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


class _Setting(NamedTuple):
    """Settings of one call to run_ranks."""

    pg_timeout: float
    shared_memory: str | None


class _Parent:
    """Process that imports torch and test modules, and forks the ranks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_fork_on_order, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def fork(self, module: str) -> Connection:
        """Order a child, which starts when `module` is imported; return a pipe to it."""
        ours, theirs = multiprocessing.Pipe()
        self._orders.send(("fork", module, 0.0))
        reduction.send_handle(self._orders, theirs.fileno(), self._process.pid)
        theirs.close()
        return ours

    def await_exit(self, child: int, deadline: float) -> None:
        """Wait until `deadline` at most."""
        self._orders.send(("await", child, deadline))
        self._orders.recv()

    def kill(self, child: int) -> None:
        self._orders.send(("kill", child, 0.0))
        self._orders.recv()

    def end(self) -> None:
        self._orders.close()
        self._process.join()


class _Rank:
    """Child of a parent process; it runs the tests and can be killed."""

    def __init__(self, parent: _Parent) -> None:
        self._parent = parent
        self._pipe: Connection | None = None  # to the child; closed when the child ends
        self._pid: int | None = None  # known when the child runs

    def start(self, module: str) -> None:
        """Start a child process if there is none; the parent imports `module` first."""
        if self._pipe is None:
            self._pipe, self._pid = self._parent.fork(module), None

    def await_birth(self) -> None:
        """Wait until the child runs. Importing torch may take a minute, which must not count for a test's timeout."""
        if self._pid is None:
            assert self.pipe.poll(_TO_BE_BORN), "a rank did not start"
            self._pid = self.pipe.recv()

    @property
    def pipe(self) -> Connection:
        assert self._pipe is not None
        return self._pipe

    def kill(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            if self._pid is not None:
                self._parent.kill(self._pid)

    def dismiss(self) -> None:
        """Ask the child to exit normally, so that it writes its coverage data."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)

    def bury(self, deadline: float) -> None:
        """Wait until `deadline` for the exit of a dismissed child, then kill it."""
        if self._pid is not None and self._pipe is not None:
            self._parent.await_exit(self._pid, deadline)
        self.kill()


def _fork_on_order(orders: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets Ctrl-C, too, and ends this process and its children
    while True:
        try:
            order, what, deadline = orders.recv()
        except EOFError:
            return
        if order == "fork":
            with contextlib.suppress(Exception):  # the child gets the same error and reports it
                importlib.import_module(what)
            handle = reduction.recv_handle(orders)
            if not os.fork():
                orders.close()
                try:
                    _work(Connection(handle))
                finally:
                    os._exit(0)
            os.close(handle)
        elif order == "await":
            while time.monotonic() < deadline and not os.waitid(os.P_PID, what, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                time.sleep(0.005)
            orders.send("awaited")
        else:
            os.kill(what, signal.SIGKILL)  # no wait call has reaped it yet, so its pid has not been reused
            os.waitpid(what, 0)
            orders.send("killed")


class _Pool:
    def __init__(self) -> None:
        # Ranks of different parents differ in random properties such as the order of sets.
        self._parents: list[_Parent] = []
        self._ranks: list[_Rank] = []

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        world_size: int,
        timeout: float,
        setting: _Setting,
        store_file: Path | None,
    ):
        while len(self._parents) < 2:
            self._parents.append(_Parent())
        while (rank := len(self._ranks)) < world_size:
            # Two ranks of a group whose numbers differ in one bit have different parents.
            self._ranks.append(_Rank(self._parents[rank.bit_count() % 2]))
        server = serve() if store_file is None else None
        store = str(store_file) if server is None else server.port
        for process in self._ranks[:world_size]:
            process.start(fn.__module__)
        for process in self._ranks[:world_size]:  # all of them first: the first ranks would time out waiting for others
            process.await_birth()
        for rank, process in enumerate(self._ranks[:world_size]):
            process.pipe.send((fn, args, rank, world_size, store, setting))
        results = self._collect(world_size, timeout)
        failures = [f"rank {rank}: {text}" for rank, (kind, text) in sorted(results.items()) if kind == "error"]
        missing = [rank for rank in range(world_size) if rank not in results]
        if failures or missing:
            for process in self._ranks:
                process.kill()
            if missing:
                failures.append(f"ranks {missing} had not returned when they were killed")
            raise AssertionError("\n".join(failures))
        worn = [process for rank, process in enumerate(self._ranks[:world_size]) if results[rank][0] == "worn"]
        for process in worn:
            process.dismiss()
        for process in worn:
            process.bury(time.monotonic() + _TO_END)
        return [results[rank][1] for rank in range(world_size)]

    def _collect(self, world_size: int, timeout: float) -> dict[int, tuple[str, Any]]:
        pending = {self._ranks[rank].pipe: rank for rank in range(world_size)}
        results: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), left):
                rank = pending.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = ("error", "the process died")
                if results[rank][0] == "error":
                    # Other ranks may wait for this rank: give them time to report what they were doing.
                    deadline = min(deadline, time.monotonic() + 5.0)
        return results

    def stop(self) -> None:
        for process in self._ranks:
            process.dismiss()
        deadline = time.monotonic() + _TO_END
        with contextlib.suppress(EOFError, OSError):  # after Ctrl-C during the import of torch
            for process in self._ranks:
                process.bury(deadline)
        for parent in self._parents:
            parent.end()
        self._ranks.clear()
        self._parents.clear()


def _work(pipe: Connection) -> None:
    warnings.simplefilter("error")
    pipe.send(os.getpid())
    gc.freeze()  # collections after each call must not scan torch's own objects, which takes longer than most tests
    while True:
        try:
            if (call := pipe.recv()) is None:
                return
        except EOFError:
            return
        fn, args, rank, world_size, store, setting = call
        try:
            value = _call(fn, args, rank, world_size, store, setting)
            result: tuple[str, Any] = ("worn" if _keeps_groups() else "ok", value)
        except BaseException:
            result = ("error", traceback.format_exc())
        pipe.send(result)


_meshes: dict[int, DeviceMesh] = {}  # by zero3_size, for the current call


def mesh_of(zero3_size: int) -> DeviceMesh:
    """Return the mesh of all ranks. It is cached during a call to :func:`run_ranks`: making groups is slow."""
    if zero3_size not in _meshes:
        _meshes[zero3_size] = layerzero.init_mesh(zero3_size)
    return _meshes[zero3_size]


def _call(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store_at: int | str, setting: _Setting
):
    # An earlier call may have changed it, as examples/train_gpt.py does; layer norm's bf16 gradients depend on it.
    torch.set_num_threads(1)
    store = dist.FileStore(store_at, world_size) if isinstance(store_at, str) else dist.TCPStore(_HOST, store_at)
    # A long timeout while all ranks connect, even on a busy machine; afterwards the timeout of the test.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TO_MEET)
    dist.barrier()  # otherwise a rank may leave while other ranks are still connecting
    timeout = timedelta(seconds=setting.pg_timeout)
    store.set_timeout(timeout)
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout)  # before torch 2.14
    defaults: dict[str, Any] = inspect.unwrap(layerzero.shard_model).__kwdefaults__
    default = defaults["shared_memory"]
    defaults["shared_memory"] = setting.shared_memory or default
    try:
        value = fn(rank, *args)
        _leave_together(store, world_size)
        return value
    except BaseException:
        store.set(_ALL_LEAVE, "")
        raise
    finally:
        defaults["shared_memory"] = default
        _meshes.clear()
        _clear_caches()
        gc.collect()  # models are cycles of modules and hooks, and hold process groups with threads of their own
        if dist.is_initialized():  # the test may have destroyed the default group
            _destroy_groups()


def _leave_together(store: dist.Store, world_size: int) -> None:
    """Wait a moment for the other ranks, which may still be connecting to a group that this rank is about to destroy.

    The store is independent of what the test has done with the default group.
    """
    if store.add("ranks that leave", 1) == world_size:
        store.set(_ALL_LEAVE, "")
    with contextlib.suppress(RuntimeError):  # a rank died or still runs, and is reported as such
        store.wait([_ALL_LEAVE], _TO_LEAVE)


def _clear_caches() -> None:
    """Clear torch's caches that refer to the meshes and groups of this call; older versions have fewer of them.

    A group that stays alive has a thread that wakes up 100 times a second, on every rank.
    """
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for cached in (_redistribute._gen_transform_infos, getattr(MeshTopoInfo, "build_from_mesh", None)):
        getattr(cached, "cache_clear", lambda: None)()


def _keeps_groups() -> bool:
    """Return whether groups of this call are still alive, such as those of a model that a test module refers to."""
    threads = Path("/proc/self/task")
    return threads.exists() and len(list(threads.iterdir())) > 16  # a group has three threads


def _destroy_groups() -> None:
    """Destroy all groups at once, each in a thread: gloo closes connections one by one, 10 ms each."""
    last_references = [[group] for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    threads = [threading.Thread(target=references.clear) for references in last_references]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve() -> dist.TCPStore:
    """Return a TCPStore that this process serves, so that it outlives every rank. Ranks would poll a FileStore.

    The store looks up the host name of each rank that connects. With a socket that torch makes, which also accepts
    IPv6, it looks up ::ffff:127.0.0.1 at a name server, which takes five seconds if an answer is lost.
    """
    with socket.create_server((_HOST, 0)) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


_pool = _Pool()
stop_ranks = _pool.stop
atexit.register(stop_ranks)  # for runs without pytest, which calls it at the end of the session
