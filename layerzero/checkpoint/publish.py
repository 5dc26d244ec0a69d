"""Publish checkpoint folders and files atomically, and write files durably.

[Note: Atomic publication]
All files of a checkpoint are written into ``.NAME.TOKEN.partial`` and flushed to disk. The manifest is written last.
It lists every other file with its size and checksums. The folder is then renamed to ``NAME``. If a process dies before
the rename, it leaves a folder whose name starts with a dot. Such a folder is never read as a checkpoint, and neither is
a folder without an intact manifest.

[Note: Concurrent saves to one path]
A restarted job, or a node that rejoins, may save to a path that another job is saving to. The first rank draws a random
token for each save and sends the token to the other ranks with the global plan. Therefore no job writes into or removes
a folder that another job is writing. rename() decides which job gets the name: it fails if the target is a folder that
contains files, even on NFS. (An empty target folder is replaced, but then no data is lost.) A folder is renamed before
it is removed. A job that tries to publish this folder then fails, instead of publishing a folder that is being deleted.

[Note: Replacement of a checkpoint]
If the file system can exchange two paths, a single rename swaps the old checkpoint with the new one. Otherwise, as on
NFS, the old checkpoint is first renamed to ``.NAME.TOKEN.replaced``. If publishing the new checkpoint then fails, the
old checkpoint is renamed back. If a process dies between the two renames, ``NAME`` does not exist. While that name is
free, the ``.replaced`` folder counts as a checkpoint. Loads find this folder, and other jobs do not remove it.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from layerzero.checkpoint.checksums import ByteRange, ChecksumScheme, ChunkHasher, FileRecord, read_pieces
from layerzero.checkpoint.errors import CheckpointError, PathTakenError
from layerzero.checkpoint.manifest import MANIFEST, Manifest

_PIECE = 1 << 20  # size in bytes of the pieces that are hashed and written while they are in the cache
_AHEAD = 16 << 20  # number of bytes that are written before flushing them to disk starts
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(partial|replaced)", re.DOTALL)
_OURS = re.compile(r"manifest\.json|contents\.json|rank-\d{5,}\.safetensors")  # names of the files in a checkpoint
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux only


def write_file(path: Path, content: Iterable[Any]) -> FileRecord:
    """Write the buffers in `content` to a new file, fsync it, and return its size and checksums."""
    hasher = ChunkHasher(ChecksumScheme.best())
    with open(path, "xb", buffering=0) as file:
        flush_start = 0
        for buffer in content:
            hasher.update(buffer)
            _write_all(file.fileno(), buffer)
            if hasher.size - flush_start >= _AHEAD:
                _begin_flush(file.fileno(), flush_start, hasher.size)
                flush_start = hasher.size
        os.fsync(file.fileno())
    return FileRecord(path.name, hasher.size, hasher.hexdigest())


def read_back(folder: Path, record: FileRecord) -> None:
    """Read a flushed file and compare its checksums with the checksums in `record`.

    If the operating system supports it, the cached pages of the file are dropped first, so that the disk is read.

    Raises:
        CheckpointError: the contents differ.
    """
    path = folder / record.name
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):  # cached pages would hide a disk error
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        read_pieces(path, [ByteRange(0, record.size, None)], record, ChecksumScheme.best())
    except CheckpointError as error:
        raise CheckpointError(
            f"a file of the new checkpoint differs from the data that was written: {error}. Check the disk"
        ) from None


def contiguous_on_cpu(tensor: Tensor) -> Tensor:
    """Return the values of a plain tensor as a contiguous CPU tensor, copied only if necessary."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def tensor_bytes(tensor: Tensor) -> Iterator[Any]:
    """Yield the memory of a contiguous CPU tensor in pieces, without copying. `tensor` must outlive the pieces."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    for start in range(0, nbytes, _PIECE):
        yield (ctypes.c_char * min(_PIECE, nbytes - start)).from_address(address + start)


def new_token() -> str:
    """Return a new random token for one save; see [Note: Concurrent saves to one path]."""
    return secrets.token_hex(8)


def partial_path(path: Path, token: str) -> Path:
    """Return the hidden folder into which the save with this token writes the files of the checkpoint `path`."""
    return path.with_name(f".{path.name}.{token}.partial")


def is_temporary(path: Path) -> bool:
    """Return whether `path` has the name of a folder that is being written, replaced or removed."""
    return _HIDDEN.fullmatch(path.name) is not None and not is_displaced(path)


def is_displaced(path: Path) -> bool:
    """Return whether `path` is a replaced checkpoint whose former path is free.

    See [Note: Replacement of a checkpoint].
    """
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
    """Publish the files in `partial` as the checkpoint `path`; see [Note: Atomic publication].

    Args:
        sequence, token, finite: see :class:`Manifest`.
        overwrite: replace an existing checkpoint at `path`.

    Raises:
        CheckpointError: a file is missing or its size differs from the recorded size, for instance because the ranks
            do not share a file system.
        PathTakenError: `path` already exists, and either `overwrite` is False or `path` is not a checkpoint.
    """
    files = {record.name: record for record in records}
    manifest = Manifest(partial, files, ChecksumScheme.best(), sequence, token, finite)
    try:
        for record in files.values():
            manifest.check_type_and_size(record)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}, seen from the first rank. Save to a file system that all ranks share"
        ) from None
    write_file(partial / MANIFEST, [manifest.text])
    publish_folder(partial, path, lambda: manifest.is_at(path), overwrite=overwrite)


def publish_folder(partial: Path, path: Path, is_there: Callable[[], bool], *, overwrite: bool = False) -> None:
    """Rename a complete checkpoint to `path` unless that name is taken; see [Note: Concurrent saves to one path].

    Args:
        is_there: function that returns whether the contents of `partial` are at `path` after the rename.
        overwrite: replace an existing checkpoint at `path`.

    Raises:
        PathTakenError: `path` already exists, and either `overwrite` is False or `path` is not a checkpoint.
        CheckpointError: the checkpoint is not at `path` after the rename, for instance because another job has removed
            it.
    """
    flush_folder(partial)
    replaced: Path | None = None  # path of the old checkpoint: `partial`, if the two were swapped
    descriptor = os.open(partial, os.O_RDONLY)  # the inode number is not reused while the folder is open
    try:
        partial_stat = os.fstat(descriptor)
        if os.path.lexists(path):
            if not overwrite:
                raise PathTakenError.at(path)
            require_only_checkpoint_files(path)
            replaced = partial if _swap_paths(partial, path) else hide_folder(path, "replaced")
        failure: OSError | None = None
        try:
            if replaced != partial:
                os.rename(partial, path)
        except OSError as error:  # NFS may report that a rename failed although it succeeded
            failure = error
        if not is_there():
            path_exists = os.path.lexists(path)
            _restore_replaced(replaced, partial, path, partial_stat)
            if failure is not None:
                raise PathTakenError.at(path) if path_exists else failure
            raise CheckpointError(
                f"{path} does not contain the new checkpoint after the rename. Either another job has removed the "
                "checkpoint, or this file system does not rename folders atomically. keep_last counts the "
                "checkpoints of all jobs in a folder. Use a separate folder for each run, on a file system with "
                "atomic renames"
            )
    finally:
        os.close(descriptor)
    try:
        flush_folder(path.parent)
    except OSError as error:  # only warn, because the checkpoint exists
        warnings.warn(
            f"the new checkpoint exists, but its folder {path.parent} could not be flushed to the disk: {error}. "
            "The checkpoint may be lost if the machine crashes",
            stacklevel=3,
        )
    if replaced is not None:
        remove(replaced)


def require_only_checkpoint_files(path: Path) -> None:
    """Raise PathTakenError unless `path` is a folder that contains only checkpoint files, complete or damaged."""
    if path.is_symlink() or not path.is_dir() or not all(_OURS.fullmatch(name) for name in os.listdir(path)):
        raise PathTakenError(
            f"{path} already exists and is not overwritten, because it does not consist of checkpoint files only. "
            "Use another path"
        )


def _swap_paths(partial: Path, path: Path) -> bool:
    """Swap the two paths atomically; return False if the swap fails or is not supported."""
    names = os.fsencode(partial), os.fsencode(path)
    return _renameat2 is not None and not _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)


def _restore_replaced(replaced: Path | None, partial: Path, path: Path, stat: os.stat_result) -> None:
    """Move the old checkpoint back to `path` after publishing the new one failed.

    Args:
        stat: stat result of the new checkpoint's folder. If another job has created a different folder at `path`, that
            other folder is not moved.
    """
    with suppress(OSError):  # if this fails, loads find the old checkpoint under its current name
        if replaced != partial:
            if replaced is not None and not os.path.lexists(path):
                os.rename(replaced, path)
        elif not (_is_same(path, stat) and _swap_paths(partial, path)):
            hide_folder(partial, "replaced")  # so that discarding the new checkpoint does not remove the old one


def _is_same(path: Path, expected_stat: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), expected_stat)
    except OSError:
        return False


def publish_file(partial: Path, path: Path) -> None:
    """Rename a complete file to `path`. Raises PathTakenError if `path` exists."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise PathTakenError(f"{path} already exists. Use another path") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise PathTakenError(f"{path} already exists. Use another path") from None
        os.rename(partial, path)
    partial.unlink(missing_ok=True)
    flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents and fsync each new directory entry.

    Raises:
        FileExistsError: `folder` or one of its parents is a file.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise FileExistsError(f"{folder} exists, but it is not a folder. Use another path") from None
        flush_folder(folder.parent)


