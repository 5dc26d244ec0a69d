"""Emulation of an accelerator's streams and backend on the CPU: work on side streams runs late, in a thread per stream.

The host enqueues work and continues, as with a device. A dispatch mode intercepts operations on a stream that the
engine has made; the stream's thread runs them after delays, which are drawn by seed and rank. Collectives run in a
thread of their group, after the earlier work of the stream that launched them, or on that stream itself if they are
not asynchronous. Until then their output is NaN, and their input must not change while they are in flight. The compute
stream is the host itself and is never late; if the engine forgets to let it wait, it reads NaN or stale data.

Memory that a pool returns to the allocator is overwritten with NaN as soon as the allocator could reuse it.

Missing waits for the compute stream are detected in another way. Each write of a compute stream has a number. An event
carries the numbers that its stream has reached, and a stream that waits for the event then knows them. An operation or
collective fails if it uses memory that was written under a number unknown to its stream. Hooks of a leaf run on the
stream on which they were registered, as autograd does it on a device.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerzero.device.accelerator import HostDeviceCopies
from layerzero.device.buffer_pools import DeviceBufferPool
from layerzero.device.streams import DeviceStream, _DeviceEvents
from tests.support import wrapped_gloo

NAME = "device"
_MODULES = (
    "comm.collectives",
    "comm.watchdog",
    "device.accelerator",
    "device.buffer_pools",
    "device.streams",
    "engine.rank_traits",
    "engine.scheduler",
    "sharding.make_root",
)
_MOST_LATE = 2e-3  # seconds
_PATIENCE = 20.0
_REGISTER = "register_post_accumulate_grad_hook"


class Event:
    def __init__(self, device: Device, known: dict[Stream, int]) -> None:
        self.set = threading.Event()
        self.known = dict(known)  # copied when the event is recorded
        self._device = device

    def synchronize(self) -> None:
        """Block the host until the event is reached."""
        self.reach()

    def query(self) -> bool:
        return self.set.is_set()

    def reach(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self.set.wait(0.1):
            assert not self._device.failures, "\n".join(self._device.failures)
            assert time.monotonic() < deadline, "a stream waits for ever"


class Stream:
    """Stream of the device. A compute stream runs on the host."""

    def __init__(self, device: object = None, *, priority: int = 0, computes: bool = False) -> None:
        self.computes = computes
        self.device = _device()
        self._given: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.known: dict[Stream, int] = {}  # by compute stream: number of its last write that this stream waits for
        self.random = random.Random(dist.get_rank() + 100 * len(self.device.streams))
        self.device.streams.append(self)
        if not computes:
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with torch.no_grad():
            while (operation := self._given.get()) is not None:
                rarely = self.random.random() < 0.03
                time.sleep(self.random.random() * (10 if rarely else 1) * _MOST_LATE)
                try:
                    operation()
                except BaseException:
                    self.device.failures.append(traceback.format_exc())

    def give(self, operation: Callable[[], object]) -> None:
        if self.computes:
            operation()
        else:
            self._given.put(operation)

    def end(self) -> None:
        self._given.put(None)

    def record_event(self) -> Event:
        event = Event(self.device, self.known)
        self.give(event.set.set)
        return event

    def wait_event(self, event: Event) -> None:
        self.give(event.reach)
        for stream, number in event.known.items():
            self.known[stream] = max(number, self.known.get(stream, 0))

    def write(self, tensors: Iterable[Tensor]) -> None:
        """Record that this stream has written the tensors."""
        self.known[self] = self.known.get(self, 0) + 1
        for tensor in tensors:
            self.device.writes[tensor.untyped_storage().data_ptr()] = self, self.known[self]

    def use(self, tensors: Iterable[Tensor], what: str) -> None:
        """Raise if this stream uses a tensor without a wait for its last write."""
        for tensor in tensors:
            writer, number = self.device.writes.get(tensor.untyped_storage().data_ptr(), (self, 0))
            if self.known.get(writer, 0) < number:
                raise AssertionError(f"{what} uses what it has not waited for: {list(tensor.shape)}, {tensor.dtype}")

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class _Hand(TorchDispatchMode):
    """Dispatch mode that enqueues mutating operations on a stream; views and allocations run at once."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # collectives of torch's fake group
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            tensors = _tensors_of((args, kwargs))
            self._stream.use(tensors, func._schema.name)
            self._stream.give(lambda: func(*args, **kwargs))
            self._stream.device.forget(_tensors_of(args[0]))
            return args[0]
        name = func._schema.name
        views = func.is_view or name in ("aten::empty", "aten::zeros", "aten::empty_like", "aten::detach")
        assert views, f"{name} on a stream: the host would have to wait for its result"
        return func(*args, **kwargs)


