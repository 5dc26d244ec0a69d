"""Determine the data-parallel mesh and the model-parallel axes of each unit of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from layerzero.comm.agreement import agreed
from layerzero.comm.collectives import Communicator
from layerzero.comm.mesh_info import MeshInfo, as_data_parallel, check_mesh, mesh_of_ranks
from layerzero.comm.model_ranks import ModelParallelAxes, ModelRanks, broadcast_over
from layerzero.comm.process_groups import ModelGroups
from layerzero.device.accelerator import default_device_type
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec, local_part
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.resources import MeshResources
from layerzero.sharding.unit_selection import UnitDefinition, ranks_in

MeshOf = Callable[[str, nn.Module], DeviceMesh]


def root_mesh(model: nn.Module, mesh: DeviceMesh | MeshOf | None, zero3_size: int | None) -> DeviceMesh:
    """Return the mesh of the root. Units without their own mesh also use it.

    If `mesh` is None, the returned mesh covers all ranks. If parameters are DTensors on a submesh, the returned mesh
    covers only the ranks that have this rank's coordinates on that submesh.

    Raises:
        TypeError, ValueError: `mesh` or `zero3_size` is invalid; or both are given; or parameters are DTensors on a
            submesh and neither `mesh` nor `zero3_size` is given.
    """
    if mesh is not None and zero3_size is not None:
        raise ValueError(
            "mesh and zero3_size are both given, but a mesh determines zero3_size. Pass either mesh or zero3_size"
        )
    if mesh is not None:
        return _mesh_of_module(mesh, "", model)
    model_parallel = _model_parallel_mesh(model)
    if model_parallel is None or model_parallel.size() == 1 or model_parallel._get_root_mesh() == model_parallel:
        return mesh_of_ranks(
            range(dist.get_world_size()), zero3_size, default_device_type(), caller="shard_model(zero3_size=...)"
        )
    if zero3_size is None:
        raise ValueError(
            "parameters are DTensors on a model-parallel axis, so shard_model does not choose the data-parallel ranks "
            "by default. Pass mesh, such as mesh['dp'], or zero3_size"
        )
    ranks = _data_parallel_ranks(model_parallel)
    return mesh_of_ranks(ranks, zero3_size, model_parallel.device_type, caller="shard_model(zero3_size=...)")


def unit_mesh_selector(mesh: DeviceMesh | MeshOf | None, root: DeviceMesh) -> MeshOf:
    """Return a function that returns the mesh of a unit: the result of `mesh` if it is a callable, otherwise `root`."""
    if mesh is None or isinstance(mesh, DeviceMesh):
        return lambda name, module: root

    def mesh_of_unit(name: str, module: nn.Module) -> DeviceMesh:
        unit_mesh = _mesh_of_module(mesh, name, module) if name else root
        is_same = unit_mesh.shape[-1] == root.shape[-1] and ranks_in(unit_mesh) == ranks_in(root)
        return root if is_same else unit_mesh

    return mesh_of_unit


def _mesh_of_module(mesh: DeviceMesh | MeshOf, name: str, module: nn.Module) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh) and callable(mesh):
        mesh = mesh(name, module)
    check_mesh(mesh)
    return mesh


def _model_parallel_mesh(model: nn.Module, ranks: Sequence[int] = ()) -> DeviceMesh | None:
    """Return the mesh of the first DTensor parameter whose mesh has at most one of `ranks`, or None."""
    parameters: list[Any] = list(model.parameters()) if isinstance(model, nn.Module) else []
    dtensors = [p for p in parameters if isinstance(p, DTensor) and not isinstance(p, RowShardedTensor)]
    return next((p.device_mesh for p in dtensors if len({*ranks_in(p.device_mesh)} & {*ranks}) < 2), None)


def _data_parallel_ranks(model_parallel: DeviceMesh) -> list[int]:
    """Return the sorted ranks that have this rank's coordinates on the axes of `model_parallel`.

    Raises:
        ValueError: `model_parallel` is not a submesh of a mesh that contains all ranks.
    """
    full_mesh = model_parallel._get_root_mesh()
    if full_mesh.size() != dist.get_world_size():
        raise ValueError(
            f"parameters are DTensors on a mesh of the ranks {model_parallel.mesh.tolist()}, which is not a submesh of "
            "a mesh of all ranks. Pass the mesh of the data-parallel ranks: "
            "mesh=init_device_mesh(..., mesh_dim_names=('dp', 'tp'))['dp']"
        )
    table, coordinate = full_mesh.mesh, full_mesh.get_coordinate()
    assert coordinate is not None
    names = full_mesh.mesh_dim_names or ()  # a mesh with submeshes has named axes
    for axis in reversed(range(full_mesh.ndim)):
        if names[axis] in (model_parallel.mesh_dim_names or ()):
            table = table.select(axis, coordinate[axis])
    return sorted(table.flatten().tolist())


ModelParallelMeshes = dict[DeviceMesh, DeviceMesh | None]


def find_model_parallel_meshes(plans: Sequence[UnitDefinition]) -> ModelParallelMeshes:
    """Return a dict that maps each mesh of units to the model-parallel mesh of its DTensor parameters, or to None.

    The root's mesh is the first key.

    Raises:
        ValueError: parameters on one data-parallel mesh are DTensors on different meshes; or a unit that is not on the
            root's mesh has both DTensors and trainable plain parameters.
    """
    first_dtensors: dict[DeviceMesh, tuple[str, DeviceMesh]] = {}  # name of the first DTensor parameter, and its mesh
    for plan in plans:
        for info in plan.parameters:
            is_trainable_plain = info.parameter.requires_grad and not isinstance(info.parameter, DTensor)
            if (
                is_trainable_plain
                and plan.mesh is not plans[0].mesh
                and any(isinstance(p.parameter, DTensor) for p in plan.parameters)
            ):
                raise ValueError(
                    f"parameter {info.name!r} is a plain tensor in unit {plan.name!r}, whose mesh is not the root's "
                    "mesh and whose other parameters are DTensors. Ranks with different parts of the DTensors would "
                    "train different copies of it. Move it (a router, a norm) to a unit on the root's mesh"
                )
            if isinstance(info.parameter, DTensor):
                axes = info.parameter.device_mesh
                name, previous = first_dtensors.setdefault(plan.mesh, (info.name, axes))
                if axes != previous:
                    raise ValueError(
                        f"parameters {name!r} and {info.name!r} are sharded over the same ranks, but they are DTensors "
                        f"on different axes: {previous} and {axes}. Use one mesh for both, or put them into units with "
                        "different meshes"
                    )
    return {plan.mesh: first_dtensors[plan.mesh][1] if plan.mesh in first_dtensors else None for plan in plans}


def agreed_on_model_parallel_axes(
    model: nn.Module, root: DeviceMesh, fields: Mapping[str, object]
) -> AbstractContextManager[None]:
    """Return :func:`agreed` for the ranks along the root's model-parallel axes."""
    axes = _model_parallel_mesh(model, ranks_in(root))
    return agreed("shard_model", fields, ranks=() if axes is None else sorted(ranks_in(axes)))


