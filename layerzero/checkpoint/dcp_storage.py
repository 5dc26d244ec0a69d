"""Write and read safetensors files and ``contents.json`` through torch.distributed.checkpoint (DCP).

DCP plans which rows each rank writes and reads. The StorageWriter and the StorageReader in this module execute the
plan. Each rank writes one file, in which tensors are named by their keys. ``contents.json`` records which rows of a
tensor are in which file.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, WriteItem
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from layerzero.checkpoint.collect_state import CollectedState
from layerzero.checkpoint.contents import CheckpointContents, Chunk, num_saving_ranks
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.publish import make_folder, new_token, partial_path, publish, read_back, remove
from layerzero.checkpoint.run_folder import next_sequence
from layerzero.checkpoint.safetensors_files import CheckpointFiles, Region, rank_file, write_items


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, without the copies and checks of the global plan, which take quadratic time.

    :meth:`SafetensorsWriter.prepare_global_plan` checks the plan in linear time.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = all_plans, Metadata({})
        return all_plans, self.metadata


def chunk_of(item: WriteItem) -> Chunk:
    """Return the chunk that an item of a save plan writes."""
    assert item.tensor_data is not None
    data = item.tensor_data
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return item.index.fqn, dtype, data.size, data.chunk.offsets, data.chunk.sizes


@dataclass
class SafetensorsWriter(StorageWriter):
    """DCP ``StorageWriter`` that writes one checkpoint.

    Attributes:
        path: path of the checkpoint, which exists only after the save finishes.
        state: state of this rank.
        topology: see :class:`CheckpointContents`.
        keep_last: number of checkpoints to keep in the parent folder; None to keep all.
        overwrite: whether to replace an existing checkpoint at `path`.
    """

    path: Path
    state: CollectedState
    topology: Mapping[str, int]
    rank: int
    keep_last: int | None = None
    overwrite: bool = False
    _token: str | None = None  # see [Note: Concurrent saves to one path]
    _contents: CheckpointContents | None = None  # on the first rank, after the global plan
    _finite: bool | None = None  # whether all trained tensors are finite; on the first rank, after the global plan

    @property
    def _reads_back(self) -> bool:
        """Whether to read each file again and verify its checksums before the checkpoint is published."""
        return self.keep_last is not None or self.overwrite

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because no state is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because no setup is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=json.dumps([self.state.own, not self.state.bad]))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if len(plans) != num_saving_ranks(self.topology):  # DCP saves for one rank if there is no default group
            raise CheckpointError(
                f"{num_saving_ranks(self.topology)} ranks must save {self.path}, but only {len(plans)} took part"
            )
        rank_entries = [json.loads(plan.storage_data) for plan in plans]
        self._finite = all(finite for _, finite in rank_entries)
        self._contents, kept = CheckpointContents.of_ranks(
            self.topology,
            self.state.document,
            [own_values for own_values, _ in rank_entries],
            ((rank_file(rank), map(chunk_of, plan.items)) for rank, plan in enumerate(plans)),
        )
        make_folder(self.path.parent)
        self._token = new_token()
        self._partial.mkdir()
        return [
            replace(plan, items=[plan.items[index] for index in indices], storage_data=self._token)
            for plan, indices in zip(plans, kept, strict=True)
        ]

    @property
    def _partial(self) -> Path:
        """Hidden folder into which the files are written. The folder is later renamed to the path of the checkpoint."""
        assert self._token is not None
        return partial_path(self.path, self._token)

    def discard(self) -> None:
        """Remove the files written so far.

        Call this method on the first rank, after all ranks know that the save failed.
        """
        if self._token is not None:
            remove(self._partial)

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        self._token = plan.storage_data
        future: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            record = write_items(self._partial, self.rank, plan.items, planner)
            if self._reads_back:
                read_back(self._partial, record)
            results = [WriteResult(MetadataIndex(record.name), record.size, record)]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = [result.storage_data for of_rank in results for result in of_rank]
        assert self._contents is not None and self._token is not None
        written = self._contents.write(self._partial)
        if self._reads_back:
            read_back(self._partial, written)
        publish(
            self._partial,
            self.path,
            [*files, written],
            sequence=next_sequence(self.path.parent),
            token=self._token,
            finite=self._finite,
            overwrite=self.overwrite,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@dataclass
class SafetensorsReader(StorageReader):
    """DCP ``StorageReader`` that reads one verified checkpoint.

    Attributes:
        names: key of each tensor, by flat name.
        values: values that are not tensors, by flat name.
    """

    files: CheckpointFiles
    names: Mapping[str, str]
    values: Mapping[str, Any]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because no state is kept between loads."""

    def read_metadata(self, *args: Any) -> Metadata:
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self.values}
        for name, key in self.names.items():
            stored = self.files.contents.tensors[key]
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in stored.chunks
            ]
            entries[name] = TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(stored.shape), chunks)
        return Metadata(state_dict_metadata=entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because no setup is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        regions, targets = [], []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickle_to_buffer(self.values[item.storage_index.fqn]))
                continue
            target = planner.resolve_tensor(item).detach()
            origin = item.storage_index.offset or (0,) * len(item.lengths)
            starts = [at + offset for at, offset in zip(origin, item.storage_offsets, strict=True)]
            box = tuple(slice(start, start + n) for start, n in zip(starts, item.lengths, strict=True))
            regions.append(Region(self.names[item.storage_index.fqn], box, target))
            targets.append((item, target))
        self.files.read_regions(regions)
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _pickle_to_buffer(value: Any) -> io.BytesIO:
    """Return a buffer with the pickled `value`, as DCP expects for values that are not tensors.

    DCP unpickles the buffer. This is safe, because the value was decoded from JSON.
    """
    torch.save(value, buffer := io.BytesIO())
    buffer.seek(0)
    return buffer
