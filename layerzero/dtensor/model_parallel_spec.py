"""Describe parameters that are DTensors on model-parallel axes, such as tensor-parallel layers and experts.

[Note: Model-parallel specs]
``parallelize_module`` makes parameters DTensors on a model-parallel axis. Each rank on that axis has a part or a copy
of the parameter. The ranks that have the same part form a data-parallel group and shard the part by rows, like any
other parameter. The engine uses only these parts. The model-parallel spec of a parameter describes everything else:

- The module computes with a DTensor on the model-parallel axis. The DTensor's local tensor is in the full buffer.
- The gradient from autograd may have other placements, such as Partial.
- Users see one DTensor of the global shape on all axes: the model-parallel axes, then (zero3, replica). In this order,
  each axis splits the part that the previous axis has produced. The order of the ranks in the mesh is therefore the
  order of their rows in the tensor.

In a model with such DTensors, a plain parameter also has a model-parallel spec, because each rank on the axis has a
copy of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from layerzero.comm.collectives import broadcast_group
from layerzero.dtensor.typed_torch import make_dtensor
from layerzero.utils.torch_compat import (
    AsyncCollectiveTensor,
    DTensorSpec,
    TensorMeta,
    compute_local_shape_and_global_offset,
)


def reason_not_shardable(placements: Sequence[Placement], ndim: int) -> str | None:
    """Return why a DTensor with these placements cannot be sharded further, or None if it can be."""
    if unsupported := [each for each in placements if type(each) not in (Shard, Replicate)]:
        return f"a DTensor with placement {unsupported[0]!r}, but only Shard and Replicate can be sharded further"
    columns = {each.dim % ndim for each in placements if isinstance(each, Shard)} - {0}
    if len(columns) > 1:
        return f"a DTensor that is sharded along dims {sorted(columns)}, but only one dim besides dim 0 is supported"
    return None


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor without a copy. Return a plain tensor unchanged."""
    return _wait_if_async(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def _wait_if_async(tensor: Tensor) -> Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


@dataclass(frozen=True, eq=False)
class ModelParallelSpec:
    """Mesh, placements and global shape of a parameter beyond its data-parallel part.

    See [Note: Model-parallel specs].
    """

    mesh: DeviceMesh  # the model-parallel axes
    placements: tuple[Placement, ...]  # on `mesh`
    shape: tuple[int, ...]  # global shape
    stride: tuple[int, ...]
    global_mesh: DeviceMesh  # mesh of the user's DTensor: the model-parallel axes, then those of MeshInfo.flat_mesh
    is_dtensor: bool  # True if the module computes with a DTensor; False if it computes with a plain copy on each rank
    owner: tuple[int, int] | None = None  # (axis, the only coordinate on this axis that has elements); see `of_state`

    @classmethod
    def of(cls, parameter: Tensor, mesh: DeviceMesh, shown: DeviceMesh) -> ModelParallelSpec:
        """Create the spec of a parameter in the unsharded model.

        Args:
            parameter: a DTensor or a plain parameter.
            mesh: mesh of the model's DTensor parameters, used if `parameter` is plain.
            shown: value for `global_mesh`.
        """
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        if isinstance(parameter, DTensor):
            return cls(parameter.device_mesh, tuple(parameter.placements), shape, stride, shown, is_dtensor=True)
        return cls(mesh, (Replicate(),) * mesh.ndim, shape, stride, shown, is_dtensor=False)

    @cached_property
    def _sizes_and_offsets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes, offsets = self._sizes_and_offsets_without(None if self.owner is None else self.owner[0])
        return sizes if self._is_holder else (0, *sizes[1:]), offsets

    def _sizes_and_offsets_without(self, axis: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes and offsets that this rank's part would have if `axis` did not shard the parameter."""
        placements = [Replicate() if mesh_axis == axis else each for mesh_axis, each in enumerate(self.placements)]
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, placements)
        return tuple(sizes), tuple(offsets)

    @property
    def _is_holder(self) -> bool:
        return self.owner is None or self._coordinate[self.owner[0]] == self.owner[1]

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """Slices of this rank's part in the global tensor."""
        return tuple(slice(start, start + size) for size, start in zip(*self._sizes_and_offsets, strict=True))

    @property
    def is_primary_copy(self) -> bool:
        """True if this rank has the first copy of its part. Only this copy is saved and counted."""
        coordinates = zip(self._coordinate, self.placements, strict=True)
        return not any(coordinate for coordinate, each in coordinates if isinstance(each, Replicate))

    @property
    def part_coordinates(self) -> tuple[int | None, ...]:
        """Coordinate of this rank on each model-parallel axis, or None if the parameter is replicated on the axis."""
        coordinates = zip(self._coordinate, self.placements, strict=True)
        return tuple(None if isinstance(each, Replicate) else coordinate for coordinate, each in coordinates)

    @property
    def _coordinate(self) -> Sequence[int]:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return coordinate

    @property
    def is_sharded(self) -> bool:
        """True if ranks on the model-parallel axes have different parts."""
        return any(isinstance(each, Shard) for each in self.placements)

    def same_sharding(self, other: ModelParallelSpec) -> bool:
        is_equal = (self.shape, self.placements, self.owner) == (other.shape, other.placements, other.owner)
        return is_equal and self.mesh == other.mesh

    # One axis of several

    def sharded_dim(self, axis: int) -> int | None:
        """Return the dim along which `axis` shards the parameter, or None if `axis` does not shard it."""
        placement = self.placements[axis]
        if not isinstance(placement, Shard) or self.mesh.size(axis) == 1:
            return None
        return placement.dim % len(self.shape)

    def coordinate_on(self, axis: int) -> int:
        """Return this rank's coordinate on an axis."""
        return self._coordinate[axis]

    def joined_shape(self, axis: int) -> tuple[int, ...]:
        """Return the shape of this rank's part after it is joined with the parts of the other ranks on `axis`."""
        return self._sizes_and_offsets_without(axis)[0]

    def of_state(self, shape: Sequence[int], *, axis: int | None, coordinate: int) -> ModelParallelSpec:
        """Return the spec of a tensor in the optimizer state of an owned parameter.

        Along `axis`, if it is not None, only the rank at `coordinate` has elements. Other axes that shard the
        parameter split a stack of matrices along dim 0, and they split the state tensor in the same way.
        """
        cut = [axis == mesh_axis or self.sharded_dim(mesh_axis) is not None for mesh_axis in range(self.mesh.ndim)]
        return replace(
            self,
            placements=tuple(Shard(0) if each else Replicate() for each in cut),
            shape=tuple(shape),
            stride=tuple(torch.empty(tuple(shape), device="meta").stride()),
            is_dtensor=False,
            owner=None if axis is None else (axis, coordinate),
        )

    # Between the local part and the global tensor

    def to_module_param(self, part: Tensor) -> nn.Parameter:
        """Convert this rank's part, without a copy, to the parameter that the module uses."""
        return nn.Parameter(self._as_dtensor(part) if self.is_dtensor else part)

    def local_grad(self, gradient: Tensor) -> Tensor:
        """Return this rank's part of a gradient. All ranks on the model-parallel axes must call this method."""
        if not isinstance(gradient, DTensor):
            return gradient
        if tuple(gradient.placements) != self.placements:  # Partial, or sharded where the parameter is replicated
            gradient = gradient.redistribute(placements=self.placements)
        return local_part(gradient)

    def part_of(self, value: Tensor) -> Tensor:
        """Return this rank's part of a full tensor.

        If `value` is a DTensor with a different mesh or different placements, all ranks of its mesh must call this
        method.
        """
        if isinstance(value, DTensor):
            if value.device_mesh == self.mesh and tuple(value.placements) == self.placements:
                return local_part(value)
            value = value.full_tensor()
        return value[self.global_slices] if self.shape else value

    def gather_global(self, part: Tensor) -> Tensor:
        """Gather the global tensor from all parts. All ranks on the model-parallel axes must call this method."""
        if self.owner is not None:
            return self._from_holder(part)
        return self._as_dtensor(part).full_tensor() if self.is_sharded else part

    def _from_holder(self, part: Tensor) -> Tensor:
        assert self.owner is not None
        axis, holder = self.owner
        joined = part.detach().clone(memory_format=torch.contiguous_format)
        if not self._is_holder:
            joined = part.new_empty(self.joined_shape(axis))
        if joined.numel():  # sent as bytes, because backends do not support all dtypes
            broadcast_group(joined.view(-1).view(torch.uint8), self.mesh.get_group(axis), from_rank=holder)
        placements = tuple(Replicate() if mesh_axis == axis else each for mesh_axis, each in enumerate(self.placements))
        return replace(self, placements=placements, owner=None).gather_global(joined)

    def _as_dtensor(self, part: Tensor) -> DTensor:
        meta = TensorMeta(torch.Size(self.shape), self.stride, part.dtype)
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return make_dtensor(DTensor, part, spec)
