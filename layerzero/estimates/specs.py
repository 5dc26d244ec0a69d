"""Specs of handles and units, without tensors, for predictions of memory, traffic and schedules."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.transport.base import TransportTraits, post_forward_bytes
from layerzero.config import LayerZeroConfig, Precision
from layerzero.device.accelerator import device_module
from layerzero.device.buffer_pools import Size, UnitFootprint
from layerzero.dtensor.extensions import GatheredBytes
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.engine.unit import Unit
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent, ShardGrid

__all__ = ["HandleSpec", "RankTraits", "UnitSpec", "specs_of"]


@dataclass(frozen=True)
class RankTraits:
    """Position of a rank in the grid, and the properties of its backends that determine its memory."""

    grid: ShardGrid
    transport: TransportTraits  # of the ZeRO-3 group
    adds_hop2: bool  # hop 2 receives the part of each rank, which are added here, as on gloo; else it receives the sum
    on_device: bool  # an accelerator with its own streams and memory
    weights_in_host: bool = False  # ZeRO-3 shards are in host memory

    @classmethod
    def of(cls, topology: MeshInfo, transport: TransportTraits, *, offload_params: bool) -> RankTraits:
        return cls(
            topology.grid,
            transport,
            adds_hop2=topology.replica_comm.is_gloo,
            on_device=device_module(topology.device) is not None,
            weights_in_host=offload_params and not transport.full_buffer_resident,
        )

    @property
    def gathers(self) -> bool:
        """True if the full buffer has memory in addition to the ZeRO-3 shard."""
        resident = self.transport.full_buffer_resident or self.grid.same_elements(Extent.ZERO3, Extent.FULL)
        return self.weights_in_host or not resident


@dataclass(frozen=True)
class HandleSpec:
    """Description of a handle without its tensors."""

    unit: str  # name of its unit
    kind: str  # description of its parameters, for messages
    trainable: bool
    precision: Precision
    layout: FlatLayout
    reduction_spec: ReductionSpec
    in_host: bool = False  # its master and final gradient are in host memory
    strided: tuple[int, ...] = ()  # bytes of each gathered parameter that is not contiguous
    coded: int = 0  # bytes that a gather of encoded shards receives
    set_aside: bool = False  # its final gradient was kept across a backward; see engine/gradient_storage.py
    extension: GatheredBytes | None = None  # sizes of the all-gather extension of its only parameter

    def keeps_sum(self, config: LayerZeroConfig) -> bool:
        """Return whether hop 1 sends an accumulator that has permanent memory on this rank."""
        return (
            self.reduction_spec.incoming_extent is self.reduction_spec.accumulator_extent and not config.offload_grads
        )

    @property
    def incoming_numel(self) -> Size:
        return self.layout.numel, self.reduction_spec.incoming_dtype

    @property
    def sent_numel(self) -> Size:
        """Number of elements and dtype that the first stage sends."""
        return self.layout.numel, self.reduction_spec.stages[0].wire_dtype

    def gathered_sizes(self, where: RankTraits) -> tuple[int, ...]:
        """Return the bytes of the full buffer and of each strided parameter, or those of an all-gather extension."""
        if self.extension is not None:
            return (*self.extension.received, *self.extension.made)
        return (self.layout.numel * self.precision.compute.itemsize if where.gathers else 0, *self.strided)


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Description of a unit without its tensors."""

    name: str
    handles: tuple[HandleSpec, ...]
    traits: RankTraits
    reshard_after_forward: (
        bool | int
    )  # True: it is freed after its forward; an int: its backward gathers it among that many ranks
    over: Hashable = None  # identifies the mesh that it is sharded over

    @property
    def stays(self) -> bool:
        """True if the unit stays gathered between forward and backward.

        On a device the root always stays gathered, because the backward needs it at once.
        """
        return not self.reshard_after_forward or (self.traits.on_device and not self.name)

    def coded_of(self, handle: HandleSpec) -> int:
        """Return the bytes of encoded weights that a handle needs during a gather, in addition to its full buffer."""
        return handle.coded if self.traits.gathers else 0

    def kept_of(self, handle: HandleSpec) -> int:
        """Return the bytes of a handle's post-forward shard."""
        if (
            isinstance(self.reshard_after_forward, bool)
            or self.stays
            or not self.traits.gathers
            or handle.extension is not None
        ):
            return 0
        return post_forward_bytes(handle.layout.numel, handle.precision.compute.itemsize, self.reshard_after_forward)

    @cached_property
    def gathered_memory(self) -> UnitFootprint:
        nbytes = sum(size for handle in self.handles for size in handle.gathered_sizes(self.traits))
        nbytes += sum(map(self.coded_of, self.handles))
        return UnitFootprint(nbytes, self.reshard_after_forward, self.over, sum(map(self.kept_of, self.handles)))


def specs_of(units: Iterable[Unit]) -> list[UnitSpec]:
    """Return the specs of existing units, whose layouts may have changed since they were planned."""
    units = tuple(units)
    in_host = any(handle.weights.host_shard is not None for unit in units for handle in unit.handles)
    return [
        UnitSpec(
            unit.name,
            tuple(
                HandleSpec(
                    unit.name,
                    "",
                    handle.gradients is not None,
                    handle.precision,
                    handle.layout,
                    handle.reduction_spec,
                    handle.weights.to_host is not None,
                    handle.gathered_sizes[1:],
                    handle.weights.buffer.encoded_bytes,
                    handle.gradients is not None and handle.gradients.final.storage.nbytes > 0,
                    handle.extension_bytes,
                )
                for handle in unit.handles
            ),
            RankTraits.of(unit.topology, unit.transport.traits, offload_params=in_host),
            unit.reshard_after_forward,
            unit.topology,
        )
        for unit in units
    ]
