"""Emulation of late copies between host and device, on the CPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from layerzero.device.accelerator import HostDeviceCopies


class _Copy(NamedTuple):
    target: Tensor
    source: Tensor
    seen: Tensor | None  # the source when the copy was enqueued; None if an earlier copy has not filled it yet


class LateTransfers(HostDeviceCopies):
    """Copies that run as late as a device may run them: when the compute stream waits for them.

    Until then the target holds NaN, so that an early read spoils the result. When a copy runs, its source must be
    unchanged since the copy was enqueued. A wait of the compute stream does not make a copy visible to the host: a
    target in host memory holds NaN until the host itself has waited, or a later copy fetches it.
    """

    made: list[LateTransfers] = []  # noqa: RUF012

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        super().__init__(device, pin_memory=pin_memory)
        self.pins = True  # avoids a warning
        self.stores = self.fetches = 0
        self._lock = threading.RLock()  # threads that complete collectives copy at the same time as the program
        self._queue: deque[_Copy] = deque()
        self._done = 0
        self._host: set[int] = set()
        self._arriving: list[
            tuple[int, Tensor, Tensor]
        ] = []  # mark, target and contents of copies to the host that are done on their stream only
        LateTransfers.made.append(self)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.full((numel,), torch.nan, dtype=dtype)
        self._host.add(buffer.data_ptr())
        return buffer

    def copy(self, target: Tensor, source: Tensor, *, to_host: bool, after: Sequence[int | None] = ()) -> int:
        with self._lock:
            return self._copy(target, source, to_host=to_host)

    def _copy(self, target: Tensor, source: Tensor, *, to_host: bool) -> int:
        assert (target.data_ptr() in self._host) is to_host and (source.data_ptr() in self._host) is not to_host
        late = [pending.target for pending in self._queue] + [target for _, target, _ in self._arriving]
        filled_late = any(_overlap(source, each) for each in late)
        self.stores += target.data_ptr() in self._host
        self.fetches += source.data_ptr() in self._host
        self._queue.append(_Copy(target, source, None if filled_late else source.clone()))
        if not any(_overlap(target, pending.source) for pending in self._queue):
            target.fill_(torch.nan)
        return self._done + len(self._queue)

    def finish(self, mark: int | None) -> None:
        if mark is not None:
            with self._lock:
                self.wait(mark)
                self._arrive(lambda done, _: done <= mark)

    def _arrive(self, which: Callable[[int, Tensor], bool]) -> None:
        for done, target, contents in self._arriving:
            if which(done, target):
                target.copy_(contents)
        self._arriving = [
            (done, target, contents) for done, target, contents in self._arriving if not which(done, target)
        ]

    def wait(self, mark: int) -> None:
        with self._lock:
            self._wait(mark)

    def _wait(self, mark: int) -> None:
        while self._done < mark:
            made = self._queue.popleft()
            self._done += 1
            if made.seen is not None and not torch.equal(made.source.view(torch.uint8), made.seen.view(torch.uint8)):
                raise AssertionError("written before a copy from it was done")
            if made.target.data_ptr() in self._host:
                self._arriving.append((self._done, made.target, made.source.clone()))
            else:
                self._arrive(lambda _, stored, source=made.source: _overlap(stored, source))
                made.target.copy_(made.source)


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    begins = [t.storage_offset() * t.element_size() for t in (a, b)]
    ends = [begin + t.numel() * t.element_size() for begin, t in zip(begins, (a, b), strict=True)]
    return max(begins) < min(ends)


def late() -> Any:
    LateTransfers.made.clear()
    return mock.patch("layerzero.sharding.shared_resources.HostDeviceCopies", LateTransfers)
