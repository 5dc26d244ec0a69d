"""Copies between sharded and full tensors, and placements that describe uneven rows.

[Note: Copies from full tensors]
``p.copy_(full)``, and therefore ``load_state_dict`` of plain tensors, copies this rank's rows of the tensor that this
rank passes, without a collective. Each row of a parameter is in one ZeRO-1 shard, and the refresh sends the row to all
replicas, so the replicas always agree. However, if ranks pass different values, the parameter becomes a mixture of
them. Therefore each rank stores a digest of the full tensor, and the ranks compare their digests before the refresh.

[Note: Row bounds of other libraries]
To load into a parameter, libraries construct a DTensor with the parameter's mesh and placements from rows that they
have split themselves. torch.distributed.checkpoint.state_dict reads the start of each piece from our placements. Other
libraries (PEFT, through transformers) split like `torch.chunk`, but still use our placements. A rank cannot distinguish
the two cases by its own number of rows. Therefore the row counts of all ranks are all-gathered. Equal counts in the
same order mean equal bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from layerzero.comm.collectives import Collective, all_gather
from layerzero.dtensor.op_errors import row_move_error
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.utils.bit_sums import digest

if TYPE_CHECKING:
    from layerzero.dtensor.sharded_tensor import LocalShard

__all__ = ["Sharded", "UnevenShard", "rows_of"]


class UnevenShard(Shard):
    """``Shard(0)`` with uneven pieces. It compares equal to torch's ``Shard(0)``.

    ``torch.distributed.checkpoint.state_dict`` reads the size and offset of each piece from this class, and splits the
    tensors that it broadcasts accordingly.
    """

    def __init__(self, starts: Sequence[int]) -> None:
        super().__init__(0)
        self.starts = tuple(
            starts
        )  # first row of each piece along one axis of the mesh, then the end of the last piece

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        if curr_local_size != self.starts[-1] - self.starts[0]:  # torch would select the wrong rows
            raise ValueError(
                f"the tensor has {curr_local_size} rows, but the parameter, or the piece of it, has "
                f"{self.starts[-1] - self.starts[0]} rows. Pass a tensor with as many rows"
            )
        return self.starts[rank + 1] - self.starts[rank], self.starts[rank]


def rows_of(value: Tensor, span: RowShardSpec) -> Tensor:
    """Return this rank's rows of a full tensor.

    If `value` is a DTensor with another sharding, every rank must call this function.

    Raises:
        ValueError: the shape of `value` is not the shape of the full parameter. A 0-dim parameter also accepts [1].
    """
    shape = span.true_shape
    if tuple(value.shape) not in (shape, shape or (1,)):
        raise ValueError(
            f"{span.name!r} has shape {list(shape)}, got a tensor of shape {list(value.shape)}. Pass a tensor of the "
            "full shape"
        )
    if span.model_parallel is not None:
        part = span.model_parallel.part_of(value)
    elif isinstance(value, DTensor) and _is_cut_by_others(value, span):
        return _rows_as_cut(value, span)
    else:
        part = value.full_tensor() if isinstance(value, DTensor) else value
    return part.reshape(span.stored)[span.rows.start : span.rows.stop]


def _is_cut_by_others(value: DTensor, span: RowShardSpec) -> bool:
    """Return whether `value` is a DTensor that is sharded by rows on our mesh but was not created by layerzero."""
    as_one_row = value.device_mesh == span.mesh_info.flat_mesh and all(
        each == Shard(0) for each in value._spec.placements
    )
    return as_one_row and not hasattr(value._local_tensor, "spec")


def _rows_as_cut(value: DTensor, span: RowShardSpec) -> Tensor:
    """Return this rank's rows of a DTensor for which :func:`_is_cut_by_others` is true.

    See [Note: Row bounds of other libraries]. Every data-parallel rank must call this function.

    Raises:
        ValueError: the row counts match neither layerzero's bounds nor those of `torch.chunk`. All ranks raise.
    """
    local, mesh_info = value.to_local().detach(), span.mesh_info
    counts = torch.tensor([local.shape[0]])
    for comm in mesh_info.control_comms:
        along = torch.empty(comm.size * counts.numel(), dtype=torch.int64)
        all_gather(comm, Collective.METADATA, along, counts).wait()
        counts = along
    held = counts.view(mesh_info.replicas, mesh_info.zero3_size).T.flatten().tolist()  # by k = s * R + r
    if held == [stop - start for start, stop in zip(span.bounds, span.bounds[1:], strict=False)]:
        return local
    lengths = [each for rows in _chunks(span.count, mesh_info.zero3_size) for each in _chunks(rows, mesh_info.replicas)]
    if held != lengths:
        raise ValueError(
            f"{span.name!r} was given a DTensor of which the ranks have {held} of {span.count} rows, which matches "
            "neither layerzero's row bounds nor torch's. Pass the full tensor on all ranks, or load through "
            "layerzero.load_full_state_dict"
        )
    whole = replace(span, bounds=tuple(accumulate(lengths, initial=0))).gather(local)
    return whole.view(span.stored)[span.rows.start : span.rows.stop]


def _chunks(rows: int, pieces: int) -> list[int]:
    """Return the number of rows of each piece of `torch.chunk`."""
    longest = -(-rows // pieces)
    return [max(0, min(longest, rows - i * longest)) for i in range(pieces)]


def _new(name: str) -> Callable[..., Tensor]:
    method = getattr(Tensor, name)

    def make(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        """Create a tensor as torch does: sharded like this tensor if the shapes are equal, else plain and full."""
        sizes = {name: value for name, value in kwargs.items() if name in ("size", "fill_value")}
        shape = method(torch.empty(0, device="meta"), *args, **sizes).shape
        like = self if shape == self.shape else torch.empty(0, dtype=self.dtype, device=self.device)
        return method(like, *args, **kwargs)

    return make


class Sharded(DTensor):
    """Base class of sharded tensors with the methods that use full tensors; see `layerzero.dtensor.sharded_tensor`."""

    _local_tensor: LocalShard
    new_empty, new_zeros = _new("new_empty"), _new("new_zeros")
    new_ones, new_full = _new("new_ones"), _new("new_full")

    def copy_(self, other: Any, non_blocking: bool = False) -> Any:  # type: ignore[override]
        """Copy like ``torch.Tensor.copy_``. If `other` is a full tensor, copy this rank's rows of it.

        All ranks must call this method with the same values. See [Note: Copies from full tensors].
        """
        local = self._local_tensor
        if isinstance(other, DTensor) and isinstance(other._local_tensor, type(local)):
            if not other._local_tensor.spec.same_sharding(local.spec):
                raise ValueError(
                    f"{local.spec.name!r} cannot be copied from {other._local_tensor.spec.name!r}, which has another "
                    "sharding. Load through layerzero.checkpoint or torch.distributed.checkpoint"
                )
            return super().copy_(other, non_blocking)
        if not isinstance(other, Tensor) or tuple(other.shape) != local.spec.true_shape:
            return super().copy_(other, non_blocking)
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"parameter {local.spec.name!r} requires grad, so autograd does not allow an in-place copy. Copy under "
                "torch.no_grad()"
            )
        rows = rows_of(other.detach(), local.spec)
        if local.tracker is not None and local.spec.holders > 1 and not isinstance(other, DTensor):
            local.tracker.loaded_digests[local.spec.name] = digest(other)
        with torch.no_grad():
            local.copy_(rows, non_blocking)
        return self

    @property
    def placements(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Placements on the model-parallel axes, followed by two ``Shard(0)`` with uneven pieces."""
        span = self._local_tensor.spec
        bounds, mesh_info = span.bounds, span.mesh_info
        replicas = mesh_info.replicas
        first = mesh_info.grid.zero3_rank * replicas
        inside = [bound - bounds[first] for bound in bounds[first : first + replicas + 1]]
        further = () if span.model_parallel is None else span.model_parallel.placements
        return *further, UnevenShard(bounds[::replicas]), UnevenShard(inside)

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **kwargs: object
    ) -> DTensor:
        """Return a DTensor that is replicated on all axes. Every rank must call this method.

        Raises:
            NotImplementedError: `placements` are not all ``Replicate()``, or `device_mesh` is another mesh.
        """
        mesh = self.device_mesh
        wanted = [] if placements is None else list(placements)
        whole = len(wanted) == mesh.ndim and all(isinstance(placement, Replicate) for placement in wanted)
        if not whole or (device_mesh is not None and device_mesh != mesh):
            raise NotImplementedError(row_move_error("redistribute", self._local_tensor.spec))
        return DTensor.from_local(self.full_tensor(), mesh, wanted, run_check=False)

    # Methods that would treat this rank's rows as the full tensor

    def untyped_storage(self) -> NoReturn:
        raise TypeError(
            f"{_not_here(self)} to save the full tensor. torch.export and make_fx of the root or of a unit are not "
            "supported either. Pass an unsharded copy to them"
        )

    def storage(self) -> NoReturn:
        self.untyped_storage()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError(f"{_not_here(self)} to read the full tensor")

    def tolist(self) -> NoReturn:
        raise TypeError(f"{_not_here(self)} to read the full tensor")


def _not_here(tensor: Sharded) -> str:
    span = tensor._local_tensor.spec
    return (
        f"this rank has {len(span.rows)} of {span.count} rows of {span.name!r}. Use p.to_local() for these rows "
        "(p.to_local().numpy() is a read-only array of them). Call layerzero.full_state_dict(model) or "
        "p.detach().full_tensor() on every rank"
    )
