"""Releases a model's resources: :func:`close`."""

from __future__ import annotations

from torch import nn

from layerzero.comm.agreement import agree
from layerzero.comm.process_groups import kept_for_release, released_everywhere
from layerzero.comm.texts import share_texts
from layerzero.engine.hooks import detach, is_closed, runtime_of
from layerzero.tensors.outside import inside_backward

__all__ = ["close"]


def close(model: nn.Module) -> None:
    """Release what a sharded model has made: process groups, threads, buffers, shared and pinned memory.

    The same happens when the model is garbage collected. Call this to choose the moment, or where something else keeps
    the model alive. A save in the background ends first. All ranks should call this; where collectives run on a device,
    they must, since its communicators end together.

    Afterwards forwards, optimizer steps, checkpoints and all functions that take the model raise RuntimeError. Its
    parameters remain, and ``p.to_local()`` shows this rank's rows; ``p.full_tensor()`` raises where it would need other
    ranks. Closing again does nothing. A mesh that was passed to :func:`shard_model` is not closed.

    Args:
        model: from :func:`shard_model`.

    Raises:
        RuntimeError: a backward is running, or :func:`unsharded` or ``EMA.swapped`` is active.
        TypeError, ValueError: `model` is not a sharded model.

    Example::

        for learning_rate in (1e-4, 3e-4):
            model = layerzero.shard_model(build(), zero3_size=8, units={Block})
            train(model, learning_rate)
            layerzero.close(model)
    """
    if isinstance(model, nn.Module) and is_closed(model):
        return
    runtime = runtime_of(model)
    failure: RuntimeError | None = None
    if inside_backward():
        failure = RuntimeError("layerzero.close was called inside a backward, which needs the model; call it after it")
    elif runtime.views:
        failure = RuntimeError(
            "layerzero.close was called inside layerzero.unsharded or EMA.swapped, which would write back into a model "
            "that is gone; leave the context first"
        )
    if not runtime.topology.zero3_reduce.held.is_local:  # see [Note: Release of groups] in comm/process_groups.py
        agree("close", {}, ranks=runtime.everyone.ranks, failure=failure)
    if failure is not None:
        raise failure
    everyone = runtime.everyone
    detach(model)
    if not runtime.topology.zero3_reduce.held.is_local:
        released_everywhere(share_texts(everyone.control, kept_for_release()), everyone.ranks)
    runtime.close()
