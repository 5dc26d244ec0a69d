"""Bits that flip as cosmic rays flip them."""

from __future__ import annotations

import ctypes

from torch import Tensor


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Of a contiguous tensor on the CPU; torch does not know."""
    address = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << (bit % 8)
