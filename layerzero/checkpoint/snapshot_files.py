"""Manage the snapshot files in the shared memory of each node, and transfer missing files between ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Container, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerzero.checkpoint.contents import CONTENTS
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerzero.checkpoint.safetensors_reader import CheckpointFiles
from layerzero.comm.collectives import Communicator, send_recv
from layerzero.comm.gather_text import all_gather_text
from layerzero.utils.machine import boot_id

__all__ = [
    "CHUNK",
    "SnapshotPart",
    "SnapshotSource",
    "allocate_file",
    "create_private_folder",
    "gather_view",
    "list_complete_tokens",
    "list_snapshot_parts",
    "map_file",
    "map_writable_file",
    "newest_number",
    "remove_views",
]

_NAME = re.compile(r"(\d{10}-[0-9a-f]{16})\.\d+")  # folder name of one rank's part of one snapshot
CHUNK = 4 << 20  # number of bytes per message


@dataclass(frozen=True)
class SnapshotPart:
    """Folder that contains one rank's part of one snapshot."""

    folder: Path

    @property
    def token(self) -> str:
        """Token of the snapshot. Tokens increase with every snapshot of a run."""
        return self.folder.name.partition(".")[0]


def list_snapshot_parts(folder: Path) -> list[SnapshotPart]:
    """Return the snapshot parts of all ranks on this node. The list is empty if another rank has removed `folder`."""
    names = os.listdir(folder) if folder.exists() else []
    return [SnapshotPart(folder / name) for name in names if _NAME.fullmatch(name)]


def create_private_folder(folder: Path) -> str:
    """Create a folder that only this user can access; return an identifier that is unique across nodes.

    Raises:
        PermissionError: the folder belongs to another user, or other users can access it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{folder} is not a folder that only this user can access, so it cannot store snapshots. Remove it, or use "
            "another name"
        )
    return f"{boot_id()}/{status.st_dev}/{status.st_ino}"


def remove_views(folder: Path, ranks: int) -> None:
    """Remove view folders that crashed loads left behind, if their ranks no longer exist; see :func:`gather_view`.

    The links in a view folder keep memory in use.

    Args:
        folder: folder that contains the snapshots of a run.
        ranks: current number of ranks.
    """
    for view in folder.glob("view.*"):
        if not view.suffix[1:].isdigit() or int(view.suffix[1:]) >= ranks:
            shutil.rmtree(view, ignore_errors=True)


def newest_number(folder: Path) -> int:
    """Return the number of the newest snapshot, complete or not, or -1 if there is none."""
    return max((int(part.token[:10]) for part in list_snapshot_parts(folder)), default=-1)


def map_file(path: Path, size: int) -> Tensor:
    """Map an entire file as a uint8 tensor of shape [size]. The tensor must not be written to."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)


def allocate_file(path: Path, size: int) -> Tensor:
    """Create a file and map it as a writable uint8 tensor of shape [size].

    The function reserves the space for the file. If there is too little space, this function raises OSError, so that no
    later write fails.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
    return map_writable_file(path, size)


def map_writable_file(path: Path, size: int) -> Tensor:
    """Map a file that :func:`allocate_file` created as a writable uint8 tensor of shape [size]."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(os.fspath(path), shared=True, size=size, dtype=torch.uint8)


def list_complete_tokens(comm: Communicator, folder: Path) -> list[str]:
    """Return the tokens of snapshots that were once complete, newest first. All ranks must call this function.

    The list is the same on all ranks. Files of a snapshot may have been lost after the snapshot was completed.
    """
    own_names: dict[str, list[str]] = {}
    for part in list_snapshot_parts(folder):
        own_names.setdefault(part.token, []).extend(os.listdir(part.folder))
    files_by_rank = [json.loads(text) for text in all_gather_text(comm, json.dumps(own_names))]
    # A manifest proves that all files once existed. The ranks may have lost some of these files since then.
    return sorted(
        {token for tokens in files_by_rank for token, names in tokens.items() if MANIFEST in names}, reverse=True
    )


