"""Define :class:`LocalShard`, the local tensor of a sharded parameter. It contains this rank's rows.

See [Note: Uneven rows in a DTensor] in `layerzero.dtensor.sharded_tensor`.

[Note: Decisions about rows]
If only some ranks raised an error, the others would wait for them in their next collective. Therefore a refusal must
not depend on this rank's rows. DTensor computes local sizes for torch's own sharding
(``RowShardSpec.torch_row_counts``), and torch notices nothing on a rank that happens to have as many rows. Therefore a
LocalShard knows which of its dims has the rows. Operations that are not element-wise are first called on the meta
device with a number of rows that no rank has. If this call fails, the operation assumes torch's sharding, and all ranks
raise an error. Otherwise its result shows which dim of the result has the rows. In an element-wise operation, a plain
tensor is replicated, or torch has sharded it. It may be broadcast along the rows unless torch's sharding gives one row
to a rank, because the plain tensor might be such a row. ``to_local()`` returns rows outside of a DTensor, for which no
other rank takes part in an operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.op_errors import unsupported
from layerzero.dtensor.ops_random import draw_full, is_drawing_operator
from layerzero.dtensor.ops_reduction import COLLECTIVES, PartialScalar, neutral_result, refuse_uneven_collective
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.typed_torch import apply_function, make_dtensor
from layerzero.utils.torch_compat import (
    DisableTorchDispatch,
    disabled_torch_function,
    make_subclass,
    tree_leaves,
    tree_map_only,
)

if TYPE_CHECKING:  # a third of the import time of this package, and needed only to save and load
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class LocalShard(torch.Tensor):
    """Rows of a sharded tensor on this rank, ``[rows, *rest]``; see [Note: Uneven rows in a DTensor]."""

    spec: RowShardSpec
    tracker: MutationTracker
    row_dim: int | None  # dim of the rows, counted from the last; None outside of a DTensor, and if there are no rows
    is_outside: bool  # True for rows that the user has requested with to_local()

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls,
        plain: Tensor,
        spec: RowShardSpec,
        tracker: MutationTracker | None = None,
        row_dim: int | None = 0,
        *,
        is_outside: bool = False,
    ) -> LocalShard:
        rows: LocalShard = make_subclass(cls, plain, False)
        rows.spec, rows.tracker, rows.is_outside = spec, tracker or MutationTracker(), is_outside
        rows.row_dim = None if row_dim is None else max(row_dim or -plain.ndim, -plain.ndim)
        return rows

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LocalShard({self.spec.name!r}, rows {self.spec.rows}, {plain(self)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shards = [tensor for tensor in tensors if isinstance(tensor, cls)]
        shard = next((each for each in shards if each.ndim), shards[0])  # rows, unless all are elements
        if func.namespace in COLLECTIVES:
            _accessible_rows(shard)  # an access error takes precedence
            refuse_uneven_collective(func, args, shard.spec)
        _refuse_misaligned(func, args, kwargs)
        _check_access(func, tensors)
        _record_writes(func, args, kwargs)
        with DisableTorchDispatch():
            if shard.ndim and is_drawing_operator(func, shard.spec):
                return draw_full(func, args, kwargs)
            row_dims = _row_dims(func, shard, args, kwargs)
            output = neutral_result(func, args, kwargs)
            if output is None:
                output = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            return output
        tracker = shard.tracker if _returns_alias(func) else None  # None: new memory
        return tree_map_only(Tensor, lambda t: shard._wrap_result(func, t, tracker, next(row_dims)), output)

    def _wrap_result(self, func: Any, result: Tensor, tracker: MutationTracker | None, row_dim: int | None) -> Tensor:
        """Wrap a result of `func`, which was called with these rows; see [Note: Partial scalars]."""
        if isinstance(result, LocalShard):
            return result
        is_value = self.is_outside or self.spec.is_fully_local  # not partial
        if is_value and tracker is None and not (result.ndim and self.ndim):  # a value, or computed from elements only
            return result
        if result.ndim or is_value:  # rows, or an element, as in p.to_local()[0, 0] = 1
            return LocalShard(result, self.spec, tracker, row_dim, is_outside=self.is_outside)
        return PartialScalar(result, self.spec, func._schema.name.removeprefix("aten::"))

    def with_rows(self, rows: Tensor) -> LocalShard:
        return LocalShard(rows, self.spec, None, self.row_dim, is_outside=self.is_outside)

    def view_as(self, other: Tensor) -> LocalShard:
        """Return an alias of `self` outside of a DTensor. Only :meth:`DTensor.to_local` calls this method."""
        return LocalShard(plain(self), self.spec, self.tracker, None, is_outside=True)

    def __deepcopy__(self, memo: dict[int, object]) -> LocalShard:
        """Return a copy with a tracker of its own."""
        copied = memo[id(self)] = self.with_rows(_accessible_rows(self).clone())
        return copied

    def numpy(self, *, force: bool = False) -> Any:
        """Return these rows as a read-only array.

        The array shares memory with the rows, unless `force` is True and torch has to copy the rows.
        """
        array = _accessible_rows(self).detach().numpy(force=force)
        array.flags.writeable = False  # the tracker cannot detect writes through the array
        return array

    def tolist(self) -> Any:
        return _accessible_rows(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Checkpoint writers serialize only the rows. The offsets are in the checkpoint's metadata.
        rows: Any = plain(self)
        return rows.__reduce_ex__(protocol)

    # torch.distributed.checkpoint calls these three methods of a DTensor's local tensor.

    def __create_write_items__(self, fqn: str, whole: DTensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415 - see above
        from torch.distributed.checkpoint.planner import (  # noqa: PLC0415 - see above
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        if self.tracker.on_read is not None:
            self.tracker.on_read()
        if self.spec.model_parallel is not None and not self.spec.model_parallel.is_primary_copy:
            return []  # the rank with the primary copy writes it
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(plain(self)), size=whole.size()
                ),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Called when a load is planned. On a rank without rows, nothing is written, but the rank must take part in the
        # refresh.
        self.tracker.record_write()
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 - see above

        spec = self.spec
        if (self.shape[0] == 0 and spec.num_rows > 0) or (self.numel() == 0 and 0 not in spec.full_shape):
            return []
        if not spec.shape:
            return [ChunkStorageMetadata(offsets=torch.Size([]), sizes=torch.Size([]))]
        offsets = torch.Size([inside.start for inside in spec.global_slices])
        return [ChunkStorageMetadata(offsets=offsets, sizes=self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # A load writes to the returned tensor, so the tensor must be tracked. A 0-dim parameter has no tracked view,
        # but the write to it was recorded when the load was planned.
        return outside_dtensor(self) if self.spec.shape else plain(self).view(())


def local_shard(tensor: DTensor) -> LocalShard:
    """Return the local tensor of a sharded tensor."""
    return cast(LocalShard, tensor._local_tensor)


def find_local_shard(tensor: object) -> LocalShard | None:
    """Return the LocalShard that `tensor` is, or that is its local tensor. Return None if there is none."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local if isinstance(local, LocalShard) else None


