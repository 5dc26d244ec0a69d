"""The files of snapshots in the shared memory of a node: who has which, and how a rank gets those that it lacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerzero.checkpoint.atomic_files import CheckpointError, FileRecord, Manifest
from layerzero.checkpoint.dcp_storage import CONTENTS
from layerzero.checkpoint.manifest import MANIFEST
from layerzero.checkpoint.safetensors_reader import CheckpointFiles
from layerzero.comm.collectives import Communicator, send_recv
from layerzero.comm.texts import all_gather_text
from layerzero.comm.transport.shm_rendezvous import boot_id

__all__ = [
    "CHUNK",
    "SnapshotPart",
    "SnapshotSource",
    "allocate_file",
    "gather_view",
    "highest",
    "mapped",
    "opened_folder",
    "opened_to_write",
    "pieces_in",
    "remove_views",
    "whole_snapshots",
]

_NAME = re.compile(r"(\d{10}-[0-9a-f]{16})\.\d+")  # of what one rank holds of one snapshot
CHUNK = 4 << 20  # bytes that travel at once


@dataclass(frozen=True)
class SnapshotPart:
    """A folder with what one rank holds of one snapshot."""

    folder: Path

    @property
    def token(self) -> str:
        """Of the snapshot; grows with every snapshot of a run."""
        return self.folder.name.partition(".")[0]


def pieces_in(folder: Path) -> list[SnapshotPart]:
    """Of all ranks whose memory this is; none once another of them has removed it."""
    names = os.listdir(folder) if folder.exists() else []
    return [SnapshotPart(folder / name) for name in names if _NAME.fullmatch(name)]


def opened_folder(folder: Path) -> str:
    """Make it, for this user alone; what tells this memory from that of other nodes.

    Raises:
        PermissionError: somebody else has made it, or may look into it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone, and snapshots are not put there")
    return f"{boot_id()}/{found.st_dev}/{found.st_ino}"


def remove_views(folder: Path, ranks: int) -> None:
    """What loads have left that died, of ranks that are no more: links, which keep the memory of a snapshot."""
    for view in folder.glob("view.*"):
        if not view.suffix[1:].isdigit() or int(view.suffix[1:]) >= ranks:
            shutil.rmtree(view, ignore_errors=True)


def highest(folder: Path) -> int:
    """The number of the newest snapshot of which there is anything; -1: there is none."""
    return max((int(piece.token[:10]) for piece in pieces_in(folder)), default=-1)


def mapped(path: Path, size: int) -> Tensor:
    """1-D [size] of bytes: a whole file, which must not be written to."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)


def allocate_file(path: Path, size: int) -> Tensor:
    """1-D [size] of bytes: a new file. Raises OSError where there is no room, now and not when it is written to."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
    return opened_to_write(path, size)


