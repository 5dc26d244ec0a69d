"""Measure whether encoded refreshes are faster than plain ones, for ``refresh_codec="auto"``."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from layerzero.comm.collectives import Collective, Communicator, all_gather, all_gather_small
from layerzero.slow_links.lossless_differences import LosslessDifferences

__all__ = ["RefreshDurations", "measure_refresh"]

_NUMEL = 2**20  # weights that a rank sends and receives in a measurement
_GAIN = 0.7  # encoding occupies the processor, so it must save at least 30% of the time


class RefreshDurations(NamedTuple):
    """Durations of a plain and an encoded refresh, in seconds."""

    plain: float
    encoded: float

    @property
    def prefers_encoding(self) -> bool:
        return self.encoded < _GAIN * self.plain


def measure_refresh(comm: Communicator, codec: LosslessDifferences) -> RefreshDurations:
    """Time a plain and an encoded refresh of random weights. All ranks of the model must call this function together.

    The link and the processors are then as busy as in a step. The encoded messages have about 8 bits per weight, as at
    the beginning of training. Encoding, sending and decoding are assumed not to overlap.

    Args:
        comm: gloo communicator along the replica axis.
    """
    generator = torch.Generator().manual_seed(0)
    numel = max(_NUMEL // max(1, comm.size - 1), 2**16)
    old = torch.randn(numel, generator=generator)
    new = (old + 0.02 * torch.randn(numel, generator=generator)).bfloat16()
    old, last_change = old.bfloat16(), torch.zeros(numel, dtype=torch.int16)
    buffer = torch.empty(comm.size * new.nbytes, dtype=torch.uint8)
    codec.encode(old[:1000], new[:1000], buffer[:2000])  # imports the package
    all_gather_small(comm, Collective.METADATA, torch.zeros(1)).wait()
    began = time.perf_counter()
    all_gather(comm, Collective.METADATA, buffer, new.view(torch.uint8)).wait()
    sent = time.perf_counter()
    encoded = buffer[: codec.encode(old, new, buffer[: new.nbytes], last_change)]
    for _ in range(comm.size - 1):
        codec.decode(encoded, old.clone(), last_change)
    plain_seconds, codec_seconds = sent - began, time.perf_counter() - sent
    return RefreshDurations(plain_seconds, plain_seconds * encoded.numel() / new.nbytes + codec_seconds)
