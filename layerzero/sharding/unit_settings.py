"""Choose the settings of each unit, and check them against the model and the backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from layerzero.comm.codecs import has_feedback, is_encoded
from layerzero.config import Codecs, LayerZeroConfig, Precision, UnitSettings
from layerzero.dtensor.gather_extension import has_extension
from layerzero.sharding.unit_selection import UnitDefinition, describe_tensor_kind, is_plain_strided

ChosenSettings = Mapping[UnitDefinition, UnitSettings]


def settings_of_units(
    plans: Sequence[UnitDefinition], config: LayerZeroConfig, zero3_size: int | None = None
) -> dict[UnitDefinition, UnitSettings]:
    """Return the settings of each unit.

    Args:
        zero3_size: number of ranks that share the weights of each unit. If None, the meshes of the units determine it.
    """
    root = config.root_policy(plans[0].called[0])
    return {
        plan: config.unit_settings(plan.name, plan.called[0], zero3_size or plan.mesh.shape[-1], root) for plan in plans
    }


def settings_to_compare(settings: ChosenSettings, config: LayerZeroConfig) -> dict[str, object]:
    """Return the settings and model properties that must be the same on all ranks of the model, by name."""
    fields, plans = config.comparable_settings(), [*settings]
    fields["units"] = [plan.name for plan in plans]
    for plan, chosen in settings.items():
        fields |= unit_to_compare(plan, chosen, config)
        if plan.mesh is not plans[0].mesh:
            fields[f"shape of the mesh of {plan.label}"] = list(plan.mesh.shape)
    return fields | tied_buffers(plans[0].called[0])


def tied_buffers(model: nn.Module) -> dict[str, object]:
    """Return the names of the buffers that are one tensor, for each such tensor.

    All ranks must have the same tied buffers. :func:`load_full_state_dict` sends each tensor once.
    """
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {f"names of the buffer {tied[0]!r}": tied for tied in names.values() if len(tied) > 1}


def unit_to_compare(
    plan: UnitDefinition, chosen: UnitSettings, config: LayerZeroConfig, *, may_differ_on_meta: bool = False
) -> dict[str, object]:
    """Return the settings and properties of a unit that must be the same on all ranks of the model, by name.

    Args:
        may_differ_on_meta: True if only some ranks may have built the unit on meta.
    """
    compared = config.comparable_settings_of_unit(chosen)
    fields: dict[str, object] = {f"{name} of {plan.label}": value for name, value in compared.items()}
    if len(plan.called) > 1:
        fields[f"modules that call {plan.label}"] = [plan.modules.get(module) for module in plan.called]
    for info in plan.parameters:
        parameter = info.parameter
        frozen = "" if parameter.requires_grad else " frozen"
        on_meta = " on meta" if parameter.is_meta and not may_differ_on_meta else ""
        sharding = (
            f" {parameter.placements} on {list(parameter.device_mesh.shape)}" if isinstance(parameter, DTensor) else ""
        )
        kind = f" {type(parameter).__name__}" if has_extension(parameter) else ""
        text = f"{list(parameter.shape)} {parameter.dtype}{kind}{frozen}{on_meta}{sharding} in {plan.label}"
        fields[f"parameter {info.name!r}"] = text
    for _, _, name, buffer in plan.buffers():
        on_meta = " on meta" if buffer.is_meta and not may_differ_on_meta else ""
        fields[f"buffer {name!r}"] = f"{list(buffer.shape)} {buffer.dtype}{on_meta}"
    return fields


def parts_to_compare(plans: Sequence[UnitDefinition]) -> dict[str, object]:
    """Return this rank's model-parallel coordinates for each DTensor, by parameter name.

    Only units on the root's mesh are included. The coordinates must be the same on all ranks of the root's mesh.
    """
    return {
        f"model-parallel coordinates of parameter {found.name!r}": found.parameter.device_mesh.get_coordinate()
        for plan in plans
        for found in plan.parameters
        if isinstance(found.parameter, DTensor) and plan.mesh is plans[0].mesh
    }


def require_broadcastable_buffers(plans: Sequence[UnitDefinition]) -> None:
    """Raise ValueError if a buffer cannot be broadcast from rank 0."""
    for each in (each for plan in plans for each in plan.buffers()):
        if not is_plain_strided(each.buffer):
            raise ValueError(
                f"buffer {each.name!r} is {describe_tensor_kind(each.buffer)}, which cannot be broadcast from rank 0. "
                "Pass sync_module_states=False, and give the buffer equal values on all ranks"
            )


def check_offload(plans: Sequence[UnitDefinition], config: LayerZeroConfig) -> None:
    """Raise ValueError if parameters are offloaded and the class of a parameter has an all-gather extension."""
    extended = [info for plan in plans for info in plan.parameters if has_extension(info.parameter)]
    if config.offload.params and extended:
        raise ValueError(
            f"Offload(params=True) is not supported for parameter {extended[0].name!r}: the all-gather extension of "
            f"its class {type(extended[0].parameter).__name__} reads its shard on the device. Leave params out. "
            "Offloads of grads and optimizer are supported"
        )


def check_codecs(settings: ChosenSettings, codecs: Codecs) -> None:
    """Raise ValueError if a codec does not support the model's compute dtypes or replicated parameters."""
    precisions: dict[bool, set[Precision]] = {False: set(), True: set()}  # of frozen and of trainable parameters
    for plan, chosen in settings.items():
        for parameter in (info.parameter for info in plan.parameters):
            trainable = parameter.requires_grad
            precisions[trainable].add(chosen.policy.precision_of(parameter.dtype, trainable=trainable))
    trained = precisions[True]
    _check_gather(codecs, {each.compute for each in trained | precisions[False]})
    _check_hop2(codecs, trained)
    _check_copies(codecs, [*settings])
    _check_refresh(codecs, trained)


