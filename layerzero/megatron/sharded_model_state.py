"""Create sharded state dicts for ``megatron.core.dist_checkpointing`` that contain this rank's rows of each tensor.

[Note: Row numbers in place of parameters]
``sharded_state_dict`` of Megatron's modules returns the position of each parameter in the full model and splits some
parameters into several pieces. During the call, each parameter is replaced by a tensor that contains its row numbers.
This tensor is expanded from one column to save memory. The returned pieces therefore contain the numbers of their rows,
and each rank selects its own rows.

Megatron uses the same keys, shapes and nesting. Therefore Megatron can load checkpoints of layerzero, and vice versa.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from layerzero.extend import ManagedParam, RowShardSpec, sharded
from layerzero.megatron.parallel_groups import NOT_FOUND


@dataclass(frozen=True)
class GlobalParam:
    """Positions of this rank's rows of one parameter in the tensors of the full model.

    Attributes:
        member: managed parameter.
        key: key of the tensor, or common prefix of the keys of the tensor's pieces.
        pieces: ``(rows, piece)`` pairs. `rows` is a range of this rank's rows, and `piece` is a ShardedTensor without
            data that gives the position of these rows.
    """

    member: ManagedParam
    key: str
    pieces: tuple[tuple[range, ShardedTensor], ...]

    def entry(self, rows: Tensor, *, prefix: str = "", spec: RowShardSpec | None = None) -> Any:
        """Return the sharded state dict entry for `rows`: this rank's rows of the parameter or of its optimizer state.

        A load replaces the entry with a RowShardedTensor, which may share memory with `rows`. If the checkpoint lacks a
        piece, a non-strict load replaces the entry with NOT_FOUND.

        Args:
            spec: sharding of the rows, if it is not that of the parameter.
        """
        spec = spec or self.member.spec
        if not self.pieces:
            return LocalNonpersistentObject(sharded(rows, spec))

        def build(key: str, rows: Tensor, replica: Any, flattened_range: Any) -> dict[str, Any]:
            # A load removes pieces that the checkpoint lacks. Because of the extra entry, the dict is never empty, and
            # merge is always called.
            built: dict[str, Any] = {"merged": LocalNonpersistentObject(True)}
            for index, (row_range, piece) in enumerate(self.pieces):
                built[str(index)] = replace(
                    piece,
                    key=key + piece.key.removeprefix(self.key),
                    data=rows[row_range.start : row_range.stop].view(piece.local_shape),
                    dtype=rows.dtype,
                )
            return built

        def merge(loaded: dict[str, Any]) -> Any:
            keys = [str(index) for index in range(len(self.pieces))]
            if not loaded.keys() >= set(keys):
                return NOT_FOUND
            parts = [loaded[key].view(-1, *spec.shape[1:]) for key in keys]
            return sharded(parts[0] if len(parts) == 1 else torch.cat(parts), spec)

        return ShardedTensorFactory(prefix + self.key, rows, build, merge, self.pieces[0][1].replica_id)


def global_params(
    module: Any,
    members: Iterable[ManagedParam],
    metadata: Any,
    prefix: str = "",
    sharded_offsets: Any = (),
    *,
    of_all_ranks: bool = False,
) -> tuple[dict[str, Any], dict[str, GlobalParam]]:
    """Return a module's sharded state dict in which each sharded parameter is a :class:`GlobalParam`.

    Args:
        of_all_ranks: if True, describe all rows of the parameters. Otherwise, describe only this rank's rows.

    Returns:
        The state dict, and the GlobalParams in it by parameter name.

    Raises:
        NotImplementedError: a parameter is stored in pieces that are not contiguous ranges of its rows.
    """
    params: dict[str, GlobalParam] = {}
    # See [Note: Row numbers in place of parameters].
    with _replace_by_row_numbers(members) as member_at:
        state: dict[str, Any] = module.sharded_state_dict(
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )

        def describe_value(value: Any) -> Any:
            data = getattr(value, "data", None)
            member = member_at.get(data.untyped_storage().data_ptr()) if isinstance(data, Tensor) else None
            if member is None:
                return value
            parts = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
            required_rows = range(member.spec.shape[0]) if of_all_ranks else member.spec.rows
            overlaps = [
                part for part in (_own_part(part, member.spec, required_rows) for part in parts) if part is not None
            ]
            overlaps.sort(key=lambda part: part[0].start)
            if member.master.numel() or of_all_ranks:
                starts, stops = [rows.start for rows, _ in overlaps], [rows.stop for rows, _ in overlaps]
                if [*starts, len(required_rows)] != [0, *stops]:
                    raise NotImplementedError(_odd_pieces_message(member.spec, value.key))
            result = GlobalParam(member, value.key, tuple(overlaps))
            return params.setdefault(member.name, result)

        dict_list_map_inplace(describe_value, state)
    return state, params


def insert_weights(state: dict[str, Any]) -> dict[str, Any]:
    """Replace each GlobalParam in `state` with an entry that contains a copy of this rank's rows in compute dtype.

    `state` is modified in place and returned.
    """

    def fill_weights(value: Any) -> Any:
        if not isinstance(value, GlobalParam):
            return value
        return value.entry(value.member.master.to(value.member.gathered.dtype, copy=True))

    dict_list_map_inplace(fill_weights, state)
    return state


@contextmanager
def _replace_by_row_numbers(members: Iterable[ManagedParam]) -> Iterator[dict[int, ManagedParam]]:
    """Context manager in which each parameter is replaced with a tensor of its row numbers.

    Yields:
        The managed parameters, by the data pointers of their replacements.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    member_at: dict[int, ManagedParam] = {}
    try:
        for member in members:
            shape = member.spec.shape
            if not shape:
                raise NotImplementedError(_odd_pieces_message(member.spec, member.name))
            numbers = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
            stand_in = nn.Parameter(numbers, requires_grad=False)
            vars(stand_in).update(vars(member.gathered))  # attributes that Megatron has set on the parameter
            member_at[numbers.untyped_storage().data_ptr()] = member
            for parameters, name in member.module_refs:
                replaced.append((parameters, name, parameters[name]))
                parameters[name] = stand_in
        yield member_at
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


