"""Common base of the tests' third-party backends, which wrap gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import layerzero


def register(group: type[WrappedGloo]) -> None:
    """Register a backend in this process; later calls have no effect."""
    if group.NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(group.NAME, group, devices=["cpu"])


def mesh_on(backend: str, zero3_size: int, timeout: timedelta | None = None) -> Any:
    """Return the mesh of all ranks, with process groups of a backend."""
    ranks = list(range(dist.get_world_size()))
    blocks = [ranks[at : at + zero3_size] for at in range(0, len(ranks), zero3_size)]
    all_ranks, *nodes = (dist.new_group(block, backend=backend, timeout=timeout) for block in (ranks, *blocks))
    return layerzero.mesh_from_groups(all_ranks, nodes[dist.get_rank() // zero3_size])


class WrappedGloo(dist.ProcessGroup):
    """Process group that torch lists as ``cpu:NAME``. It has no options, and so no timeout that can be read."""

    NAME = ""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.is_async = True  # `async_op` of the collective that is launched

    def launch(self, run: Callable[[], dist.Work], output: Tensor, given: Tensor) -> dist.Work:
        """Start a collective; `run` runs it with gloo."""
        raise NotImplementedError

    def getBackendName(self) -> str:
        return self.NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def options(self) -> Any:
        raise RuntimeError("this backend has no options")

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        self.is_async = opts.asyncOp
        return self.launch(lambda: self._gloo.broadcast(tensors, opts), tensors[0], tensors[0])

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        self.is_async = opts.asyncOp
        return self.launch(lambda: self._gloo.allreduce(tensors, opts), tensors[0], tensors[0])

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        self.is_async = opts.asyncOp
        return self.launch(lambda: self._gloo._allgather_base(output, tensor, opts), output, tensor)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        self.is_async = opts.asyncOp
        return self.launch(lambda: self._gloo._reduce_scatter_base(output, tensor, opts), output, tensor)

    def alltoall_base(self, output: Tensor, tensor: Tensor, outputs: list[int], inputs: list[int], opts: Any) -> Any:
        self.is_async = opts.asyncOp
        return self.launch(lambda: self._gloo.alltoall_base(output, tensor, outputs, inputs, opts), output, tensor)

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Exchange a list of tensors, which gloo itself supports only for equal sizes."""
        self.is_async = opts.asyncOp

        def run() -> dist.Work:
            received = torch.empty(sum(part.numel() for part in outputs), dtype=outputs[0].dtype)
            sizes = [part.numel() for part in outputs], [part.numel() for part in tensors]
            self._gloo.alltoall_base(received, torch.cat(tensors), *sizes, opts).wait()
            for part, values in zip(outputs, received.split(sizes[0]), strict=True):
                part.copy_(values)
            return self._gloo.barrier(dist.BarrierOptions())

        return self.launch(run, tensors[0], tensors[0])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._allgather_base(output, tensor, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._reduce_scatter_base(output, tensor, opts)
