"""Handle sharded parameters of shape ``[]``, such as a learned temperature.

[Note: 0-dim parameters]
A 0-dim parameter is stored on one rank, as one row with one element. Users see a DTensor of shape ``[]``. DTensor
cannot shard a 0-dim tensor. Therefore torch computes with a tensor of shape ``[1]`` on the same memory, and results
with one row are converted back to 0-dim tensors. Only one rank has the value. Therefore reading the value raises an
error on all ranks, as for partial values.
"""

from __future__ import annotations

from typing import Any

from layerzero.dtensor.op_errors import row_move_message
from layerzero.dtensor.row_shard_spec import RowShardSpec

__all__ = ["is_in_place", "is_metadata_access", "refuse_scalar_conversion"]

_ABOUT_ITSELF = {
    *("size", "dim", "ndimension", "stride", "storage_offset", "numel", "nelement", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "type", "requires_grad_", "retain_grad", "backward", "__hash__", "__len__"),
    *("__get__", "__set__", "__delete__", "__dir__", "register_hook", "is_contiguous", "data_ptr"),
    "register_post_accumulate_grad_hook",
}
_READS = {"item", "__float__", "__int__", "__bool__", "__index__", "__format__", "__complex__", "__contains__"}
_RESHAPES = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "squeeze", "unsqueeze", "atleast_1d"),
    *("expand", "expand_as", "broadcast_to", "repeat", "tile"),
}


def is_metadata_access(func: Any) -> bool:
    """Return whether the torch function `func` only accesses shapes, flags or gradients and computes no values."""
    return func.__name__ in _ABOUT_ITSELF


def is_in_place(func: Any) -> bool:
    name = func.__name__
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))


def refuse_scalar_conversion(func: Any, spec: RowShardSpec) -> None:
    """Raise an error if `func` would read a value that only one rank has, or change the number of dims.

    Raises:
        RuntimeError: `func` reads the value.
        NotImplementedError: `func` reshapes the tensor.
    """
    if func.__name__ in _RESHAPES:
        raise NotImplementedError(row_move_message(func.__name__, spec))
    if func.__name__ in _READS and spec.mesh_info.data_parallel > 1:
        raise RuntimeError(
            f"the value of parameter {spec.name!r}, or of a tensor derived from it, cannot be read: only one rank has "
            "the value of a 0-dim parameter. Call full_tensor() first, on all ranks, as in p.full_tensor().item()"
        )
