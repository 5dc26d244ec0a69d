"""Notices a loop that reduces in each of its micro-batches, where one reduction a step would do.

[Note: Who is told]
Frameworks have names of their own for what `no_sync` does, and some never call it on a model that they do not know:
the result is right, and each micro-batch pays for the slow link. So it is said, once, by one rank, to the log: a loop
that is right must not fail where warnings are errors. Who has ever run a backward inside `no_sync` knows, and hears
nothing; nor does who would save nothing. Gradients that are zeroed before a step, as those that a generator's loss
gives to a discriminator, do not count. The several backwards of a discriminator's step do: all but the last may run in
`no_sync`.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["NoSyncHint"]

_ENOUGH = 2  # steps in a row; the first may be a warm-up of the user's

_LOG = logging.getLogger("layerzero")


class NoSyncHint:
    """Counts the reducing backwards of each step."""

    def __init__(self, *, would_save: bool) -> None:
        self.listens = would_save and dist.get_rank() == 0
        self._backwards = 0  # that reduced, since the last step or since there was no gradient
        self._steps = 0  # in a row that came after several

    def note_backward(self, *, reduces: bool, is_first: bool) -> None:
        """A backward begins; `is_first` if no gradient is there for it to be added to."""
        self.listens &= reduces
        self._backwards = 1 if is_first else self._backwards + 1

    def note_step(self) -> None:
        if self._backwards:  # else a second optimizer of the same model
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
