"""Flat storage for the parameters of one kind in a unit, and its changes between sharded and gathered.

[Note: One storage for equal shards]
The ZeRO-1 shard is a part of the ZeRO-3 shard. If both have the same dtype, the master is a view of that part and needs
no extra memory. If S = 1, the ZeRO-3 shard is the full buffer, and nothing is gathered or freed. The same holds if the
ranks of the ZeRO-3 group use shared memory: that memory contains the ZeRO-3 shards of all ranks in order, which form
the full buffer of each rank. [Note: Rounds of writing] in comm/transport/shared_memory.py defines when it may be
written and read.

[Note: Version counters]
Collectives write to `full_buffer`. `compute` is an alias of it with its own version counter, and the gathered
parameters are views of `compute`. The alias is needed because gloo bumps the counter of its output from another thread,
which autograd would report as an in-place change. All gathered parameters share the counter of `compute`, except those
with custom strides and DTensors, which have one each. Comparing the counter shows whether a forward has changed
gathered weights; such a change would be lost. Incrementing it makes autograd refuse a graph that outlived an optimizer
step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from layerzero.comm.collectives import Collective, Communicator, PendingCollective, all_gather
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.transport.process_group import GatherOptions, PendingDecode, gathers_of
from layerzero.comm.transport.shared_memory import SharedFullBuffer
from layerzero.config import Precision
from layerzero.device.gradient_offload import ModelPools
from layerzero.device.host_storage import Fetch, HostShard
from layerzero.dtensor.extensions import ExtendedGather, Extension, GatheredBytes, PendingExtension, accumulate_node
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec
from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.op_errors import MOVED, TOO_COARSE
from layerzero.dtensor.ops_data import carry_over
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.sharded_tensor import RowShardedTensor, sharded
from layerzero.engine.full_precision import FullPrecision
from layerzero.engine.gathered_params import GatheredParams
from layerzero.engine.grad_attribute import GradAttribute
from layerzero.engine.handle_gradients import HandleGradients, Inspect
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.layout.flat_layout import FlatLayout, Slot
from layerzero.layout.shard_grid import Extent, overlap

__all__ = ["Handle", "ShardState"]


class ShardState(enum.Enum):
    """State of a full buffer: SHARDED -> GATHERING -> GATHERED -> SHARDED."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


_NEXT = {
    ShardState.SHARDED: ShardState.GATHERING,
    ShardState.GATHERING: ShardState.GATHERED,
    ShardState.GATHERED: ShardState.SHARDED,
}


