"""Exit cleanly after a preemption signal. All ranks save a checkpoint after the same step and stop before a deadline.

[Note: Delayed agreement]
A signal may arrive at any time, and on only some of the ranks. In each call of :meth:`LeaveRequest.asked`, a rank reads
the messages that were sent in the previous call, which have usually arrived. Then it sends a new message, which states
whether it has received the signal. Therefore ranks rarely wait, and all ranks get the same answer at the same point in
the program. The signal spreads along one mesh axis per call (:class:`DelayedRankMaximum`).

[Note: Deadline during blocking calls]
Python runs a signal handler between two bytecode instructions. A rank that waits for a dead rank may be inside one
instruction for minutes. The C-level handler, however, immediately writes a byte to the wakeup file descriptor, and a
thread waits for that byte. A process has only one wakeup file descriptor. Therefore requests for several signals share
this descriptor. A later request uses the descriptor of an earlier request whose handler is still set.

[Note: Forked processes]
A forked process inherits the handlers and the wakeup file descriptor. A signal to a worker process would therefore also
affect its parent process. To prevent this, requests are closed in a child process right after the fork. Closing a
request restores the previous handler in the child.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from layerzero.checkpoint.background import finish_pending
from layerzero.extend import Collective, DelayedRankMaximum, PendingSmallGather, all_gather_small, get_state


def on_signal(
    signum: int, model: nn.Module, *, deadline: float | None = None, exit_code: int | None = None
) -> LeaveRequest:
    """Set a signal handler that requests a clean exit instead of ending the process.

    All data-parallel ranks must call this function from the main thread and then call :meth:`LeaveRequest.asked` at the
    same points in the loop. Only one rank needs to receive the signal.

    Args:
        signum: signal number, such as ``signal.SIGTERM``, which launchers and schedulers send before ``SIGKILL``.
        model: model that :func:`layerzero.shard_model` returned.
        deadline: time in seconds after the signal at which the process is ended, regardless of its state. If None,
            there is no deadline.
        exit_code: exit code of the process. Default: 128 + `signum`, as if the signal had ended the process.

    Example::

        request = layerzero.checkpoint.on_signal(signal.SIGTERM, model, deadline=25)
        for step in range(first_step, steps):
            train_one_step()
            if request.asked():
                layerzero.checkpoint.save(f"runs/1/step-{step + 1:06d}", model, optimizer, {"step": step + 1})
                request.leave()
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "checkpoint.on_signal must be called from the main thread, because Python handles signals there"
        )
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline must be positive or None, got {deadline!r}. Pass seconds, or leave it out")
    return LeaveRequest(signum, model, deadline, 128 + signum if exit_code is None else exit_code)