class _Computes(TorchDispatchMode):
    """Dispatch mode that records the writes of a compute stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        stream = _device().current_stream()
        if stream.computes and func.namespace == "aten" and not func.is_view:
            schema = func._schema.arguments
            given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
            written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
            fresh = () if func._schema.is_mutable else result
            if "empty" in func._schema.name:  # nothing has been written there yet
                stream.device.forget(_tensors_of(fresh))
            else:
                stream.write(_tensors_of((written, fresh)))
        return result


def _require_watchdog() -> None:
    asked_by = threading.current_thread().name
    assert asked_by == "layerzero wait monitor", "what is launched must not depend on whether a collective is done"


def _query(events: _DeviceEvents, *, query: Callable[[_DeviceEvents], bool] = _DeviceEvents.query) -> bool:
    if dist.get_backend() != "fake":  # such groups are local: their completed work is dropped when more is launched
        _require_watchdog()
    return query(events)


def _tensors_of(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _poison(buffer: Tensor) -> None:
    buffer.fill_(torch.nan if buffer.is_floating_point() else 77)


class DeviceCopies(HostDeviceCopies):
    """Copies between the simulated device and the host."""

    def device_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class Device:
    """Stand-in for ``torch.cuda``, used inside :meth:`installed`; only one at a time.

    Args:
        one_at_a_time: run the collectives of all groups one after the other, in the order in which this rank launched
            them. Ranks that launch in different orders wait for each other until the test fails.
    """

    Stream = Stream

    def __init__(self, *, one_at_a_time: bool = False) -> None:
        self.one_at_a_time = one_at_a_time
        self.captures = False
        self.collectives: Stream | None = None  # one stream for all groups, with one_at_a_time
        self.streams: list[Stream] = []
        self.failures: list[str] = []
        self.births: set[Stream] = set()  # streams on which hooks of leaves were registered
        self.writes: dict[int, tuple[Stream, int]] = {}  # by address: the stream of the last write, and its number
        self._current: Stream | None = None
        self._poisoned: set[int] = set()
        self.kept: list[Tensor] = []  # tensors whose memory stays until the engine's streams have used them

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def current_stream(self) -> Stream:
        assert self._current is not None
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        with ExitStack() as stack:
            if not stream.computes:
                stack.enter_context(_Hand(stream))
            try:
                yield
            finally:
                self._current = before

    @contextmanager
    def installed(self) -> Iterator[Device]:
        """Make layerzero treat the CPU as this device."""
        _installed.append(self)
        self._current = Stream(computes=True)
        with ExitStack() as stack:
            for module in _MODULES:
                stack.enter_context(mock.patch(f"layerzero.{module}.device_module", lambda device: self))
            stack.enter_context(mock.patch("layerzero.sharding.shared_resources.HostDeviceCopies", DeviceCopies))
            stack.enter_context(mock.patch("layerzero.device.buffer_pools.keep_until_done", self._poison_later))
            stack.enter_context(mock.patch.object(DeviceStream, "keep_until_done", self._keep))
            stack.enter_context(mock.patch.object(_DeviceEvents, "query", _query))
            stack.enter_context(mock.patch.object(DeviceBufferPool, "_subtract", self._poisons()))
            stack.enter_context(mock.patch.object(Tensor, _REGISTER, self._registers()))
            stack.enter_context(mock.patch.object(torch.autograd.Variable, "_execution_engine", _Engine(self)))
            stack.enter_context(_Computes())
            try:
                yield self
            finally:
                _installed.pop()
        for stream in self.streams:
            stream.end()
        assert not self.failures, "\n".join(self.failures)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Drop the records of writes to these tensors."""
        for tensor in tensors:
            self.writes.pop(tensor.untyped_storage().data_ptr(), None)

    def _poison_later(self, buffer: Tensor, stream: Stream) -> None:
        """Overwrite a buffer of a pool as soon as the allocator could reuse its memory."""
        self._poisoned.add(id(buffer))
        stream.give(lambda: _poison(buffer))

    def _keep(self, tensor: Tensor) -> None:
        """Count what stays until its stream has used it; memory of the CPU stays as long as the thread refers to it."""
        self.kept.append(tensor)

    def _poisons(self) -> Callable[[DeviceBufferPool, Tensor], None]:
        forget = DeviceBufferPool._subtract

        def forgets(pool: DeviceBufferPool, buffer: Tensor) -> None:
            if id(buffer) in self._poisoned:
                self._poisoned.remove(id(buffer))
            else:
                pool._main_stream.use([buffer], "the next owner of freed memory")
                _poison(buffer)
            forget(pool, buffer)

        return forgets

    def _registers(self) -> Callable[[Tensor, Callable[[Tensor], None]], Any]:
        register = getattr(Tensor, _REGISTER)

        def on_its_stream(leaf: Tensor, hook: Callable[[Tensor], None]) -> Any:
            birth = self.current_stream()
            self.births.add(birth)

            def called(tensor: Tensor) -> None:
                if birth is not self.current_stream():
                    birth.wait_stream(self.current_stream())  # autograd inserts this wait
                with self.stream(birth):
                    hook(tensor)

            return register(leaf, called)

        return on_its_stream


