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
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from layerzero.checkpoint.checksums import Piece, Scheme, Sums, read_pieces, sums_of
from layerzero.checkpoint.untrusted import MANIFEST_BYTES, CheckpointError, parse, read_capped

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "FileRecord",
    "Manifest",
    "NameTaken",
    "discard",
    "flush_folder",
    "hide",
    "host_values",
    "is_partial",
    "make_folder",
    "new_token",
    "partial_of",
    "publish",
    "publish_file",
    "remove",
    "take_name",
    "tensor_bytes",
    "write_file",
]

MANIFEST = "manifest.json"
FORMAT = "layerzero-checkpoint"
VERSION = 2  # in version 1, a file has one SHA-256
_PIECE = 1 << 20  # bytes of a tensor that are summed and written while they are in the cache
_AHEAD = 16 << 20  # bytes that are written before the disk is told to begin
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
_PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial", re.DOTALL)


class NameTaken(FileExistsError):
    """Somebody else has published something at the path of a checkpoint."""

    @classmethod
    def at(cls, path: Path) -> NameTaken:
        return cls(f"{path} exists already; a checkpoint is never overwritten")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    name: str
    size: int  # bytes
    sums: str  # hexadecimal, of all its chunks


@dataclass(frozen=True)
class Manifest:
    """All other files of a checkpoint, and its place in the order of saves.

    Attributes:
        scheme: of the sums of all files.
        sequence: grows with every save into one folder; :func:`layerzero.checkpoint.latest` goes by it.
        token: of the save that wrote it, see [Note: Two jobs at one name].
    """

    folder: Path
    files: Mapping[str, FileRecord]
    scheme: Scheme
    sequence: int
    token: str | None = None

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Manifest:
        """The manifest of the checkpoint at `folder`; of the other files, presence and size are checked.

        Raises:
            FileNotFoundError: there is nothing at `folder`.
            CheckpointError: it is no checkpoint, or an incomplete or damaged one.
        """
        folder = Path(folder)
        if not folder.exists():
            raise FileNotFoundError(f"there is no checkpoint at {folder}")
        path = folder / MANIFEST
        if not path.is_file() or path.is_symlink():
            raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
        text = read_capped(path, MANIFEST_BYTES)
        try:
            content = parse(path, text)
            version = content["version"]
            if content["format"] == FORMAT and version not in (1, VERSION):
                raise CheckpointError(
                    f"{path} has format version {version}; this layerzero reads versions 1 to {VERSION}"
                )
            needed = ("format", "version", "sequence", "files", *(("checksums",) if version != 1 else ()))
            known = {key: content[key] for key in (*needed, *_optional(content))}
            intact = text == _manifest_text(known)
            sequence = known["sequence"]
            records = {name: FileRecord(name, size, sums) for name, (size, sums) in known["files"].items()}
            scheme = Scheme.version_1() if version == 1 else Scheme(**known["checksums"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
        if not intact or known["format"] != FORMAT:
            raise CheckpointError(f"{path} is damaged: it does not match its own SHA-256")
        if type(sequence) is not int or not all(type(record.size) is int for record in records.values()):
            raise CheckpointError(f"{path} was not written by layerzero: a number is none")
        if type(token := known.get("token", "")) is not str:
            raise CheckpointError(f"{path} was not written by layerzero: its token is {token!r}")
        try:
            scheme.check()
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        if odd := next((record for record in records.values() if not scheme.fits(record.sums, record.size)), None):
            raise CheckpointError(f"{path} was not written by layerzero: its checksums of {odd.name!r} are none")
        manifest = cls(folder, records, scheme, sequence, token or None)
        for record in records.values():
            manifest._check_presence(record)
        return manifest

    def _check_presence(self, record: FileRecord) -> None:
        if Path(record.name).name != record.name or record.name in ("", ".", ".."):
            raise CheckpointError(f"{self.folder / MANIFEST} names a file outside the checkpoint: {record.name!r}")
        path = self.folder / record.name
        try:
            found = path.lstat()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError) as error:  # such as a name that is too long, or has a zero byte in it
            raise CheckpointError(f"{self.folder / MANIFEST} names a file {record.name!r}: {error}") from None
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path} is not a regular file; links inside a checkpoint are refused")
        if found.st_size != record.size:
            raise CheckpointError(f"{path} is damaged: it has {found.st_size} bytes, {record.size} were written")

    def path_of(self, name: str) -> Path:
        """Where the file `name` is, which the manifest must list."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder / MANIFEST} does not list the file {name!r}")
        return self.folder / name

    @property
    def fingerprint(self) -> str:
        """Differs from that of every other checkpoint."""
        files = sorted((record.name, record.size, record.sums) for record in self.files.values())
        return hashlib.sha256(repr((self.scheme, files)).encode()).hexdigest()

    def read_pieces(self, name: str, pieces: Sequence[Piece], *, compare: bool = True) -> None:
        """Bytes of the file `name`; `compare` them with the sums of the chunks in which they lie.

        Raises:
            CheckpointError: the file is not what was written; names it.
        """
        path, record = self.path_of(name), self.files[name]
        read_pieces(path, record.size, record.sums if compare else None, self.scheme, pieces)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare every byte of some files, or of all. Raises CheckpointError as :meth:`read_pieces`."""
        for name in self.files if names is None else names:
            self.read_pieces(name, [Piece(0, self.files[name].size, None)])

    def verify_text(self, name: str, text: bytes) -> None:
        """:meth:`verify` of a file that has been read. Raises CheckpointError."""
        if sums_of(text, self.scheme) != self.files[name].sums:
            raise CheckpointError(f"{self.path_of(name)} is damaged: its checksum is not the one that was written")


