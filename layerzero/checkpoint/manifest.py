"""Read and write the manifest: the names, sizes and checksums of a checkpoint's files, and its sequence number.

A checkpoint is complete when its folder, with an intact manifest, has been renamed to its final name; see [Note: Atomic
publication] in publish.py. A load compares names, shapes and dtypes and verifies the checksums of all bytes that
it needs before it changes anything; see [Note: Checks before changes] in restore.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from layerzero.checkpoint.checksums import CHECKSUM_DIGITS, ByteRange, ChecksumScheme, FileRecord, read_pieces
from layerzero.checkpoint.errors import CheckpointError, UnsupportedFormatError

MANIFEST = "manifest.json"
FORMAT = "layerzero-checkpoint"
VERSION = 2
_LAST_READERS = {1: "f359e383"}  # last commit that reads an earlier version


@dataclass(frozen=True)
class Manifest:
    """Records of all other files of a checkpoint, and the position of the checkpoint in the order of saves.

    Attributes:
        scheme: checksum scheme of all files.
        sequence: sequence number, which increases with every save into a folder. :func:`layerzero.checkpoint.latest`
            returns the checkpoint with the largest sequence number.
        token: token of the save, by which ranks notice that they have read different checkpoints; see [Note: Concurrent
            saves to one path] in publish.py.
        finite: whether all values of the trained tensors were finite, or None if the values were not checked.
    """

    folder: Path
    files: Mapping[str, FileRecord]
    scheme: ChecksumScheme
    sequence: int
    token: str
    finite: bool | None = None

    @classmethod
    def read(cls, folder: str | os.PathLike[str], *, parts: bool = False) -> Manifest:
        """Read the manifest of the checkpoint at `folder` and check that the other files have the recorded sizes.

        Args:
            parts: if True, do not check the other files, because `folder` may lack some of them.

        Raises:
            FileNotFoundError: `folder` does not exist.
            CheckpointError: `folder` is not a checkpoint, or is incomplete or damaged.
        """
        folder = Path(folder)
        if not folder.exists():
            raise FileNotFoundError(f"there is no checkpoint at {folder}. Check the path")
        path = folder / MANIFEST
        if not path.is_file() or path.is_symlink():
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: it has no {MANIFEST}. Pass the folder of a complete checkpoint"
            )
        text = path.read_bytes()
        try:
            content = json.loads(text)
            version = content["version"]
            if content["format"] == FORMAT and version != VERSION:
                reader = f"commit {_LAST_READERS[version]}" if version in _LAST_READERS else "a newer version"
                raise UnsupportedFormatError(
                    f"{path} has format version {version}, but this version of layerzero reads only version {VERSION}. "
                    f"Read it with {reader} of layerzero"
                )
            fields = {key: value for key, value in content.items() if key != "sha256"}
            intact = text == manifest_text(fields) and fields["format"] == FORMAT
            records = {name: FileRecord(name, size, sums) for name, (size, sums) in fields["files"].items()}
            scheme = ChecksumScheme(**fields["checksums"])
            sequence, token, finite = int(fields["sequence"]), str(fields["token"]), fields.get("finite")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
        if not intact:
            raise CheckpointError(f"{path} is damaged: it does not match its own SHA-256")
        if scheme.algorithm not in CHECKSUM_DIGITS:
            raise UnsupportedFormatError(
                f"{path} has checksums of the unknown algorithm {scheme.algorithm!r}. Read it with a newer version of "
                "layerzero"
            )
        manifest = cls(folder, records, scheme, sequence, token, finite)
        for record in () if parts else records.values():
            manifest.check_type_and_size(record)
        return manifest

    def check_type_and_size(self, record: FileRecord) -> None:
        """Check that a file is a regular file in the folder and has the recorded size. Its contents are not read.

        Raises:
            CheckpointError: the file is missing, is outside the folder, is not a regular file, or has another size.
        """
        if Path(record.name).name != record.name or record.name in ("", ".", ".."):
            raise CheckpointError(f"{self.folder / MANIFEST} names a file outside the checkpoint: {record.name!r}")
        path = self.folder / record.name
        try:
            status = path.lstat()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError) as error:  # for instance because the name is too long or contains a zero byte
            raise CheckpointError(f"{self.folder / MANIFEST} names a file {record.name!r}: {error}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file. Links inside a checkpoint are not supported")
        if status.st_size != record.size:
            raise CheckpointError(f"{path} is damaged: it has {status.st_size} bytes, but {record.size} were written")

    def is_at(self, path: Path) -> bool:
        """Return whether the checkpoint at `path` is complete and has this manifest, wherever it was before."""
        try:
            return replace(Manifest.read(path), folder=self.folder) == self
        except (CheckpointError, OSError):
            return False

    def path_of(self, name: str) -> Path:
        """Return the path of the file `name`. Raises CheckpointError if the manifest does not list it."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder / MANIFEST} does not list the file {name!r}")
        return self.folder / name

    @property
    def text(self) -> bytes:
        """Contents of the manifest file."""
        table = {name: [record.size, record.sums] for name, record in sorted(self.files.items())}
        fields = {"format": FORMAT, "version": VERSION, "sequence": self.sequence, "files": table, "token": self.token}
        fields |= {} if self.finite is None else {"finite": self.finite}
        return manifest_text({**fields, "checksums": asdict(self.scheme)})

    def read_pieces(self, name: str, pieces: Sequence[ByteRange]) -> None:
        """Read byte ranges of the file `name` and verify the checksums of all chunks that overlap these ranges.

        Raises:
            CheckpointError: the file is damaged; the message names the file.
        """
        read_pieces(self.path_of(name), pieces, self.files[name], self.scheme)

    def verify(self) -> None:
        """Verify every byte of all files. Raises CheckpointError if a file is damaged."""
        for name in self.files:
            self.read_pieces(name, [ByteRange(0, self.files[name].size, None)])

    def read_bytes(self, name: str) -> bytes:
        """Return the verified contents of the file `name`. Raises CheckpointError if the file is damaged."""
        size = self.files[self.path_of(name).name].size
        buffer = torch.empty(size, dtype=torch.uint8)
        self.read_pieces(name, [ByteRange(0, len(buffer), buffer)])
        return buffer.numpy().tobytes()


def manifest_text(known: Mapping[str, Any]) -> bytes:
    """Return the contents of a manifest file with the entries `known`.

    The entries determine every byte of the contents. Therefore the file is damaged if any byte on disk differs.
    """
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return json.dumps({**known, "sha256": digest}, sort_keys=True, indent=1).encode() + b"\n"
