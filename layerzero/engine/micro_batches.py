"""Log message for training loops that reduce gradients in every micro-batch instead of once per step.

[Note: Conditions of the hint]
Frameworks use different names for `no_sync`, and some do not call `no_sync` on unknown model classes. The result is
correct, but each micro-batch runs a reduction over the slow link. Therefore rank 0 logs a hint once. The hint is a log
message and not a warning, because a correct loop must not fail if warnings are errors. No hint is logged after a
backward inside `no_sync`, or if `no_sync` would not save a collective. Gradients that are zeroed before a step do not
count, for example gradients of a discriminator from the loss of a generator. Several backwards in the step of a
discriminator count, because all but the last may run inside `no_sync`.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["NoSyncHint"]

_ENOUGH = 2  # consecutive steps; the first may be a warm-up

_LOG = logging.getLogger("layerzero")


class NoSyncHint:
    """Counter of reducing backwards per step, which logs a hint if a step has several.

    See [Note: Conditions of the hint].
    """

    def __init__(self, *, would_save: bool) -> None:
        self.listens = would_save and dist.get_rank() == 0
        self._backwards = 0  # reducing backwards since the last step, or since the model had no gradients
        self._steps = 0  # consecutive steps after several backwards each

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
                "layerzero: optimizer.step() followed %d backwards, and each backward reduced all gradients. One "
                "reduction per step is enough. Run all backwards but the last inside `with layerzero.no_sync(model):` "
                "or model.no_sync(), or after model.set_requires_gradient_sync(False). If the last backward is not "
                "known in advance, run all backwards inside no_sync: step() reduces the remaining gradients. Ignore "
                "this message if you read .grad between the backwards",
                self._backwards,
            )
        self._backwards = 0