def gather_view(comm: Communicator, folder: Path, token: str, view: Path) -> None:
    """Create a folder from which this rank can read a snapshot. The folder contains links to the files on this node.

    All ranks must call this function.

    Raises:
        CheckpointError: no rank has an intact manifest, or no rank has ``contents.json``. All ranks raise this error.
    """
    failure, text = "", ""
    try:
        shutil.rmtree(view, ignore_errors=True)
        view.mkdir(mode=0o700)
        for part in list_snapshot_parts(folder):
            if part.token == token:
                _link_files(part.folder, view)
                text = text or _intact_manifest_text(part.folder)
    except OSError as error:
        failure = f"rank {comm.rank}: {error}"
    manifests = all_gather_text(comm, text)
    text = next((text for text in manifests if text), "")
    if not text:
        raise CheckpointError(f"snapshot {token} has no intact manifest")
    if not failure:
        try:
            (view / MANIFEST).write_text(text)
        except OSError as error:
            failure = f"rank {comm.rank}: {error}"
    _raise_if_any_failed(comm, failure)
    fetch_missing_files(comm, view, Manifest.read(view, parts=True).files, {CONTENTS})


def _link_files(source: Path, view: Path) -> None:
    for name in os.listdir(source):
        if name.removeprefix(".") != MANIFEST and not (view / name).exists():
            os.link(source / name, view / name)


def _intact_manifest_text(folder: Path) -> str:
    """Return the text of the manifest in `folder`, or an empty string if the manifest is missing or damaged."""
    try:
        Manifest.read(folder, parts=True)
        return (folder / MANIFEST).read_text()
    except (CheckpointError, UnicodeDecodeError):
        return ""


def _raise_if_any_failed(comm: Communicator, failure: str) -> None:
    """Raise CheckpointError on all ranks if `failure` is not empty on any rank."""
    if failures := [text for text in all_gather_text(comm, failure) if text]:
        raise CheckpointError("; ".join(failures))


def fetch_missing_files(comm: Communicator, view: Path, records: Mapping[str, FileRecord], wanted: Set[str]) -> None:
    """Receive the files that this rank needs but that its node lacks. All ranks must call this function.

    Args:
        view: folder into which the files are written; see :func:`gather_view`.
        records: records of all files of the snapshot, by name.
        wanted: names of the files that this rank needs.

    Raises:
        CheckpointError: no rank has a needed file, or a rank has too little memory for a file. All ranks raise this
            error.
    """
    own_names = {name for name, record in records.items() if _file_size(view / name) == record.size}
    message = json.dumps([sorted(own_names), sorted(wanted - own_names)])
    rank_entries = [json.loads(text) for text in all_gather_text(comm, message)]
    holders = {name: [rank for rank, (names, _) in enumerate(rank_entries) if name in names] for name in records}
    if unavailable := sorted(
        {f"no rank has {name}" for _, needed_names in rank_entries for name in needed_names if not holders[name]}
    ):
        raise CheckpointError("; ".join(unavailable))
    if not any(needed_names for _, needed_names in rank_entries):
        return
    failure = ""
    try:
        for name in sorted(wanted - own_names):
            (view / name).unlink(missing_ok=True)
            allocate_file(view / name, records[name].size)
    except OSError as error:
        failure = f"rank {comm.rank}: {error}"
    _raise_if_any_failed(comm, failure)
    num_transfers: Counter[int] = Counter()
    for rank, (_, needed_names) in enumerate(rank_entries):
        for name in needed_names:
            holder = min(holders[name], key=lambda candidate: (num_transfers[candidate], candidate))
            num_transfers[holder] += 1
            if comm.rank == holder:
                transfer(comm, map_file(view / name, records[name].size), to=rank)
            elif comm.rank == rank:
                transfer(comm, map_writable_file(view / name, records[name].size), source=holder)


def transfer(comm: Communicator, data: Tensor, *, to: int | None = None, source: int | None = None) -> None:
    """Send `data` to the rank `to`, or receive `data` from the rank `source`, in chunks."""
    empty = data[:0]
    for chunk in torch.split(data, CHUNK):
        outgoing, incoming = (empty, chunk) if to is None else (chunk, empty)
        send_recv(comm, sent=outgoing, to=to, received=incoming, source=source, name="a snapshot").wait()


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


class SnapshotSource(CheckpointFiles):
    """Source of tensors that reads a snapshot. Missing files are fetched from other ranks.

    Args:
        view: folder that :func:`gather_view` created.
    """

    def __init__(self, comm: Communicator, view: Path) -> None:
        manifest = Manifest.read(view, parts=True)
        super().__init__(manifest)
        self._comm, self._view, self._records = comm, view, manifest.files

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        fetch_missing_files(self._comm, self._view, self._records, self.files_of(tensors))
        super().read(tensors, in_place)
