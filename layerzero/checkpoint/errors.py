"""Define the errors of saves and loads."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(RuntimeError):
    """Error for a checkpoint that is incomplete or damaged, or could not be written. The message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_unprintable(message))


class UnsupportedFormatError(CheckpointError):
    """Error for a checkpoint that this version of layerzero cannot read, although it may be intact."""


class RankLostError(CheckpointError):
    """Error that is raised if a collective fails because a rank has exited or is late."""


class PathTakenError(FileExistsError):
    """Error that is raised if the path of a new checkpoint already exists."""

    @classmethod
    def at(cls, path: Path) -> PathTakenError:
        return cls(f"{path} already exists and is not overwritten. Use another path, or pass overwrite=True.")


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters in `text`, such as terminal control sequences. Newlines are kept."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
