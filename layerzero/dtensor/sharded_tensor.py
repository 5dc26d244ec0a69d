"""Define sharded parameters, which are DTensors whose local tensor contains complete rows of the parameter.

[Note: Uneven rows in a DTensor]
DTensor's ``Shard(0)`` implies the row bounds of `torch.chunk`. layerzero splits a flat order into shards, so ranks have
unequal numbers of rows, and some ranks may have no rows. Element-wise operations, norms and other reductions work with
any row bounds. Operations that move rows between ranks do not work, and torch would return wrong tensors without an
error. Two classes prevent such wrong results:

- :class:`RowShardedTensor`, the DTensor itself, overrides ``full_tensor()`` and ``redistribute()`` and gathers with the
  actual row bounds.
- :class:`layerzero.dtensor.local_shard.LocalShard`, its local tensor, is passed through DTensor's dispatch to every
  derived DTensor. A LocalShard raises an error for collectives that would misplace rows, and for broadcasting with a
  tensor with different row bounds.

[Note: 0-dim parameters]
A 0-dim parameter is stored on one rank, as one row with one element. Users see a DTensor of shape ``[]``. DTensor
cannot shard a 0-dim tensor. Therefore torch computes with a tensor of shape ``[1]`` on the same memory, and results
with one row are converted back to 0-dim tensors. Only one rank has the value. Therefore reading the value raises an
error on all ranks, as for partial values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from layerzero.dtensor.derived import call_on_sharded, is_in_place
from layerzero.dtensor.full_tensor import UnevenShard, rows_of
from layerzero.dtensor.local_shard import LocalShard, find_local_shard, local_shard, outside_dtensor, plain, to_local
from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.op_errors import no_gradient_message, unsupported
from layerzero.dtensor.ops_data import FUNCTION_OVERRIDES, AbsentAttribute, mark_uninitialized
from layerzero.dtensor.ops_random import LIKE, call_on_full, is_drawing_function
from layerzero.dtensor.ops_reduction import REDUCTIONS, REFUSED
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.typed_torch import apply_function, make_dtensor
from layerzero.utils.bit_sums import digest
from layerzero.utils.torch_compat import (
    DisableTorchDispatch,
    DisableTorchFunctionSubclass,
    DTensorSpec,
    TensorMeta,
    tree_leaves,
    tree_map_only,
    will_execute,
)


def _creation_method(name: str) -> Callable[..., Tensor]:
    method, like = getattr(Tensor, name), getattr(torch, f"{name.removeprefix('new_')}_like")

    def create_like(self: RowShardedTensor, *args: Any, **kwargs: Any) -> Any:
        """Create a tensor that is sharded like `self` if it has the same shape, and a plain, full tensor otherwise."""
        sizes = {name: value for name, value in kwargs.items() if name in ("size", "fill_value")}
        shape = method(torch.empty(0, device="meta"), *args, **sizes).shape
        if shape == self.shape:
            kwargs.pop("size", None)
            return like(self, *args[1:2] if name == "new_full" else (), **kwargs)
        return method(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)

    return create_like


class RowShardedTensor(DTensor):
    """DTensor with unequal numbers of rows on the ranks. Create it with :func:`sharded`."""

    _local_tensor: LocalShard
    gathered: Tensor | None = None  # gathered parameter, if this tensor is a sharded parameter
    __tensor_flatten__ = AbsentAttribute()  # see [Note: Module moves and conversions]
    new_empty, new_zeros = _creation_method("new_empty"), _creation_method("new_zeros")
    new_ones, new_full = _creation_method("new_ones"), _creation_method("new_full")

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a backward hook, as :meth:`torch.Tensor.register_hook` does.

        For a sharded parameter, `hook` receives the full gradient from this rank's batch in the compute dtype, once per
        backward. As in DDP, this gradient has not yet been averaged over the ranks. If `hook` returns a tensor, this
        tensor replaces the gradient.
        """
        target: Any = super() if self.gathered is None else self.gathered
        return target.register_hook(hook)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _autograd_grad(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            if func is torch.autograd.backward:
                inputs = kwargs.get("inputs")
                return func(*args, **kwargs if inputs is None else {**kwargs, "inputs": _with_gathered(inputs)})
            if func in FUNCTION_OVERRIDES and isinstance(args[0], cls):
                return FUNCTION_OVERRIDES[func](*args)
            if is_drawing_function(func, args, kwargs):
                return call_on_full(func, args, kwargs)
            if func in LIKE:
                return mark_uninitialized(func, _as_row_sharded(func(*args, **kwargs)))
        spec = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._local_tensor.spec
        if func in REFUSED:
            raise REFUSED[func](func.__name__, spec)
        reduce = REDUCTIONS.get(func) if args and isinstance(args[0], (cls, list)) else None
        made = call_on_sharded(reduce or func, args, kwargs, spec)
        return _as_row_sharded(made) if func in (Tensor.clone, torch.clone) else made  # a clone has full_tensor() too

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: ``torch.nn.utils.parametrize`` and others cannot replace a sharded parameter."""
        raise unsupported("set_", self._local_tensor.spec)

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """Gather the full tensor on every rank, in this tensor's dtype. Every rank must call this method.

        A backward pass through the result raises RuntimeError.
        """
        if grad_placements is not None:
            raise ValueError("full_tensor of a layerzero parameter is not differentiable. Leave grad_placements out")
        self._local_tensor.tracker.prepare_read()
        with torch.no_grad():
            full = self._local_tensor.spec.gather_full(plain(self._local_tensor))
        if self.requires_grad and torch.is_grad_enabled():
            full = apply_function(_RaiseInBackward, self, full)
        return full

    def copy_(self, other: Any, non_blocking: bool = False) -> Any:
        """Copy `other` into this tensor. If `other` is a full tensor, copy only this rank's rows.

        All ranks must call this method and pass the same values. See [Note: Copies from full tensors].
        """
        local = self._local_tensor
        if isinstance(other, DTensor) and (other_local := find_local_shard(other)) is not None:
            if not other_local.spec.same_sharding(local.spec):
                raise ValueError(
                    f"{local.spec.name!r} cannot be copied from {other_local.spec.name!r}, which has another "
                    "sharding. Load through layerzero.checkpoint or torch.distributed.checkpoint"
                )
            return super().copy_(other, non_blocking)
        if not isinstance(other, Tensor) or tuple(other.shape) != local.spec.full_shape:
            return super().copy_(other, non_blocking)
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"parameter {local.spec.name!r} requires grad, so autograd does not allow an in-place copy. Copy under "
                "torch.no_grad()"
            )
        rows = rows_of(other.detach(), local.spec)
        if local.spec.num_holders > 1 and not isinstance(other, DTensor):
            local.tracker.loaded_digests[local.spec.name] = digest(other)
        with torch.no_grad():
            outside_dtensor(local).copy_(rows, non_blocking)
        return self

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        return to_local(self, grad_placements)

    @property
    def placements(self) -> tuple[Any, ...]:
        """Placements on the model-parallel axes, followed by ``Shard(0)`` placements with uneven pieces."""
        spec = self._local_tensor.spec
        bounds, mesh_info = spec.bounds, spec.mesh_info
        replicas = mesh_info.replicas
        first_shard = mesh_info.grid.zero3_rank * replicas
        inside = bounds[first_shard : first_shard + replicas + 1]
        relative = [bound - inside[0] for bound in inside]
        model_parallel_placements = () if spec.model_parallel is None else spec.model_parallel.placements
        on_data_axes = (UnevenShard(bounds[::replicas]), UnevenShard(relative))[: mesh_info.flat_mesh.ndim]
        return *model_parallel_placements, *on_data_axes

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **kwargs: object
    ) -> DTensor:
        """Return a DTensor that is replicated on all axes. Every rank must call this method.

        Raises:
            NotImplementedError: `placements` are not all ``Replicate()``, or `device_mesh` is a different mesh.
        """
        mesh = self.device_mesh
        target = [] if placements is None else list(placements)
        is_replicated = len(target) == mesh.ndim and all(isinstance(placement, Replicate) for placement in target)
        if not is_replicated or (device_mesh is not None and device_mesh != mesh):
            raise unsupported("redistribute", self._local_tensor.spec)
        return DTensor.from_local(self.full_tensor(), mesh, target, run_check=False)

    def with_rows(self, rows: Tensor) -> RowShardedTensor:
        return sharded(rows, self._local_tensor.spec)

    def detach(self) -> RowShardedTensor:
        return make_dtensor(type(self), self._local_tensor.detach(), self._spec)

    def __deepcopy__(self, memo: dict[int, object]) -> RowShardedTensor:
        """Return a copy of this rank's rows, for entries in state dicts. For parameters, raise TypeError."""
        if not isinstance(self, nn.Parameter):
            copied = make_dtensor(type(self), copy.deepcopy(self._local_tensor, memo), self._spec)
            memo[id(self)] = copied
            return copied
        raise TypeError(
            "deepcopy of a parameter or a model sharded by layerzero is not supported. Copy the model before "
            "shard_model, load layerzero.full_state_dict(model) into a new model, or use copy.deepcopy of "
            "model.state_dict(). To average a model's weights, use layerzero.EMA(model)"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "pickling a parameter sharded by layerzero is not supported: this rank has only some of its rows. Call "
            "layerzero.full_state_dict(model) on all ranks and save the result on one, or use layerzero.checkpoint.save"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        spec = self._local_tensor.spec
        return f"sharded({spec.name!r}, shape={list(self.shape)}, dtype={self.dtype}, rows {spec.rows} here)"

    def untyped_storage(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError, like the methods below. They would treat this rank's rows as the full tensor."""
        spec = self._local_tensor.spec
        raise TypeError(
            f"this rank has {len(spec.rows)} of {spec.num_rows} rows of {spec.name!r}. Use p.to_local() for these rows "
            "(p.to_local().numpy() is a read-only array of them). Call layerzero.full_state_dict(model) or "
            "p.detach().full_tensor() on every rank to read or save the full tensor. torch.export and make_fx of the "
            "root or of a unit are not supported either. Pass an unsharded copy to them"
        )

    storage = numpy = tolist = untyped_storage


# Names of torch functions that only access shapes, flags or gradients and compute no values.
_ABOUT_ITSELF = {
    *("size", "dim", "ndimension", "stride", "storage_offset", "numel", "nelement", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "type", "requires_grad_", "retain_grad", "backward", "__hash__", "__len__"),
    *("__get__", "__set__", "__delete__", "__dir__", "register_hook", "is_contiguous", "data_ptr"),
    "register_post_accumulate_grad_hook",
}
_READS_VALUE = {"item", "__float__", "__int__", "__bool__", "__index__", "__format__", "__complex__", "__contains__"}
_RESHAPES = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "squeeze", "unsqueeze", "atleast_1d"),
    *("expand", "expand_as", "broadcast_to", "repeat", "tile"),
}


class ShardedScalar(RowShardedTensor):
    """Sharded tensor of shape ``[]``; see [Note: 0-dim parameters]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTION_OVERRIDES or func.__name__ in _ABOUT_ITSELF or func is torch.autograd.grad:
            return super().__torch_function__(func, types, args, kwargs)
        spec = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._local_tensor.spec
        if func.__name__ in _RESHAPES:
            raise unsupported(func.__name__, spec)
        if func.__name__ in _READS_VALUE and spec.mesh_info.data_parallel > 1:
            raise RuntimeError(
                f"the value of parameter {spec.name!r}, or of a tensor derived from it, cannot be read: only one rank "
                "has the value of a 0-dim parameter. Call full_tensor() first, on all ranks, as in "
                "p.full_tensor().item()"
            )
        is_written = is_in_place(func, kwargs)
        numbers: dict[int, ShardedScalar] = {}  # keyed by the id of the row that replaces the scalar
        rows: list[Tensor] = []

        def row_of(number: ShardedScalar) -> Tensor:
            if number.requires_grad and torch.is_grad_enabled() and not is_written:
                return apply_function(_ZeroDimToRow, number)
            row = _from_local_shard(number._local_tensor, (1,)).requires_grad_(number.requires_grad)
            rows.append(row)  # keeps the row alive, so that no other tensor gets its id
            numbers[id(row)] = number
            return row

        def zero_dim_of(made: DTensor) -> Tensor:
            if id(made) in numbers:
                return numbers[id(made)]
            local = find_local_shard(made)
            if made.ndim == 0 or local is None or local.spec.shape:
                return made
            if tuple(made.shape) != (1,):
                raise unsupported(func.__name__, spec)
            return apply_function(_RowToZeroDim, made) if made.requires_grad else _from_local_shard(local, ())

        args, kwargs = tree_map_only(cls, row_of, (args, kwargs))
        return tree_map_only(DTensor, zero_dim_of, RowShardedTensor.__torch_function__(func, types, args, kwargs))

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        return to_local(apply_function(_ZeroDimToRow, self), grad_placements)


class _ZeroDimToRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: ShardedScalar) -> Tensor:
        ctx.spec = number._local_tensor.spec
        return _from_local_shard(number._local_tensor, (1,))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with DisableTorchDispatch():  # the local gradient is a LocalShard or a PartialScalar
            rows = gradients[0]._local_tensor.as_subclass(torch.Tensor)
        # A copy, because autograd may pass the same tensor to other nodes, and _accumulate_grad keeps it.
        gradient = sharded(rows.clone(), ctx.spec)
        return None if _accumulate_grad(ctx.next_functions[0][0], gradient) else gradient


def _accumulate_grad(node: Any, gradient: RowShardedTensor) -> bool:
    """Do the work of an AccumulateGrad node: add `gradient` to the ``.grad`` of a 0-dim parameter.

    Autograd itself would add the 0-dim DTensors, and DTensor cannot do that. Return False, without a change, if
    autograd does not execute `node`, or if the node accumulates nothing.
    """
    parameter = getattr(node, "variable", None)
    if parameter is None or not parameter.requires_grad:
        return False
    try:
        if not will_execute(node):
            return False
    except RuntimeError:  # torch.autograd.grad with respect to the parameter
        return False
    with DisableTorchFunctionSubclass():
        if isinstance(parameter.grad, RowShardedTensor):
            parameter.grad._local_tensor.add_(gradient._local_tensor)
        else:
            parameter.grad = gradient
    return True


class _RowToZeroDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: DTensor) -> Tensor:
        return _from_local_shard(local_shard(row), ())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _from_local_shard(gradients[0]._local_tensor, (1,))


class _RaiseInBackward(torch.autograd.Function):
    """Identity function on a full parameter. Its backward raises, because the gradient would be lost silently."""

    @staticmethod
    def forward(ctx: Any, parameter: RowShardedTensor, whole: Tensor) -> Tensor:
        ctx.name = parameter._local_tensor.spec.name
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"a backward reached full_tensor() of parameter {ctx.name!r}, which is not differentiable. Use the "
            "parameter inside the forward of its unit, p.to_local() for a penalty on this rank's rows, or "
            "p.detach().full_tensor() if you need no gradient"
        )


def sharded(local: Tensor, spec: RowShardSpec, tracker: MutationTracker | None = None) -> RowShardedTensor:
    """Return a DTensor of shape ``spec.full_shape`` whose rows on this rank are the plain tensor `local`."""
    return _from_local_shard(LocalShard(local, spec, tracker), spec.full_shape)


def _from_local_shard(local: LocalShard, shape: tuple[int, ...]) -> RowShardedTensor:
    stride = tuple(torch.empty(shape, device="meta").stride())
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    model_parallel_placements = () if local.spec.model_parallel is None else local.spec.model_parallel.placements
    on_data_axes = (Shard(0),) * local.spec.mesh_info.flat_mesh.ndim
    spec = DTensorSpec(local.spec.mesh, (*model_parallel_placements, *on_data_axes), tensor_meta=meta)
    return make_dtensor(RowShardedTensor if shape else ShardedScalar, local, spec)


def _with_gathered(inputs: Sequence[Any]) -> list[Any]:
    """Return `inputs`, the argument of a backward pass, followed by the gathered parameters of its elements."""
    gathered = [tensor.gathered for tensor in inputs if isinstance(tensor, RowShardedTensor)]
    return [*inputs, *(leaf for leaf in gathered if leaf is not None and leaf.requires_grad)]


def _autograd_grad(outputs: Sequence[Any], inputs: Sequence[Any], **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Call ``torch.autograd.grad``, which reaches sharded parameters only through ``p.to_local()``.

    Raises:
        RuntimeError: a sharded parameter has no gradient, even with ``allow_unused=True``, because units may have used
            the gathered parameter.
    """
    with DisableTorchFunctionSubclass():
        with_none = {**kwargs, "allow_unused": True, "materialize_grads": False}
        gradients = list(torch.autograd.grad(outputs, inputs, **with_none))
    for index, (tensor, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        if gradient is not None:
            continue
        if isinstance(tensor, RowShardedTensor):
            raise RuntimeError(no_gradient_message(tensor._local_tensor.spec))
        if kwargs.get("materialize_grads"):
            gradients[index] = torch.zeros_like(tensor)
        elif not kwargs.get("allow_unused"):
            raise RuntimeError("torch.autograd.grad found no gradient for an input. Set allow_unused=True to get None")
    return tuple(gradients)


def _as_row_sharded(made: Tensor) -> Tensor:
    """Convert `made` to a RowShardedTensor if its rows and shape allow it and `made` needs no gradient.

    Otherwise return `made` unchanged.
    """
    local = find_local_shard(made)
    if not isinstance(made, DTensor) or local is None or made.requires_grad:
        return made
    if tuple(made.shape) != (local.spec.full_shape or (1,)):
        return made
    return make_dtensor(RowShardedTensor, local, made._spec)
