"""Describe `no_sync`, and log a hint if a training loop reduces gradients in every micro-batch.

[Note: no_sync]
`no_sync` (sharding/module_methods.py) sets ``Scheduler.requires_gradient_sync`` to False. A backward pass that starts
then runs only the accumulating stages of each handle's :class:`ReductionSpec`: none with accumulation "full", hop 1
with "sharded", and all stages with "local". The next backward pass outside `no_sync`, or otherwise the step of the
optimizer, runs the remaining stages once, on the accumulated gradients.

[Note: Conditions of the hint]
Frameworks use different names for `no_sync`, and some do not call `no_sync` on unknown model classes. The results are
correct, but each micro-batch runs a reduction over the slow link. Therefore the first rank of the model logs a hint
once. The hint is a log message and not a warning, because a correct loop must not fail if warnings are errors. No hint
is logged after a backward pass inside `no_sync`, or if `no_sync` would not save a collective. A backward pass does not
count if its gradients are zeroed before the next step. In a GAN, for example, the generator's loss also produces
gradients for the discriminator, and the loop zeroes them. Several backward passes before one step of the discriminator
do count, because all but the last may run inside `no_sync`.
"""

from __future__ import annotations

import logging

_ENOUGH = 2  # number of consecutive steps after which the hint is logged; the first may be a warm-up

_LOG = logging.getLogger("layerzero")


class NoSyncHint:
    """Counter of the backward passes before each optimizer step, which logs a hint to use `no_sync`.

    The hint is logged after two consecutive steps that each followed several backward passes. See [Note: Conditions of
    the hint].

    Args:
        listens: True if this rank may log the hint.
    """

    def __init__(self, *, listens: bool) -> None:
        self.listens = listens
        self._backwards = 0  # number of backward passes since the last step, or since the model had no gradients
        self._steps = 0  # number of consecutive steps that each followed several backward passes

    def note_backward(self, *, reduces: bool, is_first: bool) -> None:
        """Record the start of a backward pass.

        Args:
            reduces: True if the pass runs outside no_sync.
            is_first: True if the model has no gradients yet.
        """
        self.listens &= reduces
        self._backwards = 1 if is_first else self._backwards + 1

    def note_step(self) -> None:
        if self._backwards:  # 0 in the step of a second optimizer of the same model
            self._steps = self._steps + 1 if self._backwards > 1 else 0
        if self.listens and self._steps == _ENOUGH:
            self.listens = False
            _LOG.warning(
                "layerzero: optimizer.step() followed %d backward passes, and each of them reduced all gradients. One "
                "reduction per step is enough. Run all but the last pass inside `with layerzero.no_sync(model):` or "
                "model.no_sync(), or after model.set_requires_gradient_sync(False). If the last pass is not known in "
                "advance, run all of them inside no_sync: step() reduces the remaining gradients. Ignore this message "
                "if you read .grad between the passes",
                self._backwards,
            )
        self._backwards = 0
