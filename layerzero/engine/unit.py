"""Manage one unit: one or more modules whose parameters are gathered and freed together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.traffic_counters import GATHERS, gather_name
from layerzero.device.buffer_pools import UnitFootprint
from layerzero.engine.gather_order import GatherOrderCheck
from layerzero.engine.handle import GatherState, Handle
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.module_buffers import CastBuffer
from layerzero.engine.module_checks import replaced_param_error
from layerzero.engine.resources import MeshResources
from layerzero.utils.pytree import cast_floating, iter_tensors, map_tensors
from layerzero.utils.torch_compat import has_storage


class Casts(NamedTuple):
    """Dtypes to which floating-point inputs and outputs of a forward pass are cast, or None if they are not."""

    inputs: torch.dtype | None
    output: torch.dtype | None


class Unit:
    """One or more modules whose handles are gathered and freed together.

    Between passes, the modules have sharded parameters. During forward and backward passes, they have gathered
    parameters. Activation checkpoints that a backward pass recomputes therefore use gathered parameters.

    Attributes:
        label: name of the unit in traces and messages.
        enclosing: common units that contain the unit, innermost first. Empty if the unit is common itself. See
            [Note: Reductions on several meshes] in reduction_queue.py.
        is_common: True if all ranks call the unit at the same points of the program.
        is_called_alike: True if all ranks that reduce the gradients of the unit call it, or none of them does.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        handles: tuple[Handle, ...],
        mesh: MeshResources,
        *,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int,
        reshard_after_backward: bool,
        cast_buffers: Sequence[CastBuffer] = (),
        enclosing: Sequence[Unit] = (),
    ) -> None:
        self.name = name
        self.label = name or "the root"
        self._modules = [weakref.ref(module) for module in modules]  # see [Note: References between model and state]
        self.handles = handles
        self.mesh_info = mesh.mesh_info
        self.transport_traits = mesh.transport.traits  # not the transport, because live graphs keep units alive
        self.cast_buffers = tuple(cast_buffers)
        self.enclosing = tuple(enclosing)
        self.is_common = not enclosing
        self.is_called_alike = self.is_common or self.mesh_info.replicas == 1
        self.reshard_after_forward = reshard_after_forward  # an int: number of ranks that keep post-forward shards
        # True if set_reshard_after_forward was called. On a device, the root and the unit that is
        # called last follow the setting only in this case.
        self.reshard_is_explicit = False
        self.reshard_after_backward = reshard_after_backward
        self.needs_gather = any(handle.weights.needs_gather for handle in handles)
        self._keeps_shards = any(handle.weights.buffer.post_forward_bytes for handle in handles)
        self._kept_for: Callable[[], object] = lambda: None  # the last forward pass that kept a post-forward shard
        self.param_dtype = policy.param_dtype
        self._policy_casts = Casts(policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype)
        self._casts = self._policy_casts
        self._unsharded_casts = self._casts_in({handle.precision.master for handle in handles})
        self._module_refs = [
            (parameters, attribute, member) for member in self.members() for parameters, attribute in member.module_refs
        ]

    @property
    def modules(self) -> list[nn.Module]:
        """Modules of the unit. A call to any of these modules is a call to the unit."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        assert len(modules) == len(self._modules)
        return modules

    def members(self) -> Iterator[ManagedParam]:
        for handle in self.handles:
            yield from handle.members

    @property
    def gathered(self) -> bool:
        return any(handle.state is not GatherState.SHARDED for handle in self.handles)

    @property
    def stays_until_step(self) -> bool:
        """True if the unit stays gathered until the optimizer step."""
        return not (self.reshard_after_forward or self.reshard_after_backward)

    @property
    def has_post_forward_shard(self) -> bool:
        """True if the next gather uses post-forward shards."""
        return self._keeps_shards and any(handle.weights.buffer.has_post_forward_shard for handle in self.handles)

    @property
    def gathered_footprint(self) -> UnitFootprint:
        buffers = [handle.weights.buffer for handle in self.handles]
        gathered = sum(size for handle in self.handles for size in handle.gathered_sizes)
        gathered += sum(buffer.encoded_bytes for buffer in buffers)
        reshards = self.reshard_after_forward and self.reshard_after_backward
        return UnitFootprint(gathered, reshards, self.mesh_info, sum(buffer.post_forward_bytes for buffer in buffers))

    def keep_post_forward(self, forward: object) -> None:
        """Keep a post-forward shard for the backward pass of `forward`, if the unit uses post-forward shards.

        Call this method before resharding.
        """
        if isinstance(self.reshard_after_forward, bool):
            return
        self._kept_for = weakref.ref(forward)
        for handle in self.handles:
            handle.weights.buffer.keep_post_forward()

    def reshard(self) -> None:
        for handle in self.handles:
            handle.reshard()

    def end_use(self) -> None:
        """Reshard the unit after a forward pass or another use, unless it stays gathered until the optimizer step."""
        if not (self.stays_until_step and self._wait_and_may_stay()):
            self.reshard()

    def _wait_and_may_stay(self) -> bool:
        return all(handle.wait_and_may_stay() for handle in self.handles)

    def copy_aliases(self, output: Any) -> Any:
        """Return `output` with copies of gathered parameters and their views, because resharding frees their memory.

        Raises:
            RuntimeError: such a tensor is in a container that cannot be rebuilt.
        """
        freed = self._freed_storages
        if not freed or not any(_storage_key(tensor) in freed for tensor in iter_tensors(output)):
            return output
        output = map_tensors(output, lambda tensor: tensor.clone() if _storage_key(tensor) in freed else tensor)
        if any(_storage_key(tensor) in freed for tensor in iter_tensors(output)):
            raise RuntimeError(
                f"an output of {self.label} contains a parameter or a view of one, whose memory is freed after the "
                "forward. Return a copy, as in `return self.weight.clone()`"
            )
        return output

    @cached_property
    def _freed_storages(self) -> frozenset[int | None]:
        """Keys of the storages that resharding frees."""
        keys: set[int | None] = set()
        for handle in self.handles:
            keys.update(_storage_key(member.shown) for member in handle.members)
            if not handle.weights.needs_gather:
                keys.discard(_storage_key(handle.weights.compute))
        return frozenset(keys) - {None}

    def set_full_precision(self, enabled: bool) -> None:
        """Set whether later forward passes compute with gathered masters (`enabled` is True) or with compute weights.

        The unit must be sharded.
        """
        for handle in self.handles:
            handle.set_full_precision(enabled)
        self.__dict__.pop("_freed_storages", None)
        dtypes = {handle.evaluated_dtype for handle in self.handles}
        self._casts = self._casts_in(dtypes) if enabled else self._policy_casts

    def _casts_in(self, dtypes: set[torch.dtype]) -> Casts:
        """Return the casts of a forward pass whose parameters have `dtypes` instead of the compute dtype.

        Outputs are not cast to a dtype that is narrower than these.
        """
        inputs, output = self._policy_casts
        if inputs is not None:
            inputs = next(iter(dtypes)) if len(dtypes) == 1 else None
        if output is not None and any(
            torch.promote_types(output, each) != output for each in dtypes or {torch.float32}
        ):
            output = None
        return Casts(inputs, output)

    def cast_inputs(self, args: Any, kwargs: Any, *, unsharded: bool = False) -> tuple[Any, Any]:
        """Cast the inputs of a forward pass to the dtype of the parameters, if the policy requires it.

        Args:
            unsharded: True if the forward pass uses unsharded parameters, which have the dtypes of the masters.
        """
        dtype = (self._unsharded_casts if unsharded else self._casts).inputs
        if dtype is None:
            return args, kwargs
        return cast_floating(args, dtype), cast_floating(kwargs, dtype) if kwargs else kwargs

    def cast_output(self, output: Any, *, unsharded: bool = False) -> Any:
        """Cast the output of a forward pass to the policy's dtype, unless the parameters have a wider one."""
        dtype = (self._unsharded_casts if unsharded else self._casts).output
        return output if dtype is None else cast_floating(output, dtype)

    def end_backward(self, passed: Collection[object] | None) -> None:
        """Install the sharded parameters in the modules and free the full buffer and the post-forward shard.

        Keep the full buffer if `reshard_after_backward` is False. See :meth:`drop_post_forward` for `passed`.
        """
        self.show_sharded()
        if self.reshard_after_backward or not self._wait_and_may_stay():
            self.reshard()
        self.drop_post_forward(passed)

    def drop_post_forward(self, passed: Collection[object] | None) -> None:
        """Free the post-forward shard if the forward pass that kept it is in `passed`, or if `passed` is None."""
        for handle in self.handles if self._keeps_shards and (passed is None or self._kept_for() in passed) else ():
            handle.weights.buffer.drop_post_forward()

    def show_gathered(self) -> None:
        for parameters, attribute, member in self._module_refs:
            current = parameters.get(attribute)
            if current is not member.sharded and current is not member.shown and current is not member.gathered:
                raise replaced_param_error(member)
            parameters[attribute] = member.shown

    def show_sharded(self) -> None:
        for parameters, attribute, member in self._module_refs:
            parameters[attribute] = member.sharded


