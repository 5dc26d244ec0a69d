"""Detect uninitialized tensors in a model that was built on the meta device.

[Note: Sentinels in uninitialized memory]
Uninitialized memory may look like weights, and a model would train on it without an error. Therefore the memory of
tensors that were on meta is first filled with a sentinel that no computation produces. If a tensor still contains the
sentinel, no write (in place, through ``.data`` or by a kernel) has initialized the tensor. The first check runs after
initialization and after the broadcast from rank 0. The user or a checkpoint load may later write to the tensors that
this check finds. Therefore the first forward checks these tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerzero.comm.agreement import require_equal
from layerzero.engine.managed_param import ManagedParam

__all__ = ["UninitializedTensor", "fill_sentinel", "has_sentinel", "initialization_check"]

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