def write_file(path: Path, content: Iterable[Any]) -> FileRecord:
    """Write a new file, of objects with a buffer, through to the disk."""
    sums = Sums(Scheme.best())
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


def is_partial(path: Path) -> bool:
    """It has the name of something that a save writes, or that is being removed."""
    return _PARTIAL.fullmatch(path.name) is not None


def publish(partial: Path, path: Path, records: Iterable[FileRecord], *, sequence: int, token: str) -> None:
    """Make a checkpoint of the files in `partial`; see [Note: When a checkpoint exists].

    Raises:
        CheckpointError: a file is not there as it was written: ranks do not share the file system.
        NameTaken: there is something at `path`.
    """
    files = {record.name: record for record in records}
    manifest = Manifest(partial, files, Scheme.best(), sequence, token)
    try:
        for record in files.values():
            manifest._check_presence(record)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, seen from the first rank: do all ranks share this file system?") from None
    table = {name: [record.size, record.sums] for name, record in sorted(files.items())}
    known = {"format": FORMAT, "version": VERSION, "sequence": sequence, "files": table, "token": token}
    text = _manifest_text({**known, "checksums": asdict(manifest.scheme)})
    if len(text) > MANIFEST_BYTES:
        raise CheckpointError(f"{path / MANIFEST} would have {len(text):,} bytes, more than {MANIFEST_BYTES:,}")
    write_file(partial / MANIFEST, [text])
    take_name(partial, path, lambda: _is_at(manifest, path))


def take_name(partial: Path, path: Path, is_there: Callable[[], bool]) -> None:
    """Rename a whole checkpoint to `path`, if nobody else has it; see [Note: Two jobs at one name].

    Args:
        is_there: what was in `partial` is now at `path`.

    Raises:
        NameTaken: there is something at `path`.
        CheckpointError: another job has removed the checkpoint at once.
    """
    flush_folder(partial)
    if os.path.lexists(path):
        raise NameTaken.at(path)
    try:
        os.rename(partial, path)
    except OSError:
        if not is_there():  # NFS may report a failure of a rename whose success it had no time to report
            if os.path.lexists(path):
                raise NameTaken.at(path) from None
            raise
    else:
        if not is_there():
            raise CheckpointError(
                f"{path} does not hold what has just been renamed to it: another job has removed it (keep_last counts "
                "the checkpoints of all jobs in a folder: give each run a folder of its own), or this file system does "
                "not rename folders in one step, and cannot hold checkpoints"
            )
    try:
        flush_folder(path.parent)
    except OSError as error:  # the checkpoint exists
        warnings.warn(f"{path.parent} could not be flushed to the disk: {error}", stacklevel=3)


def _is_at(manifest: Manifest, path: Path) -> bool:
    try:
        return replace(Manifest.read(path), folder=manifest.folder) == manifest
    except (CheckpointError, OSError):
        return False


def publish_file(partial: Path, path: Path) -> None:
    """Give a whole file its name. Raises NameTaken if there is something at `path`."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise NameTaken(f"{path} exists already") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise NameTaken(f"{path} exists already") from None
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


def hide(folder: Path) -> Path:
    """Take a checkpoint, or what is left of one, out of everybody's hands; returns where it is now."""
    match = _PARTIAL.fullmatch(folder.name)
    hidden = partial_of(folder.with_name(match[1] if match else folder.name), new_token())
    os.rename(folder, hidden)
    with suppress(OSError):  # of another user's
        os.utime(hidden)  # whoever looks for what the dead have left sees that somebody is at work
    return hidden


def remove(partial: Path) -> None:
    """Remove something that nobody else has a name for."""
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def _optional(content: Mapping[str, Any]) -> tuple[str, ...]:
    return ("token",) if "token" in content else ()


def _manifest_text(known: Mapping[str, Any]) -> bytes:
    """The one text that says this: any other byte on the disk is damage."""
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return json.dumps({**known, "sha256": digest}, sort_keys=True, indent=1).encode() + b"\n"


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
