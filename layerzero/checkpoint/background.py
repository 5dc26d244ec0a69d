"""Save in the background: copies of the state in host memory, and the thread that writes them to files."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from layerzero.checkpoint.rank_tree import FILES, RankTree
from layerzero.extend import (
    LayerZeroState,
    LocalShard,
    StepObserver,
    host_memory,
    local_rows,
    may_wait,
    sharded,
    synchronize_current_stream,
)


class PendingSave:
    """Background save of a checkpoint. Returned by :func:`save_async`.

    Args:
        optimizers: optimizers whose next step emits a warning if the save has failed.
    """

    def __init__(
        self,
        write: Callable[[], None],
        what: str = "layerzero.checkpoint.save_async",
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        self._function_name = what  # name of the function in warnings
        self._error: BaseException | None = None
        self._is_reported = False
        self._hooks = [optimizer.register_step_pre_hook(self.warn_if_failed) for optimizer in optimizers]
        self._thread = threading.Thread(target=self._write_in_thread, args=(write,), name="layerzero checkpoint")
        self._thread.start()

    def _write_in_thread(self, write: Callable[[], None]) -> None:
        may_wait()
        try:
            write()
        except BaseException as error:
            self._error = error
            if not dist.is_initialized():  # no optimizer step or save will report the error
                sys.stderr.write(f"{self._function_name} failed: {error}\n")

    def done(self) -> bool:
        """Return whether the save has completed. If the save failed, :meth:`wait` raises its error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint exists.

        If the save failed, the first call raises the error that :func:`save` would have raised.
        """
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Wait until the save ends.

        Emit a warning if the save failed and neither a warning nor :meth:`wait` has reported the error.
        """
        self._join()
        self.warn_if_failed()

    def _join(self) -> None:
        self._thread.join()
        while self._hooks:
            self._hooks.pop().remove()

    def warn_if_failed(self, *_: object) -> None:
        """Emit one warning if the save has failed and :meth:`wait` has not raised its error."""
        if self._is_reported or not self.done():
            return
        self._is_reported = True
        if self._error is not None:
            message = (
                f"{self._function_name} failed: {self._error}. Training continues, and the next save is not affected."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)


class Staging(StepObserver):
    """Host memory for the background saves of one model. Each save reuses the memory.

    Args:
        device: device of the model.

    Attributes:
        tree: connections of saves, loads and snapshots, or None before the first one; see :func:`rank_tree`.
        tags: unused tags of messages along the tree.
        pending: save that reads this memory, or None after :meth:`finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self.tree: RankTree | None = None
        self.tags = itertools.count(FILES + 1)
        self.pending: PendingSave | None = None
        self._device = device
        self._memory = host_memory(0, torch.uint8, device=device)

    def close(self) -> None:
        """Wait for the background save to end; see :meth:`finish`. Release the connections."""
        self.finish()
        self.tree = None

    def finish(self) -> None:
        """Wait for the background save, if any. Emit a warning if the save failed and its error was not raised."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.settle()

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of `tensors` in host memory. The copies are sharded like the originals.

        The copies are complete when this method returns.
        """
        sources = {key: local_rows(tensor.detach()) for key, tensor in tensors.items()}
        ends = list(itertools.accumulate(_padded_nbytes(source) for source in sources.values()))
        if ends and ends[-1] != self._memory.numel():
            self._memory = host_memory(0, torch.uint8, device=self._device)  # the old memory is freed first
            self._memory = host_memory(ends[-1], torch.uint8, device=self._device)
        copies: dict[str, Tensor] = {}
        for (key, source), end in zip(sources.items(), ends, strict=True):
            start = end - _padded_nbytes(source)
            staged_bytes = self._memory[start : start + source.numel() * source.element_size()]
            copy = staged_bytes.view(source.dtype).view(source.shape)
            copy.copy_(source, non_blocking=True)
            original = tensors[key]
            local = original._local_tensor if isinstance(original, DTensor) else None
            copies[key] = sharded(copy, local.spec) if isinstance(local, LocalShard) else copy
        synchronize_current_stream(self._device)
        return copies


def _padded_nbytes(tensor: Tensor) -> int:
    """Return the size of `tensor` in bytes, padded so that the next tensor is aligned for every dtype."""
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def staging_of(lz_state: LayerZeroState) -> Staging:
    """Return the staging memory of a model. It is created at first use."""
    return lz_state.attached_of(Staging) or lz_state.attach(Staging(lz_state.mesh_info.device))


def rank_tree(lz_state: LayerZeroState) -> RankTree:
    """Return the connections of saves, loads and snapshots. All ranks must call this function.

    The ranks create them at first use, and again if an exchange has failed on any rank. They first exchange whether
    they have them.
    """
    staging = staging_of(lz_state)
    is_usable = staging.tree is not None and not staging.tree.failure
    if "lacks them" in lz_state.ranks.all_gather_text("has them" if is_usable else "lacks them"):
        staging.tree = RankTree("connections for checkpoints", lz_state.ranks)
    assert staging.tree is not None
    return staging.tree


def finish_pending(lz_state: LayerZeroState) -> None:
    """Wait for the background save of a model, if any.

    Emit a warning if the save failed and its error was not raised.
    """
    staging_of(lz_state).finish()
