"""Release a model's resources, with :func:`close`."""

from __future__ import annotations

from torch import nn

from layerzero.comm.agreement import agreed
from layerzero.comm.process_groups import drop_released_groups
from layerzero.engine.call_context import in_backward
from layerzero.engine.hooks import close_hooks, get_state, is_closed


def close(model: nn.Module) -> None:
    """Release the process groups, threads, buffers, shared memory and pinned memory of a sharded model.

    These resources are also released when the model is garbage collected, and its process groups at the next
    :func:`shard_model` or ``close``. Call this function to control when they are released, or if a reference keeps the
    model alive. The function waits for a background save to finish. All ranks
    should call this function. If collectives run on a device, all ranks must call it, because ranks destroy the
    communicators together.

    After the call, forward passes, optimizer steps, checkpoints and all functions that accept the model raise
    RuntimeError. ``p.to_local()`` still returns this rank's rows of a parameter. ``p.full_tensor()`` raises an error if
    it needs other ranks. A second call has no effect. A mesh that was passed to :func:`shard_model` is not destroyed.

    Args:
        model: a model that :func:`shard_model` has returned.

    Raises:
        RuntimeError: a backward pass is running, or one of the contexts :func:`gathered`, :func:`unsharded`,
            :func:`full_precision` and ``EMA.swapped`` is active.
        TypeError, ValueError: `model` is not a sharded model.

    Example::

        for learning_rate in (1e-4, 3e-4):
            model = layerzero.shard_model(build(), zero3_size=8, units={Block})
            train(model, learning_rate)
            layerzero.close(model)
    """
    if isinstance(model, nn.Module) and is_closed(model):
        return
    lz_state = get_state(model)
    lz_state.refreshes.require_no_active_use("layerzero.close")
    model_ranks = lz_state.ranks
    # See [Note: Release of groups] in comm/process_groups.py.
    closes_together = not lz_state.mesh_info.zero3_reduce_comm.held_group.is_local
    with agreed("close", {}, ranks=model_ranks.ranks if closes_together else ()):
        if in_backward():
            raise RuntimeError(
                "layerzero.close was called during a backward, which needs the model. Call it after the backward"
            )
        lz_state.status.refuse_inside(what="layerzero.close", why="which restores the model when the context exits")
    close_hooks(model)
    if closes_together:
        drop_released_groups(model_ranks.all_gather_text, model_ranks.ranks)
    lz_state.close()
