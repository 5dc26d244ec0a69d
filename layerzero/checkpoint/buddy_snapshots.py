"""Snapshots without a disk: each rank's part in the memory of its node and of another one, for the loss of a node.

[Note: A snapshot is a checkpoint]
Its files are those of a checkpoint, with the same manifest and checksums, and it is loaded as one, by any number of
ranks. They lie in shared memory, which outlives processes: each rank's file in its own node and in its partner's. So
whichever node is lost, the others together have all files.

[Note: Never half new]
The manifest is written last, when all ranks have said that their own file and their partner's are there and right: who
finds one manifest knows that all files have been. The files of the snapshot before are removed when all ranks begin
with the one after; so at each moment one snapshot is whole.

[Note: Which one is newer]
A snapshot is numbered by the time at which it was taken, in seconds, or one more than those before it. So a node that
comes back after long with an old snapshot does not outdo a younger one, and checkpoints on a disk can be compared.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from layerzero.checkpoint.atomic_files import CheckpointError, FileRecord, Manifest, new_token, write_file
from layerzero.checkpoint.checksums import ByteRange as Bytes
from layerzero.checkpoint.checksums import ChecksumScheme, read_pieces
from layerzero.checkpoint.collect_state import CollectedState, agree_on_state, collect, who_saves
from layerzero.checkpoint.contents_checks import StoredTensor
from layerzero.checkpoint.dcp_storage import CheckpointContents
from layerzero.checkpoint.json_codec import dtype_named, with_all_ranks
from layerzero.checkpoint.loading import prepare_from
from layerzero.checkpoint.manifest import MANIFEST, UnsupportedFormat
from layerzero.checkpoint.rank_agreement import RankLostError, agree_or_raise, check_usable
from layerzero.checkpoint.resuming import Resumed
from layerzero.checkpoint.run_folder import latest
from layerzero.checkpoint.safetensors_writer import write_items
from layerzero.checkpoint.saving import PendingSave
from layerzero.checkpoint.snapshot_files import (
    CHUNK,
    SnapshotPart,
    SnapshotSource,
    allocate_file,
    gather_view,
    highest,
    mapped,
    opened_folder,
    opened_to_write,
    pieces_in,
    remove_views,
    whole_snapshots,
)
from layerzero.comm.collectives import Communicator, send_recv
from layerzero.comm.process_groups import ModelGroups, groups_so_far
from layerzero.comm.texts import all_gather_text
from layerzero.comm.traffic_counters import TrafficCounters
from layerzero.engine.hooks import get_state
from layerzero.engine.runtime import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["Buddies"]

_LOG = logging.getLogger("layerzero")
_SHARE = 0.25  # of the time between two snapshots, over which one is spread
_WHAT = "layerzero.checkpoint.Buddies"


class Buddies:
    """Snapshots of a run in the memory of its nodes: what a lost node had, another one has, too.

    All data-parallel ranks must make one, and call its methods together. A snapshot holds what a checkpoint holds. Each
    rank writes its part into shared memory of its node, and sends it to a rank of another node, in the background and
    spread over a quarter of the time between two snapshots. After a restart, also on other nodes and with another
    number of ranks, :meth:`load` puts the last one that is whole into model and optimizer; no disk is read.

    It takes 48 N/D bytes of host memory a rank with AdamW: two snapshots, each rank's part and its partner's. They stay
    when processes die; :meth:`close` removes them, at the orderly end of a run.

    Args:
        model: from :func:`layerzero.shard_model`.
        optimizer: from :func:`layerzero.shard_optimizer`.
        name: of the run: a restart finds what was left under it. No two runs on a machine may share one.
        memory: where shared memory is mounted; the same for the ranks of a node.

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
        self._runtime = runtime = get_state(model)
        self.folder = Path(memory) / f"layerzero-{os.getuid()}-{name}"
        failure: Exception | None = None
        node = ""
        try:
            check_usable(runtime, optimizer)
            if not name or Path(name).name != name:
                raise ValueError(f"name must be a plain name, got {name!r}")
            node = json.dumps([opened_folder(self.folder), highest(self.folder)])
        except Exception as error:
            failure = error
        (made,) = groups_so_far(runtime.ranks.ranks).values()
        agree_or_raise(_WHAT, runtime, {"name": name, **made}, failure)
        self._groups = ModelGroups()
        # Of its own ledger: a thread counts there.
        group = runtime.ranks.new_control_group(self._groups)
        self._lane = Communicator.over("snapshots", "control", group, TrafficCounters(), "cpu")
        told = [json.loads(text) for text in all_gather_text(self._lane, node)]
        self._number = max(number for _, number in told)  # of the last snapshot that was begun
        self._to, self._from = _partners([place for place, _ in told], self._lane.rank)
        if self._to is None and self._lane.rank == 0:
            _LOG.warning("%s: all ranks are on one node: snapshots outlive processes, and not the node", _WHAT)
        self._pending: PendingSave | None = None
        self._hooks: list[Any] = []
        self._newest = ""  # the token of the last snapshot that was whole, as far as this rank knows
        self._began = self._period = 0.0
        self._hurries = threading.Event()  # somebody waits for the exchange that is under way

    # Taking

    def snapshot(self, extra: object = None) -> None:
        """Take one, of the state as it is now. All ranks must call this, between ``optimizer.step()`` and a backward.

        This rank's part is copied when this returns, and travels meanwhile. The one before is waited for; if it has
        failed, that is a warning at the next step, and the one before that stays.

        Args:
            extra: as for :func:`save`: what else the run needs.

        Raises:
            CheckpointError: there is no room, or numbers are not finite: nothing is taken, and what was taken stays.
        """
        self._finish()
        runtime, failure = self._runtime, None
        state = CollectedState({}, {}, [], {}, [])
        try:
            check_usable(runtime, self._optimizer)
            state = collect(runtime, self._optimizer, extra)
        except Exception as error:
            failure = error
        agree_on_state(f"{_WHAT}.snapshot", runtime, state.digests, failure)
        number = max(self._number + 1, int(time.time()))  # see [Note: Which one is newer]
        said = json.dumps([f"{number:010d}-{new_token()}", self._newest])
        told = [json.loads(text) for text in all_gather_text(self._lane, said)]
        token = told[0][0]
        self._number = int(token[:10])
        self._remove_all_but({token, *(newest for _, newest in told)})
        here = SnapshotPart(self.folder / f"{token}.{self._lane.rank}")
        job: _SnapshotJob | None = None
        try:
            job = self._write(here, state)
        except OSError as error:
            failure = error
        sizes = all_gather_text(self._lane, "" if job is None else json.dumps([job.record.name, job.record.size]))
        try:
            if failure is None and self._from is not None and sizes[self._from]:
                name, size = json.loads(sizes[self._from])
                allocate_file(here.folder / name, size)
        except OSError as error:
            failure = error
        if failure is not None:
            shutil.rmtree(here.folder, ignore_errors=True)
            room = shutil.disk_usage(self.folder).free
            failure = CheckpointError(f"{failure}; {self.folder.parent} has room for {room:,} bytes")
        agree_or_raise(f"{_WHAT}.snapshot", runtime, {}, failure)
        assert job is not None
        now = time.monotonic()
        self._period, self._began = (now - self._began if self._began else 0.0), now
        self._hurries.clear()
        self._pending = PendingSave(partial(self._exchange, job), f"{_WHAT}.snapshot")
        self._hooks = [each.register_step_pre_hook(self._pending.tell_if_done) for each in runtime.optimizers]

    def wait(self) -> None:
        """Return when the last snapshot is whole on all nodes; raises what has kept it from that."""
        self._hurries.set()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def close(self) -> None:
        """Wait, and remove all snapshots of the run from the memory of all nodes. All ranks must call this."""
        self._finish()
        all_gather_text(self._lane, "")  # nobody needs them any more
        self._groups.release()
        shutil.rmtree(self.folder, ignore_errors=True)  # others of the node are at it, too

    def _finish(self) -> None:
        self._hurries.set()
        pending, self._pending = self._pending, None
        while self._hooks:
            self._hooks.pop().remove()
        if pending is not None:
            pending.settle()

    def _remove_all_but(self, tokens: Container[str]) -> None:
        for piece in pieces_in(self.folder):
            if piece.token not in tokens:
                shutil.rmtree(piece.folder, ignore_errors=True)

    def _write(self, here: SnapshotPart, state: CollectedState) -> _SnapshotJob:
        here.folder.mkdir(mode=0o700)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state.tensors, None, is_coordinator=True)
        items = planner.create_local_plan().items
        record = write_items(here.folder, self._lane.rank, items, planner)
        chunks = []
        for item in items:
            assert item.tensor_data is not None
            data, offsets = item.tensor_data, item.index.offset
            at = [0] * len(data.size) if offsets is None else list(offsets)
            dtype = str(data.properties.dtype).removeprefix("torch.")
            chunks.append([item.index.fqn, dtype, list(data.size), at, list(data.chunk.sizes)])
        return _SnapshotJob(here, record, chunks, state)

    def _exchange(self, job: _SnapshotJob) -> None:
        """In a thread: give and take what the partners have, and make a snapshot of it."""
        lane, folder = self._lane, job.here.folder
        try:
            first = job.state.document if lane.rank == 0 else None
            said = [asdict(job.record), job.chunks, job.state.own, first]
            told = [json.loads(text) for text in all_gather_text(lane, json.dumps(said))]
            records = [FileRecord(**record) for record, *_ in told]
            failure = ""
            try:
                self._swap(folder, job.record, None if self._from is None else records[self._from])
                contents = CheckpointContents(who_saves(self._runtime), _document(told), _table(records, told))
                written = contents.write(folder)
                text = _manifest(folder, [*records, written], job.here.token)
                write_file(folder / f".{MANIFEST}", [text])
                for file in folder.iterdir():
                    file.chmod(0o600)
            except (CheckpointError, OSError) as error:
                failure = f"rank {lane.rank}: {error}"
            if failures := [text for text in all_gather_text(lane, failure) if text]:
                raise CheckpointError("; ".join(failures))
            os.rename(folder / f".{MANIFEST}", folder / MANIFEST)  # see [Note: Never half new]
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise RankLostError(f"ranks have lost each other: {error}") from error
        self._newest = job.here.token

    def _swap(self, folder: Path, mine: FileRecord, theirs: FileRecord | None) -> None:
        """Send this rank's file, and receive another's, chunk by chunk with pauses in between."""
        if theirs is None:
            return
        sent, count = mapped(folder / mine.name, mine.size), -(-max(mine.size, theirs.size) // CHUNK)
        received = opened_to_write(folder / theirs.name, theirs.size)
        for index in range(count):
            began, cut = time.monotonic(), slice(index * CHUNK, (index + 1) * CHUNK)
            pair = {"to": self._to, "source": self._from}
            send_recv(self._lane, sent=sent[cut], received=received[cut], **pair, name="a snapshot").wait()
            self._hurries.wait(max(0.0, _SHARE * self._period / count - (time.monotonic() - began)))
        read_pieces(
            folder / theirs.name, theirs.size, theirs.sums, ChecksumScheme.best(), [Bytes(0, theirs.size, None)]
        )

    # Loading

    def load(self, *, strict: bool = True, newer_than: str | os.PathLike[str] | None = None) -> Resumed | None:
        """Put the last whole snapshot into model and optimizer; None if the nodes have none. All ranks must call this.

        Each rank reads its rows, compared with their checksums, from the memory of its node, and gets from others what
        that does not have. A damaged snapshot is told in the log, and the one before is tried.

        Args:
            strict: as for :func:`load`.
            newer_than: a folder of checkpoints, as for :func:`load_latest`: snapshots that were taken before the last
                complete one there was begun are left alone.

        Raises:
            ValueError: names, shapes or dtypes do not fit.
        """
        self._finish()
        view = self.folder / f"view.{self._lane.rank}"
        remove_views(self.folder, self._lane.size)
        saved = self._saved(newer_than)

        def opened(runtime: LayerZeroState) -> SnapshotSource:
            return SnapshotSource(self._lane, view)

        for token in whole_snapshots(self._lane, self.folder):
            if int(token[:10]) <= saved:
                break
            try:
                gather_view(self._lane, self.folder, token, view)
                said = f"the snapshot {token} in {self.folder}"
                extra = prepare_from(opened, said, self._model, self._optimizer, strict=strict).commit()
            except (RankLostError, UnsupportedFormat):
                raise
            except CheckpointError as error:
                if self._lane.rank == 0:
                    _LOG.warning("%s.load: %s", _WHAT, error)
                continue
            finally:
                shutil.rmtree(view, ignore_errors=True)
            self._newest = token
            return Resumed(self.folder, extra, ())
        return None

    def _saved(self, folder: str | os.PathLike[str] | None) -> int:
        """When the last checkpoint of a folder was begun, in seconds; -1: there is none. As the first rank says."""
        saved = -1
        if folder is not None and self._lane.rank == 0:
            with suppress(OSError):  # another job may remove what is looked at
                newest = latest(folder)
                saved = -1 if newest is None else int(min(file.stat().st_mtime for file in newest.iterdir()))
        return int(all_gather_text(self._lane, str(saved))[0])


@dataclass(frozen=True)
class _SnapshotJob:
    """One snapshot that is being taken.

    Attributes:
        chunks: of the tensors in this rank's file: key, dtype, whole shape, offsets, sizes.
    """

    here: SnapshotPart
    record: FileRecord
    chunks: list[list[Any]]
    state: CollectedState


def _partners(nodes: Sequence[str], rank: int) -> tuple[int | None, int | None]:
    """Whom a rank sends its part to, and whose it gets; `nodes` says on which each is. None: there is one node only.

    Ranks are counted node by node: as far on as the largest node has ranks is another one, unless that has most.
    """
    order = sorted(range(len(nodes)), key=lambda each: (nodes.index(nodes[each]), each))
    if len(set(nodes)) == 1:
        return None, None
    place, far = order.index(rank), max(map(nodes.count, nodes))
    return order[(place + far) % len(order)], order[(place - far) % len(order)]


def _manifest(folder: Path, records: Sequence[FileRecord], token: str) -> bytes:
    files = {record.name: record for record in records}
    return Manifest(folder, files, ChecksumScheme.best(), int(token[:10]), token, finite=True).text


def _document(told: Sequence[Sequence[Any]]) -> dict[str, Any]:
    document: dict[str, Any] = with_all_ranks(told[0][3], [own for _, _, own, _ in told])
    return document


def _table(records: Sequence[FileRecord], told: Sequence[Sequence[Any]]) -> dict[str, StoredTensor]:
    """What is in which file; of copies, the first."""
    found: dict[str, tuple[str, list[int], dict[tuple[int, ...], tuple[str, tuple[int, ...], tuple[int, ...]]]]] = {}
    for record, (_, chunks, *_) in zip(records, told, strict=True):
        for key, dtype, shape, offsets, sizes in chunks:
            at = tuple(offsets)
            found.setdefault(key, (dtype, shape, {}))[2].setdefault(at, (record.name, at, tuple(sizes)))
    return {
        key: StoredTensor(tuple(shape), dtype_named(dtype), tuple(chunks.values()))
        for key, (dtype, shape, chunks) in found.items()
    }
