"""Gradients that are not finite: noticed before they are stepped, on all ranks, and told by rank and parameter.

[Note: Where a NaN is looked for]
The norm that every step needs shows whether anything is wrong, and costs nothing more. By then the ranks' gradients
have been summed, though, and the sum does not tell whose it was. So each rank looks at its own gradients as they are
sent, and keeps the answer on the device: one read of what is sent, no exchange, nothing that the host waits for. It is
read only when a norm has shown that something is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.engine.handle import Handle
from layerzero.megatron.groups import ProcessGroups, tell_all
from layerzero.tensors.sharded import plain

__all__ = ["OwnGradients", "refuse"]

_SHOWN = 3  # names of parameters in a message, of each handle


class OwnGradients:
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

    def bad(self) -> list[str]:
        """Those that were not finite, as a sentence each. The host waits for the device."""
        return [
            _spell(handle, [handle.members[slot].name for slot, bad in enumerate(of_handle.tolist()) if bad])
            for handle, of_handle in zip(self._handles, self._bad, strict=True)
            if of_handle.any()
        ]


def _look(bad: Tensor, outgoing: Sequence[tuple[int, Tensor]]) -> None:
    """Note in `bad` [slots], on the device, which of some gradients, by slot, are not finite."""
    sent = [(slot, gradient) for slot, gradient in outgoing if gradient.numel()]
    if not sent:
        return
    # The largest magnitude: a sum of squares may overflow where every element is finite.
    largest: list[Tensor] = list(torch._foreach_norm([gradient for _, gradient in sent], math.inf))
    if len(sent) < len(bad):
        by_slot = dict(zip((slot for slot, _ in sent), largest, strict=True))
        nothing = largest[0].new_zeros(())
        largest = [by_slot.get(slot, nothing) for slot in range(len(bad))]
    bad |= ~torch.isfinite(torch.stack(largest))


def refuse(chunks: Iterable[Any], groups: ProcessGroups) -> None:
    """Raise on all ranks of the model if a final gradient on any of them is not finite. All ranks must call this."""
    chunks = list(chunks)
    rank = dist.get_rank()
    own = [f"rank {rank}: {text}" for chunk in chunks if chunk.own_gradients for text in chunk.own_gradients.bad()]
    final = []
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None and not torch.isfinite(plain(parameter.grad)).all():
                final.append(name)
    told = tell_all(groups, (own, final))
    if not any(final for _, final in told):
        return
    found = [text for own, _ in told for text in own]
    if not found:
        names = list(dict.fromkeys(name for _, final in told for name in final))
        found = [f"{_names(names)}, where every rank's own gradient is finite: their sum overflowed"]
    raise RuntimeError(
        f"layerzero.megatron: gradients that are not finite, and nothing has been stepped: {'; '.join(found)}. To skip "
        "this batch, call zero_grad_buffer() of all chunks and go on; wrap(check_for_nan_in_grad=False) steps such "
        "gradients"
    )


def _spell(handle: Handle, names: Sequence[str]) -> str:
    return f"{_names(names)} ({handle.name})"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
