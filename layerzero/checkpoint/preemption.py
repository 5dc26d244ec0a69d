"""Leaving when a signal asks for it: all ranks after the same step, with a checkpoint, within a deadline.

[Note: One step late]
A signal comes to some ranks and not to others, and at any moment. So at each question the ranks tell each other whether
they have been asked, and read the messages of the question before, which have arrived long since. So no rank waits, and
all ranks get the same answer at the same place of the program. Messages go along one axis of ranks after the other, and
one question is needed for each axis (:class:`LateMaximum`).

[Note: A deadline that is kept]
Python runs a signal's handler between two of its own instructions. A rank that waits for a dead one is inside one for
minutes. The operating system's handler, though, writes a byte at once, and a thread waits for that. A process has one
place where such bytes go. Requests for several signals share it: a later one finds it with an earlier one, whose
handler is set.

[Note: Children]
A forked process inherits handlers, and the place of the bytes: a signal for a worker of a pool would be heard by the
run. So in a child, requests are closed at its birth: the signal does there what it did before.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from layerzero.checkpoint.staging import finish_pending
from layerzero.comm.collectives import Collective, PendingSmallGather, all_gather_small
from layerzero.comm.model_ranks import LateMaximum
from layerzero.engine.hooks import get_state

__all__ = ["LeaveRequest", "on_signal"]


def on_signal(
    signum: int, model: nn.Module, *, deadline: float | None = None, exit_code: int | None = None
) -> LeaveRequest:
    """From here on, a signal asks the run to end well, instead of ending the process.

    All data-parallel ranks must call this, from the main thread, and then :meth:`LeaveRequest.asked` in the same places
    of the loop. One rank that gets the signal is enough.

    Args:
        signum: ``signal.SIGTERM``, for instance, which launchers and schedulers send before they kill.
        model: from :func:`layerzero.shard_model`.
        deadline: seconds from the signal until the process ends, whatever it is doing. None: never.
        exit_code: of the process; by default 128 + `signum`, as of one that the signal has ended.

    Example::

        request = layerzero.checkpoint.on_signal(signal.SIGTERM, model, deadline=25)
        for step in range(first_step, steps):
            train_one_step()
            if request.asked():
                layerzero.checkpoint.save(f"runs/1/step-{step + 1:06d}", model, optimizer, {"step": step + 1})
                request.leave()
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("checkpoint.on_signal must be called from the main thread, which gets the signals")
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline must be positive or None, got {deadline!r}")
    return LeaveRequest(signum, model, deadline, 128 + signum if exit_code is None else exit_code)


