"""Files that are either there, whole, or not there at all: what every other part of a checkpoint relies on.

[Note: When a checkpoint exists]
All files of a checkpoint are written into ``.NAME.TOKEN.partial``, each flushed to the disk. The manifest comes last:
it names every other file with its size and checksums. Only then is the folder renamed to ``NAME``. Whatever dies in
between leaves a name with a leading dot, which nothing here takes for a checkpoint; and a folder without an intact
manifest is none.

[Note: Two jobs at one name]
A job that was started again, or a node that came back, may save to the path that another job saves to. The first rank
draws a random token for each save, and the others get it with their part of the plan: no job ever writes into or
removes what another is writing. rename() decides who gets the name: onto a folder with files in it, it fails, on NFS
too. (An empty folder it would replace, by which nothing is lost.) What is removed is renamed first, so that whoever was
about to rename it fails, and does not make a checkpoint of what is being deleted.

[Note: One for another]
A checkpoint that is to be overwritten changes places with the new one in one step, where the system can do that. Where
it cannot (NFS), the old one goes out of sight first, as ``.NAME.TOKEN.replaced``. If the new one does not get the name
then, the old one gets it back. A process that dies between the two renames leaves nothing at the name: as long as that
is so, the old one is a checkpoint under the name that it has, to be found and not to be removed.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from layerzero.checkpoint.checksums import ByteRange, ChecksumScheme, ChunkHasher, read_pieces
from layerzero.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerzero.checkpoint.safe_json import MANIFEST_BYTES, CheckpointError

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "FileRecord",
    "Manifest",
    "PathTakenError",
    "discard",
    "flush_folder",
    "has_lost_its_name",
    "hide",
    "host_values",
    "is_leftover",
    "make_folder",
    "new_token",
    "partial_of",
    "publish",
    "publish_file",
    "read_back",
    "refuse_to_replace",
    "remove",
    "set_aside",
    "take_name",
    "tensor_bytes",
    "write_file",
]

_PIECE = 1 << 20  # bytes of a tensor that are summed and written while they are in the cache
_AHEAD = 16 << 20  # bytes that are written before the disk is told to begin
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(partial|replaced)", re.DOTALL)
_OURS = re.compile(r"manifest\.json|contents\.json|rank-\d{5,}\.safetensors")  # files of a checkpoint
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux has it


class PathTakenError(FileExistsError):
    """Somebody else has published something at the path of a checkpoint."""

    @classmethod
    def at(cls, path: Path) -> PathTakenError:
        return cls(f"{path} exists already; a checkpoint is never overwritten, unless overwrite=True says so")


def write_file(path: Path, content: Iterable[Any]) -> FileRecord:
    """Write a new file, of objects with a buffer, through to the disk."""
    sums = ChunkHasher(ChecksumScheme.best())
    with open(path, "xb", buffering=0) as file:
        begun = 0
        for piece in content:
            sums.update(piece)
            _write_all(file.fileno(), piece)
            if sums.size - begun >= _AHEAD:
                _begin_flush(file.fileno(), begun, sums.size)
                begun = sums.size
        os.fsync(file.fileno())
    return FileRecord(path.name, sums.size, sums.hexdigest())


def read_back(folder: Path, record: FileRecord) -> None:
    """Compare a file that has been flushed to the disk with what was written, as the disk has it.

    Raises:
        CheckpointError: it is not the same.
    """
    path = folder / record.name
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):  # the memory that the file was written from tells nothing
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        read_pieces(path, record.size, record.sums, ChecksumScheme.best(), [ByteRange(0, record.size, None)])
    except CheckpointError as error:
        raise CheckpointError(f"what has just been written reads back as something else: {error}") from None


def host_values(tensor: Tensor) -> Tensor:
    """The values of a plain tensor, contiguous and on the CPU; the tensor itself if it is so."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def tensor_bytes(tensor: Tensor) -> Iterator[Any]:
    """The memory of a contiguous tensor on the CPU, not copied, in pieces; `tensor` must outlive them."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    for start in range(0, nbytes, _PIECE):
        yield (ctypes.c_char * min(_PIECE, nbytes - start)).from_address(address + start)


def new_token() -> str:
    """Of one save; see [Note: Two jobs at one name]."""
    return secrets.token_hex(8)


def partial_of(path: Path, token: str) -> Path:
    """Where the checkpoint `path` is while the save with this token writes it."""
    return path.with_name(f".{path.name}.{token}.partial")


def is_leftover(path: Path) -> bool:
    """It has the name of something that a save writes or replaces, or that is being removed."""
    return _HIDDEN.fullmatch(path.name) is not None and not has_lost_its_name(path)


def has_lost_its_name(path: Path) -> bool:
    """A checkpoint that was to be replaced, by one that has not come; see [Note: One for another]."""
    match = _HIDDEN.fullmatch(path.name)
    return match is not None and match[2] == "replaced" and not os.path.lexists(path.with_name(match[1]))


def publish(
    partial: Path,
    path: Path,
    records: Iterable[FileRecord],
    *,
    sequence: int,
    token: str,
    finite: bool | None = None,
    overwrite: bool = False,
) -> None:
    """Make a checkpoint of the files in `partial`; see [Note: When a checkpoint exists].

    Args:
        finite: see :class:`Manifest`.
        overwrite: what is at `path` may go, if it is a checkpoint.

    Raises:
        CheckpointError: a file is not there as it was written: ranks do not share the file system.
        PathTakenError: there is something at `path`.
    """
    files = {record.name: record for record in records}
    manifest = Manifest(partial, files, ChecksumScheme.best(), sequence, token, finite)
    try:
        for record in files.values():
            manifest.check_presence(record)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, seen from the first rank: do all ranks share this file system?") from None
    text = manifest.text
    if len(text) > MANIFEST_BYTES:
        raise CheckpointError(f"{path / MANIFEST} would have {len(text):,} bytes, more than {MANIFEST_BYTES:,}")
    write_file(partial / MANIFEST, [text])
    take_name(partial, path, lambda: _is_at(manifest, path), overwrite=overwrite)


def take_name(partial: Path, path: Path, is_there: Callable[[], bool], *, overwrite: bool = False) -> None:
    """Rename a whole checkpoint to `path`, if nobody else has it; see [Note: Two jobs at one name].

    Args:
        is_there: what was in `partial` is now at `path`.
        overwrite: a checkpoint that is at `path` is removed.

    Raises:
        PathTakenError: there is something at `path`.
        CheckpointError: another job has removed the checkpoint at once.
    """
    flush_folder(partial)
    replaced: Path | None = None  # where it is now: at `partial`, if the two have changed places
    with _held(partial) as ours:
        if os.path.lexists(path):
            if not overwrite:
                raise PathTakenError.at(path)
            refuse_to_replace(path)
            replaced = partial if _exchange(partial, path) else hide(path, "replaced")
        try:
            if replaced != partial:
                os.rename(partial, path)
        except OSError:
            if not is_there():  # NFS may report a failure of a rename whose success it had no time to report
                taken = os.path.lexists(path)
                _put_back(replaced, partial, path, ours)
                if taken:
                    raise PathTakenError.at(path) from None
                raise
        else:
            if not is_there():
                _put_back(replaced, partial, path, ours)
                raise CheckpointError(
                    f"{path} does not hold what has just been renamed to it: another job has removed it (keep_last "
                    "counts the checkpoints of all jobs in a folder: give each run a folder of its own), or this file "
                    "system does not rename folders in one step, and cannot hold checkpoints"
                )
    try:
        flush_folder(path.parent)
    except OSError as error:  # the checkpoint exists
        warnings.warn(f"{path.parent} could not be flushed to the disk: {error}", stacklevel=3)
    if replaced is not None:
        remove(replaced)


def refuse_to_replace(path: Path) -> None:
    """Raise PathTakenError unless `path` is a checkpoint, complete or damaged, and nothing more."""
    if path.is_symlink() or not path.is_dir() or not all(_OURS.fullmatch(name) for name in os.listdir(path)):
        raise PathTakenError(f"{path} is there, and is not a checkpoint alone: it is not overwritten")


def _exchange(partial: Path, path: Path) -> bool:
    """Let the two change places in one step; False if that cannot be done here."""
    names = os.fsencode(partial), os.fsencode(path)
    return _renameat2 is not None and not _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)


def _put_back(replaced: Path | None, partial: Path, path: Path, ours: os.stat_result) -> None:
    """Undo what was done for a new checkpoint that is not at `path`, or cannot be read there.

    Args:
        ours: of the new one. What another job has put at `path` stays there.
    """
    with suppress(OSError):  # then the old one is found where it is
        if replaced != partial:
            if replaced is not None and not os.path.lexists(path):
                os.rename(replaced, path)
        elif not (_is_same(path, ours) and _exchange(partial, path)):
            hide(partial, "replaced")  # whoever discards the new one must not meet it


@contextmanager
def _held(folder: Path) -> Iterator[os.stat_result]:
    """What a folder is: as long as it is open, no other one gets its number."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _is_same(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), known)
    except OSError:
        return False


