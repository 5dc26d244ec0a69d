"""Describe handles and units without their tensors, to predict memory, traffic and schedules."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from layerzero.comm.transport.base import post_forward_bytes
from layerzero.config import LayerZeroConfig, Precision
from layerzero.device.buffer_pools import UnitFootprint
from layerzero.dtensor.gather_extension import GatheredBytes
from layerzero.engine.rank_traits import RankTraits
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.engine.unit import Unit
from layerzero.layout.flat_layout import FlatLayout


@dataclass(frozen=True)
class HandleSpec:
    """Description of a handle without its tensors."""

    unit: str  # name of the unit, or of the enclosing unit with which the handle is reduced; see Unit.enclosing
    kind: str  # description of the parameters, for messages
    trainable: bool
    precision: Precision
    layout: FlatLayout
    reduction_spec: ReductionSpec
    in_host: bool = False  # True if the master and the final gradient are in host memory
    strided: tuple[int, ...] = ()  # sizes in bytes of the gathered parameters that are not contiguous
    coded: int = 0  # number of bytes that a gather of encoded shards receives
    encodes_refresh: bool = False  # True if refreshes are sent as encoded differences
    set_aside: bool = False  # True if the final gradient was set aside in a backward; see engine/gradient_storage.py
    extension: GatheredBytes | None = None  # memory that the all-gather extension of the handle's only parameter uses

    def has_persistent_send_buffer(self, config: LayerZeroConfig) -> bool:
        """Return whether hop 1 sends directly from an accumulator that stays allocated between steps."""
        return self.reduction_spec.sends_accumulator and not config.offload.grads

    @property
    def accumulator_dtype(self) -> torch.dtype:
        return self.reduction_spec.separate_dtype or self.precision.master

    def gathered_sizes(self, where: RankTraits) -> tuple[int, ...]:
        """Return the sizes in bytes of the full buffer and of each gathered parameter that is not contiguous.

        If the handle has an all-gather extension, return the sizes of the tensors that the extension receives and
        creates.
        """
        if self.extension is not None:
            return (*self.extension.received, *self.extension.made)
        return (self.layout.numel * self.precision.compute.itemsize if where.needs_gather else 0, *self.strided)


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Description of a unit without its tensors."""

    name: str
    handles: tuple[HandleSpec, ...]
    traits: RankTraits
    reshard_after_forward: (
        bool | int
    )  # True: the unit is freed after its forward. An int: its backward gathers it among that many ranks
    reshard_after_backward: bool  # False: the unit stays gathered until the optimizer step
    over: Hashable = None  # identifies the mesh over which the unit is sharded

    @property
    def stays_gathered(self) -> bool:
        """True if the unit stays gathered between its forward and its backward pass.

        On a device, the root always stays gathered, because the backward pass starts with the root.
        """
        return not self.reshard_after_forward or (self.traits.on_device and not self.name)

    def encoded_bytes_of(self, handle: HandleSpec) -> int:
        """Return the number of bytes of encoded weights during a gather of a handle, without the full buffer."""
        return handle.coded if self.traits.needs_gather else 0

    def post_forward_bytes_of(self, handle: HandleSpec) -> int:
        """Return the size in bytes of a handle's post-forward shard."""
        if (
            isinstance(self.reshard_after_forward, bool)
            or self.stays_gathered
            or not self.traits.needs_gather
            or handle.extension is not None
        ):
            return 0
        return post_forward_bytes(handle.layout.numel, handle.precision.compute.itemsize, self.reshard_after_forward)

    @cached_property
    def gathered_footprint(self) -> UnitFootprint:
        nbytes = sum(size for handle in self.handles for size in handle.gathered_sizes(self.traits))
        nbytes += sum(map(self.encoded_bytes_of, self.handles))
        reshards = self.reshard_after_forward and self.reshard_after_backward
        return UnitFootprint(nbytes, reshards, self.over, sum(map(self.post_forward_bytes_of, self.handles)))


def specs_of(units: Iterable[Unit]) -> list[UnitSpec]:
    """Return the specs of existing units, with their current layouts."""
    units = tuple(units)
    in_host = any(handle.weights.host_shard is not None for unit in units for handle in unit.handles)
    return [
        UnitSpec(
            unit.name,
            tuple(
                HandleSpec(
                    unit.name
                    if unit.is_called_alike
                    else next((u.name for u in unit.enclosing if any(h.gradients for h in u.handles)), ""),
                    "",
                    handle.gradients is not None,
                    handle.precision,
                    handle.layout,
                    handle.reduction_spec,
                    handle.weights.to_host is not None,
                    handle.gathered_sizes[1:],
                    handle.weights.buffer.encoded_bytes,
                    handle.weights.refresher is not None,
                    handle.gradients is not None and handle.gradients.final.storage.nbytes > 0,
                    handle.extension_memory,
                )
                for handle in unit.handles
            ),
            RankTraits.of(unit.mesh_info, unit.transport_traits, offload_params=in_host),
            unit.reshard_after_forward,
            unit.reshard_after_backward,
            unit.mesh_info,
        )
        for unit in units
    ]
