"""Manage a handle, which is a group of parameters of one unit that are gathered and reduced together."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.transport.base import GatherOptions
from layerzero.config import Precision
from layerzero.device.streams import Waitable
from layerzero.dtensor.gather_extension import GatheredBytes, GatherExtension
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec
from layerzero.dtensor.mutation_tracker import MasterState, MutationTracker
from layerzero.dtensor.op_errors import FROZEN_DTYPE_MESSAGE
from layerzero.dtensor.ops_data import copy_attributes_and_hooks
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.sharded_tensor import RowShardedTensor, sharded
from layerzero.engine.full_precision import FullPrecision
from layerzero.engine.gathered_params import GatheredParams
from layerzero.engine.grad_attribute import GradAttribute
from layerzero.engine.handle_gradients import HandleGradients, Inspect
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.engine.resources import MeshResources
from layerzero.engine.weight_storage import WeightStorage
from layerzero.layout.flat_layout import FlatLayout, RowBounds, Slot
from layerzero.layout.shard_grid import Extent


class GatherState(enum.IntEnum):
    """State of a handle's weights, which cycles through SHARDED -> GATHERING -> GATHERED -> SHARDED."""

    SHARDED = 0
    GATHERING = 1
    GATHERED = 2


class Handle:
    """Group of parameters of one unit that have the same dtype and are gathered and reduced together.

    A handle owns one :class:`WeightStorage`, one :class:`HandleGradients` and one :class:`GradAttribute`.

    Args:
        name: name of the unit and kind of parameters, for messages.
        layout: positions of the parameters in the flat order.
        originals: for each slot of `layout`, the parameter (or part of a parameter) that this handle shards, its
            (module, attribute) pairs, and its model-parallel spec. Values are copied, and the original storage is
            released.
        label: name of the unit, for traces.
        precision: dtypes of masters, compute weights and gradients.
        reduction_spec: stages of the gradient reduction.
        mesh: communicators, transport and pools.
        options: options for gathers, such as the codec and the ranks that keep post-forward shards.
        extension: all-gather extension of the only parameter in `layout`, or None. With an extension, the handle has no
            full buffer. See [Note: All-gather extensions] in extensions.py.
        previous: handle with the same layout that this handle replaces, or None. This rank's rows are copied from it,
            and the sharded parameters remain the same objects. `originals` has its gathered parameters.

    Attributes:
        weights: master, ZeRO-3 shard, full buffer and gathered parameters.
        source: object that gathers the parameters that modules use: `weights`, or a :class:`FullPrecision` inside
            ``layerzero.full_precision``.
        state: state of the parameters that `source` gathers.
        used_in_context: True if a ``layerzero.gathered`` context with gradients enabled has gathered the handle.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        originals: Sequence[tuple[nn.Parameter, tuple[tuple[nn.Module, str], ...], ModelParallelSpec | None]],
        *,
        label: str,
        precision: Precision,
        reduction_spec: ReductionSpec,
        mesh: MeshResources,
        options: GatherOptions,
        extension: GatherExtension | None = None,
        previous: Handle | None = None,
    ) -> None:
        self.name = name
        self.label = label
        self.layout = layout
        self.precision = precision
        self.reduction_spec = reduction_spec
        self.mesh_info = mesh.mesh_info
        self.tracker: MutationTracker = (
            MutationTracker() if previous is None else previous.tracker.replace_for_new_storage()
        )
        self.state = GatherState.SHARDED
        self.used_in_context = False
        self._gathering: Waitable | None = None
        self._mesh = mesh
        parameters = [parameter for parameter, _, _ in originals]
        is_trained = any(parameter.requires_grad for parameter in parameters)
        self.weights: WeightStorage = WeightStorage(
            layout,
            parameters,
            precision,
            mesh,
            options,
            label=label,
            updated_on_host=is_trained or precision.master != precision.compute,
            refresher=mesh.refresher if is_trained and precision.casts_to_16_bits else None,
            extension=extension,
            previous=None if previous is None else previous.weights,
        )
        self.extension = extension
        self.source: WeightStorage | FullPrecision = self.weights
        if self.weights.refresher is not None:  # a thread may still read the masters
            self.tracker.before_write = self.weights.finish_refresh
        replaced = [None] * len(originals) if previous is None else previous.members
        self.members: tuple[ManagedParam, ...] = tuple(
            self._make_member(slot, *original, replaced=each)
            for slot, original, each in zip(layout.slots, originals, replaced, strict=True)
        )
        self._inspector: Inspect | None = None
        self.gradients: HandleGradients | None = None  # None until a parameter requires a gradient
        self.grads: GradAttribute | None = None  # exists together with `gradients`
        if self.trainable:
            self._create_gradients()
        self.weights.free()

    @property
    def extension_memory(self) -> GatheredBytes | None:
        """Memory that the gathered parameter uses if its class has an all-gather extension, otherwise None."""
        extended = self.weights.extended
        return None if extended is None else extended.extension_memory

    @property
    def trainable(self) -> bool:
        """True if any gathered parameter requires a gradient.

        The user's changes to ``requires_grad`` take effect in the next backward pass, or in the next forward pass with
        gradients enabled.
        """
        return any(member.gathered.requires_grad for member in self.members)

    def holders(self, model_ranks: ModelRanks) -> ModelRanks | MeshInfo:
        """Return the ranks that store this handle's parameters or parts of them, with communicators among them."""
        is_rank_local = any(member.spec.num_holders < model_ranks.size for member in self.members)
        return self.mesh_info if is_rank_local else model_ranks

    @property
    def may_be_updated(self) -> bool:
        """True if an optimizer step or the user may have changed the masters since the last refresh."""
        # A parameter that was frozen after the backward pass still has a gradient, so the optimizer updates it.
        has_grad = any(member.sharded.grad is not None for member in self.members)
        return self.trainable or self.refresh_due or has_grad

    def close(self) -> None:
        """Free all memory except the masters, which store the values of the sharded parameters."""
        for member in self.members:
            # A view would keep alive the memory that peers map.
            master = member.master.clone() if self.weights.peers_read_master else member.master
            member.change_rows(master, member.spec, member.shard_slice, MutationTracker())
            member.close()
        self.__dict__.clear()  # an EMA, a guard or an autograd graph may keep this object

    # Parameters

    def _rows_of(
        self, slot: Slot, shape: tuple[int, ...], model_parallel: ModelParallelSpec | None
    ) -> tuple[Tensor, RowShardSpec, slice]:
        """Return this rank's master rows of a slot, their shard spec, and their slice in the ZeRO-1 shard.

        Args:
            shape: shape of the parameter.
        """
        layout, mesh_info = self.layout, self.mesh_info
        spec = RowShardSpec(slot.name, shape, RowBounds(layout, slot), mesh_info, model_parallel)
        local = mesh_info.grid.slot_slice(layout, slot, Extent.ZERO1)
        return self.weights.master[local].view(len(spec.rows), *slot.shape[1:]), spec, local

    def _make_member(
        self,
        slot: Slot,
        original: nn.Parameter,
        owners: tuple[tuple[nn.Module, str], ...],
        model_parallel: ModelParallelSpec | None,
        *,
        replaced: ManagedParam | None,
    ) -> ManagedParam:
        master, spec, local = self._rows_of(slot, tuple(original.shape), model_parallel)
        flat_range, offers_main_grad = slice(slot.offset, slot.end), self.reduction_spec.sends_accumulator
        params = self.weights.params
        if not isinstance(params, GatheredParams):
            leaf, accumulate_grad = params.parameter, params.accumulate_grad_node
        else:
            leaf = params.make(flat_range, original, model_parallel, offers_main_grad=offers_main_grad)
            accumulate_grad = get_gradient_edge(leaf).node  # keep the node, because autograd would create another one
        shown = original if replaced is None else replaced.sharded  # the parameter that the user has
        leaf.requires_grad_(original.requires_grad)  # a later change of the user's has to be agreed
        rows = sharded(master, spec, self.tracker)
        if replaced is None:
            shown = nn.Parameter(rows, requires_grad=original.requires_grad)
        assert isinstance(shown, RowShardedTensor)
        copy_attributes_and_hooks(original, gathered=leaf, sharded=shown if replaced is None else leaf)
        shown.gathered, shown._local_tensor, shown._spec = leaf, rows._local_tensor, rows._spec
        module_refs = tuple((owner._parameters, attribute) for owner, attribute in owners)
        original_id = id(original) if replaced is None else replaced.original_id
        return ManagedParam(slot.name, module_refs, leaf, shown, master, spec, local, original_id, accumulate_grad)

    @torch.no_grad()
    def change_layout(self, layout: FlatLayout) -> None:
        """Change to the ZeRO-1 shards of `layout`, which has the same flat order but different shard boundaries.

        All ranks must call this method between passes, when there are no gradients. The sharded parameters remain the
        same objects, but their rows on this rank change.
        """
        self.weights.change_layout(layout)
        self.layout = layout
        self.tracker = self.tracker.replace_for_new_storage()
        for slot, member in zip(layout.slots, self.members, strict=True):
            member.change_rows(*self._rows_of(slot, member.spec.shape, member.spec.model_parallel), self.tracker)
        if self.gradients is not None:
            self.gradients.change_layout(layout)
            self.grads = GradAttribute(self.members, self.gradients)

    # Gather and reshard

    def gather(self) -> None:
        """Launch the gather, unless the handle is already gathered or a gather is in flight."""
        if self.state is GatherState.SHARDED:
            self._gathering = self.source.gather()
            self._set_state(GatherState.GATHERING)

    def wait(self) -> None:
        """Wait for the gather, if one is in flight, and fill the gathered parameters."""
        if self.state is not GatherState.GATHERING:
            return
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None  # reset before wait(), which may raise an error
            gathering.wait()
        self.source.fill()
        self._set_state(GatherState.GATHERED)

    def reshard(self) -> None:
        """Free the full buffer. The next gather refills the storage of views that autograd has saved.

        Raises:
            RuntimeError: a parameter was changed in place while it was gathered.
        """
        if self.state is GatherState.SHARDED:
            return
        self.wait()
        edited = self.source.free()
        if self.in_full_precision:
            edited |= self.weights.edited
        self._set_state(GatherState.SHARDED)
        if edited:
            self.weights.free()
            self.weights.buffer.drop_post_forward()
            is_copy = self.weights.needs_gather or self.weights.extended or self.in_full_precision
            raise RuntimeError(
                f"a parameter of {self.name} was changed in place while it was gathered (by a forward, a hook, or an "
                "embedding with max_norm). The change would be lost"
                + ("" if is_copy else ", or has corrupted the compute weights. Load the weights again")
                + ". Change the sharded parameter between steps instead"
            )

    def wait_and_may_stay(self) -> bool:
        """Wait for a gather in flight. Return True if compute weights are gathered and were not changed in place.

        After a gather that has failed, the state is not GATHERED.
        """
        if self._gathering is not None:
            self.wait()
        return self.state is GatherState.GATHERED and not self.in_full_precision and not self.weights.edited

    def _set_state(self, state: GatherState) -> None:
        assert state == (self.state + 1) % 3, f"{self.label}: {self.state.name} -> {state.name}"
        self.state = state

    def set_full_precision(self, enabled: bool) -> None:
        """Set whether later gathers read the masters (`enabled` is True) or the compute weights.

        This has an effect only if the compute dtype is less precise than the dtype of the masters. The handle must be
        sharded.
        """
        assert self.state is GatherState.SHARDED
        compute, master = self.precision.compute, self.precision.master
        compute_is_coarser = torch.promote_types(compute, master) != compute
        gathers = FullPrecision(self.weights, self.members) if enabled and compute_is_coarser else None
        self.source = gathers or self.weights
        for member in self.members:
            member.shown = member.gathered if gathers is None else gathers.parameters[member]

    @property
    def in_full_precision(self) -> bool:
        """True inside ``layerzero.full_precision``, if the compute weights are less precise than the masters."""
        return self.source is not self.weights

    @property
    def evaluated_dtype(self) -> torch.dtype:
        """Dtype of the parameters inside ``layerzero.full_precision``."""
        return self.precision.master if self.in_full_precision else self.precision.compute

    @property
    def gathered_sizes(self) -> tuple[int, ...]:
        """Sizes in bytes of the full buffer and of the copies of parameters with custom strides.

        These allocations exist while the unit computes.
        """
        return (self.weights.buffer.full_bytes, *self.weights.params.sizes)

    @property
    def gathered_bytes(self) -> int:
        """Number of bytes currently allocated for gathered weights.

        The number includes encoded shards, the post-forward shard, and the copies of parameters with custom strides.
        """
        evaluated = self.source.gathered_bytes if self.in_full_precision else 0
        return self.weights.gathered_bytes + evaluated

    # Refresh

    def guard_master_writes(self) -> None:
        """Make the user's writes to the masters wait for peers, if peers read the masters in place.

        The first write since the last refresh waits until no peer is reading the masters.
        """
        if self.weights.peers_read_master:
            self.tracker.before_write = self._mesh.transport.begin_write

    @property
    def refresh_due(self) -> bool:
        """True if the masters have changed and their refresh has not been launched."""
        return self.tracker.masters is not MasterState.REFRESHED

    @property
    def edited(self) -> bool:
        """True if the user has changed the masters since the last step and refresh."""
        return self.tracker.masters is MasterState.EDITED

    def launch_refresh(self, *, outside_step: bool) -> None:
        """Launch the refresh, which copies the masters to the compute weights of all replicas.

        Args:
            outside_step: True if masters were changed outside of an optimizer step. An encoded refresh then sends the
                weights instead of differences, and the errors of encoded gradients are dropped. A write to the masters
                by the user has the same effect.
        """
        assert self.state is GatherState.SHARDED
        if outside_step or self.edited:
            self._drop_differences(agreed=outside_step)
        self.weights.launch_refresh()
        self.tracker.record_refresh()
        self.weights.invalidate_graphs()

    def defer_refresh(self) -> None:
        """Record that a step has changed the masters. A refresh is then due, and backward passes of old graphs fail."""
        if self.edited:
            self._drop_differences(agreed=False)
        self.tracker.record_step()
        self.weights.invalidate_graphs()

    def _drop_differences(self, *, agreed: bool) -> None:
        """Let the next refresh send weights instead of differences, and drop the errors of encoded gradients."""
        self.weights.request_full_refresh(agreed=agreed)
        if self.gradients is not None:
            self.gradients.clear_residual()

    @property
    def weights_version(self) -> int:
        """Number that increases whenever the compute weights may have changed."""
        return self.weights.params.version

    # Gradients

    def _create_gradients(self) -> None:
        self.gradients = HandleGradients(
            self.layout,
            self.reduction_spec,
            label=self.label,
            master=self.precision.master,
            mesh=self._mesh,
            to_host=self.weights.to_host,
        )
        self.gradients.inspector = self._inspector
        self.grads = GradAttribute(self.members, self.gradients)

    def set_divide_factor(self, factor: float) -> None:
        """Divide the sum of all ranks' gradients by `factor` in later backward passes."""
        self.reduction_spec = self.reduction_spec.with_divide_factor(factor)
        if self.gradients is not None:
            self.gradients.spec = self.reduction_spec

    @property
    def inspector(self) -> Inspect | None:
        """Callback that receives this rank's gradients, by slot, before they are sent."""
        return self._inspector

    @inspector.setter
    def inspector(self, inspector: Inspect | None) -> None:
        self._inspector = inspector
        if self.gradients is not None:
            self.gradients.inspector = inspector

    @property
    def requires_grad_error(self) -> ValueError | None:
        """Error to raise if the user has unfrozen a parameter whose master dtype is too imprecise for training.

        If there is no such parameter, the value is None.
        """
        if self.gradients is not None or self.precision.master.itemsize >= 4:
            return None
        unfrozen = (member.name for member in self.members if member.sharded.requires_grad)
        return next((ValueError(FROZEN_DTYPE_MESSAGE.format(name, self.precision.master)) for name in unfrozen), None)

    def apply_requires_grad(self) -> None:
        """Copy ``requires_grad`` from sharded to gathered parameters."""
        for member in self.members:
            member.gathered.requires_grad_(member.sharded.requires_grad)
        if self.trainable and self.gradients is None:
            self._create_gradients()

    def await_remaining_gradients(self) -> None:
        """Record that a backward pass is past all calls of the unit, and expect only what autograd still computes."""
        assert self.gradients is not None
        arrived = self.gradients.arrived
        absent = () if len(arrived) == len(self.members) else enumerate(self.members)
        self.gradients.await_only(
            slot
            for slot, member in absent
            if slot not in arrived and member.gathered.requires_grad and member.will_receive_grad()
        )
