"""Take in-memory snapshots that survive the loss of a node. Each rank's part is stored on two nodes.

[Note: Snapshot format]
A snapshot is a folder in the shared memory of each node, which outlives processes. It has the files of a checkpoint,
with the same manifest and checksums. Like a checkpoint, a snapshot can be loaded by any number of ranks. Each rank's
file is stored on the rank's own node and on its partner's node. If one node is lost, the other nodes together still
have all files. The first rank of each node writes the files that all ranks share.

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

import errno
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerzero import ShardedOptimizer
from layerzero.checkpoint.background import PendingSave, rank_tree, staging_of
from layerzero.checkpoint.checkpoint_writer import chunk_of, plan_items
from layerzero.checkpoint.checksums import ByteRange, ChecksumScheme, FileRecord, read_pieces
from layerzero.checkpoint.collect_state import CollectedState, collect, topology_entry
from layerzero.checkpoint.contents import CONTENTS, CheckpointContents, Chunk
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.loading import prepare_load_from
from layerzero.checkpoint.manifest import MANIFEST, Manifest
from layerzero.checkpoint.publish import new_token, write_file
from layerzero.checkpoint.rank_agreement import agreed, check_checkpoint_arguments
from layerzero.checkpoint.rank_tree import RankTree
from layerzero.checkpoint.run_folder import Resumed, latest, try_load
from layerzero.checkpoint.safetensors_files import CheckpointFiles, write_items
from layerzero.extend import (
    Communicator,
    ModelGroups,
    boot_id,
    get_state,
    receive,
    send,
)

_LOG = logging.getLogger("layerzero")
_SHARE = 0.25  # fraction of the time between two snapshots over which a transfer is spread
_WHAT = "layerzero.checkpoint.Buddies"
_TOKEN = re.compile(r"\d{10}-[0-9a-f]{16}")  # folder name of a snapshot; it starts with the number of the snapshot
CHUNK = 4 << 20  # number of bytes per message


def list_tokens(folder: Path) -> list[str]:
    """Return the tokens of the snapshots on this node. The list is empty if another rank has removed `folder`."""
    return [name for name in (os.listdir(folder) if folder.exists() else []) if _TOKEN.fullmatch(name)]


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


def map_file(path: Path, size: int, *, writable: bool = False) -> Tensor:
    """Map an entire file as a uint8 tensor of shape [size]. The tensor must not be written to unless `writable`."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(os.fspath(path), shared=writable, size=size, dtype=torch.uint8)


