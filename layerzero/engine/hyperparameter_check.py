"""Compare optimizer settings and numbers of steps between all ranks without an additional collective.

[Note: Digest of optimizer settings]
Each backward pass that reduces gradients sends one byte per parameter, along one mesh axis after the other. The message
contains sixteen more bytes: a digest of the settings of the optimizers that have stepped, of the divisors that
:func:`set_gradient_divide_factor` has set and of the number of steps, and its complement. The digests differ if their
maximum over all ranks is not the complement of the maximum of the complements. Ranks read the bytes at the end of the
next such backward pass. They then send the maximum over the first axis along the second axis. The bytes have arrived by
then, so ranks do not wait. All ranks compute the same result in the same backward pass. If the digests differ, this
pass sends the settings. If the settings differ, the next optimizer step raises. Until then, the ranks take one step per
axis, and possibly one more, with different settings. If the numbers of steps differ, the ranks do not step at the same
point of the program, so the backward pass raises.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.comm.agreement import format_values
from layerzero.comm.model_ranks import DelayedRankMaximum, ModelRanks
from layerzero.comm.observers import StepObserver

DIGEST_BYTES = 16  # one half for the digest, one half for its complement
_DIVISOR = "gradient_divide_factor of unit "  # begins the names of divisors
Settings = list[list[tuple[str, Any]]]  # names and values, by parameter group


class HyperparameterCheck(StepObserver):
    """Comparison of optimizer settings between all ranks; see [Note: Digest of optimizer settings]."""

    hears_collectives = False

    def __init__(self, model_ranks: ModelRanks) -> None:
        self._model_ranks = model_ranks
        # Optimizers that have stepped since the last digest. If none has stepped yet, those in the last digest.
        self._stepped: list[weakref.ref[Any]] = []
        self._digested = False
        self._last: list[Settings] = []  # settings of the last digest
        self._last_digest = b""  # digest of `_last`
        self._divisors: dict[str, float] = {}  # divisors of gradients that were set, by name of the unit
        self._steps = 0  # number of steps of all optimizers
        axes = len(model_ranks.control_comms)
        self._max_digests = DelayedRankMaximum(axes, DIGEST_BYTES)
        # Settings and numbers of steps of the in-flight digests.
        self._sent: deque[tuple[list[Settings], int]] = deque(maxlen=max(1, axes))
        self._difference = ""  # message of the error that the next step raises

    def after_update(self, optimizer: Any) -> None:
        """Record that an optimizer has stepped. Its method `comparable_settings` returns :data:`Settings`."""
        if self._digested:
            self._stepped.clear()
            self._digested = False
        self._steps += 1
        if not any(stepped() is optimizer for stepped in self._stepped):
            self._stepped.append(weakref.ref(optimizer))

    def note_divisors(self, divisors: Mapping[str, float]) -> None:
        """Record divisors of gradients, by name of the unit."""
        self._divisors |= divisors

    def digests(self) -> list[Tensor]:
        """Return the messages to send next, one for each axis, uint8 [DIGEST_BYTES] each."""
        message = torch.tensor(list(self._digest_now()), dtype=torch.uint8, device="cpu")
        self._sent.append((self._last, self._steps))
        return self._max_digests.outgoing(message)

    def receive(self, messages: Sequence[Tensor]) -> None:
        """Compare the digests of all ranks. If digests differ, all ranks send their settings.

        Args:
            messages: bytes received along each axis, uint8 [ranks, DIGEST_BYTES].

        Raises:
            RuntimeError: the ranks have taken different numbers of steps. All ranks raise the error.
        """
        largest = self._max_digests.receive(messages).tolist()
        half = DIGEST_BYTES // 2
        differ = any(byte + other > 255 for byte, other in zip(largest[:half], largest[half:], strict=True))
        if differ and not self._difference:
            self._compare()

    def _digest_now(self) -> bytes:
        """Return the current digest and its complement.

        Return zeros if no optimizer has stepped, or if an optimizer that has stepped was garbage collected.
        """
        self._digested = True
        optimizers = [stepped() for stepped in self._stepped]
        if not optimizers or any(optimizer is None for optimizer in optimizers):
            self._last = []
            return bytes(DIGEST_BYTES)
        last: list[Settings] = [optimizer.comparable_settings() for optimizer in optimizers if optimizer is not None]
        if self._divisors:
            last.append([[(f"{_DIVISOR}{name!r}", value) for name, value in sorted(self._divisors.items())]])
        if last != self._last:
            self._last, self._last_digest = last, hashlib.blake2b(json.dumps(last).encode()).digest()
        text = self._last_digest + self._steps.to_bytes(8, "big")
        digest = hashlib.blake2b(text, digest_size=DIGEST_BYTES // 2).digest()
        return digest + bytes(255 - byte for byte in digest)

    def gradients_final(self, optimizer: Any) -> None:
        """Raise RuntimeError on all ranks if the settings in a digest differed. The ranks do not communicate."""
        if difference := self._difference:
            self._difference = ""
            raise RuntimeError(difference)

    def _compare(self) -> None:
        """Send the settings of the digests that differed. Set the error of the next step, or raise an error."""
        texts = self._model_ranks.all_gather_text(json.dumps(self._sent[0]))
        told = dict(zip(self._model_ranks.ranks, map(json.loads, texts), strict=True))
        ranks_by_steps: dict[str, list[int]] = defaultdict(list)
        for rank, (_, steps) in told.items():
            ranks_by_steps[str(steps)].append(rank)
        same_optimizers = len({len(optimizers) for optimizers, _ in told.values()}) == 1
        if same_optimizers and len(ranks_by_steps) > 1:
            raise RuntimeError(
                "the ranks of one model have taken different numbers of optimizer steps before the same backward: "
                f"{format_values(ranks_by_steps)}. A rank with fewer backward passes before a step (one batch fewer) "
                "updates its rows while other ranks still compute with the old weights. Run the same number of "
                "backward passes before each step on all ranks, and load the last checkpoint"
            )
        settings = _describe_settings({rank: optimizers for rank, (optimizers, _) in told.items()})
        self._difference = (
            f"the ranks have used different optimizer settings for one model: {settings}. Rows of one parameter were "
            "updated with different settings. Use the same settings on all ranks (average the loss over the ranks "
            "before you pass it to ReduceLROnPlateau), and load the last checkpoint"
        )


def _describe_settings(optimizers_by_rank: Mapping[int, list[Settings]]) -> str:
    """Return a phrase with the settings that differ between ranks, and their values."""
    settings = _ranks_by_value(optimizers_by_rank)
    several = len({index for index, _, name in settings if not name.startswith(_DIVISOR)}) > 1
    classes = {key[0]: values for key, values in settings.items() if key[2] == "class" and len(values) > 1}
    lines = [
        f"the class of {f'optimizer {index}' if several else 'the optimizer'} is {format_values(values)}"
        for index, values in classes.items()
    ]
    for (index, number, name), values in settings.items():
        differ = len(values) > 1 or sum(map(len, values.values())) < len(optimizers_by_rank)
        if differ and index not in classes and name != "class":
            optimizer = f" of optimizer {index}" if several else ""
            label = name if name.startswith(_DIVISOR) else f"{name!r} of parameter group {number}{optimizer}"
            lines.append(f"{label} is {format_values(values)}")
    return "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")


def _ranks_by_value(
    optimizers_by_rank: Mapping[int, list[Settings]],
) -> dict[tuple[int, int, str], dict[str, list[int]]]:
    """Return the ranks by value of each setting. Keys are the index of the optimizer, of the group, and the name."""
    settings: dict[tuple[int, int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, optimizers in optimizers_by_rank.items():
        for index, groups in enumerate(optimizers):
            for number, group in enumerate(groups):
                for name, value in group:
                    settings[index, number, name][json.dumps(value)].append(rank)
    return settings