class _Engine:
    """Autograd engine whose final callbacks wait for all streams of leaves."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._engine = torch.autograd.Variable._execution_engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        def called() -> None:
            for birth in self._device.births:
                self._device.current_stream().wait_stream(birth)
            callback()

        self._engine.queue_callback(called)


_installed: list[Device] = []


def _device() -> Device:
    return _installed[-1]


# The backend


def register() -> None:
    """Register the backend in this process; later calls have no effect."""
    wrapped_gloo.register(_Group)


@contextmanager
def on_device(zero3_size: int = 2, timeout: timedelta | None = None) -> Iterator[tuple[Device, Any]]:
    """Make layerzero treat the CPU as a device; return the device and a mesh of all ranks on it."""
    register()
    mesh = wrapped_gloo.mesh_on(NAME, zero3_size, timeout)
    with Device().installed() as device:
        yield device, mesh


class _Work(dist.Work):
    """Collective in the group's thread, or on the current stream; `wait` makes the current stream wait."""

    def __init__(self, done: Event, *, is_on_current: bool) -> None:
        super().__init__()
        self._done = done
        self._is_on_current = is_on_current

    def is_completed(self) -> bool:
        _require_watchdog()
        return self._done.set.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._is_on_current:
            _device().current_stream().wait_event(self._done)
        return True

    def get_future(self) -> Any:
        raise RuntimeError("this backend has no futures")


class _Group(wrapped_gloo.WrappedGloo):
    """Process group that runs collectives late, with gloo."""

    NAME = NAME

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._timeout = timeout
        self._own: Stream | None = None
        self._last: Event | None = None  # the end of the last collective that was launched

    @property
    def options(self) -> Any:
        return SimpleNamespace(_timeout=self._timeout)

    def launch(self, run: Callable[[], dist.Work], output: Tensor, given: Tensor) -> _Work:
        device = _device()
        if device.one_at_a_time:
            device.collectives = self._own = device.collectives or Stream()
        elif self._own is None or self._own not in device.streams:
            self._own = Stream()
        draw = self._own.random
        current = device.current_stream()
        current.use([given, output], "a collective")
        on_current = not (self.is_async or device.one_at_a_time or current.computes)
        launched = None if on_current else current.record_event()
        done = Event(_device(), current.known)
        previous, self._last = self._last, done
        inside = output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()

        def collective() -> None:
            if launched is not None:
                launched.reach()
            assert previous is None or device.one_at_a_time or previous.set.is_set(), (
                "two collectives of a group overlap"
            )
            before = given.clone()
            if not inside and output.is_floating_point():
                output.fill_(torch.nan)
            time.sleep(draw.random() * _MOST_LATE)
            assert torch.equal(given.view(torch.uint8), before.view(torch.uint8)), "written while a collective reads it"
            run().wait()
            done.set.set()

        (current if on_current else self._own).give(collective)
        return _Work(done, is_on_current=on_current)
