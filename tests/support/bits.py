"""Bit flips in tensors, as silent data corruption causes them."""

from __future__ import annotations

import ctypes

from torch import Tensor

from layerzero.engine.handle import Handle
from layerzero.layout.shard_grid import Extent


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of a contiguous CPU tensor, without a new version of the tensor in torch."""
    address = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << (bit % 8)


def places(handle: Handle, extent: Extent) -> list[tuple[int, str]]:
    """Return the indices of elements that are no padding in this rank's tensor of an extent, and their parameters."""
    flat = handle.mesh_info.grid.range_of(handle.layout, extent)
    slots = [(slot.offset, slot.end, slot.name) for slot in handle.layout.slots]
    return [(at - flat.start, name) for at in flat for start, stop, name in slots if start <= at < stop]
