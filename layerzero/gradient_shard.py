"""The final gradient of one handle: its ZeRO-1 gradient shard.

[Note: The gradient shard rests in the accumulator]
Once hop 2 has sent a sharded accumulator, nothing in it matters until the next backward. The final gradient therefore
needs no memory of its own: it rests in this rank's part of the accumulator, which is what ``.grad`` shows.

It must leave before anything else is accumulated there, if it is still wanted (no zero_grad since): it is a mean over
all ranks already, and what comes is a part of a sum. It is set aside in scratch then, grows there, and comes home when
the accumulator has been sent. ``.grad`` always shows the home; it cannot be read while something else is there, which
is during backwards and after one inside no_sync. A loop that zeroes gradients before the next backward, to None, never
moves anything.

Accumulators in the host have no lasting place on the device, and a whole one may be opened to kernels (``main_grad``)
while ``.grad`` is read: beside these, as where there is no accumulator, the gradient shard has memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layerzero.buffers import BufferPool
from layerzero.collectives import PendingSum

__all__ = ["GradientShard"]


class GradientShard:
    """1-D [L], master dtype; a place of its own is allocated by the first use, then kept.

    Args:
        numel: L.
        views: by slot: its elements.
        pool: lends the scratch in which the gradient is set aside.
        resting_place: gives [L] elements of an accumulator, always the same ones; None: it has a place of its own.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        views: Sequence[slice],
        *,
        pool: BufferPool,
        resting_place: Callable[[], Tensor] | None,
    ) -> None:
        self.valid = False  # holds something
        self._numel, self._dtype = numel, dtype
        self._views = views
        self._pool = pool
        self._resting_place = resting_place
        self._own: Tensor | None = None
        self._home_taken = False  # something else is accumulated there
        self._aside: Tensor | None = None  # the gradient, if there is one while its home is taken

    @property
    def rests(self) -> bool:
        """See [Note: The gradient shard rests in the accumulator]."""
        return self._resting_place is not None

    @property
    def nbytes(self) -> int:
        """Of memory of its own."""
        return 0 if self._own is None else self._own.untyped_storage().nbytes()

    def home(self) -> Tensor:
        """Where it is whenever ``.grad`` may be read."""
        if self._resting_place is not None:
            return self._resting_place()
        if self._own is None:
            self._own = torch.zeros(self._numel, dtype=self._dtype, device=self._pool.device)
        return self._own

    def shown(self, slot: int) -> Tensor:
        """This rank's elements of one parameter's gradient, 1-D, at home."""
        return self.home()[self._views[slot]]

    def leave_home(self) -> None:
        """Something else is about to be accumulated there."""
        if not self.rests or self._home_taken:
            return
        if self.valid:
            self._aside = self._pool.take(self._numel, self._dtype).copy_(self.home())
        self._home_taken = True

    def add_sum(self, pending: PendingSum, *, scale: float) -> None:
        """Add the last exchange of a reduction; if it read the home, that is free from here on."""
        target = self.home() if self._aside is None else self._aside
        pending.add_to(target, overwrite=not self.valid, scale=scale)  # waits for the exchange first
        self.valid = True
        if self._aside is not None:
            self.home().copy_(self._aside)
        self._come_home()

    def add_rows(self, slot: int, rows: Tensor, *, overwrite: bool = False) -> None:
        """Add this rank's rows of one parameter, of the master's shape."""
        target = self._now()[self._views[slot]].view(rows.shape)
        if overwrite:
            target.copy_(rows)
        else:
            target.add_(rows)

    def make_valid(self) -> None:
        """Zeros, if it holds nothing."""
        if not self.valid:
            self._now().zero_()
            self.valid = True

    def zero(self, slot: int) -> None:
        """Zeros for one parameter."""
        self._now()[self._views[slot]].zero_()

    def forget(self) -> None:
        """It holds nothing, and nor does the accumulator."""
        self.valid = False
        self._come_home()

    def _now(self) -> Tensor:
        """Where it is, wherever that may be."""
        if not self._home_taken:
            return self.home()
        if self._aside is None:
            self._aside = self._pool.take(self._numel, self._dtype)
        return self._aside

    def _come_home(self) -> None:
        self._home_taken = False
        if self._aside is not None:
            self._pool.give(self._aside)
            self._aside = None