@dataclass(frozen=True, eq=False)
class UnitMesh:
    """Data-parallel mesh of one or more units, with the model-parallel axes of their parameters."""

    ranks: ModelRanks
    resources: MeshResources
    model_parallel: ModelParallelAxes | None  # None if no parameter is a DTensor
    holds_copies: bool  # if True, ranks along the model-parallel axes have equal plain parameters

    @property
    def mesh_info(self) -> MeshInfo:
        return self.resources.mesh_info

    def has_model_parallel_spec(self, parameter: nn.Parameter) -> bool:
        return self.model_parallel is not None and (self.holds_copies or isinstance(parameter, DTensor))

    def model_parallel_spec_of(self, parameter: nn.Parameter) -> ModelParallelSpec | None:
        """Return the model-parallel spec of a parameter, or None; see [Note: Model-parallel specs]."""
        if self.model_parallel is None or not self.has_model_parallel_spec(parameter):
            return None
        return ModelParallelSpec.of(parameter, self.model_parallel.mesh, self.model_parallel.global_mesh)

    def broadcast_param_from_first(self, parameter: nn.Parameter) -> None:
        """Broadcast this rank's part of a parameter from the first rank that has the same part."""
        model_parallel = self.model_parallel_spec_of(parameter)
        copied = (
            ()
            if model_parallel is None or self.model_parallel is None
            else zip(self.model_parallel.communicators, model_parallel.placements, strict=True)
        )
        comms = [comm for comm, placement in copied if isinstance(placement, Replicate)]
        self.broadcast_from_first(local_part(parameter).detach(), comms)

    def broadcast_from_first(self, tensor: Tensor, across: Sequence[Communicator] = ()) -> None:
        """Broadcast a tensor in place from the first rank to all data-parallel ranks and over each of `across`."""
        comms = (*across, self.mesh_info.replica_comm, self.mesh_info.zero3_gather_comm)
        if tensor.numel() == 0 or all(comm.size == 1 for comm in comms):
            return
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        sent = sent.to(self.mesh_info.device).contiguous()
        broadcast_over(comms, sent)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(torch.view_as_complex(sent) if tensor.is_complex() else sent)


