"""What is known of handles and units before they have memory: all that memory and schedules can be foreseen from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.transport.post_forward_shard import kept_bytes
from layerzero.config import LayerZeroConfig, Precision
from layerzero.device.accelerator import device_module
from layerzero.device.buffer_pools import Gathered, Size
from layerzero.dtensor.extensions import GatheredBytes
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.engine.unit import Unit
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent, ShardGrid

__all__ = ["HandleSpec", "UnitSpec", "Where", "specs_of"]


@dataclass(frozen=True)
class Where:
    """A rank, and what of its surroundings decides how much memory it needs."""

    grid: ShardGrid
    adds_hop1: bool  # an exchange brings what each rank has, which is added up here, as on gloo; else it brings the sum
    adds_hop2: bool
    on_device: bool  # with streams and memory of its own
    in_node: bool = False  # the ranks of a node share memory
    weights_in_host: bool = False  # ZeRO-3 shards

    @classmethod
    def of(cls, topology: MeshInfo, *, in_node: bool, offload_params: bool) -> Where:
        return cls(
            topology.grid,
            adds_hop1=topology.zero3_reduce.is_gloo,
            adds_hop2=topology.replica.is_gloo,
            on_device=device_module(topology.device) is not None,
            in_node=in_node,
            weights_in_host=offload_params and not in_node,
        )

    @property
    def gathers(self) -> bool:
        """Whether the full buffer has memory beside the ZeRO-3 shard."""
        return self.weights_in_host or not (self.in_node or self.grid.covers(Extent.NODE, Extent.WHOLE))


@dataclass(frozen=True)
class HandleSpec:
    """A handle without memory."""

    unit: str  # its name
    kind: str  # of its parameters, for messages
    trainable: bool
    precision: Precision
    layout: FlatLayout
    route: ReductionSpec
    in_host: bool = False  # its master and its final gradient
    strided: tuple[int, ...] = ()  # bytes of gathered parameters in strides of their own
    coded: int = 0  # bytes of all that is received where encoded shards are gathered
    set_aside: bool = False  # its final gradient was kept across a backward; see device/gradient_storage.py
    extension: GatheredBytes | None = None  # of the all-gather extension of its only parameter

    def keeps_sum(self, config: LayerZeroConfig) -> bool:
        """What the first exchange sends is a sum that waits on this rank, in one place for good."""
        return self.route.lands is self.route.waits and not config.offload_grads

    @property
    def landing(self) -> Size:
        return self.layout.numel, self.route.landing_dtype

    @property
    def sent(self) -> Size:
        """Of what the first exchange sends."""
        return self.layout.numel, self.route.legs[0].wire

    def gathered_sizes(self, where: Where) -> tuple[int, ...]:
        """Bytes of the full buffer, and of parameters in strides of their own; or of an all-gather extension."""
        if self.extension is not None:
            return (*self.extension.received, *self.extension.made)
        return (self.layout.numel * self.precision.compute.itemsize if where.gathers else 0, *self.strided)


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """A unit without memory."""

    name: str
    handles: tuple[HandleSpec, ...]
    where: Where
    reshards: bool | int  # it is freed after its forward; an int: its backward gathers it among so many ranks
    over: Hashable = None  # what it is sharded over

    @property
    def stays(self) -> bool:
        """It is there from its forward to its backward. On a device the root is needed again at once."""
        return not self.reshards or (self.where.on_device and not self.name)

    def coded_of(self, handle: HandleSpec) -> int:
        """Bytes that a handle takes while it is gathered, beside its full buffer."""
        return handle.coded if self.where.gathers else 0

    def kept_of(self, handle: HandleSpec) -> int:
        """Bytes of a handle that stay from a forward to its backward."""
        if isinstance(self.reshards, bool) or self.stays or not self.where.gathers or handle.extension is not None:
            return 0
        return kept_bytes(handle.layout.numel, handle.precision.compute.itemsize, self.reshards)

    @cached_property
    def gathered_memory(self) -> Gathered:
        nbytes = sum(size for handle in self.handles for size in handle.gathered_sizes(self.where))
        nbytes += sum(map(self.coded_of, self.handles))
        return Gathered(nbytes, self.reshards, self.over, sum(map(self.kept_of, self.handles)))


def specs_of(units: Iterable[Unit]) -> list[UnitSpec]:
    """Units that are there, which may have been cut in another way since they were planned."""
    units = tuple(units)
    in_node = any(handle.shared is not None for unit in units for handle in unit.handles)
    in_host = any(handle.in_host is not None for unit in units for handle in unit.handles)
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
                    handle.route,
                    handle.to_host is not None,
                    handle.gathered_sizes[1:],
                    handle.whole.size,
                    handle.gradients is not None and handle.gradients.final.place.nbytes > 0,
                    handle.extension_bytes,
                )
                for handle in unit.handles
            ),
            Where.of(unit.topology, in_node=in_node, offload_params=in_host),
            unit.reshards,
            unit.topology,
        )
        for unit in units
    ]
