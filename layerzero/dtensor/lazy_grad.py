"""Attributes of sharded parameters: as the engine reaches them, and ``.grad`` as users do.

[Note: When .grad is known]
Whether a parameter that this rank has not used has a ``.grad`` is known when the other ranks have told. A backward
starts to ask them and does not wait; who reads, sets or deletes the ``.grad`` of any parameter of the model does. Until
then torch's own memory has those of before the backward at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor

if TYPE_CHECKING:
    from layerzero.dtensor.sharded_tensor import RowShardedTensor

__all__ = ["OF_GRADIENTS", "LazyGrad", "accumulate_hooks", "plain_access", "resolve_first"]

_GRADIENT: Any = Tensor.grad
OF_GRADIENTS = (_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__)  # as __torch_function__ sees them


def plain_access() -> AbstractContextManager[None]:
    """Attributes of sharded parameters without the detour through Python that tensor subclasses take."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard


def accumulate_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """The user's post-accumulate-grad hooks."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


class LazyGrad:
    """What the parameters of a model know of their gradients, without keeping the model.

    Args:
        show: waits for what is due, and shows it; it may be called again where it was interrupted.

    Attributes:
        due: :meth:`settle` is to be called before any ``.grad`` is read or set.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        self.pending = False
        self._show = WeakMethod(show)
        self._lock = threading.RLock()

    def resolve(self) -> None:
        """Have nothing due; whoever else asks meanwhile waits.

        Raises:
            RuntimeError: the model is gone.
        """
        with self._lock:
            if not self.pending:
                return
            if (show := self._show()) is None:
                raise RuntimeError("the sharded model was dropped before its gradients were read; keep it until then")
            with torch.inference_mode(False), torch.no_grad(), plain_access():
                show()
            self.pending = False


def resolve_first(access: Callable[..., Any]) -> Callable[..., Any]:
    """One of OF_GRADIENTS that first waits for what other ranks have to tell; see [Note: When .grad is known]."""

    def wait_for_it(parameter: RowShardedTensor, *value: Tensor | None) -> Any:
        watch = parameter._local_tensor.tracker
        if watch is not None and watch.lazy_grad is not None and watch.lazy_grad.pending:
            watch.lazy_grad.resolve()
        return access(parameter, *value)

    return wait_for_it