class _ToLocal(torch.autograd.Function):
    """Alias of a DTensor's rows outside of a DTensor. The gradient is sharded like the DTensor."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        local = local_shard(tensor)
        ctx.spec, ctx.row_spec, ctx.row_dim = tensor._spec, local.spec, local.row_dim
        return outside_dtensor(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with DisableTorchDispatch():  # the gradient is a plain tensor or a LocalShard
            rows = LocalShard(gradients[0].as_subclass(torch.Tensor), ctx.row_spec, None, ctx.row_dim)
        return make_dtensor(DTensor, rows, ctx.spec)


def to_local(tensor: Any, grad_placements: Any) -> Tensor:
    """Return the rows of a sharded or derived tensor, outside of a DTensor."""
    if torch.is_grad_enabled() and grad_placements is None and find_local_shard(tensor) is not None:
        return apply_function(_ToLocal, tensor)
    return outside_dtensor(DTensor.to_local(tensor, grad_placements=grad_placements))


def outside_dtensor(local: Tensor) -> Tensor:
    """Return an alias of a DTensor's local tensor that may be combined with plain tensors of the same local shape.

    See [Note: Decisions about rows].
    """
    if isinstance(local, PartialScalar):
        return local.value
    return local.view_as(local) if isinstance(local, LocalShard) and not local.is_outside else local


def plain(tensor: Tensor) -> Tensor:
    """Return the local rows as a plain, untracked tensor on the same storage."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, LocalShard):
        return local
    with DisableTorchDispatch():
        return local.as_subclass(torch.Tensor)


def _accessible_rows(rows: LocalShard) -> Tensor:
    """Return the rows like :func:`plain`, or raise RuntimeError if there is an access error."""
    rows.tracker.prepare_read()
    return plain(rows)


_LISTS = ("_foreach", "_fused")
_MANY_ROWS = 999_983  # a prime number, so that dims that are multiples of it contain the rows
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")  # they would allocate memory if given a device
_SAME_ROWS = {f"aten::{name}" for name in ("detach", "alias", "clone", "_to_copy", *_LIKE)}
_ZEROES = {"aten::zero_", "aten::_foreach_zero_"}
_NAMES_ONLY = {"aten::detach", "aten::alias", "aten::view", "aten::_unsafe_view", "aten::view_as"}


def _is_elementwise(func: Any) -> bool:
    name = func._schema.name
    return torch.Tag.pointwise in func.tags or name == "aten::copy_" or func.__name__.startswith(_LISTS)


