"""Take in-memory snapshots that survive the loss of a node. Each rank's part is stored on two nodes.

[Note: Snapshot format]
A snapshot has the files of a checkpoint, with the same manifest and checksums. Like a checkpoint, a snapshot can be
loaded by any number of ranks. The files are in shared memory, which outlives processes. Each rank's file is stored on
the rank's own node and on its partner's node. If one node is lost, the other nodes together still have all files.

[Note: Completeness of snapshots]
The manifest is written last, after all ranks have confirmed that their own file and their partner's file are complete
and correct. Therefore a single manifest proves that all files existed. When all ranks start a new snapshot, older
snapshots are removed, except the last complete one. Once the first snapshot is complete, a complete snapshot always
exists.

[Note: Snapshot numbers]
The number of a snapshot is the time at which it was taken, in seconds, or the previous number plus one, whichever is
larger. Therefore an old snapshot on a node that rejoins late does not take precedence over a newer snapshot. The
numbers can also be compared with the times of checkpoints on disk.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerzero import ShardedOptimizer
from layerzero.checkpoint.background import PendingSave
from layerzero.checkpoint.checksums import ByteRange, ChecksumScheme, FileSums, read_pieces
from layerzero.checkpoint.collect_state import CollectedState, collect, topology_entry
from layerzero.checkpoint.contents import CONTENTS, CheckpointContents
from layerzero.checkpoint.dcp_storage import SavePlanner, TensorTable, chunk_of
from layerzero.checkpoint.errors import CheckpointError, RankLostError, UnsupportedFormatError
from layerzero.checkpoint.json_codec import dtype_named, merge_ranks
from layerzero.checkpoint.loading import prepare_load_from
from layerzero.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerzero.checkpoint.publish import new_token, write_file
from layerzero.checkpoint.rank_agreement import agree_or_raise, agreed, check_checkpoint_arguments
from layerzero.checkpoint.run_folder import Resumed, latest
from layerzero.checkpoint.safetensors_files import CheckpointFiles, write_items
from layerzero.extend import (
    Communicator,
    LayerZeroState,
    ModelGroups,
    TrafficCounters,
    all_gather_text,
    boot_id,
    get_state,
    group_count_fields,
    send_recv,
)

__all__ = ["Buddies"]

_LOG = logging.getLogger("layerzero")
_SHARE = 0.25  # fraction of the time between two snapshots over which a transfer is spread
_WHAT = "layerzero.checkpoint.Buddies"
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
    _raise_if_any_failed(comm, _allocate_files(comm, view, {name: records[name].size for name in wanted - own_names}))
    num_transfers: Counter[int] = Counter()
    for rank, (_, needed_names) in enumerate(rank_entries):
        for name in needed_names:
            holder = min(holders[name], key=lambda candidate: (num_transfers[candidate], candidate))
            num_transfers[holder] += 1
            if comm.rank == holder:
                transfer(comm, map_file(view / name, records[name].size), to=rank)
            elif comm.rank == rank:
                transfer(comm, map_writable_file(view / name, records[name].size), source=holder)


def _allocate_files(comm: Communicator, folder: Path, sizes: Mapping[str, int]) -> str:
    """Create files of these sizes, by name; return a description of the failure, or an empty string."""
    try:
        for name, size in sizes.items():
            (folder / name).unlink(missing_ok=True)
            allocate_file(folder / name, size)
    except OSError as error:
        return f"rank {comm.rank}: {error}"
    return ""


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


class Buddies:
    """In-memory snapshots of a run that survive the loss of a node.

    All data-parallel ranks must create a ``Buddies`` and call its methods together. A snapshot has the same contents as
    a checkpoint. Each rank writes its part into the shared memory of its node and sends a copy to a rank on another
    node. The transfer runs in the background, spread over a quarter of the time between two snapshots. After a restart,
    :meth:`load` restores the model and the optimizer from the last complete snapshot without reading from disk. The
    restarted run may use other nodes and a different number of ranks.

    With AdamW, snapshots use 48 bytes of host memory per element of this rank's masters: two snapshots, each with this
    rank's part and its partner's part. Snapshots remain in memory after processes die. When a run ends normally, call
    :meth:`close` to remove the snapshots.

    Args:
        model: model that :func:`layerzero.shard_model` returned.
        optimizer: optimizer that :func:`layerzero.shard_optimizer` returned.
        name: name of the run. A restarted run finds its snapshots by this name. Runs on the same machine need different
            names.
        memory: mount point of the shared memory file system, the same for all ranks on a node.

    Example::

        buddies = layerzero.checkpoint.Buddies(model, optimizer, name="run-1")
        found = buddies.load(newer_than="runs/1") or layerzero.checkpoint.load_latest("runs/1", model, optimizer)
        for step in range(found.extra["step"] if found else 0, steps):
            train_one_step()
            if (step + 1) % 50 == 0:
                buddies.snapshot({"step": step + 1})
        buddies.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer | None = None,
        *,
        name: str,
        memory: str | os.PathLike[str] = "/dev/shm",
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._lz_state = lz_state = get_state(model)
        self.folder = Path(memory) / f"layerzero-{os.getuid()}-{name}"
        node = ""
        (group_counts,) = group_count_fields(lz_state.ranks.ranks).values()
        with agreed(_WHAT, lz_state, {"name": name, **group_counts}):
            check_checkpoint_arguments(lz_state, optimizer)
            if not name or Path(name).name != name:
                raise ValueError(f"name must be a single path component, got {name!r}. Pass a name without slashes")
            node = json.dumps([create_private_folder(self.folder), newest_number(self.folder)])
        self._groups = ModelGroups()
        # Separate traffic counters, because a background thread updates them.
        group = lz_state.ranks.new_control_group(self._groups)
        self._comm = Communicator.over("snapshots", "control", group, TrafficCounters(), "cpu")
        node_entries = [json.loads(message) for message in all_gather_text(self._comm, node)]
        self._number = max(number for _, number in node_entries)  # number of the last snapshot that was started
        self._receiver, self._sender = _partners([node_id for node_id, _ in node_entries], self._comm.rank)
        if self._receiver is None and self._comm.rank == 0:
            _LOG.warning(
                "%s: all ranks are on one node. Snapshots survive the end of processes, but not the loss of the node",
                _WHAT,
            )
        self._pending: PendingSave | None = None
        self._hooks: list[Any] = []
        self._newest = ""  # token of the last snapshot that this rank has completed or loaded
        self._began = self._period = 0.0
        self._is_awaited = threading.Event()  # set while a caller waits for the in-flight transfer

    def snapshot(self, extra: object = None) -> None:
        """Take a snapshot of the current state.

        The method first waits for the previous snapshot. It returns after it has copied this rank's part. The copy is
        sent in the background. If a snapshot fails, the next optimizer step emits a warning, and the previous snapshot
        is kept.

        Args:
            extra: additional state of the run, as for :func:`save`.

        Raises:
            CheckpointError: a node has too little memory, or values are not finite. In these cases, no snapshot is
                taken, and existing snapshots are kept.
        """
        self._finish()
        lz_state, fields = self._lz_state, dict[str, str]()
        state = CollectedState({}, {}, [], {}, [])
        with agreed(f"{_WHAT}.snapshot", lz_state, fields):
            check_checkpoint_arguments(lz_state, self._optimizer)
            state = collect(lz_state, self._optimizer, extra)
            fields |= state.digests
        number = max(self._number + 1, int(time.time()))  # see [Note: Snapshot numbers]
        message = json.dumps([f"{number:010d}-{new_token()}", self._newest])
        entries = [json.loads(message) for message in all_gather_text(self._comm, message)]
        token = entries[0][0]
        self._number = int(token[:10])
        self._remove_all_but({token, *(newest for _, newest in entries)})
        own_part = SnapshotPart(self.folder / f"{token}.{self._comm.rank}")
        job: _SnapshotJob | None = None
        failure: Exception | None = None
        try:
            job = self._write(own_part, state)
        except OSError as error:
            failure = error
        sizes = all_gather_text(self._comm, "" if job is None else json.dumps([job.record.name, job.record.size]))
        try:
            if failure is None and self._sender is not None and sizes[self._sender]:
                name, size = json.loads(sizes[self._sender])
                allocate_file(own_part.folder / name, size)
        except OSError as error:
            failure = error
        if failure is not None:
            shutil.rmtree(own_part.folder, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free
            failure = CheckpointError(
                f"the snapshot could not be stored: {failure}. {self.folder.parent} has {free:,} bytes of free space"
            )
        agree_or_raise(f"{_WHAT}.snapshot", lz_state, {}, failure)
        assert job is not None
        now = time.monotonic()
        self._period, self._began = (now - self._began if self._began else 0.0), now
        self._is_awaited.clear()
        self._pending = PendingSave(partial(self._exchange_and_publish, job), f"{_WHAT}.snapshot")
        self._hooks = [
            optimizer.register_step_pre_hook(self._pending.warn_if_failed) for optimizer in lz_state.optimizers
        ]

    def wait(self) -> None:
        """Wait until the last snapshot is complete on all nodes. If the snapshot failed, raise its error."""
        self._is_awaited.set()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def close(self) -> None:
        """Wait for the last snapshot and remove all snapshots of the run on all nodes.

        All ranks must call this method.
        """
        self._finish()
        all_gather_text(self._comm, "")  # barrier: no rank uses the snapshots after this line
        self._groups.release()
        shutil.rmtree(self.folder, ignore_errors=True)  # other ranks on the node remove the folder at the same time

    def _finish(self) -> None:
        self._is_awaited.set()
        pending, self._pending = self._pending, None
        while self._hooks:
            self._hooks.pop().remove()
        if pending is not None:
            pending.settle()

    def _remove_all_but(self, tokens: Container[str]) -> None:
        for snapshot_part in list_snapshot_parts(self.folder):
            if snapshot_part.token not in tokens:
                shutil.rmtree(snapshot_part.folder, ignore_errors=True)

    def _write(self, own_part: SnapshotPart, state: CollectedState) -> _SnapshotJob:
        own_part.folder.mkdir(mode=0o700)
        planner = SavePlanner()
        planner.set_up_planner(state.tensors, None, is_coordinator=True)
        items = planner.create_local_plan().items
        record = write_items(own_part.folder, self._comm.rank, items, planner)
        chunks = [
            [key, str(dtype).removeprefix("torch."), list(shape), list(offsets), list(sizes)]
            for key, dtype, shape, offsets, sizes in map(chunk_of, items)
        ]
        return _SnapshotJob(own_part, record, chunks, state)

    def _exchange_and_publish(self, job: _SnapshotJob) -> None:
        """Exchange files with the partners and publish the snapshot. This method runs in a background thread."""
        comm, folder = self._comm, job.here.folder
        try:
            first = job.state.document if comm.rank == 0 else None
            message = [asdict(job.record), job.chunks, job.state.own, first]
            rank_entries = [json.loads(text) for text in all_gather_text(comm, json.dumps(message))]
            records = [FileRecord(**record) for record, *_ in rank_entries]
            failure = ""
            try:
                self._swap_files(folder, job.record, None if self._sender is None else records[self._sender])
                table = TensorTable()
                for record, (_, chunks, *_) in zip(records, rank_entries, strict=True):
                    for key, dtype, *geometry in chunks:
                        table.add(record.name, key, dtype_named(dtype), *geometry)
                contents = CheckpointContents(
                    topology_entry(self._lz_state), _merged_document(rank_entries), table.tensors
                )
                written = contents.write(folder)
                text = _manifest_text(folder, [*records, written], job.here.token)
                write_file(folder / f".{MANIFEST}", [text])
                for file in folder.iterdir():
                    file.chmod(0o600)
            except (CheckpointError, OSError) as error:
                failure = f"rank {comm.rank}: {error}"
            if failures := [text for text in all_gather_text(comm, failure) if text]:
                raise CheckpointError("; ".join(failures))
            os.rename(folder / f".{MANIFEST}", folder / MANIFEST)  # see [Note: Completeness of snapshots]
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise RankLostError(f"a rank has exited or is late: {error}") from error
        self._newest = job.here.token

    def _swap_files(self, folder: Path, own_record: FileRecord, partner_record: FileRecord | None) -> None:
        """Send this rank's file, and receive and verify another rank's file.

        The files are sent in chunks, with pauses between the chunks.
        """
        if partner_record is None:
            return
        outgoing, count = (
            map_file(folder / own_record.name, own_record.size),
            -(-max(own_record.size, partner_record.size) // CHUNK),
        )
        incoming = map_writable_file(folder / partner_record.name, partner_record.size)
        for index in range(count):
            began, chunk_slice = time.monotonic(), slice(index * CHUNK, (index + 1) * CHUNK)
            partners = {"to": self._receiver, "source": self._sender}
            send_recv(
                self._comm, sent=outgoing[chunk_slice], received=incoming[chunk_slice], **partners, name="a snapshot"
            ).wait()
            self._is_awaited.wait(max(0.0, _SHARE * self._period / count - (time.monotonic() - began)))
        sums = FileSums(partner_record.size, partner_record.sums, ChecksumScheme.best())
        read_pieces(folder / partner_record.name, sums, [ByteRange(0, partner_record.size, None)])

    def load(self, *, strict: bool = True, newer_than: str | os.PathLike[str] | None = None) -> Resumed | None:
        """Load the last complete snapshot into the model and the optimizer; return None if no snapshot can be loaded.

        All ranks must call this method. Each rank reads its rows from the shared memory of its node and verifies their
        checksums. Files that the node lacks are received from other nodes. If a snapshot is damaged, the method logs a
        warning and tries the previous snapshot.

        Args:
            strict: as for :func:`load`.
            newer_than: folder that contains checkpoints, as for :func:`load_latest`. Snapshots are skipped if they were
                taken before the save of the last complete checkpoint in this folder started.

        Raises:
            ValueError: names, shapes or dtypes do not match.
        """
        self._finish()
        view = self.folder / f"view.{self._comm.rank}"
        remove_views(self.folder, self._comm.size)
        saved = self._last_save_time(newer_than)

        def open_snapshot(lz_state: LayerZeroState) -> SnapshotSource:
            return SnapshotSource(self._comm, view)

        for token in list_complete_tokens(self._comm, self.folder):
            if int(token[:10]) <= saved:
                break
            try:
                gather_view(self._comm, self.folder, token, view)
                description = f"snapshot {token} in {self.folder}"
                extra = prepare_load_from(
                    open_snapshot, description, self._model, self._optimizer, strict=strict
                ).commit()
            except (RankLostError, UnsupportedFormatError):
                raise
            except CheckpointError as error:
                if self._comm.rank == 0:
                    _LOG.warning("%s.load: %s", _WHAT, error)
                continue
            finally:
                shutil.rmtree(view, ignore_errors=True)
            self._newest = token
            return Resumed(self.folder, extra, ())
        return None

    def _last_save_time(self, folder: str | os.PathLike[str] | None) -> int:
        """Return when the save of the last complete checkpoint in `folder` started, in seconds; -1 if there is none.

        The first rank reads the folder and sends the result to all ranks.
        """
        saved = -1
        if folder is not None and self._comm.rank == 0:
            with suppress(OSError):  # meanwhile, another job may remove the checkpoint
                newest = latest(folder)
                saved = -1 if newest is None else int(min(file.stat().st_mtime for file in newest.iterdir()))
        return int(all_gather_text(self._comm, str(saved))[0])


@dataclass(frozen=True)
class _SnapshotJob:
    """Snapshot that is written on this rank but not published yet.

    Attributes:
        here: folder of this rank's part.
        record: record of this rank's file.
        chunks: (key, dtype, full shape, offsets, sizes) of each tensor in this rank's file.
    """

    here: SnapshotPart
    record: FileRecord
    chunks: list[list[Any]]
    state: CollectedState


def _partners(nodes: Sequence[str], rank: int) -> tuple[int | None, int | None]:
    """Return the rank that this rank sends its part to, and the rank that it receives from.

    On a single node, both values are None.

    The ranks are sorted by node. The partner is n positions away in this order, where n is the number of ranks on the
    largest node. Therefore the partner is on another node, unless the largest node has more than half of the ranks.

    Args:
        nodes: identifier of each rank's node.
    """
    order = sorted(range(len(nodes)), key=lambda index: (nodes.index(nodes[index]), index))
    if len(set(nodes)) == 1:
        return None, None
    position, max_ranks_per_node = order.index(rank), max(map(nodes.count, nodes))
    return order[(position + max_ranks_per_node) % len(order)], order[(position - max_ranks_per_node) % len(order)]


def _manifest_text(folder: Path, records: Sequence[FileRecord], token: str) -> bytes:
    files = {record.name: record for record in records}
    return Manifest(folder, files, ChecksumScheme.best(), int(token[:10]), token, finite=True).text


def _merged_document(rank_entries: Sequence[Sequence[Any]]) -> dict[str, Any]:
    document: dict[str, Any] = merge_ranks(rank_entries[0][3], [own_values for _, _, own_values, _ in rank_entries])
    return document