def connect_meshes(
    model_parallel_meshes: ModelParallelMeshes,
    groups: ModelGroups,
    resources_of: Callable[[MeshInfo], MeshResources],
    *,
    sums_locally: bool,
) -> tuple[ModelRanks, dict[DeviceMesh, UnitMesh]]:
    """Return the ranks of a model, and a dict that maps each mesh to its `UnitMesh`. The root's mesh is first.

    All ranks of the model must call this function.

    Args:
        resources_of: function that returns the transport and the pools for the handles on a mesh.
        sums_locally: see :meth:`MeshInfo.from_mesh`.
    """
    root, *others = model_parallel_meshes
    mesh_info = MeshInfo.from_mesh(root, groups=groups, sums_locally=sums_locally)
    model_ranks = ModelRanks.connect(mesh_info, None if groups.deferred else model_parallel_meshes[root])
    mesh_infos = {root: model_ranks.mesh_info}
    for mesh in others:
        _require_consistent_meshes(model_ranks, mesh, model_parallel_meshes[mesh])
        mesh_infos[mesh] = model_ranks.with_model_ranks(
            MeshInfo.from_mesh(as_data_parallel(mesh), mesh_info.counters, mesh_info.groups, sums_locally=sums_locally)
        )
    sites = {}
    for mesh, axes in model_parallel_meshes.items():
        model_parallel = None
        if axes is not None and groups.deferred:
            model_parallel = ModelParallelAxes.derived(mesh_infos[mesh], axes)
        elif axes is not None:
            model_parallel = ModelParallelAxes.of(mesh_infos[mesh], axes, model_ranks)
        sites[mesh] = UnitMesh(model_ranks, resources_of(mesh_infos[mesh]), model_parallel, holds_copies=mesh == root)
    return model_ranks, sites


class _MeshChoice(NamedTuple):
    """Mesh that a rank passes for some units, and the model-parallel mesh of their parameters, if there is one."""

    ranks: list[int]
    beside: list[int] | None  # ranks of the model-parallel mesh
    coordinate: Sequence[int] | None  # coordinate of the rank on the model-parallel mesh


def _require_consistent_meshes(
    model_ranks: ModelRanks, mesh: DeviceMesh, model_parallel_mesh: DeviceMesh | None
) -> None:
    """Raise ValueError on all ranks if the ranks disagree on the mesh of a unit or on its model-parallel mesh."""
    own = _MeshChoice(ranks_in(mesh), None, None)
    if model_parallel_mesh is not None:
        own = _MeshChoice(own.ranks, ranks_in(model_parallel_mesh), model_parallel_mesh.get_coordinate())
    texts = model_ranks.all_gather_text(json.dumps(own))
    choices = {rank: _MeshChoice(*json.loads(text)) for rank, text in zip(model_ranks.ranks, texts, strict=True)}
    for rank in choices:
        if problem := _mesh_problem(rank, choices, model_ranks):
            raise ValueError(problem)


def _mesh_problem(rank: int, choices: Mapping[int, _MeshChoice], model_ranks: ModelRanks) -> str | None:
    """Return why the mesh that a rank chose is inconsistent with the choices of the other ranks, or None."""
    ranks, beside, coordinate = choices[rank]
    peers = [choices.get(peer) for peer in ranks]
    if rank not in ranks or any(peer is None or (peer.ranks, peer.coordinate) != (ranks, coordinate) for peer in peers):
        return (
            f"mesh is {ranks} for some units on rank {rank}. All ranks of a mesh must be among "
            f"{list(model_ranks.ranks)}, and must pass the same mesh and have the same part of the parameters for "
            "these units. Make mesh(name, module) return equal meshes on these ranks"
        )
    if beside is None:
        if not model_ranks.model_parallel or len(ranks) == model_ranks.size:
            return None
        return (
            f"units on the mesh {ranks} have plain parameters, but other units are tensor parallel, so layerzero "
            "cannot determine which ranks have copies of the plain parameters. Make them DTensors on the axes of "
            "that mesh"
        )
    if not choices.keys() >= {*beside}:
        return (
            f"parameters of units on the mesh {ranks} are DTensors on the ranks {beside}, but the root, which has "
            f"parameters on {list(model_ranks.ranks)}, has no DTensor on these axes. Make one of the root's "
            "parameters a DTensor on the same axes (distribute_tensor with Replicate)"
        )
    if len({each for peer in beside for each in choices[peer].ranks}) != model_ranks.size:
        return (
            f"parameters of units on the mesh {ranks} are DTensors on the ranks {beside}, whose meshes together do "
            f"not cover the ranks {list(model_ranks.ranks)}. Use meshes that cover all of these ranks"
        )
    return None