def allocate_file(path: Path, size: int) -> None:
    """Create a file of `size` bytes and reserve the space for it, so that no later write fails.

    Raises:
        OSError: there is too little space.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def transfer(
    comms: Mapping[int, Communicator], sent: Tensor, to: int | None, received: Tensor, source: int | None
) -> Iterator[tuple[float, int]]:
    """Send `sent` to the rank `to` and receive `received` from the rank `source`, in chunks.

    Args:
        comms: communicators of this rank and one other rank, by the other rank.

    Yields:
        After each chunk, the time at which the chunk began, and the number of chunks.
    """
    count = -(-max(sent.numel(), received.numel()) // CHUNK)
    for index in range(count):
        began, chunk = time.monotonic(), slice(index * CHUNK, (index + 1) * CHUNK)
        works = [
            start(comms[peer], tensor[chunk], 1 - comms[peer].rank, name="a snapshot")
            for start, tensor, peer in ((receive, received, source), (send, sent, to))
            if peer is not None and tensor[chunk].numel()
        ]
        for work in works:
            work.wait()
        yield began, count


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


class SnapshotSource(CheckpointFiles):
    """Source of tensors that reads a snapshot. Missing files are fetched from other nodes.

    Args:
        fetch: function that fetches the files with the passed names. All ranks must call this function.
    """

    def __init__(self, manifest: Manifest, fetch: Callable[[Set[str]], None]) -> None:
        super().__init__(manifest)
        self._fetch = fetch

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        self._fetch(self.files_of(tensors))
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
        with agreed(_WHAT, lz_state, {"name": name}):
            check_checkpoint_arguments(lz_state, optimizer)
            if not name or Path(name).name != name:
                raise ValueError(f"name must be a single path component, got {name!r}. Pass a name without slashes")
            node = create_private_folder(self.folder)
        self._rank, self._tag = lz_state.ranks.rank, next(staging_of(lz_state).tags)
        self._tree: RankTree | None = None
        self._groups, self._partner_comms = ModelGroups(), dict[int, Communicator]()
        newest = max((int(token[:10]) for token in list_tokens(self.folder)), default=-1)
        entries = rank_tree(lz_state).all_gather(self._tag, [node, newest])
        self._nodes = [node_id for node_id, _ in entries]  # by rank
        self._number = max(number for _, number in entries)  # number of the last snapshot that was started
        self._is_first_on_node = self._nodes.index(node) == self._rank
        self._receiver, self._sender = _partners(self._nodes, self._rank)
        self._connect()
        if len(set(self._nodes)) == 1 and self._rank == 0:
            _LOG.warning(
                "%s: all ranks are on one node. Snapshots survive the end of processes, but not the loss of the node",
                _WHAT,
            )
        self._pending: PendingSave | None = None
        self._newest = ""  # token of the last snapshot that this rank has completed or loaded
        self._began = self._period = 0.0
        self._is_awaited = threading.Event()  # set while a caller waits for the in-flight transfer

    def _connect(self) -> None:
        """Connect this rank to its partners, and to all ranks along the tree, unless it is connected.

        All ranks must call this method.
        """
        tree = rank_tree(self._lz_state)
        if tree is self._tree:
            return
        self._groups.release()  # connections of a tree that has failed
        self._tree, self._groups = tree, ModelGroups(deferred=True)
        pairs = []
        if self._receiver is not None:
            pairs.append((self._rank, self._receiver))
        if self._sender is not None:
            pairs.append((self._sender, self._rank))
        node_size = max(Counter(self._nodes).values())
        # One order for all ranks. Pairs that start on every second node come first, so that these connect in parallel.
        pairs.sort(key=lambda pair: (pair[0] // node_size % 2, pair[0]))
        self._partner_comms = self._connect_pairs(pairs, self._groups)
        self._all_gather(None)  # all ranks raise an error if one of them is not connected

    def _connect_pairs(self, pairs: Iterable[tuple[int, int]], groups: ModelGroups) -> dict[int, Communicator]:
        """Connect this rank to the other ranks of `pairs`, and return the communicators by rank.

        All ranks must call this method.

        Args:
            pairs: pairs of ranks, in an order that is the same on all ranks. Pairs of two other ranks may be missing.
        """
        assert self._tree is not None
        ranks, own = self._lz_state.ranks.ranks, self._rank
        others = list(dict.fromkeys(sum(pair) - own for pair in pairs if own in pair))
        members = [[ranks[own], ranks[other]] for other in others]
        return dict(zip(others, self._tree.connect(_WHAT, members, groups), strict=True))

    def _all_gather(self, value: object) -> list[Any]:
        """Return the values of all ranks. All ranks must call this method."""
        assert self._tree is not None
        return self._tree.all_gather(self._tag, value)

    @contextmanager
    def _raising_on_all_ranks(self) -> Iterator[None]:
        """Run the body on all ranks. If it cannot read or write files on any rank, raise CheckpointError on all."""
        assert self._tree is not None
        failure = ""
        with self._tree.failing_together():
            try:
                yield
            except CheckpointError as error:
                failure = f"rank {self._rank}: {error}"
            except OSError as error:
                failure = f"rank {self._rank}: {error}"
                if error.errno == errno.ENOSPC:
                    free = shutil.disk_usage(self.folder.parent).free
                    failure += f". {self.folder.parent} has {free:,} bytes of free space"
        if failures := [text for text in self._all_gather(failure) if text]:
            raise CheckpointError("; ".join(failures))

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
        self._connect()
        number = max(self._number + 1, int(time.time()))  # see [Note: Snapshot numbers]
        entries = self._all_gather([f"{number:010d}-{new_token()}", self._newest])
        token = entries[0][0]
        self._number = int(token[:10])
        for old in set(list_tokens(self.folder)) - {token, *(newest for _, newest in entries)}:
            shutil.rmtree(self.folder / old, ignore_errors=True)
        folder = self.folder / token
        try:
            with self._raising_on_all_ranks():
                folder.mkdir(mode=0o700, exist_ok=True)
                record, chunks = self._write(folder, state)
            files = self._all_gather([record.name, record.size])
            with self._raising_on_all_ranks():
                if self._sender is not None:
                    name, size = files[self._sender]
                    allocate_file(folder / name, size)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        now = time.monotonic()
        self._period, self._began = (now - self._began if self._began else 0.0), now
        self._is_awaited.clear()
        first = state.document if self._rank == 0 else None
        write = partial(self._exchange_and_publish, folder, record, [asdict(record), chunks, state.own, first])
        self._pending = PendingSave(write, f"{_WHAT}.snapshot", lz_state.optimizers)

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
        if not self._lz_state.closed:
            self._connect()
        self._all_gather(None)  # barrier: no rank uses the snapshots after this line
        self._groups.release()
        shutil.rmtree(self.folder, ignore_errors=True)  # other ranks on the node remove the folder at the same time

    def _finish(self) -> None:
        self._is_awaited.set()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def _write(self, folder: Path, state: CollectedState) -> tuple[FileRecord, list[Chunk]]:
        """Write this rank's file. Return its record and the chunks in it."""
        items, planner = plan_items(state, is_first=True)
        return write_items(folder, self._rank, items, planner), [*map(chunk_of, items)]

    def _exchange_and_publish(self, folder: Path, record: FileRecord, message: list[Any]) -> None:
        """Exchange files with the partners and publish the snapshot. This method runs in a background thread.

        Args:
            message: record and chunks of this rank's file, its own values, and the document on the first rank.
        """
        is_first = self._is_first_on_node
        assert self._tree is not None
        with self._tree.failing_together():
            rank_entries = self._all_gather(message)
            records = [FileRecord(**entry) for entry, *_ in rank_entries]
            with self._raising_on_all_ranks():
                self._swap_files(folder, record, None if self._sender is None else records[self._sender])
                if is_first:
                    self._write_shared_files(folder, records, rank_entries)
            if is_first:
                os.rename(folder / f".{MANIFEST}", folder / MANIFEST)  # see [Note: Completeness of snapshots]
        self._newest = folder.name

    def _write_shared_files(self, folder: Path, records: list[FileRecord], rank_entries: list[list[Any]]) -> None:
        """Write the table of tensors, all other values and, under a hidden name, the manifest."""
        _, chunks, owns, documents = zip(*rank_entries, strict=True)
        chunks_of_files = zip([record.name for record in records], chunks, strict=True)
        contents, _ = CheckpointContents.of_ranks(topology_entry(self._lz_state), documents[0], owns, chunks_of_files)
        files = {each.name: each for each in [*records, contents.write(folder)]}
        token = folder.name
        manifest = Manifest(folder, files, ChecksumScheme.best(), int(token[:10]), token, finite=True)
        write_file(folder / f".{MANIFEST}", [manifest.text])

    def _swap_files(self, folder: Path, own: FileRecord, partner: FileRecord | None) -> None:
        """Send this rank's file, and receive and verify another rank's file, with pauses between the chunks.

        Args:
            partner: record of the other rank's file; None if this rank receives no file.
        """
        outgoing = incoming = torch.empty(0, dtype=torch.uint8)
        if self._receiver is not None:
            outgoing = map_file(folder / own.name, own.size)
        if partner is not None:
            incoming = map_file(folder / partner.name, partner.size, writable=True)
        for began, count in transfer(self._partner_comms, outgoing, self._receiver, incoming, self._sender):
            self._is_awaited.wait(max(0.0, _SHARE * self._period / count - (time.monotonic() - began)))
        if partner is not None:
            read_pieces(folder / partner.name, [ByteRange(0, partner.size, None)], partner, ChecksumScheme.best())

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
        self._connect()
        saved = self._last_save_time(newer_than)
        for token in self._complete_tokens():
            if int(token[:10]) <= saved:
                break
            created: list[Path] = []
            try:
                extra, reason = try_load(self._lz_state, self._load, token, created, strict=strict)
            finally:
                for path in created:
                    path.unlink(missing_ok=True)
            if reason is None:
                self._newest = token
                return Resumed(self.folder, extra, ())
            if self._rank == 0:
                _LOG.warning("%s.load: %s", _WHAT, reason or f"snapshot {token} no longer exists")
        return None

    def _load(self, token: str, created: list[Path], *, strict: bool) -> Any:
        """Load a snapshot and return ``extra``. All ranks must call this method.

        Args:
            created: the method appends the paths of files that this node lacked, which the caller removes.
        """
        folder, text = self.folder / token, ""
        with suppress(CheckpointError, OSError, UnicodeDecodeError):  # the manifest is missing or damaged
            Manifest.read(folder, parts=True)
            text = (folder / MANIFEST).read_text()
        intact = next(filter(None, self._all_gather(text)), "")
        if not intact:
            raise CheckpointError(f"snapshot {token} has no intact manifest")
        with self._raising_on_all_ranks():
            folder.mkdir(mode=0o700, exist_ok=True)
            if not text and self._is_first_on_node:
                created.append(folder / MANIFEST)
                (folder / MANIFEST).write_text(intact)
        with self._raising_on_all_ranks():
            manifest = Manifest.read(folder, parts=True)

        def fetch(wanted: Set[str]) -> None:
            assert self._tree is not None
            with self._tree.failing_together():
                self._fetch(manifest, created, wanted)

        fetch({CONTENTS})
        description = f"snapshot {token} in {self.folder}"
        return prepare_load_from(
            lambda: SnapshotSource(manifest, fetch), description, self._model, self._optimizer, strict=strict
        ).commit()

    def _complete_tokens(self) -> list[str]:
        """Return the tokens of snapshots that were once complete, newest first. The list is the same on all ranks.

        A manifest proves that all files once existed. Some of these files may have been lost since then.
        """
        own = [token for token in list_tokens(self.folder) if (self.folder / token / MANIFEST).exists()]
        tokens = {token for of_rank in self._all_gather(own) for token in of_rank}
        return sorted(tokens, reverse=True)

    def _fetch(self, manifest: Manifest, created: list[Path], wanted: Set[str]) -> None:
        """Receive the files that this node lacks. All ranks must call this method.

        Args:
            created: the method appends the paths of the files that this rank has received.
            wanted: names of the files that this rank needs.

        Raises:
            CheckpointError: no rank has a needed file, or a rank has too little memory for a file. All ranks raise this
                error.
        """
        folder, records = manifest.folder, manifest.files
        own_names = {name for name, record in records.items() if _file_size(folder / name) == record.size}
        rank_entries = self._all_gather([sorted(own_names), sorted(wanted - own_names)])
        holders = {name: [rank for rank, (names, _) in enumerate(rank_entries) if name in names] for name in records}
        receivers: dict[tuple[str, str], int] = {}  # by node and file
        for rank, (_, needed_names) in enumerate(rank_entries):
            for name in needed_names:
                receivers.setdefault((self._nodes[rank], name), rank)
        if unavailable := sorted({f"no rank has {name}" for _, name in receivers if not holders[name]}):
            raise CheckpointError("; ".join(unavailable))
        with self._raising_on_all_ranks():
            for name in [name for (_, name), rank in receivers.items() if rank == self._rank]:
                created += [folder / f".{name}", folder / name]
                (folder / f".{name}").unlink(missing_ok=True)  # left by a load that was killed
                allocate_file(folder / f".{name}", records[name].size)
        num_transfers: Counter[int] = Counter()
        transfers = []  # file, rank that sends it, rank that receives it
        for (_, name), rank in receivers.items():
            holder = min(holders[name], key=lambda candidate: (num_transfers[candidate], candidate))
            num_transfers[holder] += 1
            transfers.append((name, holder, rank))
        groups = ModelGroups(deferred=True)
        comms = self._connect_pairs([(holder, rank) for _, holder, rank in transfers], groups)
        nothing = torch.empty(0, dtype=torch.uint8)
        for name, holder, rank in transfers:
            if self._rank == holder:
                list(transfer(comms, map_file(folder / name, records[name].size), rank, nothing, None))
            elif self._rank == rank:
                received = map_file(folder / f".{name}", records[name].size, writable=True)
                list(transfer(comms, nothing, None, received, holder))
                os.rename(folder / f".{name}", folder / name)
        self._all_gather(None)  # barrier: other ranks of this node read the files that this rank has received
        groups.release()

    def _last_save_time(self, folder: str | os.PathLike[str] | None) -> int:
        """Return when the save of the last complete checkpoint in `folder` started, in seconds; -1 if there is none.

        The first rank reads the folder and sends the result to all ranks.
        """
        saved = -1
        if folder is not None and self._rank == 0:
            with suppress(OSError):  # meanwhile, another job may remove the checkpoint
                newest = latest(folder)
                saved = -1 if newest is None else int(min(file.stat().st_mtime for file in newest.iterdir()))
        return int(self._all_gather(saved)[0])


def _partners(nodes: Sequence[str], rank: int) -> tuple[int | None, int | None]:
    """Return the rank that this rank sends its part to, and the rank that it receives from.

    A value is None if that rank is on the same node, as on a single node.

    The ranks are sorted by node. The partner is n positions away in this order, where n is the number of ranks on the
    largest node. Therefore the partner is on another node, unless the largest node has more than half of the ranks.

    Args:
        nodes: identifier of each rank's node.
    """
    order = sorted(range(len(nodes)), key=lambda index: (nodes.index(nodes[index]), index))
    position, max_ranks_per_node = order.index(rank), max(map(nodes.count, nodes))
    to, source = (order[(position + shift) % len(order)] for shift in (max_ranks_per_node, -max_ranks_per_node))
    return to if nodes[to] != nodes[rank] else None, source if nodes[source] != nodes[rank] else None
