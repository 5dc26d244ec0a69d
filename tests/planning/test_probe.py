"""Cluster performance, measured by the ranks that run on it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.planning import Cluster, ProbeResult, TransformerShape, probe
from layerzero.planning.probe import _host_bytes, _worst_over_ranks, latency_and_bandwidth
from tests.support.models import integer_net
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMPUTED = {"tflops", "reserve", "memory", "memory_speed", "host_memory", "host_memory_speed", "processor_per_byte"}
SHAPE = {"nodes", "accelerators", "device"}
SMALL = 1 << 16


def test_a_small_and_a_large_collective_give_latency_and_speed() -> None:
    for ranks, steps in ((2, 1), (8, 3), (9, 4)):
        latency, speed = 1e-5, 1e9
        small = steps * latency
        found = latency_and_bandwidth(small, small + 1e6 / speed, ranks=ranks, sent=1_000_000)
        assert found == pytest.approx((latency, speed)), ranks
    assert latency_and_bandwidth(2.0, 1.0, ranks=2, sent=100)[1] == 1e4, "of noise, a finite speed"


def _run_probe(rank: int, size: int) -> ProbeResult:
    before = list(dist.distributed_c10d._world.pg_map)
    found = probe(zero3_size=size, nbytes=SMALL, dtype=torch.float32)
    assert list(dist.distributed_c10d._world.pg_map) == before, "nothing stays"
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(("world", "size"), [(4, 2), (2, 2), (2, 1), (1, 1)])
def test_what_can_be_measured_is_and_the_rest_is_a_default(world: int, size: int, tmp_path: Path) -> None:
    found, *others = run_ranks(_run_probe, size, world_size=world)
    assert all(other == found for other in others)
    expected = SHAPE | COMPUTED
    expected |= {"inside", "inside_latency", "launch"} if size > 1 else set()
    expected |= {"between", "between_latency", "launch"} if world > size else set()
    assert set(found.measured) == expected
    cluster, defaults = found.cluster, Cluster(nodes=world // size)
    assert (cluster.nodes, cluster.accelerators, cluster.device) == (world // size, size, "cpu")
    for name, value in asdict(cluster).items():
        assert name in found.measured or value == getattr(defaults, name), name
    found.write(tmp_path / "cluster.yaml")
    read = Cluster.from_yaml(tmp_path / "cluster.yaml")
    for name, value in asdict(read).items():
        assert value == (pytest.approx(getattr(cluster, name), rel=1e-3) if isinstance(value, float) else value), name
    assert (
        layerzero.plan(TransformerShape(layers=2, hidden=64, vocab=128, heads=2), cluster, micro_batches=[1]).best
        is not None
    )


def _one_is_slow(rank: int) -> dict[str, float]:
    model = layerzero.shard_model(integer_net(), zero3_size=2)
    control = get_state(model).mesh_info.control_comms
    found = _worst_over_ranks({"between": 1.0 + rank, "launch": 10.0 + rank, "nodes": 2, "device": "cpu"}, control)
    return found


def test_a_container_may_take_less_than_there_is(tmp_path: Path) -> None:
    limit, nowhere = tmp_path / "memory.max", tmp_path / "nowhere"
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for text, expected in (("max\n", there), (f"{2 * there}\n", there), ("1000000\n", 1_000_000)):
        limit.write_text(text)
        assert _host_bytes((nowhere, limit)) == expected


def test_the_slowest_rank_counts() -> None:
    for found in run_ranks(_one_is_slow, world_size=2):
        assert found == {"between": 1.0, "launch": 11.0, "nodes": 2, "device": "cpu"}


def _refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"zero3_size=3 does not divide"):
        probe(zero3_size=3)
    with pytest.raises(ValueError, match="nbytes=1 is too small"):
        probe(zero3_size=1, nbytes=1)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        probe()


def test_what_cannot_be_probed_is_said() -> None:
    run_ranks(_refused, world_size=2)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        probe()


def _run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


PLAN = ("-m", "layerzero", "plan", "--probe", "--layers", "2", "--hidden", "64", "--vocab", "128", "--heads", "2")


@pytest.mark.exhaustive
def test_the_command_measures_where_it_runs_and_plans_for_it(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = _run(*torchrun, *PLAN, "--memory", "6", folder=tmp_path)
    assert "No backend of type" not in done.stderr  # torch's warning when it destroys a group without default backend
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# measured on 2 ranks") == 1 and done.stdout.count("Recommended:") == 1, done.stdout
    assert "accelerators: 2" in done.stdout and "# between: 800  # Gbit/s per node\n" in done.stdout
    assert "2 accelerators of 6 GB" in done.stdout, "a flag is put in place of what was measured"
    speed = next(line for line in done.stdout.splitlines() if line.startswith("inside: "))
    assert math.isfinite(float(speed.split()[1]))


@pytest.mark.exhaustive
def test_alone_the_command_says_how_to_start_it(tmp_path: Path) -> None:
    done = _run(*PLAN, folder=tmp_path)
    assert done.returncode == 2 and "torchrun --nnodes 2 --nproc-per-node 8 -m layerzero plan --probe" in done.stderr
    (tmp_path / "c.yaml").write_text("nodes: 1")
    done = _run(*PLAN, "--cluster", "c.yaml", folder=tmp_path)
    assert done.returncode == 2 and "--probe and --cluster exclude each other" in done.stderr
