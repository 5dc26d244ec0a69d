"""Real text that every machine has: the source files of Python's own standard library, as bytes.

Everything here is a function of its arguments: which files are read, which of them are held out for
validation, and which bytes a rank sees in a step. So a run can be repeated, and two runs that split the same
ranks differently (another `zero3_size`) train on the same batches.
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

# Third-party packages, tests, and tables that no person wrote.
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
VALIDATION_ONE_IN = 10  # files
IGNORED = -100  # target that cross-entropy leaves out


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # uint8 [bytes]
    validation: Tensor  # uint8 [bytes], from files of which no byte is in `train`
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


class Batch(NamedTuple):
    inputs: Tensor  # int64 [batch, length]
    targets: Tensor  # int64 [batch, length], the inputs moved on by one byte


def load_corpus(*, max_bytes: int = 8_000_000, root: str | Path | None = None) -> Corpus:
    """Read at most `max_bytes` of whole files from `root` (default: this Python's standard library)."""
    root = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    train: list[tuple[str, bytes]] = []
    validation: list[tuple[str, bytes]] = []
    left = max_bytes
    # By hash, not by name: the cap then takes a fair sample of the files and not those from a to m.
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
    """Names of the .py files worth reading, relative to `root`, with forward slashes on every system."""
    found: list[str] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_PARTS]  # which may hold more than all others
        paths = (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return found


def is_held_out(name: str) -> bool:
    # A digit of the hash that the order does not depend on, or the first files would all be held out.
    return int(_name_hash(name)[-8:], 16) % VALIDATION_ONE_IN == 0


@dataclass(frozen=True)
class WindowSampler:
    """Gives each (step, micro-batch, rank) windows of its own.

    The windows of an epoch tile the text without overlap and are visited in a shuffled order; within an epoch
    no window is drawn twice, by any rank. They are handed out by one global counter. So the windows of a step
    depend only on how many the step has, ranks x micro_batches x batch_size, and a run on one process can see
    the union of what four ranks saw.
    """

    text: Tensor  # uint8 [bytes]
    seq_len: int
    batch_size: int  # windows a rank and micro-batch
    micro_batches: int
    ranks: int  # data-parallel ranks, however they are split
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
        # A window also needs the byte after it; one more window is given up to the epoch's offset.
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
    windows: Tensor  # int64 [windows an epoch], a permutation
    offset: int  # of the first window; another each epoch, so that the text is cut elsewhere


@functools.lru_cache(maxsize=2)  # a batch may reach over the end of an epoch
def _epoch_order(windows: int, seq_len: int, seed: int) -> EpochOrder:
    generator = torch.Generator().manual_seed(seed)
    offset = int(torch.randint(seq_len, (1,), generator=generator))
    return EpochOrder(torch.randperm(windows, generator=generator), offset)


def cut_windows(text: Tensor, starts: list[int], seq_len: int) -> Batch:
    rows = torch.stack([text[start : start + seq_len + 1] for start in starts]).long()
    return Batch(rows[:, :-1].clone(), rows[:, 1:].clone())  # no memory shared: targets may be masked


def validation_share(
    text: Tensor, *, windows: int, seq_len: int, batch_size: int, rank: int, ranks: int
) -> list[Batch]:
    """This rank's share of `windows` windows, spread evenly over the text.

    Every rank gets the same number of batches of the same shape, since every forward gathers weights from all
    ranks. Where the share does not fill them, targets are `IGNORED`. So the mean over ranks is over the same
    windows whatever the number of ranks.
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
