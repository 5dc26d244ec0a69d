"""Read checkpoints through torch.distributed.checkpoint (DCP).

DCP plans which rows each rank reads. The StorageReader in this module executes the plan.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from layerzero.checkpoint.safetensors_files import CheckpointFiles, Region


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
