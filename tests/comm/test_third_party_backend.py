"""Backends other than gloo: the launch order depends on the program alone; no unusual features are used."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

import layerzero
from layerzero import Offload
from layerzero.comm.process_groups import mesh_group
from tests.support.late_backend import NAME, register
from tests.support.late_transfers import late as late_transfers
from tests.support.launches import three_steps
from tests.support.models import SideBySide, different, exact_sgd, integer_net, train
from tests.support.ranks import mesh_of, on_ranks, run_ranks
from tests.support.wrapped_gloo import mesh_on

pytestmark = pytest.mark.slow

WORLD = 4
UNITS = 5


CASES = {
    "sharded": {},
    "full": {"accumulation": "full"},
    "ZeRO-1": {"zero3_size": 1},
    "offloaded": {"offload": Offload(grads=True)},
    "offloaded, full": {"offload": Offload(grads=True), "accumulation": "full"},
}


def _launch(rank: int) -> dict[str, list[str]]:
    logs = {}
    register()
    meshes = {size: mesh_on(NAME, size) for size in (1, 2)}
    for name, case in CASES.items():
        settings = dict(case)
        size = settings.pop("zero3_size", 2)
        results = []
        for mesh in (meshes[size], mesh_of(size)):
            with late_transfers() if "offload" in settings else nullcontext():
                model = layerzero.shard_model(
                    SideBySide(UNITS), mesh=mesh, units=[f"units.{i}" for i in range(UNITS)], **settings
                )
                results.append(three_steps(model, rank))
        (logs[name], ours), (_, on_gloo) = results
        assert not different(ours, on_gloo), name
    return logs


def test_all_ranks_launch_alike_however_late_each_collective_is() -> None:
    logs = run_ranks(_launch, world_size=WORLD, pg_timeout=30)
    for name in CASES:
        first = logs[0][name]
        assert sum(entry.startswith("hop2") for entry in first) == 4 * (UNITS + 1), name
        for rank, log in enumerate(logs):
            if "full" not in name and name != "ZeRO-1":  # each hop 2 right after its hop 1, among the reductions
                sums = [entry for entry in log[name] if entry.startswith("hop")]
                steps = [sums[at : at + 2] for at, entry in enumerate(sums[:-1]) if sums[at + 1].startswith("hop2")]
                assert all(a.replace("hop1", "hop2") == b for a, b in steps), f"{name}: {sums}"
            assert log[name] == first, f"{name}, rank {rank}: {log[name]} instead of {first}"


# --- init_process_group(device_id=...) ---


@on_ranks(world_size=WORLD, pg_timeout=20)
def test_groups_of_some_ranks_are_not_split_off_from_all(rank: int) -> None:
    """Check the splitting of groups without a backend that splits: torch first asks what to split."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) does
    asked = AssertionError("a communicator of all ranks would be split, and the other half of them does not know")
    with mock.patch("torch.distributed.distributed_c10d._get_split_source", side_effect=asked):
        if rank < 2:
            net = integer_net()
            model = layerzero.shard_model(net, mesh=layerzero.mesh_from_groups(half, half), units=net.UNITS)
            train(model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model), rank, range(2))
        assert world.bound_device_id == torch.device("cuda", 0)
    world.bound_device_id = None


@on_ranks(world_size=WORLD)
def test_groups_have_the_timeout_that_the_backend_tells_or_torchs(rank: int) -> None:
    register()
    ranks = list(range(WORLD))
    for backend, expected in ((NAME, default_pg_timeout), ("gloo", timedelta(seconds=45))):
        like = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=45))
        made = mesh_group(ranks, like=like, device_type="cpu")._get_backend(torch.device("cpu"))
        assert (made._gloo if backend == NAME else made).options._timeout == expected, backend