def _is_at(manifest: Manifest, path: Path) -> bool:
    try:
        return replace(Manifest.read(path), folder=manifest.folder) == manifest
    except (CheckpointError, OSError):
        return False


def publish_file(partial: Path, path: Path) -> None:
    """Give a whole file its name. Raises PathTakenError if there is something at `path`."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise PathTakenError(f"{path} exists already") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise PathTakenError(f"{path} exists already") from None
        os.rename(partial, path)
    partial.unlink(missing_ok=True)
    flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, through to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush_folder(folder.parent)


def discard(folder: Path) -> None:
    """Remove a checkpoint, or what is left of one, so that nobody can meet half of it.

    Raises:
        FileNotFoundError: somebody else has removed or published it.
    """
    remove(hide(folder))


def hide(folder: Path, kind: Literal["partial", "replaced"] = "partial") -> Path:
    """Take a checkpoint, or what is left of one, out of everybody's hands; returns where it is now."""
    match = _HIDDEN.fullmatch(folder.name)
    hidden = folder.with_name(f".{match[1] if match else folder.name}.{new_token()}.{kind}")
    os.rename(folder, hidden)
    with suppress(OSError):  # of another user's
        os.utime(hidden)  # whoever looks for what the dead have left sees that somebody is at work
    return hidden


def set_aside(folder: Path) -> Path:
    """Give a damaged checkpoint a name that nothing here looks at or removes; returns it."""
    aside = folder.with_name(f".{folder.name}.{new_token()}.damaged")
    os.rename(folder, aside)
    return aside


def remove(partial: Path) -> None:
    """Remove something that nobody else has a name for."""
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def _write_all(descriptor: int, data: Any) -> int:
    written = os.write(descriptor, data)
    while written < len(data):  # a signal, or a disk that is about to be full
        written += os.write(descriptor, bytes(data)[written:])
    return written


def _begin_flush(descriptor: int, start: int, stop: int) -> None:
    """Let the disk begin with what has been written, while more is; :func:`os.fsync` waits for all of it."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(stop - start), _SYNC_FILE_RANGE_WRITE)


def flush_folder(folder: Path) -> None:
    """Let the names in a folder be on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