class LeaveRequest:
    """Request to stop the run after a signal. Created by :func:`on_signal`.

    The request is a context manager. Leaving the context closes the request.
    """

    def __init__(self, signum: int, model: nn.Module, deadline: float | None, exit_code: int) -> None:
        self._lz_state = get_state(model)
        self._signum = signum
        self._deadline = deadline
        self._exit_code = exit_code
        self._signaled = False  # this rank has received the signal
        self._agreed = False  # all ranks have received the message that a signal has arrived
        comms = self._lz_state.ranks.control_comms
        self._late = DelayedRankMaximum(len(comms), 1)
        self._heard: list[PendingSmallGather] = []  # messages of the last call of asked(), one per mesh axis
        self._in_time = threading.Event()
        self._timer: threading.Thread | None = None
        self._before: Any = signal.signal(signum, self._on_signal)  # raises for a signal that cannot be handled
        if _Wakeups.current is None:
            _Wakeups.current = _Wakeups.listen()
        _open_requests.append(self)

    def asked(self) -> bool:
        """Return whether any rank has received the signal.

        All ranks must call this method. The result is the same on all ranks. It is True no later than in the third call
        after the signal. If all ranks are in one ZeRO-3 group, or if every ZeRO-3 group has one rank, it is True no
        later than in the second call. See [Note: Delayed agreement].
        """
        comms = self._lz_state.ranks.control_comms
        if not comms:
            self._agreed = self._agreed or self._signaled
        elif not self._agreed:
            pending, self._heard = self._heard, []
            self._agreed = bool(pending) and bool(self._late.receive([gather.wait() for gather in pending]).any())
            if not self._agreed:
                messages = self._late.outgoing(torch.tensor([self._signaled], dtype=torch.uint8))
                pairs = zip(comms, messages, strict=True)
                self._heard = [all_gather_small(comm, Collective.METADATA, message) for comm, message in pairs]
        if self._agreed:
            self._start_deadline()
        return self._agreed

    def leave(self) -> NoReturn:
        """Wait for a background save, then end the process and return the exit code to the launcher.

        Raises SystemExit.
        """
        self._start_deadline()
        self._wait_for_pending()
        finish_pending(self._lz_state)
        sys.exit(self._exit_code)

    def close(self) -> None:
        """Restore the previous signal handler and cancel the deadline. All ranks must call this method."""
        self._release()
        self._in_time.set()
        self._wait_for_pending()

    def __enter__(self) -> LeaveRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._release()  # without communication; after an exception, a running deadline is not canceled
        if kind is None:
            self.close()

    def _release(self) -> None:
        """Restore the previous handler, or the default if Python did not set the previous one."""
        if self not in _open_requests:
            return
        _open_requests.remove(self)
        if signal.getsignal(self._signum) == self._on_signal:  # otherwise another handler has been set since
            signal.signal(self._signum, signal.SIG_DFL if self._before is None else self._before)
        for later in _open_requests:
            if later._before == self._on_signal:
                later._before = self._before
        if not _open_requests and _Wakeups.current is not None:
            _Wakeups.current.close()
            _Wakeups.current = None

    def _wait_for_pending(self) -> None:
        pending, self._heard = self._heard, []
        for gather in pending:
            gather.wait()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signaled = True
        self._start_deadline()

    def _start_deadline(self) -> None:
        if self._timer is None and self._deadline is not None:
            self._timer = threading.Thread(target=self._enforce_deadline, name="layerzero deadline", daemon=True)
            self._timer.start()

    def _enforce_deadline(self) -> None:
        if not self._in_time.wait(self._deadline):
            message = (
                f"layerzero: the process ends {self._deadline:g} s after the signal, which is the deadline passed to "
                "checkpoint.on_signal.\n"
            )
            os.write(2, message.encode())
            os._exit(self._exit_code)


_open_requests: list[LeaveRequest] = []  # of this process, whose signal handlers and wakeup descriptor belong to all


def _close_in_child() -> None:
    """Close all requests in a forked child; see [Note: Forked processes]."""
    for request in tuple(_open_requests):
        request._release()


os.register_at_fork(after_in_child=_close_in_child)


class _Wakeups:
    """Thread that listens on the wakeup file descriptor and starts the deadlines of all open requests.

    See [Note: Deadline during blocking calls].

    Attributes:
        current: listener of the open requests, or None if there is none.
    """

    current: _Wakeups | None = None

    def __init__(self, heard: socket.socket, written: socket.socket) -> None:
        self._heard, self._written = heard, written
        threading.Thread(target=self._listen, name="layerzero signals", daemon=True).start()

    @classmethod
    def listen(cls) -> _Wakeups | None:
        """Return a new listener, or None if other code, such as asyncio, has set the wakeup file descriptor."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        if previous_fd == -1:
            return cls(receiver, sender)
        signal.set_wakeup_fd(previous_fd)
        receiver.close()
        sender.close()
        return None

    def close(self) -> None:
        current_fd = signal.set_wakeup_fd(-1)
        if current_fd != self._written.fileno():  # other code has set the descriptor since
            signal.set_wakeup_fd(current_fd)
        self._written.close()  # ends the thread

    def _listen(self) -> None:
        with self._heard, suppress(OSError):
            while received := self._heard.recv(1):
                for request in tuple(_open_requests):
                    if request._signum == received[0]:
                        request._start_deadline()
