"""Two jobs save all their stages to one path at the same time: a checkpoint reported as saved can be loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import layerzero
import layerzero.megatron
from layerzero import checkpoint
from layerzero.checkpoint import CheckpointError
from layerzero.megatron import ProcessGroups, ShardedChunk, chunk_checkpoint
from tests.support.damaging import flip_bit
from tests.support.models import IntegerNet, different, full_parameters, integer_net
from tests.support.ranks import on_ranks
from tests.support.rivals import Job, kill_one_of_two, race

pytestmark = pytest.mark.slow

_UNITS = [f"module.{name}" for name in IntegerNet.UNITS]
_save = checkpoint.save


def _groups(ranks: list[list[int]], rank: int) -> ProcessGroups:
    """Return the groups of jobs of two ranks: two pipeline stages without data parallelism."""
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    pipeline = next(group for job in ranks if (group := dist.new_group(job)) and rank in job)
    return ProcessGroups(zero1=alone, zero3=alone, tensor=alone, pipeline=pipeline, model=pipeline, embedding=None)


def _chunks(groups: ProcessGroups, seed: int) -> list[ShardedChunk]:
    """Return two model chunks, as with interleaving; each stage has weights of its own."""
    mesh = layerzero.mesh_from_groups(groups.zero1, groups.zero3)
    chunks = []
    for chunk in range(2):
        module = integer_net(100 * seed + 10 * dist.get_rank(groups.pipeline) + chunk)
        chunks.append(ShardedChunk(module, None, groups))
        layerzero.shard_model(chunks[-1], mesh=mesh, units=_UNITS)
    return chunks


def _weights(chunks: list[ShardedChunk]) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": value for index, each in enumerate(chunks) for name, value in full_parameters(each).items()
    }


def _job(jobs: list[list[int]], seed: int) -> Job:
    groups = _groups(jobs, dist.get_rank())
    chunks, again = _chunks(groups, seed), _chunks(groups, 2)

    def change(turn: int) -> None:
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.add_(1)

    return Job(
        change,
        lambda: _weights(chunks),
        lambda path, extra, later: layerzero.megatron.save(path, chunks, None, extra),
        lambda path: (layerzero.megatron.load(path, again), _weights(again)),
    )


def test_of_two_jobs_that_save_all_stages_to_one_path_one_gets_it_and_can_load_it(tmp_path: Path) -> None:
    race(_job, tmp_path)


def test_a_job_that_dies_while_it_saves_its_stages_takes_nothing_with_it(tmp_path: Path) -> None:
    kill_one_of_two(_job, tmp_path, (0, 5, 12, 19))


@on_ranks(world_size=2)
def test_what_is_in_the_way_of_a_save_of_all_stages_is_named_on_all_ranks(rank: int, tmp_path: Path) -> None:
    groups = _groups([[0, 1]], rank)
    chunks, again = _chunks(groups, 0), _chunks(groups, 1)
    layerzero.megatron.save(tmp_path / "one", chunks, None, 3)
    dist.barrier()
    if rank == 0:
        (tmp_path / "one" / "complete").write_bytes(b"")  # as it was before saves had tokens
        (tmp_path / "half").mkdir()
        (tmp_path / "half" / "file").touch()
    dist.barrier()
    assert layerzero.megatron.load(tmp_path / "one", again) == 3
    assert not different(_weights(again), _weights(chunks))
    with pytest.raises(FileExistsError, match="contains no complete checkpoint"):
        layerzero.megatron.save(tmp_path / "half", chunks)
    assert (tmp_path / "half" / "file").exists(), "whosever it is"
    with pytest.raises((ValueError, RuntimeError), match="starts with a dot"):
        layerzero.megatron.save(tmp_path / ".hidden", chunks)
    with pytest.raises((TypeError, RuntimeError), match="cannot be saved, because checkpoints contain no code"):
        layerzero.megatron.save(tmp_path / "two", chunks, None, object() if rank == 1 else 3)
    with (
        mock.patch.object(
            chunk_checkpoint,
            "save_with_rank_local_names",
            _elsewhere if rank == 1 else chunk_checkpoint.save_with_rank_local_names,
        ),
        pytest.raises(
            CheckpointError,
            match=r"lacks \['layout-1-2-tensor-000-stage-001-chunk-000', .*file system that all ranks share",
        ),
    ):
        layerzero.megatron.save(tmp_path / "two", chunks)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "one"], "nothing is left of what failed"


@on_ranks(world_size=2)
def test_a_checkpoint_with_one_damaged_stage_changes_none(rank: int, tmp_path: Path) -> None:
    groups = _groups([[0, 1]], rank)
    chunks, again = _chunks(groups, 0), _chunks(groups, 1)
    layerzero.megatron.save(tmp_path / "one", chunks)
    before = _weights(again)
    if rank == 0:
        (file,) = (tmp_path / "one").glob("*stage-001-chunk-001/rank-00000.safetensors")
        flip_bit(file, -3)
    dist.barrier()
    with pytest.raises(CheckpointError, match="stage-001-chunk-001"):
        layerzero.megatron.load(tmp_path / "one", again)
    assert not different(_weights(again), before), "nothing is changed on any stage"


def _elsewhere(apart: Any, path: Path, *args: Any) -> None:
    """Save as a rank with its own disk: the first rank does not see the files of this one."""
    _save(path, *args)
    shutil.rmtree(path)
