"""Control access to attributes of sharded parameters, and make ``.grad`` wait for other ranks.

[Note: Lazy .grad]
If any rank has used a parameter, the parameter has a ``.grad`` on all ranks. During a backward pass, each rank asks the
other ranks which parameters they have used, but does not wait for the answers. Code that reads, sets or deletes the
``.grad`` of any parameter of the model waits for the answers. Until then, the ``.grad`` that torch stores is either
None or has the values from before the backward pass. After a failed backward pass, such code recovers from it first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from layerzero.utils.torch_compat import DisableTorchFunctionSubclass

_GRADIENT: Any = Tensor.grad
GRAD_ACCESSORS = (_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__)  # as passed to __torch_function__


def plain_access() -> AbstractContextManager[None]:
    """Return a context in which attribute access on sharded parameters bypasses ``__torch_function__``."""
    guard: AbstractContextManager[None] = DisableTorchFunctionSubclass()
    return guard


def post_accumulate_grad_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the post-accumulate-grad hooks of `parameter`."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*hooks.values()] if hooks else []


class LazyGrad:
    """Pending ``.grad`` values for one model's parameters. The object holds no strong reference to the model.

    Attributes:
        pending: True if :meth:`resolve` must be called before any ``.grad`` is read or set.
        show: weak reference to the method that waits for the pending gradients and sets ``.grad``. The method is called
            again if it is interrupted.
    """

    def __init__(self) -> None:
        self.pending = False
        self.show: Callable[[], Callable[[], None] | None] = lambda: None
        self._lock = threading.RLock()

    def resolve(self) -> None:
        """Wait for pending gradients and set ``.grad``. Other threads that call this method in the meantime also wait.

        Raises:
            RuntimeError: the model has been deleted.
        """
        with self._lock:
            if not self.pending:
                return
            if (show := self.show()) is None:
                raise RuntimeError(
                    "the sharded model was deleted before its gradients were read. Keep a reference to the model until "
                    "then"
                )
            with torch.inference_mode(False), torch.no_grad(), plain_access():
                show()
            self.pending = False


def resolve_first(access: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `access`, one of GRAD_ACCESSORS, so that it first resolves pending gradients; see [Note: Lazy .grad]."""

    def resolve_and_access(parameter: Any, *value: Tensor | None) -> Any:
        lazy_grad = parameter._local_tensor.tracker.lazy_grad
        if lazy_grad is not None and lazy_grad.pending:
            lazy_grad.resolve()
        return access(parameter, *value)

    return resolve_and_access
