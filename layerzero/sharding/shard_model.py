"""Shard a model in place, with :func:`shard_model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from layerzero.comm.agreement import agreed, require_equal
from layerzero.comm.mesh_info import AXES, as_data_parallel
from layerzero.comm.process_groups import ModelGroups, drop_idle_groups, group_count_fields
from layerzero.config import (
    Accumulation,
    Codecs,
    LayerZeroConfig,
    ModuleEntry,
    Offload,
    Policy,
    PrecisionPolicy,
    Reshards,
    Units,
    names_new_places,
)
from layerzero.sharding.build_units import BuiltUnit, build_unit, plan_unit, require_equal_encoded_sizes
from layerzero.sharding.make_root import make_root
from layerzero.sharding.meta_init import InitFn, check_meta_init
from layerzero.sharding.shared_resources import SharedResources
from layerzero.sharding.unit_meshes import (
    MeshOf,
    ModelParallelMeshes,
    agreed_on_model_parallel_axes,
    find_model_parallel_meshes,
    root_mesh,
    unit_mesh_selector,
)
from layerzero.sharding.unit_selection import UnitDefinition, partition, ranks_in
from layerzero.sharding.unit_settings import (
    ChosenSettings,
    check_codecs,
    check_offload,
    parts_to_compare,
    require_broadcastable_buffers,
    settings_of_units,
    settings_to_compare,
)


@names_new_places
def shard_model(
    model: nn.Module,
    *,
    mesh: DeviceMesh | MeshOf | None = None,
    zero3_size: int | None = None,
    units: Units = None,
    mp_policy: Policy | None = None,
    accumulation: Accumulation = "sharded",
    offload: Offload | OffloadPolicy | None = None,
    codecs: Codecs | None = None,
    reshard_after_forward: Reshards = True,
    prefetch: int = 1,
    shared_memory: str = "auto",
    ignored_params: Iterable[nn.Parameter] | str | None = None,
    ignored_modules: ModuleEntry | Iterable[ModuleEntry] | None = None,
    sync_module_states: bool = True,
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Shard a model in place and return it.

    fp32 masters are sharded over all data-parallel ranks (ZeRO-1, Rajbhandari et al. 2020). Compute weights are sharded
    over `zero3_size` consecutive ranks (ZeRO-3). Between passes, ``model.parameters()`` yields DTensors with the
    original shapes. Their local tensors are this rank's rows of the masters. ``.grad`` is the gradient, averaged over
    all ranks. All ranks must call this function with the same model and settings.

    Args:
        model: any module. Parameters may be on the CPU, on the device, or on ``meta``.
        mesh: mesh of the data-parallel ranks, as an alternative to `zero3_size`. Use :func:`init_mesh`,
            :func:`mesh_from_groups` or any DeviceMesh. On a mesh with one axis, the weights are sharded over all ranks.
            On a mesh with two axes, the first is the replica axis. The mesh may also be ``callable(name, module) ->
            DeviceMesh``. It is called for each unit (``""`` is the root), for example to shard experts over fewer
            data-parallel ranks. Parameters may be DTensors on model-parallel axes (as in tensor and expert
            parallelism). See ``docs/meshes.md``.
        zero3_size: S, number of ranks over which the compute weights are sharded. S must divide the world size. Without
            a mesh, the default is the number of ranks per node, which torchrun sets.
        units: selects the modules that are gathered and freed together. Pass module classes (``{Block}``), names of
            modules or of their classes (``["blocks.0", "Block"]``), modules of the model, or lists of these.
            Each list is one unit that is gathered when any of its modules is called: ``[Block, [model.norm,
            model.head]]``. A list takes precedence over classes and names. You may also pass ``callable(name, module)
            -> bool``. If it returns a str, all modules with the same str form one unit. ``"auto"`` selects the
            classes in the model's ``_no_split_modules``, or the classes to which transformers applies activation
            checkpointing. It also selects the model's input and output embeddings, unless their weights are tied.
            Policies from ``torch.distributed.fsdp.wrap`` are also accepted: a ``ModuleWrapPolicy``, or a function of
            ``(module, recurse, nonwrapped_numel)`` such as ``size_based_auto_wrap_policy``, also as a
            ``functools.partial``. Parameters outside all units belong to the root. With None, the root is the only
            unit. :func:`layerzero.units` lists the units, and ``print(model)`` marks them.
        mp_policy: :class:`PrecisionPolicy`, or torch's ``MixedPrecisionPolicy``. `param_dtype` is the dtype of compute
            weights and computation, by default the dtype of the model. `reduce_dtype` is the dtype of gradient
            reduction inside the ZeRO-3 group, by default `param_dtype`. `output_dtype` and `cast_forward_inputs` apply
            to every unit, as in FSDP2. You may also pass ``callable(name, module)``, which returns a policy for each
            unit. ``""`` is the root. For a unit of several modules, the callable receives the unit's key and its first
            module. To compute a norm in fp32 between bf16 blocks, make the norm a unit with
            ``MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)``.
        accumulation: form in which the gradients of N elements are accumulated between micro-batches. ``"sharded"``
            stores N/S fp32 elements and reduces inside the ZeRO-3 group in each backward. ``"full"`` stores N fp32
            elements and sends no data until the backward that reduces gradients. ``"local"`` stores only the final
            gradient (N/D fp32 elements) and reduces over all ranks in each backward, even inside :func:`no_sync`. To
            choose the form for each unit, pass ``callable(name, module)``.
        offload: :class:`Offload`, which selects tensors that are stored in host memory. torch's ``CPUOffloadPolicy``
            means ``Offload(grads=True, optimizer=True, params=True)``. By default, all tensors are on the device.
        codecs: :class:`Codecs`, which selects encodings of gathered weights, of gradients between nodes, and of
            refreshed weights. By default, messages are not encoded.
        reshard_after_forward: if True, free a unit's full weights after its forward and gather them again for its
            backward. On a device, the root and the unit that is called last stay gathered. If False, keep them from the
            forward to the backward. ``"step"`` keeps them from their first use after an optimizer step to the next
            ``optimizer.step()``, through all micro-batches, so each unit is gathered once per step, and frozen weights
            once. Evaluation keeps them, too. A change of the weights, :func:`full_precision` and ``unit.reshard()``
            free them. An int, as in FSDP2, is a divisor of `zero3_size`. Between forward and backward, the unit stays
            sharded over that many consecutive ranks, and its backward gathers it among these ranks only. `zero3_size`
            itself means True, and 1 means False. To choose for each unit, pass ``callable(name, module)``, which
            returns one of these values.
        prefetch: number of units to gather ahead of the unit that is computing.
        shared_memory: ``"auto"`` or ``"off"``. With ``"auto"``, the ranks of a ZeRO-3 group share memory instead of
            sending weights and gradients, if they run on one machine and compute on its CPU. If these ranks cannot
            share memory, a message is logged. With ``"off"``, ranks use collectives, as on devices. See
            ``docs/settings.md``.
        ignored_params: parameters that are not sharded. Such parameters stay full on every rank, and their gradients
            are not averaged. ``"unsupported"`` selects the frozen parameters that cannot be sharded (integers, 8-bit
            formats and tensor subclasses), such as quantized base weights under adapters. All ranks must have loaded
            the same values. A class with FSDP2's all-gather extension, as in torchao's float8 training, is supported.
            Its parameters are sharded by the rows of their single inner tensor.
        ignored_modules: modules, their classes, or names of modules or classes, whose parameters are ignored in the
            same way. Passing modules that contain all parameters of the model is an error.
        sync_module_states: broadcast rank 0's parameters and buffers to all data-parallel ranks. With tensor
            parallelism, each part and each plain buffer is broadcast from the first rank that has this part or buffer.
            Replicated parameters are broadcast from the first rank of the model.
        param_init_fn: function ``fn(module)`` that initializes the parameters and buffers that a ``meta``-device module
            owns directly. It is called after their memory is allocated. The default calls the module's
            ``reset_parameters()``. Units are initialized one at a time, so that at most one unit has full tensors.
            Values that the function does not write must be loaded or assigned before the first forward. Otherwise the
            first forward raises an error.

    Raises:
        TypeError, ValueError: a setting is invalid, a parameter is unsupported, the model is already sharded, or ranks
            disagree. All of these conditions are checked before the first collective. Ranks therefore raise an error
            instead of hanging.
        RuntimeError: torch.distributed is not initialized, or this function failed on another rank.

    Example::

        model = layerzero.shard_model(
            model, zero3_size=8, units={Block}, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        )
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized. Call torch.distributed.init_process_group() first")
    root = _agree_on_root_mesh(model, mesh, zero3_size)
    ranks = ranks_in(root)
    fields: dict[str, object] = {}
    groups: dict[str, dict[str, object]] = {}
    drop_idle_groups()
    with agreed("shard_model", fields, ranks=ranks, groups=groups):
        with agreed_on_model_parallel_axes(model, root, fields):
            config = LayerZeroConfig(
                zero3_size=root.size(1),
                units=units,
                mp_policy=mp_policy if mp_policy is not None else PrecisionPolicy(),
                accumulation=accumulation,
                offload=Offload.of(offload),
                codecs=codecs if codecs is not None else Codecs(),
                reshard_after_forward=reshard_after_forward,
                prefetch=prefetch,
                shared_memory=shared_memory,
                ignored_modules=ignored_modules,
                sync_module_states=sync_module_states,
            )
            plans = _define_units(model, config, unit_mesh_selector(mesh, root), ignored_params)
            model_parallel_meshes = find_model_parallel_meshes(plans)
            check_meta_init(plans, param_init_fn)
            settings = settings_of_units(plans, config)
            check_codecs(settings, config.codecs)
            fields |= settings_to_compare(settings, config)
        groups |= group_count_fields(*(dist.get_process_group_ranks(root.get_group(axis)) for axis in AXES), ranks)
        fields |= parts_to_compare(plans)
    _build(model, settings, model_parallel_meshes, config, param_init_fn)
    return model


def _define_units(
    model: nn.Module, config: LayerZeroConfig, mesh_of: MeshOf, ignored_params: Iterable[nn.Parameter] | str | None
) -> list[UnitDefinition]:
    """Return the units of a model. Raise an error if the settings do not support its parameters or buffers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    plans = partition(
        model, config.units, mesh_of=mesh_of, ignored_params=ignored_params, ignored_modules=config.ignored_modules
    )
    check_offload(plans, config)
    if config.sync_module_states:
        require_broadcastable_buffers(plans)
    return plans