def _refuse_misaligned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError if `func` combines rows of parameters that are sharded differently.

    Otherwise, only some ranks would raise an error, or kernels that do not compare sizes would read other memory.
    """
    is_elementwise = _is_elementwise(func)
    for group in _combined_arguments(func, args, kwargs):
        shards = [value for value in group if isinstance(value, LocalShard) and value.ndim]
        for other in group if shards else ():
            if isinstance(other, Tensor) and not _may_combine(shards[0], other, is_elementwise=is_elementwise):
                raise unsupported(func.__name__, shards[0].spec)


def _combined_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Sequence[Any]]:
    """Return groups of arguments. `func` combines only the arguments of one group."""
    values = [*args, *kwargs.values()]
    if func.__name__.startswith(_LISTS):
        return zip(*(value for value in values if isinstance(value, (list, tuple)) and value), strict=False)
    name = func._schema.name
    if name in ("aten::stack", "aten::cat"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if name == "aten::stack" or dim % max([1, *(tensor.ndim for tensor in args[0])]):
            return [args[0]]
    return [values]


def _may_combine(rows: LocalShard, other: Tensor, *, is_elementwise: bool) -> bool:
    """Return whether an operation may combine `rows` with another of its arguments."""
    if not isinstance(other, LocalShard) or not other.ndim:  # an element has no rows
        return not (is_elementwise and _is_misaligned(rows, other))
    # If the numbers of rows differ and one of them is 1, torch would broadcast instead of raising an error.
    if other.spec is rows.spec or other.spec.same_sharding(rows.spec):
        return True
    return not is_elementwise and other.spec.is_fully_local and rows.spec.is_fully_local


def _is_misaligned(rows: LocalShard, other: Tensor) -> bool:
    """Return whether any rank might pair its rows with the wrong rows of `other`, which is not a LocalShard.

    See [Note: Decisions about rows].
    """
    spec = rows.spec
    if rows.row_dim is None:
        return other.ndim >= rows.ndim and other.shape != rows.shape
    if other.ndim < -rows.row_dim or spec.row_counts == spec.torch_row_counts:
        return False
    return other.shape[rows.row_dim] != 1 or 1 in spec.torch_row_counts


def _row_dims(func: Any, rows: LocalShard, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[int | None]:
    """Yield the `row_dim` of each tensor that `func` returns. See [Note: Decisions about rows].

    Raises:
        NotImplementedError: `func` assumes torch's own sharding, combines rows, or fails on ranks without rows.
    """
    name, spec, row_dim = func._schema.name, rows.spec, rows.row_dim
    has_same_rows = _is_elementwise(func) or name in _SAME_ROWS
    if row_dim is None or spec.is_fully_local or has_same_rows or func.namespace != "aten":
        return repeat(row_dim)
    results = _call_with_many_rows(func, spec, args, kwargs)
    if results is None:
        return repeat(row_dim)
    dims = [_find_row_dim(result) for result in results]
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    keeps_rows = any(dim == row_dim and t.ndim == rows.ndim for dim, t in zip(dims, results, strict=True))
    is_along_rows = named.get("dim") in (row_dim, row_dim + rows.ndim) and keeps_rows and not _returns_alias(func)
    if is_along_rows or name == "aten::aminmax":  # torch cannot compute the latter without rows
        raise unsupported(func.__name__, spec)
    return iter(dims)


def _call_with_many_rows(
    func: Any, spec: RowShardSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor] | None:
    """Return the tensors that `func` returns on the meta device if this rank has `_MANY_ROWS` rows.

    Return None if the meta device does not support `func`, or if an error does not depend on the number of rows.

    Raises:
        NotImplementedError: `func` assumes torch's own sharding.
    """

    def resize(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if isinstance(tensor, LocalShard) and tensor.row_dim is not None:
            shape[tensor.row_dim] = _MANY_ROWS
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    on_meta, options = tree_map_only(Tensor, resize, (args, kwargs))
    try:
        return [leaf for leaf in tree_leaves(func(*on_meta, **options)) if isinstance(leaf, Tensor)]
    except NotImplementedError:
        return None
    except (RuntimeError, IndexError) as error:
        if spec.row_counts == spec.torch_row_counts:
            return None
        raise unsupported(func.__name__, spec) from error


def _find_row_dim(result: Tensor) -> int | None:
    """Return the dim, counted from the last, that contains the rows of :func:`_call_with_many_rows`, or None."""
    sizes = enumerate(result.shape)
    return next((dim - result.ndim for dim, size in sizes if size % _MANY_ROWS == 0 < size), None)


def _returns_alias(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _check_access(func: Any, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError if `func` uses the values of an argument with an access error, unless it sets them to zero."""
    name = func._schema.name
    if name in _NAMES_ONLY:
        return
    for tracker in [tensor.tracker for tensor in tensors if isinstance(tensor, LocalShard)]:
        if tracker.access_error is not None and name in _ZEROES:
            tracker.zero_requested, tracker.access_error = True, None
        if tracker.access_error is not None or not func._schema.is_mutable:
            tracker.prepare_read()


def _record_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for value in written_values(func, args, kwargs):
        if isinstance(value, LocalShard):
            value.tracker.record_write()
            value.tracker.was_zeroed |= func._schema.name in _ZEROES


def written_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments to which the operator `func` writes. Lists are flattened."""
    if not func._schema.is_mutable:
        return []
    written = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tree_leaves(written)
