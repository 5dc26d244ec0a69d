"""Sharded parameters: DTensors whose local tensor is this rank's whole rows.

[Note: Uneven rows in a DTensor]
DTensor's ``Shard(0)`` means `torch.chunk`'s split. Ours is another one: shards are cut from a flat order, so ranks
hold unequal numbers of rows, some none. Element-wise operations, norms and other reductions do not care. Whatever
moves rows between ranks does, and torch would return wrong tensors without a word. Two classes prevent that:

- :class:`RowShardedTensor`, the DTensor itself, knows how to build the full tensor.
- :class:`LocalRows`, its local tensor, travels through DTensor's dispatch into every derived DTensor, refuses the
  collectives that would misplace rows, and refuses to be broadcast against a differently cut tensor.

[Note: Who edited the master]
Every operation of a user on a sharded parameter, through ``p``, ``p.data``, ``p.detach()`` or ``p.to_local()``,
reaches :class:`LocalRows` in the end, which tells its :class:`Watch` when it is written to. Version counters would
miss ``p.data``. The engine itself works on plain views of the same storage, which nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.collectives import Exchange, all_gather, broadcast
from layerzero.topology import Topology

__all__ = ["LocalRows", "RowShardedTensor", "RowSpan", "Watch", "carry_over", "sharded"]


class Watch:
    """What has happened to the storage behind some :class:`LocalRows`."""

    __slots__ = ("edited", "forbidden", "zeroed")

    def __init__(self) -> None:
        self.edited = False
        self.forbidden: str | None = None  # while set, using the values raises RuntimeError with this text
        self.zeroed = False  # zero_() was called while `forbidden` was set, the one use that needs no values


@dataclass(frozen=True, eq=False)
class RowSpan:
    """Which rows of one parameter each rank holds."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    bounds: tuple[int, ...]  # the rank at flat position k holds rows [bounds[k], bounds[k + 1])
    topology: Topology

    @property
    def rows(self) -> range:
        """This rank's rows."""
        k = self.topology.shard_index
        return range(self.bounds[k], self.bounds[k + 1])

    def cut_like(self, other: RowSpan) -> bool:
        """Every rank holds the same rows of both. Equal bounds are not enough: S decides whose is flat position k."""
        return self.bounds == other.bounds and self.topology.zero3_size == other.topology.zero3_size

    def gather(self, local: Tensor) -> Tensor:
        """The whole parameter, from every rank's rows `local`; every rank must call this."""
        longest = max(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))
        evenly = self.topology.data_parallel * longest <= 2 * self.shape[0]
        return self._gather_padded(local, longest) if evenly else self._gather_from_holders(local)

    def _gather_padded(self, local: Tensor, longest: int) -> Tensor:
        topology, rest = self.topology, self.shape[1:]
        pieces = local.new_zeros(1, longest, *rest)
        pieces[0, : local.shape[0]] = local
        for lane in (topology.replica, topology.gather):  # k = s * R + r: the replica axis is the inner one
            if lane.size > 1 and pieces.numel():
                wider = local.new_empty(lane.size * pieces.shape[0], longest, *rest)
                all_gather(lane, Exchange.UNSHARD, wider.view(-1), pieces.view(-1), name=self.name).wait()
                pieces = wider
            elif lane.size > 1:
                pieces = pieces.new_zeros(lane.size * pieces.shape[0], longest, *rest)
        held = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        if all(rows == longest for rows in held):
            return pieces.view(self.shape)
        return torch.cat([piece[:rows] for piece, rows in zip(pieces, held, strict=True)])

    def _gather_from_holders(self, local: Tensor) -> Tensor:
        """For a few ranks that hold most rows, where equal pieces would be mostly padding."""
        topology = self.topology
        whole = local.new_empty(self.shape)
        whole[self.rows.start : self.rows.stop] = local
        for k in range(topology.data_parallel):
            piece = whole[self.bounds[k] : self.bounds[k + 1]]
            s, r = divmod(k, topology.replica.size)
            if topology.replica.size > 1 and topology.gather.rank == s and piece.numel():
                broadcast(topology.replica, Exchange.UNSHARD, piece, from_rank=r)
            if topology.gather.size > 1 and piece.numel():
                broadcast(topology.gather, Exchange.UNSHARD, piece, from_rank=s)
        return whole


