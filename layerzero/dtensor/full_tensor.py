"""What sharded tensors do with whole ones: take their rows, become whole, say how they are cut.

[Note: Whole values and ranks]
``p.copy_(whole)``, and so ``load_state_dict`` of plain tensors, takes this rank's rows of what this rank was given;
nothing is exchanged. Each row of a parameter lies in one ZeRO-1 shard, and the refresh carries it to all replicas, so
replicas agree whatever was given. But where ranks are given different values, the parameter becomes a mixture that
nobody meant. So the digest of what was given is kept, and the agreement that precedes the refresh compares it.

[Note: Whose cut]
Libraries make a DTensor "like" a parameter to load into it: with its mesh and its placements, around rows that they cut
themselves. torch.distributed.checkpoint.state_dict asks our placements where pieces begin; others (PEFT, by way of
transformers) count as `torch.chunk` does, and put our placements on the result all the same. A rank cannot tell by its
own number of rows. So all ranks tell theirs: equal numbers in order are equal cuts.
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
from layerzero.dtensor.op_errors import moves_rows
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.utils.bit_sums import digest

if TYPE_CHECKING:
    from layerzero.dtensor.sharded_tensor import LocalShard

__all__ = ["Sharded", "UnevenShard", "rows_of"]


class UnevenShard(Shard):
    """``Shard(0)``, equal to torch's, that says where its pieces begin when torch asks for the place of one.

    ``torch.distributed.checkpoint.state_dict`` cuts what it broadcasts by it.
    """

    def __init__(self, starts: Sequence[int]) -> None:
        super().__init__(0)
        self.starts = tuple(starts)  # of the pieces along one axis of the mesh, and the end of the last one

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        if curr_local_size != self.starts[-1] - self.starts[0]:  # torch would take what lies at the same place
            raise ValueError(
                f"a tensor with {curr_local_size} rows was given for a parameter (or a piece of one) that has "
                f"{self.starts[-1] - self.starts[0]}"
            )
        return self.starts[rank + 1] - self.starts[rank], self.starts[rank]


def rows_of(value: Tensor, span: RowShardSpec) -> Tensor:
    """This rank's rows of a whole tensor; of a DTensor that torch has cut otherwise, every rank must call this.

    Raises:
        ValueError: `value` has another shape than the whole parameter; of a 0-dim one, [1] will do.
    """
    shape = span.true_shape
    if tuple(value.shape) not in (shape, shape or (1,)):
        raise ValueError(f"{span.name!r} has shape {list(shape)}, got a tensor of shape {list(value.shape)}")
    if span.model_parallel is not None:
        part = span.model_parallel.part_of(value)
    elif isinstance(value, DTensor) and _is_cut_by_others(value, span):
        return _rows_as_cut(value, span)
    else:
        part = value.full_tensor() if isinstance(value, DTensor) else value
    return part.reshape(span.stored)[span.rows.start : span.rows.stop]


def _is_cut_by_others(value: DTensor, span: RowShardSpec) -> bool:
    """By rows on our mesh, but not one of our tensors."""
    by_rows = value.device_mesh == span.mesh_info.flat_mesh and all(each == Shard(0) for each in value._spec.placements)
    return by_rows and not hasattr(value._local_tensor, "spec")


def _rows_as_cut(value: DTensor, span: RowShardSpec) -> Tensor:
    """This rank's rows of a DTensor that :func:`_is_cut_by_others`; see [Note: Whose cut].

    Raises:
        ValueError: ranks have other rows than either way of cutting gives them; on all ranks.
    """
    local, topology = value.to_local().detach(), span.mesh_info
    counts = torch.tensor([local.shape[0]])
    for lane in topology.control_comms:
        along = torch.empty(lane.size * counts.numel(), dtype=torch.int64)
        all_gather(lane, Collective.METADATA, along, counts).wait()
        counts = along
    held = counts.view(topology.replicas, topology.zero3_size).T.flatten().tolist()  # by k = s * R + r
    if held == [stop - start for start, stop in zip(span.bounds, span.bounds[1:], strict=False)]:
        return local
    lengths = [each for rows in _chunks(span.count, topology.zero3_size) for each in _chunks(rows, topology.replicas)]
    if held != lengths:
        raise ValueError(
            f"{span.name!r} was given a DTensor of which the ranks hold {held} of {span.count} rows, which is neither "
            "layerzero's way of cutting them nor torch's: give all ranks the whole tensor, or load through "
            "layerzero.load_full_state_dict"
        )
    whole = replace(span, bounds=tuple(accumulate(lengths, initial=0))).gather(local)
    return whole.view(span.stored)[span.rows.start : span.rows.stop]


def _chunks(rows: int, pieces: int) -> list[int]:
    """How many rows `torch.chunk` gives to each."""
    longest = -(-rows // pieces)
    return [max(0, min(longest, rows - i * longest)) for i in range(pieces)]


def _new(name: str) -> Callable[..., Tensor]:
    method = getattr(Tensor, name)

    def make(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        """As torch's: sharded as this tensor is if it has its shape, else an ordinary one, whole on every rank."""
        sizes = {name: value for name, value in kwargs.items() if name in ("size", "fill_value")}
        shape = method(torch.empty(0, device="meta"), *args, **sizes).shape
        like = self if shape == self.shape else torch.empty(0, dtype=self.dtype, device=self.device)
        return method(like, *args, **kwargs)

    return make


