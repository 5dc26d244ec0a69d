"""Training text from the source files of Python's standard library, as bytes.

The selected files, the validation files, and the bytes of each rank and step depend only on the arguments.
Runs are therefore reproducible, and two runs with the same ranks but another `zero3_size` train on the same
batches.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Third-party packages, tests, and generated tables.
SKIPPED_PARTS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "lib2to3",
    "turtledemo",
    "pydoc_data",
    "encodings",
    "ensurepip",
    "__pycache__",
}
VALIDATION_ONE_IN = 10  # one file out of this many is a validation file
IGNORED = -100  # target that cross-entropy ignores


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # uint8 [bytes]
    validation: Tensor  # uint8 [bytes], from other files than `train`
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


class Batch(NamedTuple):
    inputs: Tensor  # int64 [batch, length]
    targets: Tensor  # int64 [batch, length], the inputs shifted by one byte


def load_corpus(*, max_bytes: int = 8_000_000, root: str | Path | None = None) -> Corpus:
    """Read complete files of at most `max_bytes` in total from `root` (default: this Python's standard library)."""
    root = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    train: list[tuple[str, bytes]] = []
    validation: list[tuple[str, bytes]] = []
    left = max_bytes
    # Sort by hash, not by name, so that `max_bytes` selects a fair sample of the files.
    for name in sorted(source_files(root), key=_name_hash):
        text = (root / name).read_bytes()
        if len(text) > left:
            break
        left -= len(text)
        (validation if is_held_out(name) else train).append((name, text))
    if not train or not validation:
        raise ValueError(f"found too few .py files under {root} to train on; give a folder with source text")
    return Corpus(
        train=_joined(train),
        validation=_joined(validation),
        train_files=tuple(name for name, _ in train),
        validation_files=tuple(name for name, _ in validation),
    )


def source_files(root: Path) -> list[str]:
    """Return the names of the .py files to read, relative to `root`, with forward slashes on every system."""
    found: list[str] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_PARTS]  # these folders may be large
        paths = (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return found


def is_held_out(name: str) -> bool:
    # Use digits of the hash that do not affect the order. Otherwise all of the first files would be held out.
    return int(_name_hash(name)[-8:], 16) % VALIDATION_ONE_IN == 0


@dataclass(frozen=True)
class WindowSampler:
    """Sampler with different windows for each (step, micro-batch, rank).

    The windows of an epoch tile the text without overlap, in shuffled order. No rank draws a window twice in an
    epoch. One global counter assigns the windows. The windows of a step therefore depend only on their number,
    ranks x micro_batches x batch_size, and one process can train on the union of the windows of four ranks.
    """

    text: Tensor  # uint8 [bytes]
    seq_len: int
    batch_size: int  # windows per rank and micro-batch
    micro_batches: int
    ranks: int  # data-parallel ranks, for any zero3_size
    seed: int = 0

    def __post_init__(self) -> None:
        if self.windows_per_epoch < self.windows_per_step:
            raise ValueError(
                f"one step needs {self.windows_per_step} windows of {self.seq_len} bytes, the text has "
                f"{self.windows_per_epoch}; use a smaller batch, shorter sequences or more text"
            )

    @property
    def windows_per_step(self) -> int:
        return self.ranks * self.micro_batches * self.batch_size

    @property
    def windows_per_epoch(self) -> int:
        # A window also needs the byte after it. The offset of the epoch costs one more window.
        return (len(self.text) - 1) // self.seq_len - 1

    def batch(self, *, step: int, micro_batch: int, rank: int) -> Batch:
        first = step * self.windows_per_step + (micro_batch * self.ranks + rank) * self.batch_size
        counters = range(first, first + self.batch_size)
        return cut_windows(self.text, [self._start(counter) for counter in counters], self.seq_len)

    def _start(self, counter: int) -> int:
        epoch, index = divmod(counter, self.windows_per_epoch)
        order = _epoch_order(self.windows_per_epoch, self.seq_len, self.seed * 1_000_003 + epoch)
        return order.offset + int(order.windows[index]) * self.seq_len


class EpochOrder(NamedTuple):
    windows: Tensor  # int64 [windows per epoch], a permutation
    offset: int  # offset of the first window, which differs between epochs


@functools.lru_cache(maxsize=2)  # a batch may contain windows of two epochs
def _epoch_order(windows: int, seq_len: int, seed: int) -> EpochOrder:
    generator = torch.Generator().manual_seed(seed)
    offset = int(torch.randint(seq_len, (1,), generator=generator))
    return EpochOrder(torch.randperm(windows, generator=generator), offset)


def cut_windows(text: Tensor, starts: list[int], seq_len: int) -> Batch:
    rows = torch.stack([text[start : start + seq_len + 1] for start in starts]).long()
    return Batch(rows[:, :-1].clone(), rows[:, 1:].clone())  # separate memory, because targets may be masked


def validation_share(
    text: Tensor, *, windows: int, seq_len: int, batch_size: int, rank: int, ranks: int
) -> list[Batch]:
    """Return this rank's batches of `windows` validation windows, spread evenly over the text.

    All ranks get the same number of batches of the same shape, because every forward gathers weights from all
    ranks. Surplus targets are `IGNORED`. The mean over ranks therefore uses the same windows for any number of ranks.
    """
    room = len(text) - seq_len - 1
    if room < 0:
        raise ValueError(f"the validation text has {len(text)} bytes, fewer than seq_len={seq_len} + 1")
    mine = [room * index // max(windows - 1, 1) for index in range(rank, windows, ranks)]
    largest_share = -(-windows // ranks)
    batches = []
    for first in range(0, largest_share, batch_size):
        starts = mine[first : first + batch_size]
        missing = batch_size - len(starts)
        batch = cut_windows(text, starts + [0] * missing, seq_len)
        batch.targets[len(starts) :] = IGNORED
        batches.append(batch)
    return batches


def _name_hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _joined(files: list[tuple[str, bytes]]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(text for _, text in files)), dtype=torch.uint8)
