"""Sharded parameters: DTensors whose local tensor has some full rows of the parameter.

[Note: Uneven rows in a DTensor]
DTensor's ``Shard(0)`` means the split of `torch.chunk`. layerzero cuts shards from a flat order, so ranks hold unequal
numbers of rows, some none. Element-wise operations, norms and other reductions work with any cut. Operations that move
rows between ranks do not, and torch would silently return wrong tensors. Two classes prevent that:

- :class:`RowShardedTensor`, the DTensor itself, gathers the full tensor.
- :class:`LocalShard`, its local tensor, is passed through DTensor's dispatch to every derived DTensor. It refuses
  collectives that would misplace rows, and refuses to be broadcast against a tensor that is cut differently.

[Note: Who edited the master]
Every operation of a user on a sharded parameter, through ``p``, ``p.data``, ``p.detach()`` or ``p.to_local()``, reaches
:class:`LocalShard`, which reports writes to its :class:`MutationTracker`. Version counters would miss writes through
``p.data``. The engine works on plain views of the same storage, whose writes are not tracked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.dtensor.derived import with_origin
from layerzero.dtensor.full_tensor import Sharded
from layerzero.dtensor.op_errors import named_error, penalty_error, row_cut_error, row_move_error
from layerzero.dtensor.ops_data import CALLS, AbsentAttribute, mark_uninitialized
from layerzero.dtensor.ops_random import call_on_full, draw_full, draws, is_drawing, is_empty_like
from layerzero.dtensor.ops_reduction import COLLECTIVES, REDUCTIONS, PartialScalar, neutral_result, refuse_collective
from layerzero.dtensor.row_shard_spec import MutationTracker, RowShardSpec
from layerzero.dtensor.sharded_scalar import is_in_place, is_metadata_access, refuse_for_number

__all__ = ["LocalShard", "RowShardedTensor", "plain", "sharded"]


class LocalShard(torch.Tensor):
    """This rank's rows of a sharded tensor, ``[rows, *rest]``; see [Note: Uneven rows in a DTensor]."""

    spec: RowShardSpec
    tracker: MutationTracker | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: Tensor, span: RowShardSpec, watch: MutationTracker | None) -> LocalShard:
        rows: LocalShard = torch.Tensor._make_subclass(cls, plain, False)
        rows.spec, rows.tracker = span, watch
        return rows

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LocalShard({self.spec.name!r}, rows {self.spec.rows}, {plain(self)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = next(tensor for tensor in tensors if isinstance(tensor, cls))
        if func.namespace in COLLECTIVES:
            _readable(ours)  # an access error takes precedence
            refuse_collective(func, args, ours.spec)
        _refuse_misaligned(func, ours, tensors)
        _tell_watches(func, args, kwargs, tensors)
        with torch._C._DisableTorchDispatch():
            if draws(func, ours.spec):
                return draw_full(func, args, kwargs)
            out = neutral_result(func, args)
            if out is None:
                out = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            return out
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        watch = ours.tracker if aliases else None
        return tree_map_only(Tensor, lambda t: t if isinstance(t, cls) else ours._made(func, t, watch), out)

    def _made(self, func: Any, result: Tensor, watch: MutationTracker | None) -> Tensor:
        """Wrap a result of `func` on these rows; see [Note: Parts of a number]."""
        if result.ndim:
            return LocalShard(result, self.spec, watch)
        if self.spec.is_fully_local:
            return result
        return PartialScalar(result, self.spec, func._schema.name.removeprefix("aten::"))

    def with_rows(self, rows: Tensor) -> LocalShard:
        return type(self)(rows, self.spec, None)

    def __deepcopy__(self, memo: dict[int, object]) -> LocalShard:
        """Return a copy without a tracker."""
        copied = memo[id(self)] = LocalShard(_readable(self).clone(), self.spec, None)
        return copied

    def numpy(self, *, force: bool = False) -> Any:
        """Return these rows as a read-only array that shares their memory.

        With `force`, the array is a copy if torch needs one.
        """
        array = _readable(self).detach().numpy(force=force)
        array.flags.writeable = False  # the tracker would miss writes through the array
        return array

    def tolist(self) -> Any:
        return _readable(self).tolist()  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Checkpoint writers serialize the rows only; their offsets are in the checkpoint's own metadata.
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # torch.distributed.checkpoint calls these three methods of a DTensor's local tensor.

    def __create_write_items__(self, fqn: str, whole: DTensor) -> list[WriteItem]:
        if self.spec.model_parallel is not None and not self.spec.model_parallel.is_primary_copy:
            return []  # another rank writes its copy
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
        # Called when a load is planned. A rank without rows gets no write but must take part in the refresh.
        if self.tracker is not None:
            self.tracker.record_write()
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        span = self.spec
        if (self.shape[0] == 0 and span.count > 0) or (self.numel() == 0 and 0 not in span.true_shape):
            return []
        if not span.shape:
            return [ChunkStorageMetadata(offsets=torch.Size([]), sizes=torch.Size([]))]
        offsets = torch.Size([inside.start for inside in span.global_slices])
        return [ChunkStorageMetadata(offsets=offsets, sizes=self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # A load writes to the returned tensor, so it must be tracked. For a 0-dim parameter a tracked view does not
        # exist; the write was recorded when the load was planned.
        return self if self.spec.shape else plain(self).view(())


class RowShardedTensor(Sharded):
    """DTensor with uneven rows, created by :func:`sharded`."""

    _local_tensor: LocalShard
    gathered: Tensor | None = None  # gathered parameter, if this is a sharded parameter
    __tensor_flatten__ = AbsentAttribute()  # see [Note: Moves of a module]

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook as ``torch.Tensor.register_hook`` does.

        On a sharded parameter, `hook` receives the full gradient of this rank's batch in the compute dtype, once for
        each backward. As with DDP, this gradient is not yet averaged over the ranks. The result of `hook` replaces the
        gradient.
        """
        if self.gathered is not None:
            return self.gathered.register_hook(hook)  # type: ignore[no-untyped-call]
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if func in CALLS and isinstance(args[0], cls):
                    return CALLS[func](*args)
                if func in REDUCTIONS and args and isinstance(args[0], (cls, list)):
                    return _derived(REDUCTIONS[func](*args, **kwargs), args)
                if is_drawing(func, args, kwargs):
                    return call_on_full(func, args, kwargs)
                out = func(*args, **kwargs)
                return mark_uninitialized(func, _alike(out)) if is_empty_like(func) else _derived(out, args)
        except RuntimeError as error:
            ours = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)), None)
            if ours is None or (told := named_error(error, func, ours._local_tensor.spec)) is error:
                raise
            raise told from error

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError. ``torch.nn.utils.parametrize`` calls this on a parameter."""
        raise RuntimeError(row_cut_error(Tensor.set_, self._local_tensor.spec))

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """Gather the full tensor on every rank, in this tensor's dtype. Every rank must call this.

        A backward through the result raises RuntimeError.
        """
        if grad_placements is not None:
            raise ValueError("full_tensor of a layerzero parameter is not differentiable; drop grad_placements")
        watch = self._local_tensor.tracker
        if watch is not None and watch.access_error is not None:
            raise RuntimeError(watch.access_error)
        with torch.no_grad():
            whole = self._local_tensor.spec.gather_full(plain(self._local_tensor))
        if self.requires_grad and torch.is_grad_enabled():
            whole = _WithoutGradient.apply(self, whole)  # type: ignore[no-untyped-call]
        return whole

    def with_rows(self, rows: Tensor) -> RowShardedTensor:
        return sharded(rows, self._local_tensor.spec, MutationTracker())

    def within_bounds(self) -> RowShardedTensor:
        """Return a detached alias for which every comparison with a bound is false."""
        return _WithinBounds(self._local_tensor, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def detach(self) -> RowShardedTensor:
        return type(self)(self._local_tensor.detach(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, object]) -> RowShardedTensor:
        """Return a copy of this rank's rows, for entries of state dicts. Raise TypeError for parameters."""
        if not isinstance(self, nn.Parameter):
            copied = type(self)(copy.deepcopy(self._local_tensor, memo), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            memo[id(self)] = copied
            return copied
        raise TypeError(
            "deepcopy of a parameter or a model sharded by layerzero is not supported: copy the model before "
            "shard_model, load layerzero.full_state_dict(model) into a new one, or keep copy.deepcopy of "
            "model.state_dict(); layerzero.EMA(model) averages a model's weights"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "pickling a parameter sharded by layerzero is not supported: save layerzero.full_state_dict(model), "
            "or use torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        span = self._local_tensor.spec
        return f"sharded({span.name!r}, shape={list(self.shape)}, dtype={self.dtype}, rows {span.rows} here)"


class _WithinBounds(RowShardedTensor):
    """Values drawn by ``nn.init.trunc_normal_``, all within its bounds; see [Note: Numbers by global row]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.lt, Tensor.gt):
            return torch.zeros((), dtype=torch.bool, device="cpu")
        return super().__torch_function__(func, types, args, kwargs)


class ShardedScalar(RowShardedTensor):
    """Sharded tensor of shape ``[]``; see [Note: A number is one row]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CALLS or is_metadata_access(func):
            return super().__torch_function__(func, types, args, kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        span = next(leaf for leaf in leaves if isinstance(leaf, cls))._local_tensor.spec
        refuse_for_number(func, span)
        with torch._C.DisableTorchFunctionSubclass():
            meets = any(not isinstance(leaf, DTensor) and leaf.requires_grad for leaf in leaves)
        if meets and torch.is_grad_enabled() and not span.is_fully_local:
            raise RuntimeError(penalty_error(span))
        numbers: dict[int, ShardedScalar] = {}  # by id of the row that replaces it
        rows: list[Tensor] = []

        def row_of(number: ShardedScalar) -> Tensor:
            if number.requires_grad and torch.is_grad_enabled() and not is_in_place(func):
                return _AsRow.apply(number)  # type: ignore[no-untyped-call, no-any-return]
            row = _of_rows(number._local_tensor, (1,)).requires_grad_(number.requires_grad)
            rows.append(row)  # keeps the row alive, so that no other tensor gets its id
            numbers[id(row)] = number
            return row

        def number_of(made: DTensor) -> Tensor:
            if id(made) in numbers:
                return numbers[id(made)]
            local = made._local_tensor
            if made.ndim == 0 or not isinstance(local, LocalShard) or local.spec.shape:
                return made
            if tuple(made.shape) != (1,):
                raise NotImplementedError(row_move_error(func.__name__, span))
            return _AsNumber.apply(made) if made.requires_grad else _of_rows(local, ())  # type: ignore[no-untyped-call]

        args, kwargs = tree_map_only(cls, row_of, (args, kwargs))
        return tree_map_only(DTensor, number_of, RowShardedTensor.__torch_function__(func, types, args, kwargs))

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        row: Any = _AsRow.apply(self)  # type: ignore[no-untyped-call]
        local: Tensor = row.to_local(grad_placements=grad_placements)
        return local


class _AsRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: ShardedScalar) -> Tensor:
        ctx.span = number._local_tensor.spec
        return _of_rows(number._local_tensor, (1,))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch._C._DisableTorchDispatch():  # the local gradient is a LocalShard or a PartialScalar
            rows = gradients[0]._local_tensor.as_subclass(torch.Tensor)
        return sharded(rows, ctx.span, MutationTracker())


class _AsNumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: DTensor) -> Tensor:
        return _of_rows(row._local_tensor, ())  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _of_rows(gradients[0]._local_tensor, (1,))


class _WithoutGradient(torch.autograd.Function):
    """Identity on a full parameter that raises in backward, where the gradient would be lost silently."""

    @staticmethod
    def forward(ctx: Any, parameter: RowShardedTensor, whole: Tensor) -> Tensor:
        ctx.name = parameter._local_tensor.spec.name
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"a backward reached full_tensor() of parameter {ctx.name!r}, through which no gradient can flow; use the "
            "parameter inside the forward of its unit, p.to_local() for a penalty on this rank's rows, or "
            "p.detach().full_tensor() where no gradient is wanted"
        )


def sharded(local: Tensor, span: RowShardSpec, watch: MutationTracker) -> RowShardedTensor:
    """Return a DTensor of shape ``span.true_shape`` whose rows on this rank are `local`, a plain tensor."""
    return _of_rows(LocalShard(local, span, watch), span.true_shape)


def _of_rows(local: LocalShard, shape: tuple[int, ...]) -> RowShardedTensor:
    stride = tuple(torch.empty(shape, device="meta").stride())
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    further = () if local.spec.model_parallel is None else local.spec.model_parallel.placements
    spec = DTensorSpec(local.spec.mesh, (*further, Shard(0), Shard(0)), tensor_meta=meta)
    kind = RowShardedTensor if shape else ShardedScalar
    return kind(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _alike(made: Tensor) -> Tensor:
    """Return `made` as a RowShardedTensor if it has the rows and shape of one and needs no gradient, else unchanged."""
    local = made._local_tensor if isinstance(made, DTensor) else None
    if not isinstance(local, LocalShard) or made.requires_grad or tuple(made.shape) != (local.spec.true_shape or (1,)):
        return made
    return RowShardedTensor(local, made._spec, requires_grad=False)  # type: ignore[attr-defined, no-untyped-call]


def _derived(made: Any, args: Sequence[Any]) -> Any:
    """Mark results that autograd derives from a parameter; see [Note: No gradient through a sharded tensor]."""
    if type(made) not in (DTensor, tuple, list) or not torch.is_grad_enabled():
        return made
    ours = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, RowShardedTensor)), None)
    return made if ours is None else with_origin(made, ours._local_tensor.spec)


def plain(tensor: Tensor) -> Tensor:
    """Return the local rows as a plain, untracked tensor on the same storage."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, LocalShard):
        return local
    with torch._C._DisableTorchDispatch():
        return local.as_subclass(torch.Tensor)


def _readable(rows: LocalShard) -> Tensor:
    """Return the rows as :func:`plain` does, or raise RuntimeError if there is an access error."""
    if rows.tracker is not None and rows.tracker.access_error is not None:
        raise RuntimeError(rows.tracker.access_error)
    return plain(rows)


_ZEROES = {"aten::zero_", "aten::_foreach_zero_"}
_NAMES_ONLY = {"aten::detach", "aten::alias", "aten::view", "aten::_unsafe_view", "aten::view_as"}


def _refuse_misaligned(func: Any, ours: LocalShard, tensors: Sequence[Tensor]) -> None:
    if torch.Tag.pointwise not in func.tags and func._schema.name != "aten::copy_":
        return
    for other in tensors:
        if isinstance(other, LocalShard):
            # If the numbers of rows differ and one is 1, torch would broadcast instead of raise.
            if not (func.__name__.startswith("_foreach") or other.spec.same_sharding(ours.spec)):
                raise ValueError(
                    f"{func.__name__} mixes parameters {ours.spec.name!r} and {other.spec.name!r}, of which ranks hold "
                    "different rows; use p.full_tensor() of both, on all ranks"
                )
        elif other.ndim >= ours.ndim and other.shape != ours.shape:
            raise ValueError(
                f"{func.__name__} mixes parameter {ours.spec.name!r} (rows {ours.spec.rows} on this rank) with a "
                f"tensor cut differently (local shape {list(other.shape)}, expected {list(ours.shape)}); "
                "use tensors made from the sharded parameter itself, such as torch.zeros_like(p). A penalty on "
                "parameters is written on this rank's rows, p.to_local(), which counts each row once"
            )


def _tell_watches(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    if func._schema.name not in _NAMES_ONLY:
        for tensor in tensors:
            if (
                isinstance(tensor, LocalShard)
                and tensor.tracker is not None
                and tensor.tracker.access_error is not None
            ):
                if func._schema.name not in _ZEROES:
                    raise RuntimeError(tensor.tracker.access_error)
                tensor.tracker.zero_requested, tensor.tracker.access_error = True, None
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(value):
            if isinstance(tensor, LocalShard) and tensor.tracker is not None:
                tensor.tracker.record_write()
