"""Find the ranks whose own gradients were not finite.

[Note: Origin of non-finite gradients]
A check of the final gradients, or of their norm, before each step detects non-finite gradients. By then, the gradients
of all ranks have been summed, so the check cannot identify the rank that produced the non-finite gradients. Therefore
each rank also checks its own gradients before it sends them, and stores the result on the device. This local check
reads the gradients once, does not communicate and does not block the host. Its result is read only after a check of the
final gradients has failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from layerzero.extend import Handle, format_first_names, max_magnitudes, torch_compat


class LocalGradientCheck:
    """Check of this rank's own gradients before they are sent. It records which of them are not finite."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        device = handles[0].mesh_info.device if handles else None
        self._bad = [torch.zeros(len(handle.members), dtype=torch.bool, device=device) for handle in handles]
        for handle, bad in zip(handles, self._bad, strict=True):
            handle.inspector = partial(_mark_nonfinite, bad)

    def stop(self) -> None:
        """Stop checking gradients."""
        for handle in self._handles:
            handle.inspector = None

    def clear_record(self) -> None:
        """Clear the record of non-finite gradients."""
        if self._bad:
            torch_compat.foreach_zero_(self._bad)

    def nonfinite_messages(self, among: Collection[str] | None = None) -> list[str]:
        """Return one message for each handle that has non-finite gradients. It names the affected parameters.

        This method makes the host wait for the device.

        Args:
            among: names of the parameters to report. If None, all parameters are reported.
        """
        messages = []
        for handle, of_handle in zip(self._handles, self._bad, strict=True):
            bad = [handle.members[slot].name for slot, is_bad in enumerate(of_handle.tolist()) if is_bad]
            if names := [name for name in bad if among is None or name in among]:
                messages.append(_format_names(handle, names))
        return messages


def _mark_nonfinite(bad: Tensor, outgoing: Sequence[tuple[int, Tensor]]) -> None:
    """Mark the slots whose outgoing gradients are not finite. The host does not wait.

    Args:
        bad: bool tensor of shape [slots] to update in place.
        outgoing: ``(slot, gradient)`` pairs.
    """
    nonempty = [(slot, gradient) for slot, gradient in outgoing if gradient.numel()]
    if not nonempty:
        return
    largest = max_magnitudes([gradient for _, gradient in nonempty])
    if len(nonempty) < len(bad):
        by_slot = dict(zip((slot for slot, _ in nonempty), largest, strict=True))
        nothing = largest[0].new_zeros(())
        largest = [by_slot.get(slot, nothing) for slot in range(len(bad))]
    bad |= ~torch.isfinite(torch.stack(largest))


def _format_names(handle: Handle, names: list[str]) -> str:
    return f"{format_first_names(names)} ({handle.name})"


def nonfinite_text(own: Sequence[str], final: Iterable[str]) -> str:
    """Return a message about non-finite gradients.

    Args:
        own: texts from all ranks about their own non-finite gradients; empty if all ranks' own gradients were finite.
        final: names of the parameters whose final gradients are not finite.
    """
    if own:
        return "; ".join(own)
    names = format_first_names(list(dict.fromkeys(final)))
    return f"{names}, where every rank's own gradient is finite, but their sum overflowed"