class Handle:
    """ZeRO-1 shard, ZeRO-3 shard and full buffer of a group of parameters, with the copies between these three.

    Args:
        name of the unit and kind of the parameters, for messages.
        label: name of the unit, for traces. Handles of one unit share a slab; see device/gradient_offload.py.
        layout: positions of the parameters in the flat order.
        originals: for each slot of `layout`, the part of a parameter that is sharded here, the (module, attribute)
            pairs that hold it, and its model-parallel spec. Values are copied; the original storage is not kept.
        precision: dtypes of masters, compute weights and gradients.
        route: stages of the gradient reduction.
        buffers: memory pools of the model.
        gather_options: encoding of gathers, and size of the shard kept between a forward and its backward.
        shared: shared memory for the full buffer, if the ZeRO-3 group uses it.
        extension: all-gather extension of the only parameter in `layout`; the handle then has no full buffer. See
            [Note: All-gather extensions] in dtensor/extensions.py.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        originals: Sequence[tuple[nn.Parameter, tuple[tuple[nn.Module, str], ...], ModelParallelSpec | None]],
        *,
        label: str,
        precision: Precision,
        route: ReductionSpec,
        mesh_info: MeshInfo,
        buffers: ModelPools,
        gather_options: GatherOptions,
        shared: SharedFullBuffer | None = None,
        extension: Extension | None = None,
    ) -> None:
        self.name = name
        self.label = label
        self.layout = layout
        self.precision = precision
        self.mesh_info = mesh_info
        self.shared = shared
        self._is_extended = extension is not None
        self._storages = buffers.full
        self.state = ShardState.SHARDED
        self.tracker = MutationTracker()
        by_host = any(parameter.requires_grad for parameter, _, _ in originals) or precision.master != precision.compute
        self.to_host = (
            buffers.to_host if by_host else None
        )  # if the optimizer updates on the host; see device/host_storage.py
        self._gathering: PendingCollective | PendingDecode | Fetch | PendingExtension | None = None
        self._refreshing: PendingCollective | None = None
        self.full_precision: FullPrecision | None = None  # inside layerzero.full_precision
        self.refresh_due = False  # a step has changed the masters; their refresh is not launched yet

        grid, device = mesh_info.grid, mesh_info.device
        numel, place = grid.numel(layout, Extent.ZERO3), grid.slice_within(layout, Extent.ZERO3, Extent.FULL)
        self.in_host: HostShard | None = None  # compute weights in host memory; see device/host_storage.py
        if shared is None and buffers.weights_to_host is not None:
            self.in_host = HostShard(numel, precision.compute, buffers.weights_to_host, buffers.scratch)
        self.zero3_shard = self._new_zero3(numel, place)  # [G / S]
        self._own_part = self.zero3_shard[grid.slice_within(layout, Extent.ZERO1, Extent.ZERO3)]
        self.master = self._new_master()  # [L]
        self.full_buffer = self.zero3_shard if shared is None else shared.full  # [G]
        if self._has_full_buffer:
            self.full_buffer = torch.empty(layout.numel, dtype=precision.compute, device=device)
        self._full_bytes = self.full_buffer.untyped_storage().nbytes()
        self._gathered_own = (
            self.full_buffer[place] if self.in_host is not None else self.zero3_shard
        )  # input of gathers
        self.kept, self.whole = gathers_of(
            layout, self.full_buffer, self._gathered_own, mesh_info.zero3_gather_comm, gather_options, buffers.full
        )
        self._encodes = bool(gather_options.codec)
        self.compute = self.full_buffer.data  # see [Note: Version counters]
        self.reduction_spec = route
        self._take_values([parameter for parameter, _, _ in originals])
        if shared is not None:
            shared.publish_shard(None)
        self._gathered_params: GatheredParams | ExtendedGather = GatheredParams(self.compute)
        if extension is not None:
            ((original, _, _),) = originals
            name, shape = layout.slots[0].name, tuple(original.shape)
            self._gathered_params = ExtendedGather(
                extension, name, shape, self.zero3_shard, mesh_info, buffers.full, label=label
            )
        self.members = tuple(
            self._make_member(slot, *original) for slot, original in zip(layout.slots, originals, strict=True)
        )
        self._buffers = buffers
        self._inspect: Inspect | None = None
        self.gradients: HandleGradients | None = None  # None until a parameter requires a gradient
        self.grads: GradAttribute | None = None  # exists together with `gradients`
        if self.trainable:
            self._start_gradients()
        self._version = self._gathered_params.version
        self._free_full()

    def _new_zero3(self, numel: int, place: slice) -> Tensor:
        if self.shared is not None:
            return self.shared.full[place]
        if self.in_host is not None:
            return self.in_host.tensor
        return torch.zeros(numel, dtype=self.precision.compute, device=self.mesh_info.device)

    @cached_property
    def shares_master(self) -> bool:
        """True if the master is a view of the ZeRO-3 shard; see [Note: One storage for equal shards]."""
        return self.precision.master == self.precision.compute and self.to_host is None and self.in_host is None

    @cached_property
    def needs_gather(self) -> bool:
        """True if weights are gathered, or copied from host memory, before a unit computes."""
        if self.in_host is not None:
            return True
        return self.shared is None and not self.mesh_info.grid.same_elements(Extent.ZERO3, Extent.FULL)

    @property
    def _has_full_buffer(self) -> bool:
        """True if the full buffer has its own memory, apart from the ZeRO-3 shard."""
        return self.needs_gather and not self._is_extended

    @property
    def extension_bytes(self) -> GatheredBytes | None:
        """Bytes of the gathered parameter, if its class has an all-gather extension."""
        return self._gathered_params.bytes if isinstance(self._gathered_params, ExtendedGather) else None

    @property
    def trainable(self) -> bool:
        """True if any gathered parameter requires a gradient.

        Changes of ``requires_grad`` by the user count from the next backward, or forward with gradients enabled.
        """
        return any(member.gathered.requires_grad for member in self.members)

    def holding_ranks(self, model_ranks: ModelRanks) -> tuple[int, ...]:
        """Return the ranks that hold the parameters of this handle, or parts of these parameters."""
        return self.mesh_info.ranks if self._is_rank_local(model_ranks) else model_ranks.ranks

    def comms_to_holding_ranks(self, model_ranks: ModelRanks) -> tuple[Communicator, ...]:
        """Return the control communicators that reach the ranks of :meth:`holding_ranks`."""
        return self.mesh_info.control_comms if self._is_rank_local(model_ranks) else model_ranks.control_comms

    def _is_rank_local(self, model_ranks: ModelRanks) -> bool:
        return any(member.spec.holders < model_ranks.size for member in self.members)

    @property
    def may_be_updated(self) -> bool:
        """True if an optimizer step or the user may have changed the masters. The value is the same on all ranks."""
        # A parameter frozen after the backward still has a gradient, and is stepped.
        graded = any(member.sharded.grad is not None for member in self.members)
        return self.trainable or self.tracker.dirty or graded

    def close(self) -> None:
        """Free all memory except the masters, which remain the values of the sharded parameters."""
        for member in self.members:
            # A view would keep the entire shared mapping alive.
            master = member.master if self.shared is None else member.master.clone()
            member.recut(master, member.spec, member.shard_slice, MutationTracker())
            member.close()
        if self.shared is not None:
            self.shared.barrier.close()
        self.__dict__.clear()  # an EMA, a guard or an autograd graph may keep this object

    # Construction

    def _new_master(self) -> Tensor:
        """Return memory for the master, 1-D [L]; see [Note: One storage for equal shards]."""
        if self.shares_master:
            return self._own_part.data
        numel = self.mesh_info.grid.numel(self.layout, Extent.ZERO1)
        if self.to_host is not None:
            return self.to_host.host_buffer(numel, self.precision.master).zero_()
        return torch.zeros(numel, dtype=self.precision.master, device=self.mesh_info.device)

    @torch.no_grad()
    def _take_values(self, parameters: Sequence[nn.Parameter]) -> None:
        grid, layout = self.mesh_info.grid, self.layout
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            values = parameter.detach().contiguous().view(-1)
            for extent, target in ((Extent.ZERO3, self.zero3_shard), (Extent.ZERO1, self.master)):
                common = overlap(slot, grid.range_of(layout, extent))
                target[common.of_range] = values[common.of_slot]

    def _rows_of(
        self, slot: Slot, shape: tuple[int, ...], model_parallel: ModelParallelSpec | None
    ) -> tuple[Tensor, RowShardSpec, slice]:
        """Return this rank's master rows of a slot, the shard spec, and the slice of these rows in the ZeRO-1 shard.

        `shape` is the shape of the parameter.
        """
        layout, mesh_info = self.layout, self.mesh_info
        rows_of = [layout.rows_in(slot, layout.shard_range(k)) for k in range(mesh_info.data_parallel)]
        bounds = (*(rows.start for rows in rows_of), slot.rows)
        span = RowShardSpec(slot.name, shape, bounds, mesh_info, model_parallel)
        local = mesh_info.grid.slot_slice(layout, slot, Extent.ZERO1)
        return self.master[local].view(len(span.rows), *slot.shape[1:]), span, local

    def _make_member(
        self,
        slot: Slot,
        original: nn.Parameter,
        owners: tuple[tuple[nn.Module, str], ...],
        model_parallel: ModelParallelSpec | None,
    ) -> ManagedParam:
        master, span, local = self._rows_of(slot, tuple(original.shape), model_parallel)
        place, offers = slice(slot.offset, slot.end), not self.reduction_spec.accumulator_is_reduced
        if isinstance(self._gathered_params, ExtendedGather):
            leaf = self._gathered_params.parameter
            accumulates = accumulate_node(leaf)
        else:
            leaf = self._gathered_params.make(place, original, model_parallel, offers_main_grad=offers)
            accumulates = get_gradient_edge(leaf).node  # keep it: autograd would create another one
        leaf.requires_grad_(original.requires_grad)
        parameter = nn.Parameter(sharded(master, span, self.tracker), requires_grad=original.requires_grad)
        assert isinstance(parameter, RowShardedTensor)
        parameter.gathered = leaf
        carry_over(original, gathered=leaf, sharded=parameter)
        places = tuple((owner._parameters, attribute) for owner, attribute in owners)
        return ManagedParam(slot.name, places, leaf, parameter, master, span, local, accumulates)

    @torch.no_grad()
    def recut(self, layout: FlatLayout) -> None:
        """Change to the ZeRO-1 shards of `layout`, which has the same flat order but other cuts.

        All ranks must call this between passes, while there are no gradients. The sharded parameters remain the same
        objects, but their rows on this rank change.
        """
        mesh_info, old = self.mesh_info, self.layout
        place = mesh_info.grid.slice_within(layout, Extent.ZERO1, Extent.ZERO3)
        self.layout, self._own_part = (
            layout,
            self.zero3_shard[place],
        )  # after a refresh it has the values of all replicas
        if self.shares_master:
            self.master = self._new_master()
        else:
            self.finish_refresh()
            node = torch.empty(len(self.zero3_shard), dtype=self.precision.master, device=mesh_info.device)
            own = self.master.to(mesh_info.device)
            parts = mesh_info.grid.replica_part_sizes(old)
            all_gather(mesh_info.replica_comm, Collective.UNSHARD, node, own, name=self.label, parts=parts).wait()
            self.master = self._new_master().copy_(node[place])
        self.tracker = self.tracker.moved(MOVED)
        for slot, member in zip(layout.slots, self.members, strict=True):
            member.recut(*self._rows_of(slot, member.spec.shape, member.spec.model_parallel), self.tracker)
        if self.gradients is not None:
            self.gradients.recut(layout)
            self.grads = GradAttribute(self.members, self.gradients)

    # Gather and reshard

    def gather(self) -> None:
        """Launch the gather, unless the handle is gathered or gathering."""
        if self.state is not ShardState.SHARDED:
            return
        if self.full_precision is not None:
            self.full_precision.gather()
        elif isinstance(self._gathered_params, ExtendedGather):
            self.finish_refresh()
            self._gathering = self._gathered_params.gather(name=self.label)
        elif self.needs_gather:
            self.finish_refresh()
            self._storages.allocate(self.full_buffer.untyped_storage(), self._full_bytes)
            self._gathering = self.kept.gather(name=self.label) or self._gather_shards()
        self._move_to(ShardState.GATHERING)

    def _gather_shards(self) -> PendingCollective | PendingDecode | Fetch:
        if self.in_host is None:
            return self.whole.gather(name=self.label)
        if self.mesh_info.zero3_size == 1:
            return self.in_host.start_fetch(self._gathered_own)
        with self.in_host.fetched(self._gathered_own, beside=not self._encodes):
            return self.whole.gather(name=self.label)

    def wait(self) -> None:
        """Wait for the gather, and fill the gathered parameters."""
        if self.state is not ShardState.GATHERING:
            return
        if self.full_precision is not None:
            self.full_precision.wait()
            self._move_to(ShardState.GATHERED)
            return
        self.finish_refresh()
        if self.shared is not None:
            self.shared.wait(self.label)
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None  # reset before wait(), which may raise
            gathering.wait()
        self._gathered_params.fill(self._storages)
        self._move_to(ShardState.GATHERED)

    def reshard(self) -> None:
        """Free the full buffer. The next gather refills the storage of views that autograd has saved.

        Raises:
            RuntimeError: a parameter was changed in place while it was gathered.
        """
        self.wait()
        if self.state is ShardState.SHARDED:
            return
        edited = self._gathered_params.version != self._version
        if self.full_precision is not None:
            edited = edited or self.full_precision.edited
            self.full_precision.free()
        self._version = self._gathered_params.version
        self._free_full()
        self._move_to(ShardState.SHARDED)
        if edited:
            self.kept.drop()
            raise RuntimeError(
                f"a parameter of {self.name} was changed in place while it was gathered (by a forward or a hook, or an "
                "embedding's max_norm); the change would be lost"
                + (
                    ""
                    if self.needs_gather or self._is_extended or self.full_precision
                    else ", or has damaged the compute weights: load them again"
                )
                + ". Change the sharded parameter between steps instead"
            )

    def evaluate_in_full_precision(self, enabled: bool) -> None:
        """Enable or disable gathers of the masters, which apply if the compute dtype is coarser.

        The handle must be sharded.
        """
        assert self.state is ShardState.SHARDED
        coarser = torch.promote_types(self.precision.compute, self.precision.master) != self.precision.compute
        self.full_precision = FullPrecision(self, self._storages) if enabled and coarser else None
        for member in self.members:
            member.evaluated = None if self.full_precision is None else self.full_precision.parameters[member]

    @property
    def evaluated_dtype(self) -> torch.dtype:
        """Dtype of the parameters inside ``layerzero.full_precision``."""
        return self.precision.compute if self.full_precision is None else self.precision.master

    def _free_full(self) -> None:
        self._gathered_params.free(self._storages)
        if self._has_full_buffer:
            self._storages.free(self.full_buffer.untyped_storage())

    @property
    def gathered_sizes(self) -> tuple[int, ...]:
        """Sizes in bytes of what is allocated while the unit computes.

        These are the full buffer and the copies of parameters with custom strides.
        """
        return (self._full_bytes if self._has_full_buffer else 0, *self._gathered_params.sizes)

    @property
    def full_bytes(self) -> int:
        """Bytes of gathered weights that are currently allocated, including the post-forward shard."""
        here = (
            self._gathered_params.nbytes
            + self.kept.nbytes
            + (0 if self.full_precision is None else self.full_precision.nbytes)
        )
        return here + (self.full_buffer.untyped_storage().nbytes() if self._has_full_buffer else 0)

    def _move_to(self, state: ShardState) -> None:
        assert _NEXT[self.state] is state, f"{self.name}: {self.state} -> {state}"
        self.state = state

    # Refresh

    def order_writes(self) -> None:
        """Make writes to masters in shared memory wait until no other rank reads these masters."""
        if self.shared is not None and self.shares_master:
            self.tracker.before_write = self.shared.barrier.arrive

    @torch.no_grad()
    def launch_refresh(self) -> None:
        """Copy the master to the ZeRO-3 shard, and launch the all-gather of the parts of all replicas into it."""
        assert self.state is ShardState.SHARDED
        self.finish_refresh()
        zero3, own = self.zero3_shard, self._own_part
        if self.in_host is not None:
            zero3 = self.in_host.borrow()
            own = zero3[self.mesh_info.grid.slice_within(self.layout, Extent.ZERO1, Extent.ZERO3)]
        if self.to_host is not None:
            self.to_host.wait(self.to_host.copy(own, self.master, to_host=False))
        elif not self.shares_master:
            own.copy_(self.master)
        replica = self.mesh_info.replica_comm
        if replica.size > 1:
            self._refreshing = all_gather(
                replica,
                Collective.REFRESH,
                zero3,
                own,
                name=self.label,
                only_reads_shard=self.shares_master,
                parts=self.mesh_info.grid.replica_part_sizes(self.layout),
            )
        if self.in_host is not None:
            self.finish_refresh()
            self.in_host.store(zero3)
        if self.shared is not None:
            self.shared.publish_shard(self._refreshing)
        self.tracker.dirty = False
        self.tracker.loaded_digests.clear()
        self.refresh_due = False
        self._refuse_old_graphs()

    def bump_version(self) -> None:
        """Record that a step has changed the masters: a refresh is due, and backwards through old graphs raise."""
        self.refresh_due = True
        self._refuse_old_graphs()

    def _refuse_old_graphs(self) -> None:
        self.kept.drop()  # the post-forward shard has the old weights
        self._gathered_params.bump_version()
        self._version = self._gathered_params.version

    def finish_refresh(self) -> None:
        if self._refreshing is not None:
            self._refreshing.wait()
            self._refreshing = None

    def read_zero3(self) -> Tensor:
        """Return the ZeRO-3 shard after the last refresh, 1-D [G / S], on the device.

        A shard in host memory is copied.
        """
        self.finish_refresh()
        return self.zero3_shard if self.in_host is None else self.in_host.arrive().to(self.mesh_info.device)

    # Gradients

    def _start_gradients(self) -> None:
        buffers = self._buffers
        self.gradients = HandleGradients(
            self.layout,
            self.reduction_spec,
            label=self.label,
            master=self.precision.master,
            mesh_info=self.mesh_info,
            pool=buffers.scratch,
            outgoing=buffers.outgoing,
            make_place=partial(buffers.accumulators.make, self.label),
            to_host=self.to_host,
        )
        self.gradients.inspect = self._inspect
        self.grads = GradAttribute(self.members, self.gradients)

    @property
    def inspect(self) -> Inspect | None:
        """Callback that receives the gradients of this rank by slot, before they are sent."""
        return self._inspect

    @inspect.setter
    def inspect(self, inspect: Inspect | None) -> None:
        self._inspect = inspect
        if self.gradients is not None:
            self.gradients.inspect = inspect

    @property
    def requires_grad_error(self) -> ValueError | None:
        """Error to raise if the user has unfrozen a parameter whose master dtype is too coarse to train; else None."""
        if self.gradients is not None or self.precision.master.itemsize >= 4:
            return None
        wanted = (member.name for member in self.members if member.sharded.requires_grad)
        return next((ValueError(TOO_COARSE.format(name, self.precision.master)) for name in wanted), None)

    def apply_requires_grad(self) -> None:
        """Apply the user's changes of ``requires_grad`` to the gathered parameters and the expected gradients."""
        for member in self.members:
            member.gathered.requires_grad_(member.sharded.requires_grad)
        if self.trainable and self.gradients is None:
            self._start_gradients()
        if self.gradients is not None:
            self.gradients.pending_slots.set_trainable([member.gathered.requires_grad for member in self.members])
