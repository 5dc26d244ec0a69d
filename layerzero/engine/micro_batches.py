"""Hint for training loops that reduce gradients in every micro-batch, although one reduction per step is enough.

[Note: Who is told]
Frameworks have their own names for `no_sync`, and some never call it on a model class that they do not know. The
result is correct, but each micro-batch pays for a reduction over the slow link. So rank 0 logs a hint, once. It is a
log message and not a warning, because a correct loop must not fail where warnings are errors. There is no hint after
any backward inside `no_sync`, or if `no_sync` would save nothing. Gradients that are zeroed before a step do not count,
such as those that the loss of a generator gives to a discriminator. Several backwards in the step of a discriminator
count, because all but the last may run inside `no_sync`.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["NoSyncHint"]

_ENOUGH = 2  # consecutive steps; the first may be a warm-up

_LOG = logging.getLogger("layerzero")


class NoSyncHint:
    """Counter of reducing backwards per step, which logs a hint if there are several; see [Note: Who is told]."""

    def __init__(self, *, would_save: bool) -> None:
        self.listens = would_save and dist.get_rank() == 0
        self._backwards = 0  # reducing ones since the last step, or since there was no gradient
        self._steps = 0  # consecutive ones that each followed several backwards

    def note_backward(self, *, reduces: bool, is_first: bool) -> None:
        """Record the start of a backward. `is_first` is True if the model has no gradients yet."""
        self.listens &= reduces
        self._backwards = 1 if is_first else self._backwards + 1

    def note_step(self) -> None:
        if self._backwards:  # zero for a second optimizer of the same model
            self._steps = self._steps + 1 if self._backwards > 1 else 0
        if self.listens and self._steps == _ENOUGH:
            self.listens = False
            _LOG.warning(
                "layerzero: optimizer.step() came after %d backwards, each of which exchanged all gradients; one "
                "exchange a step is enough. Run all but the last inside `with layerzero.no_sync(model):`, or "
                "model.no_sync(), or after model.set_requires_gradient_sync(False); if the last one is not known, run "
                "all of them so: step() reduces what is left. Only if you read .grad between them, leave it as it is",
                self._backwards,
            )
        self._backwards = 0
