"""Keep ZeRO-3 shards in host memory and copy them to and from the device.

[Note: Weights in host memory]
If `Offload.params` is True, ZeRO-3 shards are in host memory. A gather first copies the shard into this rank's slice of
the full buffer on a copy stream, and is then launched from that stream. Therefore the computation waits for the copy
and the gather only when it needs the weights. A refresh writes to a scratch buffer on the device, which is then copied
to the host. The stream that launches the refresh waits for this copy, so that the next handle can reuse the scratch
buffer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from layerzero.device.accelerator import HostDeviceCopies, StreamEvent
from layerzero.device.buffer_pools import BufferPool
from layerzero.device.streams import PendingWait


class HostShard:
    """ZeRO-3 shard in host memory; see [Note: Weights in host memory].

    Attributes:
        tensor: the shard, a 1-D tensor [numel] that is initially zero.
    """

    def __init__(self, numel: int, dtype: torch.dtype, transfers: HostDeviceCopies, pool: BufferPool) -> None:
        self.tensor = transfers.host_buffer(numel, dtype).zero_()
        self._transfers = transfers
        self._pool = pool  # provides scratch buffers on the device
        self._stored: StreamEvent = None  # event of the last copy to the host
        self._fetched: StreamEvent = None  # event of the last copy to the device

    def start_fetch(self, target: Tensor) -> PendingWait:
        """Start copying the shard to `target` [numel] on the device. Waiting makes the current stream wait."""
        self._fetched = self._transfers.copy(target, self.tensor, to_host=False, after=(self._stored,))
        return PendingWait(partial(self._transfers.wait, self._fetched))

    def on_copy_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the stream of :meth:`start_fetch` is current."""
        return self._transfers.on_copy_stream(to_host=False)

    def acquire_scratch(self) -> Tensor:
        """Return a scratch buffer on the device, 1-D [numel], to be filled and passed to :meth:`store`."""
        return self._pool.acquire(self.tensor.numel(), self.tensor.dtype)

    def store(self, fresh: Tensor) -> None:
        """Copy the borrowed scratch buffer `fresh` to the shard on the host, and release the buffer to the pool."""
        self._stored = self._transfers.copy(self.tensor, fresh, to_host=True, after=(self._fetched,))
        self._transfers.wait(self._stored)
        self._pool.release(fresh)

    def read_on_host(self) -> Tensor:
        """Wait until the host may read the shard, and return the shard."""
        self._transfers.finish(self._stored)
        return self.tensor
