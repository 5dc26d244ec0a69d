"""Compute weights that the ranks of a node share: who may write them, and when they may be read.

[Note: Rounds of writing]
The full buffer of a handle is one piece of memory for all ranks of a node, each of which writes its own ZeRO-3 shard
and reads all. Writes come in rounds, which are the same on all ranks: a round is one call of `WeightRefresher.launch`.
A rank that comes to a round says so (COME): its passes through the weights before are over, and the next one comes
after. Nobody writes before all have come to the round. Where the master lies in the shared memory itself (fp32), the
update of an optimizer or an edit of the user is the first write, so that whoever is about to make it comes to the
round then.

A rank that has said that it has come must not read before the round is over. Therefore it is said only where the
handles are marked as edited at the same time: a forward begins with their refresh, and a backward refuses to run.

Each handle has a number, too: how often this rank's shard has landed. A refresh lands when all of the replicas' parts
are there, which happens behind the next forward; a thread says so, as the rank itself may be
anywhere (in a unit that others do not call, or waiting for them). Who is about to read waits until all ranks have
landed as often as it has launched. A rank may so read what it wants, when it wants, in any order: the others need not
do the same. Before the first forward, to which all ranks come together, nobody reads, and who writes waits for nobody.
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

__all__ = ["SharedFullBuffer", "WriteBarrier", "words_for"]

_SLICE = timedelta(seconds=0.5)
_COME = FIRST_FREE_WORD
_FIRST_HANDLE = _COME + 1


def words_for(handles: int) -> int:
    """Signals of each rank that a model needs."""
    return _FIRST_HANDLE + handles


class WriteBarrier:
    """The rounds of one model; see [Note: Rounds of writing]."""

    def __init__(self, memory: SharedSegment, lane: Communicator) -> None:
        self.memory = memory
        self._lane = lane
        self._rounds = 0
        self._come = 0
        self._handles = 0
        self._used = 0  # bytes of the common memory
        self._landings = ThreadStream("refresh")
        self._landings.end_with(self)

    def close(self) -> None:
        """Unmap the shared memory. It is freed with the last tensor in it."""
        self._landings.thread.end()
        self.memory.close()

    def share(self, numel: int, dtype: torch.dtype) -> SharedFullBuffer:
        """The next handle's memory; every rank asks for the same."""
        tensor = self.memory.common(numel, dtype, self._used)
        self._used += room_of(numel, dtype)
        self._handles += 1
        return SharedFullBuffer(self, tensor, _FIRST_HANDLE + self._handles - 1)

    def arrive(self) -> None:
        """Return when no rank reads any more what it has read so far; what is then written must be refreshed."""
        if self._come == self._rounds:
            self._come += 1
            self.memory.signals.increment(_COME)
        self.wait(_COME, self._come, "")

    def end_round(self) -> None:
        """All of the round has been launched."""
        self._lane.counters.record(Collective.HAND_OVER, self._lane.axis, 0)
        self._rounds = self._come

    def publish_shard(self, works: PendingCollective | None, word: int) -> None:
        """This rank's shard is written, or will be when `works` have ended."""
        if works is None:
            self.memory.signals.increment(word)
        else:
            self._landings.run(partial(_land, works, self.memory, word))

    def wait(self, word: int, target: int, name: str) -> None:
        began = time.perf_counter()
        try:
            self.memory.signals.wait(word, target)
        except RuntimeError as error:
            raise collective_error(self._lane, Collective.HAND_OVER, name, error) from error
        finally:
            self._lane.counters.waited[Collective.HAND_OVER.value] += time.perf_counter() - began


def _land(works: PendingCollective, memory: SharedSegment, word: int) -> None:
    with suppress(RuntimeError):  # told where the rank itself waits for it
        for work in works.each:
            while not work.is_completed():
                if not threading.main_thread().is_alive():  # the process ends: no thread may be inside a backend then
                    return
                with suppress(RuntimeError):
                    work.wait(_SLICE)  # type: ignore[call-arg]  # refreshes are the backend's
            work.wait()
        memory.signals.increment(word)


class SharedFullBuffer:
    """The full buffer of one handle, of which this rank writes its ZeRO-3 shard.

    Attributes:
        full: 1-D [G], compute dtype.
    """

    def __init__(self, hand_over: WriteBarrier, full: Tensor, word: int) -> None:
        self.barrier = hand_over
        self.full = full
        self._word = word
        self._launched = 0
        self._read = 0  # the refresh that all are known to have landed

    def publish_shard(self, works: PendingCollective | None) -> None:
        """This rank's shard is written for the next time, or will be when `works` have ended."""
        self._launched += 1
        self.barrier.publish_shard(works, self._word)

    def wait(self, name: str) -> None:
        """Return when the shards of all ranks have landed as often as this one's was launched."""
        if self._read < self._launched:
            self.barrier.wait(self._word, self._launched, name)
            self._read = self._launched


def room_of(numel: int, dtype: torch.dtype) -> int:
    """Bytes that a handle's weights take in the common memory."""
    return -(-numel * dtype.itemsize // 64) * 64
