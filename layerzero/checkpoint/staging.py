"""Host memory that a state is copied into, so that it can be written while training goes on."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.sharded_tensor import LocalRows, Watch, plain, sharded

__all__ = ["Staging"]


class _Waitable(Protocol):
    def wait(self) -> None: ...


class Staging:
    """The buffers of one model's background saves, which the next save takes again.

    Args:
        group: on which the ranks talk while they write; nobody else uses it.

    Attributes:
        pending: the save that reads the buffers, until somebody has waited for it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.pending: _Waitable | None = None
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, sharded as the originals are; complete when this returns."""
        copies: dict[str, Tensor] = {}
        devices = set()
        for key, tensor in tensors.items():
            source = plain(tensor.detach())
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                pinned = source.device.type != "cpu"
                buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
            buffer.copy_(source, non_blocking=True)
            devices.add(source.device)
            self._buffers[key] = buffer
            rows = tensor._local_tensor if isinstance(tensor, DTensor) else None
            copies[key] = sharded(buffer, rows.span, Watch()) if isinstance(rows, LocalRows) else buffer
        for key in self._buffers.keys() - tensors.keys():
            del self._buffers[key]
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return copies
