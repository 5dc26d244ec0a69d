"""Keep track of the buffers that ``PrecisionPolicy(buffer_dtype=...)`` has cast, and of their original dtypes.

[Note: Dtype of saved buffers]
A state dict contains each buffer in its original dtype, as in FSDP1, so that an unsharded model can load the state
dict. The values are copied from the cast buffer and are therefore rounded. Updates during a forward pass, for example
of a running mean, are also rounded. If ``keep_vars=True`` is passed, the state dict contains the cast buffers
themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class CastBuffer:
    """Buffer of a module that was cast to another dtype."""

    module: weakref.ref[nn.Module]  # see [Note: References between model and state] in hooks.py
    name: str  # name of the buffer in the module
    dtype: torch.dtype  # dtype before the cast

    @property
    def tensor(self) -> Tensor | None:
        """Current buffer, or None if the module no longer exists or has no buffer of this name."""
        module = self.module()
        return None if module is None else module._buffers.get(self.name)

    def replace_in_module(self, tensor: Tensor) -> None:
        """Replace the module's buffer with `tensor` if the module still exists."""
        if (module := self.module()) is not None:
            module._buffers[self.name] = tensor


def original_dtypes(buffers: Iterable[CastBuffer]) -> dict[int, torch.dtype]:
    """Return the original dtype of each current buffer, keyed by the ``id`` of the buffer."""
    return {id(tensor): each.dtype for each in buffers if (tensor := each.tensor) is not None}


@contextmanager
def in_original_dtype(buffers: Iterable[CastBuffer]) -> Iterator[None]:
    """Context manager that casts the buffers to their original dtypes.

    On exit, the buffers are cast back. Values written inside the context are preserved.
    """
    replaced: list[tuple[CastBuffer, Tensor, Tensor]] = []
    with torch.inference_mode(False), torch.no_grad():  # the tensors are used in training afterwards
        for buffer in buffers:
            cast = buffer.tensor
            if cast is not None and cast.dtype != buffer.dtype:
                original = cast.to(buffer.dtype)
                buffer.replace_in_module(original)
                replaced.append((buffer, cast, original))
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for buffer, cast, original in replaced:
                current = buffer.tensor
                if current is original:  # always copy, because batch norm does not bump the version counter
                    cast.data.copy_(original)
                    buffer.replace_in_module(cast)
                elif current is not None:  # the user has replaced the buffer
                    buffer.replace_in_module(current.to(cast.dtype))


def keep_dtypes_in_state(buffers: Iterable[CastBuffer]) -> None:
    """Register state-dict hooks that cast saved buffers to their original dtype; see [Note: Dtype of saved buffers]."""
    dtypes: dict[nn.Module, dict[str, torch.dtype]] = {}
    for buffer in buffers:
        if (module := buffer.module()) is not None:
            dtypes.setdefault(module, {})[buffer.name] = buffer.dtype
    for module, module_dtypes in dtypes.items():
        hook = partial(_cast_back, module_dtypes)
        module.register_state_dict_post_hook(hook)


def _cast_back(
    dtypes: Mapping[str, torch.dtype], module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for name, dtype in dtypes.items():
        saved = state.get(prefix + name)
        if isinstance(saved, Tensor) and saved is not module._buffers.get(name):  # the same object if keep_vars is True
            state[prefix + name] = saved.to(dtype)
