"""Meshes made by torch, meshes from process groups of another framework, and the default mesh."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import layerzero
from tests.support.models import IntegerNet, backward, exact_model, follow_exactly, full_parameters, integer_net
from tests.support.ranks import on_ranks, run_ranks, run_sharing

WORLD = 4


def _train(mesh: DeviceMesh | None) -> int:
    """Train like one process on the batches of the mesh's ranks; return S."""
    model, optimizer = exact_model(mesh=mesh)
    found = next(model.parameters()).device_mesh
    ranks = sorted(found.mesh.flatten().tolist())
    follow_exactly(model, optimizer, integer_net(), rank=dist.get_rank(), ranks=ranks, micro_batches=2, case=ranks)
    return found.size(0)


def _torchs(rank: int) -> None:
    names = ("dp_replicate", "dp_shard")
    for mesh, size in (
        (init_device_mesh("cpu", (4,)), 4),
        (init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), 4),
        (init_device_mesh("cpu", (2, 2)), 2),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=names), 2),
        (init_device_mesh("cpu", (1, 4), mesh_dim_names=names), 4),
        (init_device_mesh("cpu", (4, 1), mesh_dim_names=names), 1),
        (layerzero.init_mesh(2), 2),
    ):
        assert _train(mesh) == size, mesh
    # Submeshes: the data-parallel ranks of each tensor-parallel rank, adjacent and two apart.
    for names, part in ((("dp", "tp"), "dp"), (("pp", "dp"), "dp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        assert _train(mesh[part]) == 2
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    assert _train(mesh["dp_replicate", "dp_shard"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_ranks, pytest.param(run_sharing, marks=pytest.mark.slow)])
def test_meshes_of_torch_train_as_one_process(run: Any) -> None:
    run(_torchs, world_size=WORLD)


# Data-parallel groups, alone or beside each other as with tensor or pipeline parallelism, and the blocks that share
# weights. A mean over three ranks is not exact.
GROUPS: list[tuple[list[list[int]], list[list[int]]]] = [
    ([[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    ([[0, 1, 2, 3]], [[0, 1], [2, 3]]),
    ([[0, 1, 2, 3]], [[0, 1, 2, 3]]),
    ([[0, 2], [1, 3]], [[0], [1], [2], [3]]),
    ([[0, 2], [1, 3]], [[0, 2], [1, 3]]),
    ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    ([[0], [1, 2, 3]], [[0], [1, 2, 3]]),
]
BAD_GROUPS: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "every second rank": ([[0, 1, 2, 3]], [[0, 2], [1, 3]]),
    "not aligned": ([[0, 1, 2, 3]], [[0, 3], [1, 2]]),
    "of different sizes": ([[0, 1, 2, 3]], [[0, 1, 2], [3]]),
    "of sizes 2, 1, 1": ([[0, 1, 2, 3]], [[0, 1], [2], [3]]),
    "larger than the data-parallel group": ([[0, 1], [2, 3]], [[0, 1, 2, 3]]),
    "across data-parallel groups": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
}


def _own(lists: list[list[int]]) -> list[int]:
    return next(members for members in lists if dist.get_rank() in members)


def _group(ranks: list[list[int]]) -> dist.ProcessGroup:
    """Make a process group of each list; return the one that contains this rank."""
    made = [dist.new_group(members) for members in ranks]
    return made[ranks.index(_own(ranks))]


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_meshes_of_given_groups_train_as_one_process_unless_their_blocks_are_bad(rank: int) -> None:
    for zero1, zero3 in GROUPS:
        mesh, size = layerzero.mesh_from_groups(_group(zero1), _group(zero3)), len(_own(zero3))
        assert mesh.mesh_dim_names == ("replica", "zero3") and mesh.mesh.flatten().tolist() == _own(zero1)
        assert mesh.get_local_rank("zero3") == _own(zero3).index(rank)
        assert len(_own(zero1)) == 3 or _train(mesh) == size, (zero1, zero3)
    for name, (zero1, zero3) in BAD_GROUPS.items():
        zero1_group, zero3_group, start = _group(zero1), _group(zero3), time.monotonic()
        with pytest.raises((ValueError, RuntimeError), match="zero3_group"):
            layerzero.mesh_from_groups(zero1_group, zero3_group)
        assert time.monotonic() - start < 10, name
    # A difference in one data-parallel group leaves the other one alone.
    mesh = layerzero.mesh_from_groups(_group([[0, 2], [1, 3]]), _group([[0, 2], [1, 3]]))
    differs = pytest.raises(ValueError, match=r"prefetch.*\b3\b") if rank % 2 else nullcontext()
    with differs:
        layerzero.shard_model(integer_net(), mesh=mesh, prefetch=2 if rank == 3 else 1)


@on_ranks(world_size=WORLD)
def test_checkpoints_go_from_one_mesh_of_torch_to_another(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = layerzero.shard_model(integer_net(), mesh=mesh, units=IntegerNet.UNITS)
    layerzero.checkpoint.save(tmp_path / "saved", model)
    other = layerzero.shard_model(integer_net(1), mesh=init_device_mesh("cpu", (4,)))
    layerzero.checkpoint.load(tmp_path / "saved", other)
    ours, theirs = full_parameters(model), full_parameters(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@on_ranks(world_size=WORLD)
def test_without_mesh_and_size_the_ranks_of_a_node_share_the_weights(rank: int) -> None:
    before = os.environ.get("LOCAL_WORLD_SIZE")
    try:
        for said, size in (("2", 2), ("4", 4), ("1", 1)):
            os.environ["LOCAL_WORLD_SIZE"] = said
            assert _train(None) == size
            assert (mesh := layerzero.init_mesh()).size(1) == size
            # torch warns when it destroys a group of gloo for several device types that has no default backend.
            assert {group.name() for group in mesh.get_all_groups()} == {"gloo"}
        for said, text in (
            ("3", "is 3 here, with 4 ranks"),
            ("0", "is 0 here"),
            ("", "is not set here"),
            ("x", "is x"),
        ):
            os.environ["LOCAL_WORLD_SIZE"] = said
            with pytest.raises(ValueError, match=rf"LOCAL_WORLD_SIZE.*{text}.*one of \[1, 2, 4\]"):
                layerzero.shard_model(integer_net())
        os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == 3 else "2"  # nodes with unequal numbers of ranks
        with pytest.raises(ValueError, match="ranks disagree: zero3_size"):
            layerzero.shard_model(integer_net())
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


def _alone(rank: int, local_world_size: str | None) -> None:
    if local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world_size
    model = layerzero.shard_model(integer_net())
    backward(model, rank)
    assert layerzero.init_mesh().size(1) == 1 and model.head.weight.grad.shape == (3, 6)
    os.environ.pop("LOCAL_WORLD_SIZE", None)


def test_one_process_needs_neither_mesh_nor_size() -> None:
    for local_world_size in (None, "8"):
        run_ranks(_alone, local_world_size, world_size=1)
