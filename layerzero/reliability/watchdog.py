"""Watchdog that logs the collectives of a model that do not complete in time: :func:`watchdog`."""

from __future__ import annotations

from torch import nn

from layerzero import Watchdog
from layerzero.extend import agreed, get_state, new_scope


def watchdog(model: nn.Module, limit: float = 60.0) -> Watchdog:
    """Log a message on every rank if a collective has not completed after `limit` seconds.

    All ranks must call this function.

    The message names the collective, its unit and the step. It also names each missing rank and that rank's last
    collective. The message is logged within 5 s after the limit. The watchdog does not abort collectives. Only the
    timeout of the process group does. While no collective is late, a watchdog sends no requests to the store.

    On a device, :func:`layerzero.shard_model` starts a default watchdog. Its limit is half the timeout of the process
    group, but at most 5 minutes. This function replaces the default watchdog. To run without a watchdog, call
    ``layerzero.watchdog(model).close()``.

    Args:
        model: model that :func:`layerzero.shard_model` returned.
        limit: time in seconds from the launch of a collective until it counts as late. Use a limit that is longer than
            any step or checkpoint takes.

    Returns:
        The watchdog. Call its ``close()`` method to stop it.

    Raises:
        ValueError: `limit` is not positive.
        RuntimeError: a watchdog that an earlier call to this function started is still active.

    Example::

        layerzero.watchdog(model, limit=120)
    """
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit!r}")
    lz_state = get_state(model)
    previous = lz_state.mesh_info.counters.watchdog
    replaced = previous if isinstance(previous, Watchdog) and previous.is_default else None
    ranks = lz_state.ranks.ranks
    scope = new_scope(ranks)
    with agreed("watchdog", {"limit": limit, "watchdogs so far": scope.number}, ranks=ranks):
        if previous is not None and replaced is None:
            raise RuntimeError("the model already has a watchdog. Call close() of that watchdog first")
    if replaced is not None:
        replaced.close()
        lz_state.detach(replaced)
    started = Watchdog(lz_state.mesh_info, scope, limit)
    lz_state.attach(started)
    return started
