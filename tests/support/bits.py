"""Bits of tensors: comparisons, and flips as silent data corruption causes them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from layerzero.engine.handle import Handle
from layerzero.layout.shard_grid import Extent


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of a contiguous CPU tensor, without a new version of the tensor in torch."""
    address = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << (bit % 8)


def assert_equal_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor], case: object) -> None:
    """Compare names, shapes, dtypes and bits of tensors."""
    assert ours.keys() == theirs.keys(), (case, ours.keys() ^ theirs.keys())
    for name, value in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (value.shape, value.dtype), (case, name)
        own, other = (each.contiguous().view(-1).view(torch.uint8) for each in (ours[name], value))
        assert torch.equal(own, other), (case, name)


def places(handle: Handle, extent: Extent) -> list[tuple[int, str]]:
    """Return the indices of elements that are no padding in this rank's tensor of an extent, and their parameters."""
    flat = handle.mesh_info.grid.range_of(handle.layout, extent)
    slots = [(slot.offset, slot.end, slot.name) for slot in handle.layout.slots]
    return [(at - flat.start, name) for at in flat for start, stop, name in slots if start <= at < stop]