def split_at_units(
    modules: Iterable[nn.Module], is_unit: Callable[[nn.Module], bool]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return `modules` with the modules inside them, without nested units, and the nested units."""
    pending, outside, nested = list(modules), list[nn.Module](), list[nn.Module]()
    while pending:
        outside.append(pending.pop())
        for child in outside[-1].children():
            (nested if is_unit(child) else pending).append(child)
    return outside, nested


def make_gather_order_checks(
    units: Sequence[Unit], *, full_precision: bool = False
) -> dict[MeshInfo, GatherOrderCheck]:
    """Return one object that checks the order of gathers for each mesh.

    The object identifies the full gather of ``units[i]`` by the index i, and the gather of this unit from post-forward
    shards by the index ``len(units) + i``. If `full_precision` is True, all data-parallel ranks take part in the
    gathers, otherwise only the ranks of a ZeRO-3 group.
    """
    labels = [gather_name(collective, unit.label) for collective in GATHERS for unit in units]
    topologies = {unit.mesh_info for unit in units}
    if full_precision:
        return {t: GatherOrderCheck(labels, t.control_comms, t.ranks, note=_FULL_PRECISION) for t in topologies}
    return {
        t: GatherOrderCheck(labels, [t.zero3_control_comm], dist.get_process_group_ranks(t.zero3_control_comm.group))
        for t in topologies
    }


_FULL_PRECISION = (
    ". Inside layerzero.full_precision, weights are gathered from the masters of all data-parallel ranks. All of these "
    "ranks must call the same units in the same order, for any zero3_size, and with or without shared memory"
)


def _storage_key(tensor: Tensor) -> int | None:
    """Return a number that identifies the memory of a tensor. Return None if the tensor has no storage of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata if has_storage(local) else None
