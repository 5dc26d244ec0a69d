"""Detect uninitialized tensors in a model that was built on the meta device.

[Note: Sentinels in uninitialized memory]
Uninitialized memory may look like weights, and a model would train on it without an error. Therefore the memory of
tensors that were on meta is first filled with a sentinel that no computation produces. If a tensor still contains the
sentinel, no write (in place, through ``.data`` or by a kernel) has initialized the tensor. The first check runs after
initialization and after the broadcast from rank 0. The user or a checkpoint load may later write to the tensors that
this check finds. Therefore the first forward checks these tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerzero.comm.agreement import require_equal
from layerzero.dtensor.model_parallel_spec import local_part
from layerzero.engine.managed_param import ManagedParam
from layerzero.sharding.unit_selection import UnitDefinition, qualified_name

InitFn = Callable[[nn.Module], None]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 8  # maximum number of names in an error


@dataclass(frozen=True, eq=False)
class UninitializedTensor:
    """Parameter or buffer that was on the meta device and may still be uninitialized."""

    name: str  # fully qualified
    owner: nn.Module
    attribute: str
    is_parameter: bool

    @property
    def is_in_states(self) -> bool:
        """True if the tensor is in the state dict of its module, so that loading a state dict writes to it."""
        return self.is_parameter or self.attribute not in self.owner._non_persistent_buffers_set

    def is_uninitialized(self, members: Mapping[str, ManagedParam]) -> bool:
        """Return whether this rank's part of the tensor is still uninitialized."""
        tensor = members[self.name].master if self.is_parameter else self.owner._buffers.get(self.attribute)
        if tensor is None:
            return False
        # A cast may have turned the sentinel into a different NaN.
        return bool(tensor.isnan().any()) if _is_inexact(tensor) else has_sentinel(tensor)


def has_meta(module: nn.Module) -> bool:
    """Return whether a parameter or buffer that the module owns directly is on the meta device."""
    return any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values()))


def check_meta_init(plans: Sequence[UnitDefinition], param_init_fn: InitFn | None) -> None:
    """Raise an error if `param_init_fn` is invalid or a module on the meta device cannot be initialized.

    Raises:
        TypeError: `param_init_fn` is neither callable nor None.
        ValueError: an ignored parameter is on the meta device, or a module on the meta device has no
            ``reset_parameters()`` and `param_init_fn` is None.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            f"param_init_fn must be a callable(module) or None, got {param_init_fn!r}. Pass a function that "
            "initializes a module on the meta device, such as model._init_weights"
        )
    sharded = {id(found.parameter) for plan in plans for found in plan.parameters}
    for plan in plans:
        for module, module_name in plan.modules.items():
            if has_meta(module):
                _refuse_ignored_on_meta(module, module_name, sharded)
                if param_init_fn is None and not hasattr(module, "reset_parameters"):
                    where = f"module {module_name!r}" if module_name else "the model"
                    raise ValueError(
                        f"{where} ({type(module).__name__}) has parameters or buffers on the meta device and no "
                        "reset_parameters(). Pass param_init_fn, a function that initializes one module"
                    )


def _refuse_ignored_on_meta(module: nn.Module, module_name: str, sharded: Collection[int]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and id(parameter) not in sharded:
            raise ValueError(
                f"parameter {qualified_name(module_name, name)!r} is ignored and on the meta device. layerzero does "
                "not allocate or initialize ignored parameters. Build it on a real device, or do not ignore it"
            )


def tensors_on_meta(plan: UnitDefinition) -> list[UninitializedTensor]:
    """Return the parameters and buffers of a unit that are on the meta device."""
    parameters = [
        UninitializedTensor(f.name, *f.owners[0], is_parameter=True) for f in plan.parameters if f.parameter.is_meta
    ]
    buffers = [
        UninitializedTensor(each.name, each.module, each.attribute, is_parameter=False)
        for each in plan.buffers()
        if each.buffer.is_meta
    ]
    return [*parameters, *buffers]


def uninitialized_tensors(
    plan: UnitDefinition, was_on_meta: Sequence[UninitializedTensor]
) -> list[UninitializedTensor]:
    """Return those of `was_on_meta` that the initialization of the unit has not written."""
    parameters = {info.name: info.parameter for info in plan.parameters}
    uninitialized = []
    for each in was_on_meta:
        tensor = parameters[each.name] if each.is_parameter else each.owner._buffers.get(each.attribute)
        if tensor is not None and has_sentinel(local_part(tensor)):
            uninitialized.append(each)
    return uninitialized


@torch.no_grad()
def fill_sentinel(fresh: Tensor) -> None:
    """Fill a tensor with the sentinel of its dtype, which is a NaN or an unlikely integer.

    Tensors that cannot contain a sentinel, such as quantized tensors, are not changed.
    """
    if _can_hold_sentinel(fresh):
        bits = _bits(fresh)
        bits.fill_(_sentinel_of(fresh, bits))


@torch.no_grad()
def has_sentinel(tensor: Tensor) -> bool:
    """Return whether any element is uninitialized. For integers and 1-byte dtypes, check whether all elements are."""
    if not _can_hold_sentinel(tensor) or tensor.numel() == 0:
        return False
    bits = _bits(tensor)
    marked = bits == _sentinel_of(tensor, bits)
    return bool(marked.any() if _is_inexact(tensor) and bits.element_size() > 1 else marked.all())


def initialization_check(
    unwritten: Sequence[UninitializedTensor], members: Mapping[str, ManagedParam], ranks: Sequence[int]
) -> Callable[[], None]:
    """Return a function that checks in the first forward that all tensors are initialized. All ranks must call it.

    The returned function raises an error on all ranks if any rank has an uninitialized tensor.
    """

    def refuse_uninitialized() -> None:
        uninitialized = [each for each in unwritten if each.is_uninitialized(members)]
        failure = RuntimeError(_failure_message(uninitialized)) if uninitialized else None
        require_equal("first forward of a model that was built on meta", {}, ranks=ranks, failure=failure)

    return refuse_uninitialized


def _failure_message(uninitialized: Sequence[UninitializedTensor]) -> str:
    loaded = [each.name for each in uninitialized if each.is_in_states]
    buffers = [each for each in uninitialized if not each.is_in_states]
    sentences = []
    if loaded:
        sentences.append(
            f"no values were written to {_format_names(loaded)} after the model was built on meta. Initialize them in "
            "param_init_fn or in the module's reset_parameters, or load a state before the first forward "
            "(layerzero.load_full_state_dict, layerzero.checkpoint.load)"
        )
    if buffers:
        module_name, _, attribute = buffers[0].name.rpartition(".")
        sentences.append(
            f"no values were written to {_format_names([each.name for each in buffers])} after the model was built on "
            "meta. State dicts do not contain non-persistent buffers. Initialize them in param_init_fn or in the "
            "module's reset_parameters, or assign them before the first forward: "
            f"model.{module_name + '.' if module_name else ''}{attribute} = ..."
        )
    return ". ".join(sentences)


def _format_names(names: Sequence[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:_SHOWN])
    return listed + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _can_hold_sentinel(tensor: Tensor) -> bool:
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_plain and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(_BITS[real.element_size()])


def _sentinel_of(tensor: Tensor, bits: Tensor) -> int:
    size = bits.element_size()
    return int.from_bytes((b"\xff" if _is_inexact(tensor) else b"\xa5") * size, "little", signed=size > 1)
