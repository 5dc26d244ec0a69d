"""Compare optimizer settings, such as learning rates, between all ranks without an additional collective.

[Note: Digest of optimizer settings]
Each backward pass that reduces gradients sends one byte per parameter, along one mesh axis after the other. The message
contains sixteen more bytes: a digest of the settings of the optimizers that have stepped, and its complement. The
digests differ if their maximum over all ranks is not the complement of the maximum of the complements. Ranks read the
bytes at the end of the next such backward pass. They then send the maximum over the first axis along the second axis.
The bytes have arrived by then, so ranks do not wait. All ranks compute the same result at the same point in the
program. If the digests differ, the next optimizer step raises. Until then, the ranks take one step per axis, and
possibly one more, with different settings.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.comm.agreement import format_values
from layerzero.comm.model_ranks import LateMaximum, ModelRanks

__all__ = ["DIGEST_BYTES", "HyperparameterCheck"]

DIGEST_BYTES = 16  # one half for the digest, one half for its complement
Settings = list[list[tuple[str, Any]]]  # names and values, by parameter group


class HyperparameterCheck:
    """Comparison of optimizer settings between all ranks; see [Note: Digest of optimizer settings]."""

    def __init__(self, model_ranks: ModelRanks) -> None:
        self._model_ranks = model_ranks
        # Optimizers that have stepped since the last digest. If none has stepped yet, those in the last digest.
        self._stepped: list[weakref.WeakMethod[Callable[[], Settings]]] = []
        self._is_told = False
        self._last: list[Settings] = []  # settings of the last digest
        self._digest = bytes(DIGEST_BYTES)
        axes = len(model_ranks.control_comms)
        self._max_digests = LateMaximum(axes, DIGEST_BYTES)
        self._sent: deque[list[Settings]] = deque(maxlen=max(1, axes))  # settings of the in-flight digests
        self._differ = False
        self._compared: list[Settings] = []  # this rank's settings for the digests that differed

    def note_step(self, settings: Callable[[], Settings]) -> None:
        """Record that an optimizer is stepping.

        Args:
            settings: bound method of the optimizer that returns the settings of the optimizer's parameter groups.
        """
        if self._is_told:
            self._stepped.clear()
            self._is_told = False
        method = weakref.WeakMethod(settings)
        if method not in self._stepped:
            self._stepped.append(method)

    def digests(self) -> list[Tensor]:
        """Return the messages to send next, one for each axis, uint8 [DIGEST_BYTES] each."""
        message = torch.tensor(list(self._digest_now()), dtype=torch.uint8, device="cpu")
        self._sent.append(self._last)
        return self._max_digests.outgoing(message)

    def receive(self, messages: Sequence[Tensor]) -> None:
        """Compare the digests of all ranks and record whether any of them differ.

        Args:
            messages: bytes received along each axis, uint8 [ranks, DIGEST_BYTES].
        """
        largest = self._max_digests.receive(messages).tolist()
        half = DIGEST_BYTES // 2
        differ = any(byte + other > 255 for byte, other in zip(largest[:half], largest[half:], strict=True))
        if not self._differ and differ:
            self._differ, self._compared = True, self._sent[0]

    def _digest_now(self) -> bytes:
        """Return the current digest and its complement.

        Return zeros if no optimizer has stepped, or if an optimizer that has stepped was garbage collected.
        """
        self._is_told = True
        methods = [method() for method in self._stepped]
        if not methods or None in methods:
            self._last, self._digest = [], bytes(DIGEST_BYTES)
            return self._digest
        last = [method() for method in methods if method is not None]
        if last != self._last:
            self._last = last
            digest = hashlib.blake2b(json.dumps(last).encode(), digest_size=DIGEST_BYTES // 2).digest()
            self._digest = digest + bytes(255 - byte for byte in digest)
        return self._digest

    def require_equal(self) -> None:
        """Raise RuntimeError on all ranks if any digests differed.

        All ranks must call this method. The ranks communicate only if digests have differed.
        """
        if not self._differ:
            return
        self._differ = False
        values_by_setting: dict[tuple[int, int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        texts = self._model_ranks.all_gather_text(json.dumps(self._compared))
        for rank, text in zip(self._model_ranks.ranks, texts, strict=True):
            for index, groups in enumerate(json.loads(text)):
                for number, group in enumerate(groups):
                    for name, value in group:
                        values_by_setting[index, number, name][json.dumps(value)].append(rank)
        classes = {key[0]: values for key, values in values_by_setting.items() if key[2] == "class" and len(values) > 1}
        several = len({index for index, _, _ in values_by_setting}) > 1
        lines = [
            f"the class of {f'optimizer {index}' if several else 'the optimizer'} is {format_values(values)}"
            for index, values in classes.items()
        ]
        lines += [
            f"{name!r} of parameter group {number}{f' of optimizer {index}' if several else ''} is "
            + format_values(values)
            for (index, number, name), values in values_by_setting.items()
            if index not in classes
            and name != "class"
            and (len(values) > 1 or sum(map(len, values.values())) < len(texts))
        ]
        suffix = f"; and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise RuntimeError(
            f"the ranks have used different optimizer settings for one model: {'; '.join(lines[:4])}{suffix}. Rows of "
            "one parameter were updated with different settings. Use the same settings on all ranks (average the loss "
            "over the ranks before you pass it to ReduceLROnPlateau), and load the last checkpoint"
        )
