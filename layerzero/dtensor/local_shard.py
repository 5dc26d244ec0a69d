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

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.op_errors import even_sharding_message, row_move_message
from layerzero.dtensor.ops_random import draw_full, is_drawing_operator
from layerzero.dtensor.ops_reduction import COLLECTIVES, PartialScalar, neutral_result, refuse_uneven_collective
from layerzero.dtensor.row_shard_spec import RowShardSpec

if TYPE_CHECKING:  # a third of the import time of this package, and needed only to save and load
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["LocalShard", "ToLocal", "local_shard", "outside_dtensor", "plain"]


class LocalShard(torch.Tensor):
    """Rows of a sharded tensor on this rank, ``[rows, *rest]``; see [Note: Uneven rows in a DTensor]."""

    spec: RowShardSpec
    tracker: MutationTracker | None
    row_dim: int | None  # dim of the rows, counted from the last; None outside of a DTensor, and if there are no rows

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, plain: Tensor, spec: RowShardSpec, watch: MutationTracker | None, row_dim: int | None = 0
    ) -> LocalShard:
        rows: LocalShard = torch.Tensor._make_subclass(cls, plain, False)
        rows.spec, rows.tracker = spec, watch
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
        shard = next(tensor for tensor in tensors if isinstance(tensor, cls))
        if func.namespace in COLLECTIVES:
            _accessible_rows(shard)  # an access error takes precedence
            refuse_uneven_collective(func, args, shard.spec)
        _refuse_misaligned(func, shard, args, kwargs)
        _check_and_record_access(func, args, kwargs, tensors)
        with torch._C._DisableTorchDispatch():
            if is_drawing_operator(func, shard.spec):
                return draw_full(func, args, kwargs)
            row_dims = _row_dims(func, shard, args, kwargs)
            output = neutral_result(func, args, kwargs)
            if output is None:
                output = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            return output
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        tracker = shard.tracker if aliases else None
        return tree_map_only(Tensor, lambda t: shard._wrap_result(func, t, tracker, next(row_dims)), output)

    def _wrap_result(self, func: Any, result: Tensor, tracker: MutationTracker | None, row_dim: int | None) -> Tensor:
        """Wrap a result of `func`, which was called with these rows; see [Note: Partial scalars]."""
        if isinstance(result, LocalShard):
            return result
        if result.ndim:
            return LocalShard(result, self.spec, tracker, row_dim)
        if self.spec.is_fully_local:
            return result
        return PartialScalar(result, self.spec, func._schema.name.removeprefix("aten::"))

    def with_rows(self, rows: Tensor) -> LocalShard:
        return type(self)(rows, self.spec, None)

    def view_as(self, other: Tensor) -> LocalShard:  # type: ignore[override]
        """Return an alias of `self` outside of a DTensor. Only :meth:`DTensor.to_local` calls this method."""
        return LocalShard(plain(self), self.spec, self.tracker, None)

    def __deepcopy__(self, memo: dict[int, object]) -> LocalShard:
        """Return a copy without a tracker."""
        copied = memo[id(self)] = LocalShard(_accessible_rows(self).clone(), self.spec, None)
        return copied

    def numpy(self, *, force: bool = False) -> Any:
        """Return these rows as a read-only array.

        The array shares memory with the rows, unless `force` is True and torch has to copy the rows.
        """
        array = _accessible_rows(self).detach().numpy(force=force)
        array.flags.writeable = False  # the tracker cannot detect writes through the array
        return array

    def tolist(self) -> Any:
        return _accessible_rows(self).tolist()  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Checkpoint writers serialize only the rows. The offsets are in the checkpoint's metadata.
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # torch.distributed.checkpoint calls these three methods of a DTensor's local tensor.

    def __create_write_items__(self, fqn: str, whole: DTensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415 - see above
        from torch.distributed.checkpoint.planner import (  # noqa: PLC0415 - see above
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        if self.tracker is not None and self.tracker.on_read is not None:
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
        if self.tracker is not None:
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


class ToLocal(torch.autograd.Function):
    """Alias of a DTensor's rows outside of a DTensor. The gradient is sharded like the DTensor."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.spec, ctx.row_spec = tensor._spec, local_shard(tensor).spec
        return outside_dtensor(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch._C._DisableTorchDispatch():  # the gradient is a plain tensor, a LocalShard or a PartialScalar
            rows = LocalShard(gradients[0].as_subclass(torch.Tensor), ctx.row_spec, None)
        return DTensor(rows, ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]


def outside_dtensor(local: Tensor) -> Tensor:
    """Return an alias of a DTensor's local tensor that may be combined with plain tensors of the same local shape.

    See [Note: Decisions about rows].
    """
    return local.view_as(local) if isinstance(local, LocalShard) and local.row_dim is not None else local


def plain(tensor: Tensor) -> Tensor:
    """Return the local rows as a plain, untracked tensor on the same storage."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, LocalShard):
        return local
    with torch._C._DisableTorchDispatch():
        return local.as_subclass(torch.Tensor)


def _accessible_rows(rows: LocalShard) -> Tensor:
    """Return the rows like :func:`plain`, or raise RuntimeError if there is an access error."""
    if rows.tracker is not None:
        rows.tracker.prepare_read()
    return plain(rows)


_LISTS = ("_foreach", "_fused")
_MANY_ROWS = 999_983  # a prime number, so that dims that are multiples of it contain the rows
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")  # they would allocate memory if given a device
_SAME_ROWS = {f"aten::{name}" for name in ("detach", "alias", "clone", "copy_", "_to_copy", *_LIKE)}
_ZEROES = {"aten::zero_", "aten::_foreach_zero_"}
_NAMES_ONLY = {"aten::detach", "aten::alias", "aten::view", "aten::_unsafe_view", "aten::view_as"}


def _refuse_misaligned(func: Any, rows: LocalShard, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if `func` combines rows of parameters that are sharded differently.

    Otherwise, only some ranks would raise an error, or kernels that do not compare sizes would read other memory.
    """
    name, values = func._schema.name, [*args, *kwargs.values()]
    elementwise = torch.Tag.pointwise in func.tags or name == "aten::copy_"
    if func.__name__.startswith(_LISTS):
        lists = [value for value in values if isinstance(value, (list, tuple)) and value]
        for corresponding in zip(*lists, strict=False):
            _require_same_rows(func, [each for each in corresponding if isinstance(each, Tensor)], elementwise=True)
        return
    if name in ("aten::stack", "aten::cat"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if name == "aten::stack" or dim % max([1, *(tensor.ndim for tensor in args[0])]):
            values = list(args[0])
    _require_same_rows(func, [value for value in values if isinstance(value, Tensor)], elementwise=elementwise)


def _require_same_rows(func: Any, tensors: Sequence[Tensor], *, elementwise: bool) -> None:
    shards = [tensor for tensor in tensors if isinstance(tensor, LocalShard)]
    for other in tensors if elementwise and shards else ():
        if not isinstance(other, LocalShard) and _is_misaligned(shards[0], other):
            rows = shards[0]
            raise ValueError(
                f"{func.__name__} mixes parameter {rows.spec.name!r} (rows {rows.spec.rows} on this rank) with a "
                f"tensor that is sharded differently (local shape {list(other.shape)}, expected {list(rows.shape)}). "
                "Use tensors that are created from the sharded parameter, such as torch.zeros_like(p). To use a value "
                "of each column, as in p - p.mean(0), leave out keepdim. Compute a penalty on parameters from this "
                "rank's rows, p.to_local(), so that each row counts once"
            )
    for other in shards[1:]:
        # If the numbers of rows differ and one of them is 1, torch would broadcast instead of raising an error.
        if other.spec is shards[0].spec or other.spec.same_sharding(shards[0].spec):
            continue
        if elementwise or not (other.spec.is_fully_local and shards[0].spec.is_fully_local):
            raise ValueError(
                f"{func.__name__} combines rows of parameters {shards[0].spec.name!r} and {other.spec.name!r}, but a "
                "rank does not have the same rows of both. Call full_tensor() of both on all ranks, or read the model "
                "inside layerzero.unsharded(model)"
            )


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
        RuntimeError: `func` assumes torch's own sharding, and ranks have other rows.
        NotImplementedError: `func` combines rows, or it fails on ranks without rows.
    """
    name, spec, row_dim = func._schema.name, rows.spec, rows.row_dim
    has_same_rows = torch.Tag.pointwise in func.tags or func.__name__.startswith(_LISTS) or name in _SAME_ROWS
    if row_dim is None or spec.is_fully_local or has_same_rows or func.namespace != "aten":
        return repeat(row_dim)

    def resize(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if isinstance(tensor, LocalShard) and tensor.row_dim is not None:
            shape[tensor.row_dim] = _MANY_ROWS
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    on_meta, options = tree_map_only(Tensor, resize, (args, kwargs))
    try:
        results = [leaf for leaf in tree_leaves(func(*on_meta, **options)) if isinstance(leaf, Tensor)]
    except NotImplementedError:  # not available on the meta device
        return repeat(row_dim)
    except (RuntimeError, IndexError) as error:
        if spec.row_counts == spec.torch_row_counts:
            return repeat(row_dim)
        raise RuntimeError(even_sharding_message(func, spec)) from error
    dims = [
        next((i - t.ndim for i, size in enumerate(t.shape) if size % _MANY_ROWS == 0 < size), None) for t in results
    ]
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    keeps_rows = any(dim == row_dim and t.ndim == rows.ndim for dim, t in zip(dims, results, strict=True))
    is_along_rows = named.get("dim") in (row_dim, row_dim + rows.ndim) and keeps_rows and not is_view
    if is_along_rows or name == "aten::aminmax":  # torch cannot compute the latter without rows
        raise NotImplementedError(row_move_message(func.__name__, spec))
    return iter(dims)


def _check_and_record_access(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    if func._schema.name not in _NAMES_ONLY:
        for tensor in tensors:
            if not isinstance(tensor, LocalShard) or tensor.tracker is None:
                continue
            if tensor.tracker.access_error is not None and func._schema.name in _ZEROES:
                tensor.tracker.zero_requested, tensor.tracker.access_error = True, None
            if tensor.tracker.access_error is not None or not func._schema.is_mutable:
                tensor.tracker.prepare_read()
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(value):
            if isinstance(tensor, LocalShard) and tensor.tracker is not None:
                tensor.tracker.record_write()
                tensor.tracker.was_zeroed |= func._schema.name in _ZEROES
