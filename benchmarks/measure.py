"""Bytes that a process holds, counted the same way for every contestant.

[Note: What model state is]
All storages of CPU tensors that Python can reach, each once, wherever they hang: parameters, masters, gradients,
accumulators, optimizer state, a framework's flat buffers and reused scratch. The walk asks Python's garbage collector
for every tensor, so no framework has to be believed and none is favoured. It looks at three moments of a step, and
the largest sum counts: after a micro-batch that does not end the step, after the last backward, and after the update.
Activations are gone at each of them; token batches are left out by the caller. Buffers that only C++ holds are not
seen; the peak of the process's memory, measured beside it, has them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["model_state_bytes", "peak_bytes", "reset_peak", "resident_bytes"]


def model_state_bytes(*, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of all live CPU tensors' storages. See [Note: What model state is]."""
    gc.collect()
    ignored = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # type() and not isinstance(): the latter asks lazy proxies for their class, and wakes them
        if not issubclass(type(found), Tensor):
            continue
        # a gradient that no Python code has looked at has no Python object of its own
        for tensor in (found, found.grad if found.is_leaf else None):
            if tensor is None or isinstance(tensor, DTensor) or tensor.device.type != "cpu":
                continue  # a DTensor owns nothing; its local tensor is found by itself
            if tensor.layout != torch.strided or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() and storage.data_ptr() not in ignored:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    """Memory of this process that is in RAM now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Start the kernel's record of the highest resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The highest resident memory since :func:`reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report VmHWM")