class LocalRows(torch.Tensor):
    """This rank's rows of a sharded tensor, ``[rows, *rest]``; see [Note: Uneven rows in a DTensor]."""

    span: RowSpan
    watch: Watch | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: Tensor, span: RowSpan, watch: Watch | None) -> LocalRows:
        rows: LocalRows = torch.Tensor._make_subclass(cls, plain, False)
        rows.span = span
        rows.watch = watch
        return rows

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LocalRows({self.span.name!r}, rows {self.span.rows}, {plain(self)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = next(tensor for tensor in tensors if isinstance(tensor, cls))
        _refuse_moving_rows(func, ours.span)
        _refuse_misaligned(func, ours, tensors)
        _tell_watches(func, args, kwargs, tensors)
        with torch._C._DisableTorchDispatch():
            out = _norm_of_nothing(func, args) if _is_norm(func) else None
            if out is None:
                out = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            return out
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        watch = ours.watch if aliases else None
        return tree_map_only(
            Tensor,
            lambda t: t if isinstance(t, cls) or t.ndim == 0 else cls(t, ours.span, watch),
            out,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Checkpoint writers serialise the rows; where they lie is in the checkpoint's own metadata.
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # torch.distributed.checkpoint asks a DTensor's local tensor for these three.

    def __create_write_items__(self, fqn: str, whole: DTensor) -> list[WriteItem]:
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
        # A load is being planned. A rank without rows will not be written to, but must take part in the refresh.
        if self.watch is not None:
            self.watch.edited = True
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        if self.shape[0] == 0 and self.span.shape[0] > 0:
            return []
        offsets = torch.Size([self.span.rows.start] + [0] * (self.ndim - 1))
        return [ChunkStorageMetadata(offsets=offsets, sizes=self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # Loading writes into the returned tensor: it must stay a watched one.
        return self


class RowShardedTensor(DTensor):
    """A DTensor of uneven rows; made by :func:`sharded`."""

    _local_tensor: LocalRows
    gathered: Tensor | None = None  # of a sharded parameter: what the model computes with

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """As ``torch.Tensor.register_hook``.

        On a sharded parameter, `hook` gets the whole gradient of this rank's batch, once for each backward, in the
        compute dtype and before it is averaged over the ranks (as with DDP); what it returns takes its place.
        """
        if self.gathered is not None:
            return self.gathered.register_hook(hook)  # type: ignore[no-untyped-call]
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            ours = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)), None)
            if ours is None:
                raise
            raise RuntimeError(_not_gathered(func, ours._local_tensor.span)) from error

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole tensor on every rank, in this tensor's dtype. Every rank must call this.

        A backward through the result raises.
        """
        if grad_placements is not None:
            raise ValueError("full_tensor of a layerzero parameter is not differentiable; drop grad_placements")
        watch = self._local_tensor.watch
        if watch is not None and watch.forbidden is not None:
            raise RuntimeError(watch.forbidden)
        with torch.no_grad():
            whole = self._local_tensor.span.gather(plain(self._local_tensor))
        if self.requires_grad and torch.is_grad_enabled():
            whole = _WithoutGradient.apply(self, whole)  # type: ignore[no-untyped-call]
        return whole

    def redistribute(self, *args: object, **kwargs: object) -> DTensor:
        raise NotImplementedError(_moves_rows("redistribute", self._local_tensor.span))

    def detach(self) -> RowShardedTensor:
        return RowShardedTensor(self._local_tensor.detach(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, object]) -> RowShardedTensor:
        raise TypeError(
            "deepcopy of a parameter or a model sharded by layerzero is not supported: copy the model before "
            "shard_model, load layerzero.full_state_dict(model) into a new one, or use parameter.detach().clone(); "
            "layerzero.EMA(model) averages a model's weights"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "pickling a parameter sharded by layerzero is not supported: save layerzero.full_state_dict(model), "
            "or use torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        span = self._local_tensor.span
        return f"sharded({span.name!r}, shape={list(self.shape)}, dtype={self.dtype}, rows {span.rows} here)"


class _WithoutGradient(torch.autograd.Function):
    """Passes a whole parameter on, and refuses the gradient that would otherwise be lost without a word."""

    @staticmethod
    def forward(ctx: Any, parameter: RowShardedTensor, whole: Tensor) -> Tensor:
        ctx.name = parameter._local_tensor.span.name
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"a backward reached full_tensor() of parameter {ctx.name!r}, through which no gradient can flow; use the "
            "parameter inside the forward of its unit, p.to_local() for a penalty on this rank's rows, or "
            "p.detach().full_tensor() where no gradient is wanted"
        )


def sharded(local: Tensor, span: RowSpan, watch: Watch) -> RowShardedTensor:
    """The DTensor of shape ``span.shape`` whose rows on this rank are the plain tensor `local` (shared, not copied)."""
    stride = tuple(torch.empty(span.shape, device="meta").stride())
    meta = TensorMeta(torch.Size(span.shape), stride, local.dtype)
    spec = DTensorSpec(span.topology.flat_mesh, (Shard(0), Shard(0)), tensor_meta=meta)
    return RowShardedTensor(LocalRows(local, span, watch), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def carry_over(source: nn.Parameter, *, gathered: nn.Parameter, sharded: nn.Parameter) -> None:
    """Let the user's attributes and hooks on a parameter, and their removal handles, work on what takes its place."""
    for target in (gathered, sharded):
        for name, value in vars(source).items():
            if name not in ("main_grad", "grad_added_to_main_grad"):  # of who accumulated gradients before
                setattr(target, name, value)
    if source._backward_hooks is not None:
        gathered._backward_hooks = source._backward_hooks
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks is not None:
        sharded._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def plain(tensor: Tensor) -> Tensor:
    """The same storage as an ordinary, unwatched tensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, LocalRows):
        return local
    with torch._C._DisableTorchDispatch():
        return local.as_subclass(torch.Tensor)


_KEEPS_ROWS = ("all_reduce", "wait_tensor")
_ZEROES = {"aten::zero_", "aten::_foreach_zero_"}
_NAMES_ONLY = {"aten::detach", "aten::alias", "aten::view", "aten::_unsafe_view", "aten::view_as"}


def _is_norm(func: Any) -> bool:
    return func._schema.name in ("aten::linalg_vector_norm", "aten::_foreach_norm")


def _norm_of_nothing(func: Any, args: Sequence[Any]) -> Any:
    """The total norms of tensors of which some have no row here; None where torch can do it.

    torch refuses the infinite norm of an empty tensor, though what such a rank adds to the whole norm is 0.
    """
    if isinstance(args[0], Tensor):
        whole = len(args) < 3 or args[2] is None  # no dim given
        return plain(args[0]).new_zeros(()) if args[0].numel() == 0 and whole else None
    if all(tensor.numel() for tensor in args[0]):
        return None
    filled = [tensor for tensor in args[0] if tensor.numel()]
    norms = iter(func(filled, *args[1:]) if filled else ())
    return [next(norms) if tensor.numel() else plain(tensor).new_zeros(()) for tensor in args[0]]


def _refuse_moving_rows(func: Any, span: RowSpan) -> None:
    if func.namespace in ("_c10d_functional", "c10d") and not func.__name__.startswith(_KEEPS_ROWS):
        raise NotImplementedError(_moves_rows(func.__name__, span))


def _moves_rows(what: str, span: RowSpan) -> str:
    return (
        f"{what} on a tensor derived from parameter {span.name!r}: layerzero cuts rows unevenly and DTensor would "
        "misplace them; use p.full_tensor(), layerzero.full_state_dict(model) or torch.distributed.checkpoint"
    )


def _not_gathered(func: Any, span: RowSpan) -> str:
    return (
        f"{getattr(func, '__name__', func)} mixes a plain tensor with parameter {span.name!r}, of which this rank has "
        f"{len(span.rows)} of {span.shape[0]} rows. A parameter is whole only while the forward of its unit runs: call "
        "the model as a whole, and leave a module out of units if another one reads its parameters. To look at it "
        "whole, use layerzero.unsharded or p.full_tensor()"
    )


def _refuse_misaligned(func: Any, ours: LocalRows, tensors: Sequence[Tensor]) -> None:
    if torch.Tag.pointwise not in func.tags and func._schema.name != "aten::copy_":
        return
    for other in tensors:
        if not isinstance(other, LocalRows) and other.ndim >= ours.ndim and other.shape != ours.shape:
            raise ValueError(
                f"{func.__name__} mixes parameter {ours.span.name!r} (rows {ours.span.rows} on this rank) with a "
                f"tensor cut differently (local shape {list(other.shape)}, expected {list(ours.shape)}); "
                "use tensors made from the sharded parameter itself, such as torch.zeros_like(p). A penalty on "
                "parameters is written on this rank's rows, p.to_local(), which counts each row once"
            )


def _tell_watches(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    if func._schema.name not in _NAMES_ONLY:
        for tensor in tensors:
            if isinstance(tensor, LocalRows) and tensor.watch is not None and tensor.watch.forbidden is not None:
                if func._schema.name not in _ZEROES:
                    raise RuntimeError(tensor.watch.forbidden)
                tensor.watch.zeroed, tensor.watch.forbidden = True, None
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(value):
            if isinstance(tensor, LocalRows) and tensor.watch is not None:
                tensor.watch.edited = True