class LeaveRequest:
    """Made by :func:`on_signal`. As a context manager, it is closed at the end."""

    def __init__(self, signum: int, model: nn.Module, deadline: float | None, exit_code: int) -> None:
        self._runtime = get_state(model)
        self._signum = signum
        self._deadline = deadline
        self._exit_code = exit_code
        self._signalled = False  # on this rank
        self._agreed = False  # all ranks know of a signal
        lanes = self._runtime.ranks.control_comms
        self._late = LateMaximum(len(lanes), 1)
        self._heard: list[PendingSmallGather] = []  # messages of the last question, by axis
        self._in_time = threading.Event()
        self._timer: threading.Thread | None = None
        self._handles = True  # its handler is set
        self._wakeups = _Wakeups.shared()
        if self._wakeups is not None:
            self._wakeups.requests.append(self)
        try:
            self._before: Any = signal.signal(signum, self._on_signal)
        except (OSError, ValueError):  # one that nobody can handle
            if self._wakeups is not None:
                self._wakeups.release(self)
            raise
        os.register_at_fork(after_in_child=partial(_close_in_child, weakref.ref(self)))

    def asked(self) -> bool:
        """Some rank has got the signal: the same answer on all ranks, which must all ask.

        See [Note: One step late]: a signal is heeded at the third question after it at the latest; at the second one if
        all ranks are in one ZeRO-3 group, or none shares weights.
        """
        lanes = self._runtime.ranks.control_comms
        if not lanes:
            self._agreed = self._agreed or self._signalled
        elif not self._agreed:
            heard, self._heard = self._heard, []
            self._agreed = bool(heard) and bool(self._late.receive([each.wait() for each in heard]).any())
            if not self._agreed:
                messages = self._late.outgoing(torch.tensor([self._signalled], dtype=torch.uint8))
                pairs = zip(lanes, messages, strict=True)
                self._heard = [all_gather_small(lane, Collective.METADATA, message) for lane, message in pairs]
        if self._agreed:
            self._start_deadline()
        return self._agreed

    def leave(self) -> NoReturn:
        """End the process with the exit code, when a save in the background has been written. Raises SystemExit."""
        self._start_deadline()
        self._settle()
        finish_pending(self._runtime)
        sys.exit(self._exit_code)

    def close(self) -> None:
        """Let the signal do what it did before, and forget the deadline. All ranks must call this."""
        self._release()
        self._in_time.set()
        self._settle()

    def __enter__(self) -> LeaveRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._release()  # whatever other ranks do; after an exception, a deadline that has begun is kept
        if kind is None:
            self.close()

    def _release(self) -> None:
        """Let the signal do what it did before; what was not Python's handler cannot come back, and is the default."""
        if not self._handles:
            return
        self._handles = False
        if signal.getsignal(self._signum) == self._on_signal:  # else somebody's who came later
            signal.signal(self._signum, signal.SIG_DFL if self.before is None else self.before)
        if self._wakeups is not None:
            self._wakeups.release(self)

    @property
    def before(self) -> Any:
        """What handled the signal before, and still would: no request that is closed."""
        before = self._before
        request = getattr(before, "__self__", None)
        return request.before if isinstance(request, LeaveRequest) and not request._handles else before

    def close_in_child(self) -> None:
        """See [Note: Children]."""
        self._release()

    @property
    def wakeups(self) -> _Wakeups | None:
        """Where signals wake a thread, as long as this request is open."""
        return self._wakeups if self._handles else None

    def _settle(self) -> None:
        heard, self._heard = self._heard, []
        for each in heard:
            each.wait()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True
        self._start_deadline()

    def has_come(self, signum: int) -> None:
        """The operating system says so; called from another thread."""
        if signum == self._signum:
            self._start_deadline()

    def _start_deadline(self) -> None:
        if self._timer is None and self._deadline is not None:
            self._timer = threading.Thread(target=self._end_in_time, name="layerzero deadline", daemon=True)
            self._timer.start()

    def _end_in_time(self) -> None:
        if not self._in_time.wait(self._deadline):
            said = (
                f"layerzero: the process ends {self._deadline:g} s after the signal, as checkpoint.on_signal was told\n"
            )
            os.write(2, said.encode())
            os._exit(self._exit_code)


def _close_in_child(weak: weakref.ref[LeaveRequest]) -> None:
    request = weak()
    if request is not None:
        request.close_in_child()


class _Wakeups:
    """The one place where signals of the process wake a thread, for all requests; see [Note: A deadline that is kept].

    Attributes:
        requests: that are open.
    """

    def __init__(self, heard: socket.socket, written: socket.socket) -> None:
        self.requests: list[LeaveRequest] = []
        self._heard, self._written = heard, written
        threading.Thread(target=self._listen, name="layerzero signals", daemon=True).start()

    @classmethod
    def shared(cls) -> _Wakeups | None:
        """That of open requests, or a new one. None: the place is somebody else's, such as asyncio's."""
        for signum in signal.valid_signals():
            request = getattr(signal.getsignal(signum), "__self__", None)
            if isinstance(request, LeaveRequest) and request.wakeups is not None:
                return request.wakeups
        heard, written = socket.socketpair()
        written.setblocking(False)
        before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        if before == -1:
            return cls(heard, written)
        signal.set_wakeup_fd(before)
        heard.close()
        written.close()
        return None

    def release(self, request: LeaveRequest) -> None:
        self.requests.remove(request)
        if not self.requests:
            found = signal.set_wakeup_fd(-1)
            if found != self._written.fileno():  # somebody else's by now
                signal.set_wakeup_fd(found)
            self._written.close()  # by which the thread ends

    def _listen(self) -> None:
        with self._heard, suppress(OSError):
            while got := self._heard.recv(1):
                for request in tuple(self.requests):
                    request.has_come(got[0])
