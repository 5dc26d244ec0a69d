"""Write a checkpoint: the steps of each rank, and those of the first rank between them.

torch.distributed.checkpoint (DCP) plans which rows a rank writes. Each rank writes one file, in which tensors are named
by their keys. ``contents.json`` records which rows of a tensor are in which file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from layerzero.checkpoint.checksums import FileRecord
from layerzero.checkpoint.collect_state import CollectedState
from layerzero.checkpoint.contents import CheckpointContents, Chunk
from layerzero.checkpoint.publish import make_folder, new_token, partial_path, publish, read_back, remove
from layerzero.checkpoint.run_folder import next_sequence
from layerzero.checkpoint.safetensors_files import rank_file, write_items


def plan_items(state: CollectedState, *, is_first: bool) -> tuple[list[WriteItem], SavePlanner]:
    """Return the items that this rank can write, and the planner that returns their values."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state.tensors, is_coordinator=is_first)
    return planner.create_local_plan().items, planner


def chunk_of(item: WriteItem) -> Chunk:
    """Return the chunk that an item of a save plan writes."""
    assert item.tensor_data is not None
    data = item.tensor_data
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return item.index.fqn, dtype, data.size, data.chunk.offsets, data.chunk.sizes


@dataclass
class CheckpointWriter:
    """Writer of one checkpoint. The methods are called in the order in which they are defined.

    The methods exchange values that JSON can represent.

    Attributes:
        path: path of the checkpoint, which exists only after :meth:`finish`.
        state: state of this rank.
        topology: see :class:`CheckpointContents`.
        keep_last: number of checkpoints to keep in the parent folder of `path`; None to keep all.
        overwrite: whether to replace an existing checkpoint at `path`.
    """

    path: Path
    state: CollectedState
    topology: Mapping[str, int]
    rank: int
    keep_last: int | None = None
    overwrite: bool = False
    _items: list[WriteItem] = field(default_factory=list)
    _planner: SavePlanner | None = None
    _token: str | None = None  # see [Note: Concurrent saves to one path]
    _contents: CheckpointContents | None = None  # on the first rank, after `merge_plans`
    _finite: bool | None = None  # whether all trained tensors are finite; on the first rank, after `merge_plans`

    @property
    def _reads_back(self) -> bool:
        """Whether to read each file again and verify its checksums before the checkpoint is published."""
        return self.keep_last is not None or self.overwrite

    def plan(self) -> list[Any]:
        """Plan what this rank can write. Return its chunks and own values, and whether its tensors are finite."""
        self._items, self._planner = plan_items(self.state, is_first=self.rank == 0)
        return [[chunk_of(item) for item in self._items], self.state.own, not self.state.bad]

    def merge_plans(self, plans: list[Any]) -> list[Any]:
        """Check the plans of all ranks, on the first rank. Return a token and the items to write for each rank."""
        chunks, owns, finite = zip(*plans, strict=True)
        self._finite = all(finite)
        self._contents, kept = CheckpointContents.of_ranks(
            self.topology,
            self.state.document,
            owns,
            ((rank_file(rank), of_rank) for rank, of_rank in enumerate(chunks)),
        )
        make_folder(self.path.parent)
        self._token = new_token()
        self._partial.mkdir()
        return [[self._token, indices] for indices in kept]

    @property
    def _partial(self) -> Path:
        """Hidden folder into which the files are written. The folder is later renamed to the path of the checkpoint."""
        assert self._token is not None
        return partial_path(self.path, self._token)

    def write(self, token: str, kept: list[int]) -> dict[str, Any] | None:
        """Write the file of this rank. Return its record, or None if the rank has no rows.

        Args:
            token, kept: entry of this rank in the result of :meth:`merge_plans`.
        """
        self._token = token
        if not kept:
            return None
        assert self._planner is not None
        record = write_items(self._partial, self.rank, [self._items[index] for index in kept], self._planner)
        if self._reads_back:
            read_back(self._partial, record)
        return asdict(record)

    def finish(self, records: list[Any]) -> list[None]:
        """Publish the checkpoint, on the first rank, with the records of the files of all ranks."""
        assert self._contents is not None and self._token is not None
        files = [FileRecord(**record) for record in records if record is not None]
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
        return [None] * len(records)

    def discard(self) -> None:
        """Remove the files written so far.

        Call this method on the first rank, after all ranks know that the save failed.
        """
        if self._token is not None:
            remove(self._partial)
