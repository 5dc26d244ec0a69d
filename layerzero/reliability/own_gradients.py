"""Whose gradient was not finite.

[Note: Where a NaN is looked for]
The norm that every step needs shows whether anything is wrong, and costs nothing more. By then the ranks' gradients
have been summed, though, and the sum does not tell whose it was. So each rank looks at its own gradients as they are
sent, and keeps the answer on the device: one read of what is sent, no exchange, nothing that the host waits for. It is
read only when a norm has shown that something is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from layerzero.engine.handle import Handle
from layerzero.utils.nonfinite import few_names, magnitudes

__all__ = ["LocalGradientCheck", "whose"]


class LocalGradientCheck:
    """Which gradients of this rank were not finite when they were sent."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        device = handles[0].topology.device if handles else None
        self._bad = [torch.zeros(len(handle.members), dtype=torch.bool, device=device) for handle in handles]
        for handle, bad in zip(handles, self._bad, strict=True):
            handle.inspect = partial(_look, bad)

    def stop(self) -> None:
        """Look at nothing from here on."""
        for handle in self._handles:
            handle.inspect = None

    def forget(self) -> None:
        """The gradients so far will not be stepped."""
        if self._bad:
            torch._foreach_zero_(self._bad)

    def bad(self, among: Collection[str] | None = None) -> list[str]:
        """Those that were not finite, of the parameters `among`, by handle. The host waits for the device."""
        found = []
        for handle, of_handle in zip(self._handles, self._bad, strict=True):
            bad = [handle.members[slot].name for slot, is_bad in enumerate(of_handle.tolist()) if is_bad]
            if names := [name for name in bad if among is None or name in among]:
                found.append(_spell(handle, names))
        return found


def _look(bad: Tensor, outgoing: Sequence[tuple[int, Tensor]]) -> None:
    """Note in `bad` [slots], on the device, which of some gradients, by slot, are not finite."""
    sent = [(slot, gradient) for slot, gradient in outgoing if gradient.numel()]
    if not sent:
        return
    largest = magnitudes([gradient for _, gradient in sent])
    if len(sent) < len(bad):
        by_slot = dict(zip((slot for slot, _ in sent), largest, strict=True))
        nothing = largest[0].new_zeros(())
        largest = [by_slot.get(slot, nothing) for slot in range(len(bad))]
    bad |= ~torch.isfinite(torch.stack(largest))


def _spell(handle: Handle, names: list[str]) -> str:
    return f"{few_names(names)} ({handle.name})"


def whose(own: Sequence[str], final: Iterable[str]) -> str:
    """What to say of gradients that are not finite.

    Args:
        own: of all ranks: whose own gradients were not, a sentence each.
        final: names of the parameters whose final gradients are not.
    """
    if own:
        return "; ".join(own)
    names = few_names(list(dict.fromkeys(final)))
    return f"{names}, where every rank's own gradient is finite: their sum overflowed"