def _check_gather(codecs: Codecs, computes: set[torch.dtype]) -> None:
    if codecs.gather is not None and computes and not any(map(is_encoded, computes)):
        raise ValueError(
            f"Codecs.gather encodes weights in bf16 and fp16, but the model computes in {computes}. Set param_dtype in "
            "mp_policy, or leave gather out"
        )


def _check_hop2(codecs: Codecs, trained: set[Precision]) -> None:
    if has_feedback(codecs.hop2) and any(each.compute is torch.float16 for each in trained):
        raise ValueError(
            f"{type(codecs.hop2).__name__} adds the encoding errors of one step to the gradients of the next step. "
            "Because the model computes in fp16, the loss scale may differ between the two steps. Compute in bf16, or "
            "pass feedback=False"
        )


def _check_copies(codecs: Codecs, plans: Sequence[UnitDefinition]) -> None:
    """Raise ValueError if a codec would make copies of a parameter on model-parallel ranks differ."""
    refresh = codecs.refresh
    codec = codecs.hop2 or (None if refresh is None or isinstance(refresh, str) or refresh.lossless else refresh)
    if codec is not None and _has_replicated_params(plans):
        raise ValueError(
            f"{type(codec).__name__} encodes adjacent parameters with a common scale, so the copies of a parameter on "
            "tensor-parallel ranks, which have different neighbors, would become different. Leave the codec out. "
            "Codecs(refresh='lossless') is supported"
        )


def _has_replicated_params(plans: Sequence[UnitDefinition]) -> bool:
    """Return whether ranks along a model-parallel axis have copies of a parameter."""
    on_root = [info.parameter for plan in plans if plan.mesh is plans[0].mesh for info in plan.parameters]
    dtensors = [info.parameter for plan in plans for info in plan.parameters if isinstance(info.parameter, DTensor)]
    are_mixed = len({isinstance(parameter, DTensor) for parameter in on_root}) == 2
    return are_mixed or any(isinstance(each, Replicate) for dtensor in dtensors for each in dtensor.placements)


def _check_refresh(codecs: Codecs, trained: set[Precision]) -> None:
    """Raise ValueError if refreshes are encoded and the dtypes of the model do not allow it."""
    if codecs.refresh is not None and trained and not any(each.casts_to_16_bits for each in trained):
        computes = sorted({str(each.compute) for each in trained})
        raise ValueError(
            f"Codecs.refresh={codecs.refresh!r} encodes compute weights in bf16 and fp16 that have masters of higher "
            f"precision, but the model computes in {', '.join(computes)}. Set param_dtype in mp_policy, or leave "
            "refresh out"
        )
