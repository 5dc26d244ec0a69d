"""Support for megatron-core without a GPU: calls to CUDA for devices, memory or random states go to the CPU.

Only tests and the example use this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support import emerging_optimizers_stand_in


@contextlib.contextmanager
def cpu_instead_of_cuda() -> Iterator[None]:
    """Redirect Megatron's calls from CUDA to the CPU inside the context; restore torch at the end."""
    with contextlib.ExitStack() as stack:

        def put(target: Any, name: str, value: Any, **how: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value, **how))

        for name in ("zeros", "ones", "tensor", "empty", "full"):
            put(torch, name, _on_cpu(getattr(torch, name)))
        put(torch.Tensor, "cuda", lambda self, *_, **__: self)
        put(torch.Tensor, "type", _cuda_type(torch.Tensor.type))
        put(torch.cuda, "current_device", lambda: torch.device("cpu"))
        put(torch.cuda, "synchronize", lambda *_: None)
        stream = _Stream()
        put(torch.cuda, "Stream", lambda *_, **__: stream)
        put(torch.cuda, "current_stream", lambda *_: stream)
        put(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        put(torch.cuda.nvtx, "range_push", lambda *_: None)
        put(torch.cuda.nvtx, "range_pop", lambda *_: None)
        stack.enter_context(mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"))
        stack.enter_context(warnings.catch_warnings())
        random, moe_utils, token_dispatcher = _import_megatron()
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # each small function would compile for seconds
        # There is no dropout whose random state must be tracked, and weights are initialized on the CPU.
        put(random.CudaRNGStatesTracker, "fork", lambda self, name=None: contextlib.nullcontext())
        put(random, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(1, dtype=torch.uint8))
        put(random, "_set_cuda_rng_state", lambda *_, **__: None)
        # Megatron reads this name also without Transformer Engine, but does not define it then.
        put(moe_utils, "te_general_gemm", None, create=True)
        # Megatron converts to NumPy here, for the split sizes of collectives.
        put(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host)
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        # Warnings about the way Megatron-Core 0.19 calls torch.distributed.checkpoint.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable", UserWarning)
        warnings.filterwarnings("ignore", "The argument order of load has been changed", UserWarning)
        yield


def _import_megatron() -> tuple[Any, Any, Any]:
    """Import Megatron without torch.compile, which it calls at import; importing torch's compiler takes seconds."""
    with warnings.catch_warnings(), mock.patch.object(torch, "compile", _as_it_is):
        warnings.simplefilter("ignore")  # missing optional packages of Megatron, deprecations of torch
        emerging_optimizers_stand_in.install()
        import megatron.core.optimizer  # noqa: PLC0415, F401
        from megatron.core.tensor_parallel import random  # noqa: PLC0415
        from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: PLC0415
    return random, moe_utils, token_dispatcher


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Replace ``torch.compile``, as a decorator with and without arguments."""
    return _as_it_is if function is None else function


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


class _Stream:
    """Single stream on which everything runs in order; it is also its own event."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass


def _cuda_type(plain_type: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain_type)
    def named(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return named
