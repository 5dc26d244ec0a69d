"""Leaving when a signal asks for it: all ranks after the same step, with a checkpoint, within a deadline.

[Note: One step late]
A signal comes to some ranks and not to others, and at any moment. So at each question the ranks tell each other whether
they have been asked, and read what was told at the question before, which has arrived long since: nobody waits, and all
ranks get the same answer at the same place of the program.

[Note: A deadline that is kept]
Python runs a signal's handler between two of its own instructions. A rank that waits for a dead one is inside one for
minutes. The operating system's handler, though, writes a byte at once, and a thread waits for that.
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

from layerzero.checkpoint.staging import finish_pending
from layerzero.comm.collectives import Exchange, Heard, tell_all
from layerzero.engine.hooks import runtime_of

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
        self._runtime = runtime_of(model)
        self._signum = signum
        self._deadline = deadline
        self._exit_code = exit_code
        self._signalled = False  # on this rank
        self._agreed = False  # all ranks know of a signal
        self._heard: Heard | None = None  # what was told at the last question
        self._in_time = threading.Event()
        self._timer: threading.Thread | None = None
        self._bytes, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._written = theirs
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._wakes = before == -1
        if not self._wakes:  # somebody else's, such as asyncio's: the deadline then begins with Python's handler
            signal.set_wakeup_fd(before)
        self._before: Any = signal.signal(signum, self._on_signal)
        if self._wakes:
            threading.Thread(target=self._watch, name="layerzero signals", daemon=True).start()

    def asked(self) -> bool:
        """Some rank has got the signal: the same answer on all ranks, which must all ask.

        See [Note: One step late]: a signal is heeded at the second question after it at the latest.
        """
        control = self._runtime.everyone.control
        if control.size == 1:
            self._agreed = self._agreed or self._signalled
        elif not self._agreed:
            heard = self._heard
            self._agreed = heard is not None and bool(heard.wait().any())
            self._heard = None
            if not self._agreed:
                said = torch.tensor([self._signalled], dtype=torch.uint8)
                self._heard = tell_all(control, Exchange.AGREE, said)
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
        """Let the signal do what it did before. All ranks must call this."""
        self._settle()
        self._in_time.set()
        if self._before is not None:
            signal.signal(self._signum, self._before)
            self._before = None
            if self._wakes:
                signal.set_wakeup_fd(-1)
            self._written.close()

    def __enter__(self) -> LeaveRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def _settle(self) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            heard.wait()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True
        self._start_deadline()

    def _watch(self) -> None:
        """See [Note: A deadline that is kept]."""
        with self._bytes, suppress(OSError):
            while got := self._bytes.recv(1):
                if got[0] == self._signum:
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