def _own_part(piece: ShardedTensor, spec: RowShardSpec, required_rows: range) -> tuple[range, ShardedTensor] | None:
    """Return the overlap of a piece with the rows `required_rows` of a parameter.

    Returns:
        The rows of the overlap, counted from the first required row, and a ShardedTensor without data that gives their
        position in the full model. None if there is no overlap.
    """
    numbers: Tensor = piece.data
    if numbers.numel() == 0:
        return None
    row_numbers = numbers.as_strided((len(numbers),), (numbers.stride(0),))
    first = int(row_numbers[0])
    if numbers.shape[1:] != spec.shape[1:] or not torch.equal(row_numbers, first + torch.arange(len(row_numbers))):
        raise NotImplementedError(_odd_pieces_message(spec, piece.key))
    start, stop = max(first, required_rows.start), min(first + len(row_numbers), required_rows.stop)
    if start >= stop:
        return None
    offset = list(piece.global_offset)
    offset[piece.prepend_axis_num] += start - first
    local_rows = range(start - required_rows.start, stop - required_rows.start)
    return local_rows, replace(
        piece,
        data=None,
        # Layers may be stacked along prepended axes. These axes become ordinary axes of the piece, because Megatron
        # allows prepended axes only for pieces of equal size.
        local_shape=(*[1] * piece.prepend_axis_num, len(local_rows), *piece.local_shape[1:]),
        prepend_axis_num=0,
        global_offset=tuple(offset),
        axis_fragmentations=None,
        # The last number is the index of the data-parallel replica. No other data-parallel rank has these rows.
        replica_id=0 if isinstance(piece.replica_id, int) else (*piece.replica_id[:-1], 0),
    )


def _odd_pieces_message(spec: RowShardSpec, key: str) -> str:
    return (
        f"{spec.name!r} is stored as {key!r} in pieces that are not contiguous ranges of its rows. Use "
        "layerzero.megatron.save and load"
    )
