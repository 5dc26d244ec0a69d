"""Sharded parameters of shape ``[]``, such as a learned temperature.

[Note: A number is one row]
A 0-dim parameter is stored as one row of one number, which one rank has and the others have not. To users it is a
DTensor of shape ``[]``. But DTensor knows no 0-dim tensor that is a part of something: where torch computes with one, a
tensor of shape ``[1]`` stands for it, of the same memory, and what comes out as a row becomes a number again. Its value
is on one rank; so reading it is refused on all of them, as with parts of a number.
"""

from __future__ import annotations

from typing import Any

from layerzero.dtensor.op_errors import moves_rows
from layerzero.dtensor.row_shard_spec import RowShardSpec

__all__ = ["is_about_itself", "is_in_place", "refuse_for_number"]

_ABOUT_ITSELF = {
    *("size", "dim", "ndimension", "stride", "storage_offset", "numel", "nelement", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "type", "requires_grad_", "retain_grad", "backward", "__hash__", "__len__"),
    *("__get__", "__set__", "__delete__", "__dir__", "register_hook", "is_contiguous", "data_ptr"),
}
_READS = {"item", "__float__", "__int__", "__bool__", "__index__", "__format__", "__complex__", "__contains__"}
_RESHAPES = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "squeeze", "unsqueeze", "atleast_1d"),
    *("expand", "expand_as", "broadcast_to", "repeat", "tile"),
}


def is_about_itself(func: Any) -> bool:
    """`func`, a function of torch, computes nothing: shapes, flags, gradients."""
    return func.__name__ in _ABOUT_ITSELF


def is_in_place(func: Any) -> bool:
    name = func.__name__
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))


def refuse_for_number(func: Any, span: RowShardSpec) -> None:
    """Raise where `func` would read a number that only one rank has, or give it other dims."""
    if func.__name__ in _RESHAPES:
        raise NotImplementedError(moves_rows(func.__name__, span))
    if func.__name__ in _READS and span.mesh_info.data_parallel > 1:
        raise RuntimeError(
            f"the value of parameter {span.name!r}, or of what was made of it, was asked for: it is a 0-dim parameter, "
            "of which one rank has the value. Call full_tensor() first, on all ranks, as in p.full_tensor().item()"
        )
