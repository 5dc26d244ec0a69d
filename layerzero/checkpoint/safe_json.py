"""Read untrusted files: limit their size and number of values, and escape their text in messages.

[Note: Limits on JSON]
A parsed value uses up to a hundred bytes, regardless of the length of its text. For example, 60 MB of empty lists use
gigabytes of memory when parsed, and traversing the lists takes a minute. Therefore JSON is rejected if its text is too
large or may contain too many values. Both conditions are checked before parsing. layerzero writes no file that it would
refuse to read. ``contents.json`` has more than four bytes per value, regardless of the tensor shapes. In addition,
lists in ``extra`` may contain two million values. Store longer lists as tensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = [
    "CONTENTS_BYTES",
    "MANIFEST_BYTES",
    "CheckpointError",
    "check_json",
    "escape_unprintable",
    "parse",
    "read_capped",
]

MANIFEST_BYTES = 64 << 20  # enough for 400,000 files
CONTENTS_BYTES = 512 << 20  # enough for 100 units of a model with AdamW on 20,000 ranks
_FREE_VALUES = 2_000_000
_BYTES_A_VALUE = 4


class CheckpointError(RuntimeError):
    """Error for a checkpoint that is incomplete or damaged, or could not be written. The message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_unprintable(message))


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters in `text`, such as terminal control sequences. Newlines are kept."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def read_capped(path: Path, most: int) -> bytes:
    """Return the contents of a file that has at most `most` bytes.

    Raises:
        CheckpointError: the file is larger than `most` bytes.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            return file.read(most)
    raise CheckpointError(f"{path} has {size:,} bytes, but layerzero reads at most {most:,} bytes of this kind of file")


def check_json(path: Path, text: bytes) -> None:
    """Raise CheckpointError if `text`, from the file at `path`, has more values than layerzero parses.

    See [Note: Limits on JSON].
    """
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    most = _FREE_VALUES + len(text) // _BYTES_A_VALUE
    if values > most:
        raise CheckpointError(
            f"{path} has {values:,} values in {len(text):,} bytes, but layerzero reads at most {most:,} values from a "
            "file of this size. Store long lists of numbers as tensors"
        )


def parse(path: Path, text: bytes) -> Any:
    """Parse the JSON `text` of the file at `path`.

    Raises:
        CheckpointError: `text` has more values than layerzero parses.
        ValueError: `text` is not valid JSON.
        RecursionError: the values are nested too deeply.
    """
    check_json(path, text)
    return json.loads(text)