def hide_folder(folder: Path, kind: Literal["partial", "replaced", "damaged"] = "partial") -> Path:
    """Rename a checkpoint or a leftover folder to a hidden name that no other job uses; return the new path.

    A folder of the kind "damaged" is never read or removed. Before a folder is removed, it is renamed, so that no
    process finds a partly deleted checkpoint.

    Raises:
        FileNotFoundError: another job has removed or published the folder.
    """
    match = _HIDDEN.fullmatch(folder.name)
    new_path = folder.with_name(f".{match[1] if match else folder.name}.{new_token()}.{kind}")
    os.rename(folder, new_path)
    with suppress(OSError):  # the folder may belong to another user
        os.utime(new_path)  # a recent time stamp prevents `clear_leftovers` of other jobs from removing the folder
    return new_path


def remove(partial: Path) -> None:
    """Remove a file or folder whose name only this job uses."""
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def _write_all(descriptor: int, data: Any) -> int:
    written = os.write(descriptor, data)
    while written < len(data):  # os.write may write only a part after a signal, or if the disk is almost full
        written += os.write(descriptor, bytes(data)[written:])
    return written


def _begin_flush(descriptor: int, start: int, stop: int) -> None:
    """Start writing bytes `start` to `stop` of a file to the disk. A later :func:`os.fsync` waits for the writes."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(stop - start), _SYNC_FILE_RANGE_WRITE)


def flush_folder(folder: Path) -> None:
    """Fsync the directory entries of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
