"""Bytes that a process holds, counted the same way for every contestant.

[Note: What model state is]
All storages of CPU tensors that Python can reach, each once, wherever they hang: parameters, masters, gradients,
accumulators, optimizer state, a framework's flat buffers and reused scratch, and storages that no tensor has at the
moment. The walk asks Python's garbage collector, so no framework has to be believed and none is favoured. It looks at
three moments of a step, and the largest sum counts: after a micro-batch that does not end the step, after the last
backward, and after the update. Activations are gone at each of them; token batches are left out by the caller.
Buffers that only C++ holds are not seen; the peak of the process's memory, measured beside it, has them.

[Note: Memory that ranks share]
A mapping that several ranks share is memory once, however many of them have it, and every tensor in it is a view. So
tensors in shared mappings are not counted; each rank counts its share of all pages that the file behind the mapping
has, touched or not. The kernel counts touched pages as resident in each process: that is put right in the peak.
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

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt


class Shared(NamedTuple):
    """What this process shares with others; see [Note: Memory that ranks share]."""

    addresses: tuple[range, ...]
    held: int  # bytes of pages that exist, for all who share them together
    resident: int  # bytes of them that this process has touched


def shared_memory() -> Shared:
    """All shared mappings of files without a name (Linux)."""
    addresses, files, resident, inside = [], set(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):  # the head of a mapping: addresses, permissions, offset, device, inode, path
            inside = fields[1].endswith("s") and len(fields) > 5 and fields[5].startswith("/memfd:")
            if inside:
                begin, end = (int(each, 16) for each in fields[0].split("-"))
                addresses.append(range(begin, end))
                files.add(int(fields[4]))
        elif inside and fields[0] == "Rss:":
            resident += int(fields[1]) * 1024
    blocks = {}
    for file in os.listdir("/proc/self/fd") if files else ():
        with suppress(OSError):  # the one that lists them
            found = os.stat(f"/proc/self/fd/{file}")
            if found.st_ino in files:
                blocks[found.st_dev, found.st_ino] = found.st_blocks
    return Shared(tuple(addresses), 512 * sum(blocks.values()), resident)


def model_state_bytes(*, apart_from: Iterable[Tensor] = (), sharers: int = 1) -> int:
    """Bytes of all live storages on the CPU. See [Note: What model state is].

    Args:
        sharers: ranks among which this one's shared memory is divided.
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
        # type() and not isinstance(): the latter asks lazy proxies for their class, and wakes them
        if type(found) is UntypedStorage and found.device.type == "cpu":
            note(found)
        if not issubclass(type(found), Tensor):
            continue
        # a gradient that no Python code has looked at has no Python object of its own
        for tensor in (found, found.grad if found.is_leaf else None):
            if tensor is None or isinstance(tensor, DTensor) or tensor.device.type != "cpu":
                continue  # a DTensor owns nothing; its local tensor is found by itself
            if tensor.layout != torch.strided or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
                continue
            note(tensor.untyped_storage())
    return sum(storages.values()) + shared.held // sharers


def resident_bytes() -> int:
    """Memory of this process that is in RAM now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """From here on, freed blocks go back to the system at once (glibc).

    Its heap keeps freed blocks, and lets holes between them grow for many steps, by several times what is in use. That
    says more of the heap than of a framework, so peaks are measured without, and steps are timed with it.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    libc.malloc_trim(0)


def reset_peak() -> None:
    """Start the kernel's record of the highest resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(*, sharers: int = 1) -> int:
    """The highest resident memory since :func:`reset_peak`, with this rank's share of what it shares."""
    shared = shared_memory()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 - shared.resident + shared.held // sharers
    raise RuntimeError("the kernel does not report VmHWM")
