"""Compute weights in shared memory, and the synchronization of their reads and writes.

[Note: Rounds of writing]
The full buffer of a handle is one mapping for all ranks of a ZeRO-3 group. Each rank writes its own ZeRO-3 shard and
reads the full buffer. Writes come in rounds, which are the same on all ranks: a round is one call of
`WeightRefresher.launch`. A rank that arrives at a round publishes this (COME): its earlier passes no longer read the
weights, and its next pass comes after the round. No rank writes before all ranks have arrived. If the shared memory
holds the master itself (fp32), the first write is the update of the optimizer or a write of the user. The rank then
arrives at the round before that write.

A rank that has arrived must not read before the round is over. Therefore it arrives only if it also marks the handles
as written: a forward then begins with their refresh, and a backward raises.

Each handle also has a counter of the completed refreshes of this rank's shard. A refresh completes when the parts of
all replicas have been received, which overlaps with the next forward. A thread increments the counter, because the rank
itself may be busy (in a unit that other ranks do not call, or waiting for them). Before a read, a rank waits until all
ranks have completed as many refreshes as it has launched. So each rank may read any handle at any time, in any order,
independently of the other ranks. Before the first forward, which all ranks start together, no rank reads, and writes
need no wait.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from layerzero.comm.collectives import Collective, Communicator, PendingCollective, collective_error
from layerzero.comm.transport.shm_buffers import FIRST_FREE_WORD
from layerzero.comm.transport.shm_segment import SharedSegment
from layerzero.device.streams import ThreadStream

__all__ = ["SharedFullBuffer", "WriteBarrier", "num_counters"]

_SLICE = timedelta(seconds=0.5)
_COME = FIRST_FREE_WORD
_FIRST_HANDLE = _COME + 1


def num_counters(handles: int) -> int:
    """Return the number of counters per rank for a model with this many handles."""
    return _FIRST_HANDLE + handles


class WriteBarrier:
    """Barrier of one model before each round of writes to shared weights; see [Note: Rounds of writing]."""

    def __init__(self, memory: SharedSegment, comm: Communicator) -> None:
        self.memory = memory
        self._comm = comm
        self._rounds = 0
        self._come = 0
        self._handles = 0
        self._used = 0  # bytes of the common part
        self._landings = ThreadStream("refresh")
        self._landings.end_with(self)

    def close(self) -> None:
        """End the thread and close the shared memory. The memory is freed with the last tensor that uses it."""
        self._landings.thread.end()
        self.memory.close()

    def share(self, numel: int, dtype: torch.dtype) -> SharedFullBuffer:
        """Return the full buffer of the next handle. All ranks must call this with the same arguments."""
        tensor = self.memory.common(numel, dtype, self._used)
        self._used += shared_weight_bytes(numel, dtype)
        self._handles += 1
        return SharedFullBuffer(self, tensor, _FIRST_HANDLE + self._handles - 1)

    def arrive(self) -> None:
        """Wait until all ranks have arrived at this round, so that no rank still reads the weights.

        Weights that are written afterwards must be refreshed.
        """
        if self._come == self._rounds:
            self._come += 1
            self.memory.signals.increment(_COME)
        self.wait(_COME, self._come, "")

    def end_round(self) -> None:
        """End the round, after all of its refreshes have been launched."""
        self._comm.counters.record(Collective.HAND_OVER, self._comm.axis, 0)
        self._rounds = self._come

    def publish_shard(self, works: PendingCollective | None, word: int) -> None:
        """Increment counter `word` when `works` have completed, or at once if `works` is None."""
        if works is None:
            self.memory.signals.increment(word)
        else:
            self._landings.run(partial(_land, works, self.memory, word))

    def wait(self, word: int, target: int, name: str) -> None:
        began = time.perf_counter()
        try:
            self.memory.signals.wait(word, target)
        except RuntimeError as error:
            raise collective_error(self._comm, Collective.HAND_OVER, name, error) from error
        finally:
            self._comm.counters.waited[Collective.HAND_OVER.value] += time.perf_counter() - began


def _land(works: PendingCollective, memory: SharedSegment, word: int) -> None:
    with suppress(RuntimeError):  # the main thread raises it when it waits for the same works
        for work in works.each:
            while not work.is_completed():
                if not threading.main_thread().is_alive():  # no thread may be inside a backend when the process ends
                    return
                with suppress(RuntimeError):
                    work.wait(_SLICE)  # type: ignore[call-arg]  # a refresh consists of works of the backend
            work.wait()
        memory.signals.increment(word)


class SharedFullBuffer:
    """Full buffer of one handle in shared memory. This rank writes its ZeRO-3 shard.

    Attributes:
        full: 1-D [G], compute dtype.
    """

    def __init__(self, hand_over: WriteBarrier, full: Tensor, word: int) -> None:
        self.barrier = hand_over
        self.full = full
        self._word = word
        self._launched = 0
        self._read = 0  # number of refreshes that all ranks are known to have completed

    def publish_shard(self, works: PendingCollective | None) -> None:
        """Publish the next refresh of this rank's shard when `works` have completed, or at once if `works` is None."""
        self._launched += 1
        self.barrier.publish_shard(works, self._word)

    def wait(self, name: str) -> None:
        """Wait until all ranks have completed as many refreshes as this rank has launched."""
        if self._read < self._launched:
            self.barrier.wait(self._word, self._launched, name)
            self._read = self._launched


def shared_weight_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a handle's weights in the common part, rounded up to 64."""
    return -(-numel * dtype.itemsize // 64) * 64