def opened_to_write(path: Path, size: int) -> Tensor:
    """1-D [size] of bytes: a whole file, from :func:`allocate_file`."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(os.fspath(path), shared=True, size=size, dtype=torch.uint8)


def whole_snapshots(lane: Communicator, folder: Path) -> list[str]:
    """The tokens of snapshots that have been whole, newest first: the same on all ranks, which all call this."""
    found: dict[str, list[str]] = {}
    for piece in pieces_in(folder):
        found.setdefault(piece.token, []).extend(os.listdir(piece.folder))
    told = [json.loads(text) for text in all_gather_text(lane, json.dumps(found))]
    # A manifest says that once all files have been there; and who says so may not be there any more.
    return sorted({token for tokens in told for token, names in tokens.items() if MANIFEST in names}, reverse=True)


def gather_view(lane: Communicator, folder: Path, token: str, view: Path) -> None:
    """Make a folder of this rank in which a snapshot can be opened: with links to the files that its node has.

    All ranks must call this.

    Raises:
        CheckpointError: on all ranks: no manifest is intact, or the table of contents is nowhere.
    """
    failure, text = "", ""
    try:
        shutil.rmtree(view, ignore_errors=True)
        view.mkdir(mode=0o700)
        for piece in pieces_in(folder):
            if piece.token == token:
                _link(piece.folder, view)
                text = text or _intact(piece.folder)
    except OSError as error:
        failure = f"rank {lane.rank}: {error}"
    told = all_gather_text(lane, text)
    text = next((text for text in told if text), "")
    if not text:
        raise CheckpointError(f"the snapshot {token} has no manifest that is intact")
    if not failure:
        try:
            (view / MANIFEST).write_text(text)
        except OSError as error:
            failure = f"rank {lane.rank}: {error}"
    _all_well(lane, failure)
    fetch(lane, view, Manifest.read(view, parts=True).files, {CONTENTS})


def _link(source: Path, view: Path) -> None:
    for name in os.listdir(source):
        if name.removeprefix(".") != MANIFEST and not (view / name).exists():
            os.link(source / name, view / name)


def _intact(folder: Path) -> str:
    """The manifest that is there; empty: there is none, or a damaged one."""
    try:
        Manifest.read(folder, parts=True)
        return (folder / MANIFEST).read_text()
    except (CheckpointError, UnicodeDecodeError):
        return ""


def _all_well(lane: Communicator, failure: str) -> None:
    """Raise CheckpointError on all ranks where one has failed."""
    if failures := [text for text in all_gather_text(lane, failure) if text]:
        raise CheckpointError("; ".join(failures))


def fetch(lane: Communicator, view: Path, records: Mapping[str, FileRecord], wanted: Set[str]) -> None:
    """Get what this rank wants of a snapshot and its node does not have. All ranks must call this.

    Raises:
        CheckpointError: on all ranks: a file is nowhere, or there is no room for one.
    """
    have = {name for name, record in records.items() if _size(view / name) == record.size}
    said = json.dumps([sorted(have), sorted(wanted - have)])
    told = [json.loads(text) for text in all_gather_text(lane, said)]
    holders = {name: [rank for rank, (names, _) in enumerate(told) if name in names] for name in records}
    if nowhere := sorted({f"no rank has {name}" for _, needs in told for name in needs if not holders[name]}):
        raise CheckpointError("; ".join(nowhere))
    if not any(needs for _, needs in told):
        return
    failure = ""
    asked: Counter[int] = Counter()
    for rank, (_, needs) in enumerate(told):
        for name in needs:
            holder = min(holders[name], key=lambda each: (asked[each], each))
            asked[holder] += 1
            if lane.rank == holder:
                travel(lane, mapped(view / name, records[name].size), to=rank)
            elif lane.rank == rank:
                (view / name).unlink(missing_ok=True)
                try:
                    with receiving(view / name, records[name].size) as received:
                        travel(lane, received, source=holder)
                except OSError as error:
                    failure = f"rank {lane.rank}: {error}"
    _all_well(lane, failure)


def travel(lane: Communicator, data: Tensor, *, to: int | None = None, source: int | None = None) -> None:
    """Send all of it, or receive it, chunk by chunk."""
    nothing = data[:0]
    for chunk in torch.split(data, CHUNK):
        sent, received = (nothing, chunk) if to is None else (chunk, nothing)
        send_recv(lane, sent=sent, to=to, received=received, source=source, name="a snapshot").wait()


@contextmanager
def receiving(path: Path, size: int) -> Iterator[Tensor]:
    """Memory of a new file. Where there is no room, other memory, as somebody sends; and OSError at the end."""
    problem: OSError | None = None
    try:
        room = allocate_file(path, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        problem, room = error, torch.empty(size, dtype=torch.uint8)
    yield room
    if problem is not None:
        raise problem


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


class SnapshotSource(CheckpointFiles):
    """A snapshot as a source of tensors, whose files come from other ranks where they are wanted.

    Args:
        view: from :func:`gather_view`.
    """

    def __init__(self, lane: Communicator, view: Path) -> None:
        manifest = Manifest.read(view, parts=True)
        super().__init__(manifest)
        self._lane, self._view, self._records = lane, view, manifest.files

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        fetch(self._lane, self._view, self._records, self.files_of(tensors))
        super().read(tensors, in_place)