class Sharded(DTensor):
    """The part of a sharded tensor that has to do with whole ones; see `layerzero.dtensor.sharded_tensor`."""

    _local_tensor: LocalShard
    new_empty, new_zeros = _new("new_empty"), _new("new_zeros")
    new_ones, new_full = _new("new_ones"), _new("new_full")

    def copy_(self, other: Any, non_blocking: bool = False) -> Any:  # type: ignore[override]
        """As ``torch.Tensor.copy_``; of a whole tensor, this rank's rows are taken.

        All ranks must do the same with the same values. See [Note: Whole values and ranks].
        """
        local = self._local_tensor
        if isinstance(other, DTensor) and isinstance(other._local_tensor, type(local)):
            if not other._local_tensor.spec.same_sharding(local.spec):
                raise ValueError(
                    f"{local.spec.name!r} cannot take the rows of {other._local_tensor.spec.name!r}, which is sharded "
                    "in another way: load through layerzero.checkpoint or torch.distributed.checkpoint"
                )
            return super().copy_(other, non_blocking)
        if not isinstance(other, Tensor) or tuple(other.shape) != local.spec.true_shape:
            return super().copy_(other, non_blocking)
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"parameter {local.spec.name!r} requires grad and is changed in place; do it under torch.no_grad()"
            )
        rows = rows_of(other.detach(), local.spec)
        if local.tracker is not None and local.spec.holders > 1 and not isinstance(other, DTensor):
            local.tracker.loaded_digests[local.spec.name] = digest(other)
        with torch.no_grad():
            local.copy_(rows, non_blocking)
        return self

    @property
    def placements(self) -> tuple[Any, ...]:  # type: ignore[override]
        """``(Shard(0), Shard(0))``, which know that the pieces are uneven, after those on further axes."""
        span = self._local_tensor.spec
        bounds, topology = span.bounds, span.mesh_info
        replicas = topology.replicas
        first = topology.grid.zero3_rank * replicas
        inside = [bound - bounds[first] for bound in bounds[first : first + replicas + 1]]
        further = () if span.model_parallel is None else span.model_parallel.placements
        return *further, UnevenShard(bounds[::replicas]), UnevenShard(inside)

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **kwargs: object
    ) -> DTensor:
        """The whole tensor on every rank, where that is what `placements` say. Every rank must call this.

        Raises:
            NotImplementedError: any other placement.
        """
        mesh = self.device_mesh
        wanted = [] if placements is None else list(placements)
        whole = len(wanted) == mesh.ndim and all(isinstance(placement, Replicate) for placement in wanted)
        if not whole or (device_mesh is not None and device_mesh != mesh):
            raise NotImplementedError(moves_rows("redistribute", self._local_tensor.spec))
        return DTensor.from_local(self.full_tensor(), mesh, wanted, run_check=False)

    # What would take a part for the whole

    def untyped_storage(self) -> NoReturn:
        raise TypeError(
            f"{_not_here(self)} to save it whole. torch.export or make_fx of the root or of a unit is refused as well; "
            "give it an unsharded copy"
        )

    def storage(self) -> NoReturn:
        self.untyped_storage()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError(f"{_not_here(self)} to look at it whole")

    def tolist(self) -> NoReturn:
        raise TypeError(f"{_not_here(self)} to look at it whole")


def _not_here(tensor: Sharded) -> str:
    span = tensor._local_tensor.spec
    return (
        f"this rank has {len(span.rows)} of {span.count} rows of {span.name!r}: use p.to_local() for these rows "
        "(p.to_local().numpy() is a read-only array of them); layerzero.full_state_dict(model) or "
        "p.detach().full_tensor(), on every rank,"
    )
