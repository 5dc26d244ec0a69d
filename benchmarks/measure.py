"""Measurement of the memory of a process, in the same way for every contestant.

[Note: Model state]
Model state is the sum of all storages of CPU tensors that Python can reach, each counted once: parameters, masters,
gradients, accumulators, optimizer state, flat buffers and scratch of a framework, and storages without a tensor.
Python's garbage collector lists them, so the numbers do not depend on reports of the frameworks. They are measured at
three times in a step: after a micro-batch that is not the last, after the last backward, and after the update. The
largest sum counts. Activations have been freed at these times; the caller excludes token batches. Buffers that only C++
holds are not included; the peak memory of the process, which is measured as well, includes them.

[Note: Shared mappings]
A mapping that several ranks share uses memory only once, and every tensor in it is a view. Therefore tensors in shared
mappings are not counted. Instead each rank counts its share of all pages of the file behind the mapping, touched or
not. The kernel counts touched pages as resident in each process; the peak is corrected for that.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

__all__ = [
    "Shared",
    "model_state_bytes",
    "peak_bytes",
    "reset_peak",
    "resident_bytes",
    "return_freed_memory",
    "shared_memory",
]

_M_MMAP_THRESHOLD = -3  # parameter of glibc's mallopt


class Shared(NamedTuple):
    """Shared mappings of this process; see [Note: Shared mappings]."""

    addresses: tuple[range, ...]
    held: int  # bytes of existing pages, counted once for all processes
    resident: int  # bytes of pages that this process has touched


def shared_memory() -> Shared:
    """Return all shared mappings of memfd files (Linux)."""
    addresses, files, resident, inside = [], set(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):  # header of a mapping: addresses, permissions, offset, device, inode, path
            inside = fields[1].endswith("s") and len(fields) > 5 and fields[5].startswith("/memfd:")
            if inside:
                begin, end = (int(each, 16) for each in fields[0].split("-"))
                addresses.append(range(begin, end))
                files.add(int(fields[4]))
        elif inside and fields[0] == "Rss:":
            resident += int(fields[1]) * 1024
    blocks = {}
    for file in os.listdir("/proc/self/fd") if files else ():
        with suppress(OSError):  # the descriptor of listdir itself is closed by now
            found = os.stat(f"/proc/self/fd/{file}")
            if found.st_ino in files:
                blocks[found.st_dev, found.st_ino] = found.st_blocks
    return Shared(tuple(addresses), 512 * sum(blocks.values()), resident)


def model_state_bytes(*, apart_from: Iterable[Tensor] = (), sharers: int = 1) -> int:
    """Return the bytes of all live storages on the CPU. See [Note: Model state].

    Args:
        apart_from: tensors that are not counted.
        sharers: number of ranks that share this rank's shared memory.
    """
    gc.collect()
    shared = shared_memory()
    ignored = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    storages: dict[int, int] = {}

    def note(storage: UntypedStorage) -> None:
        address = storage.data_ptr() if storage.nbytes() else 0
        if address and address not in ignored and not any(address in mapping for mapping in shared.addresses):
            storages[address] = storage.nbytes()

    for found in gc.get_objects():
        # Use type(): isinstance() reads the class of lazy proxies and initializes them.
        if type(found) is UntypedStorage and found.device.type == "cpu":
            note(found)
        if not issubclass(type(found), Tensor):
            continue
        # A gradient that no Python code has accessed has no Python object.
        for tensor in (found, found.grad if found.is_leaf else None):
            if tensor is None or isinstance(tensor, DTensor) or tensor.device.type != "cpu":
                continue  # a DTensor owns no storage; its local tensor is found separately
            if tensor.layout != torch.strided or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
                continue
            note(tensor.untyped_storage())
    return sum(storages.values()) + shared.held // sharers


def resident_bytes() -> int:
    """Return the resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Make glibc return freed blocks to the system immediately.

    By default its heap keeps freed blocks and fragments for many steps, to several times the memory in use. This
    depends more on the heap than on the framework. Therefore peaks are measured with this setting, and steps are timed
    without it.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    libc.malloc_trim(0)


def reset_peak() -> None:
    """Reset the kernel's record of peak resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(*, sharers: int = 1) -> int:
    """Return the peak resident memory since :func:`reset_peak`, with this rank's share of shared mappings."""
    shared = shared_memory()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 - shared.resident + shared.held // sharers
    raise RuntimeError("the kernel does not report VmHWM")
