"""What ``megatron.core.dist_checkpointing`` saves of model chunks and optimizers: this rank's rows of each tensor.

[Note: A model that describes its row numbers]
Megatron's modules know where their parameters lie in the tensors of the whole model, and store some of them in several
pieces. So they are asked while each parameter is a tensor of its own row numbers, one column of which takes memory:
the answer shows which rows every piece is made of, and a rank keeps those of them that it holds.

Keys, shapes and nesting are those of Megatron's own optimizers, so that either can load what the other has saved.
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

from layerzero.dtensor.row_shard_spec import MutationTracker, RowShardSpec
from layerzero.dtensor.sharded_tensor import sharded
from layerzero.engine.managed_param import ManagedParam
from layerzero.megatron.parallel_groups import NOT_FOUND

__all__ = ["GlobalParam", "global_params", "with_weights"]


@dataclass(frozen=True)
class GlobalParam:
    """Where this rank's rows of one parameter lie in the tensors of the whole model.

    Attributes:
        key: of the tensor, or the beginning of the keys of its pieces.
        pieces: by which of this rank's rows they have; without data.
    """

    member: ManagedParam
    key: str
    pieces: tuple[tuple[range, ShardedTensor], ...]

    def entry(self, rows: Tensor, *, prefix: str = "") -> Any:
        """What a sharded state dict holds for some rows like the parameter's: its values, or an optimizer's state.

        A load puts a sharded tensor in its place, which has the memory of `rows` or other memory; NOT_FOUND if it
        is not strict, and the checkpoint does not have all pieces.
        """
        span = self.member.spec
        if not self.pieces:
            return LocalNonpersistentObject(sharded(rows, span, MutationTracker()))

        def build(key: str, rows: Tensor, replica: Any, flattened_range: Any) -> dict[str, Any]:
            # Pieces that the checkpoint lacks are taken out. What is never empty is found by the merge all the same.
            built: dict[str, Any] = {"merged": LocalNonpersistentObject(True)}
            for number, (own, piece) in enumerate(self.pieces):
                built[str(number)] = replace(
                    piece,
                    key=key + piece.key.removeprefix(self.key),
                    data=rows[own.start : own.stop].view(piece.local_shape),
                    dtype=rows.dtype,
                )
            return built

        def merge(found: dict[str, Any]) -> Any:
            numbers = [str(number) for number in range(len(self.pieces))]
            if not found.keys() >= set(numbers):
                return NOT_FOUND
            parts = [found[number].view(-1, *span.shape[1:]) for number in numbers]
            return sharded(parts[0] if len(parts) == 1 else torch.cat(parts), span, MutationTracker())

        return ShardedTensorFactory(prefix + self.key, rows, build, merge, self.pieces[0][1].replica_id)


def global_params(
    module: nn.Module,
    members: Iterable[ManagedParam],
    metadata: Any,
    prefix: str = "",
    sharded_offsets: Any = (),
    *,
    of_all_ranks: bool = False,
) -> tuple[dict[str, Any], dict[str, GlobalParam]]:
    """A module's sharded state dict, with :class:`GlobalParam` in place of what it says of sharded parameters.

    Args:
        of_all_ranks: describe all rows of the parameters, not this rank's.

    Returns:
        The state dict, and what it has in them by the parameter's name.

    Raises:
        NotImplementedError: a parameter is stored in pieces that are not runs of its rows.
    """
    found: dict[str, GlobalParam] = {}
    # See [Note: A model that describes its row numbers].
    with _row_numbers(members) as member_at:
        state: dict[str, Any] = module.sharded_state_dict(  # type: ignore[operator]
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )

        def described(value: Any) -> Any:
            data = getattr(value, "data", None)
            member = member_at.get(data.untyped_storage().data_ptr()) if isinstance(data, Tensor) else None
            if member is None:
                return value
            parts = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
            wanted = range(member.spec.shape[0]) if of_all_ranks else member.spec.rows
            own = [part for part in (_own_part(part, member.spec, wanted) for part in parts) if part is not None]
            own.sort(key=lambda part: part[0].start)
            if member.master.numel() or of_all_ranks:
                starts, stops = [rows.start for rows, _ in own], [rows.stop for rows, _ in own]
                if [*starts, len(wanted)] != [0, *stops]:
                    raise NotImplementedError(_odd_pieces(member.spec, value.key))
            result = GlobalParam(member, value.key, tuple(own))
            return found.setdefault(member.name, result)

        dict_list_map_inplace(described, state)
    return state, found


def with_weights(state: dict[str, Any]) -> dict[str, Any]:
    """The sharded state dict itself, with copies of this rank's rows in the dtype that the model computes in."""

    def filled(value: Any) -> Any:
        if not isinstance(value, GlobalParam):
            return value
        return value.entry(value.member.master.to(value.member.gathered.dtype, copy=True))

    dict_list_map_inplace(filled, state)
    return state


@contextmanager
def _row_numbers(members: Iterable[ManagedParam]) -> Iterator[dict[int, ManagedParam]]:
    """Inside, each parameter of the model is a tensor of its row numbers; gives the member at each address."""
    shown: list[tuple[dict[str, Any], str, Any]] = []
    member_at: dict[int, ManagedParam] = {}
    try:
        for member in members:
            shape = member.spec.shape
            if not shape:
                raise NotImplementedError(_odd_pieces(member.spec, member.name))
            numbers = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
            stand_in = nn.Parameter(numbers, requires_grad=False)
            vars(stand_in).update(vars(member.gathered))  # Megatron's marks
            member_at[numbers.untyped_storage().data_ptr()] = member
            for parameters, name in member.module_refs:
                shown.append((parameters, name, parameters[name]))
                parameters[name] = stand_in
        yield member_at
    finally:
        for parameters, name, parameter in shown:
            parameters[name] = parameter


def _own_part(piece: ShardedTensor, span: RowShardSpec, wanted: range) -> tuple[range, ShardedTensor] | None:
    """What some rows of a parameter, such as this rank's, have of a piece: which of them, and where they lie."""
    numbers: Tensor = piece.data
    if numbers.numel() == 0:
        return None
    column = numbers.as_strided((len(numbers),), (numbers.stride(0),))
    first = int(column[0])
    if numbers.shape[1:] != span.shape[1:] or not torch.equal(column, first + torch.arange(len(column))):
        raise NotImplementedError(_odd_pieces(span, piece.key))
    start, stop = max(first, wanted.start), min(first + len(column), wanted.stop)
    if start >= stop:
        return None
    offset = list(piece.global_offset)
    offset[piece.prepend_axis_num] += start - first
    own = range(start - wanted.start, stop - wanted.start)
    return own, replace(
        piece,
        data=None,
        # The layers of a stack are an axis of their own, which Megatron only adds to pieces of one size.
        local_shape=(*[1] * piece.prepend_axis_num, len(own), *piece.local_shape[1:]),
        prepend_axis_num=0,
        global_offset=tuple(offset),
        axis_fragmentations=None,
        # The last number tells data-parallel ranks apart, of which only this one has these rows.
        replica_id=0 if isinstance(piece.replica_id, int) else (*piece.replica_id[:-1], 0),
    )


def _odd_pieces(span: RowShardSpec, key: str) -> str:
    return (
        f"{span.name!r} is stored as {key!r} in pieces that are not runs of its rows, each row once; use "
        "layerzero.megatron.save and load"
    )