def _build(
    model: nn.Module,
    settings: ChosenSettings,
    model_parallel_meshes: ModelParallelMeshes,
    config: LayerZeroConfig,
    param_init_fn: InitFn | None,
) -> None:
    """Build the units one by one, and then the root. All ranks of the model must pass the same settings."""
    groups = ModelGroups()
    sums_locally = next(iter(settings.values())).policy.fp32_accumulation
    try:
        shared = SharedResources.create(model_parallel_meshes, config, groups, sums_locally=sums_locally)
        planned = [plan_unit(plan, chosen, shared) for plan, chosen in settings.items()]
        require_equal_encoded_sizes(planned, shared)
        shared = shared.share_memory([handle for unit in planned for handle in unit.handles])
        built: dict[UnitDefinition, BuiltUnit] = {}
        for unit in planned:
            enclosing = [built[each] for each in unit.definition.enclosing]
            built[unit.definition] = build_unit(unit, shared, param_init_fn=param_init_fn, enclosing=enclosing)
        make_root(model, built.values(), shared)
    except BaseException:
        groups.abandon()
        raise


def _agree_on_root_mesh(model: nn.Module, mesh: DeviceMesh | MeshOf | None, zero3_size: int | None) -> DeviceMesh:
    """Return the mesh of the root. If `mesh` is invalid on one of its ranks, all of its ranks raise an error."""
    try:
        return as_data_parallel(root_mesh(model, mesh, zero3_size))
    except (TypeError, ValueError) as error:
        ranks = sorted(ranks_in(mesh)) if isinstance(mesh, DeviceMesh) else []
        if dist.get_rank() in ranks:  # otherwise the calling ranks are unknown
            require_equal("shard_model", {}, ranks=ranks, failure=error)
        raise
