"""Shared memory: its use and benefit, ranks that cannot use it, and cleanup after a crash or release."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.shared_memory import segment
from layerzero.shared_memory.rendezvous import map_shared_segment
from layerzero.shared_memory.segment import SegmentSizes, SharedSegment
from layerzero.utils.machine import available_memory
from tests.support.crashing import survivors
from tests.support.graphs import batch, blocks, loss_of, message_of, one_pass, sgd, shard, train_step
from tests.support.logs import logged
from tests.support.models import IntegerNet, assert_same_bits, exact_model, exact_sgd, in_lockstep, integer_net, update
from tests.support.ranks import on_ranks
from tests.support.ranks import run_sharing as run_ranks
from tests.support.refreshes import is_refreshing
from tests.support.waiting import within

pytestmark = pytest.mark.slow

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _shares(model: nn.Module) -> bool:
    """Return whether all handles of a model use shared memory; it must be all or none."""
    shared = {handle.weights.buffer.read_by_peers for handle in get_state(model).handles}
    assert len(shared) == 1, shared
    assert (layerzero.traffic(model).transport == "shared_memory") is (shared == {True})
    return shared.pop()


# --- use and benefit ---


@on_ranks(shared_memory="auto")
def test_the_ranks_of_a_zero3_group_share_memory_unless_they_are_told_not_to(rank: int) -> None:
    for size, memory, shares in ((1, "auto", False), (2, "auto", True), (4, "auto", True), (4, "off", False)):
        model = shard(blocks(2), size=size, shared_memory=memory)
        assert _shares(model) is shares, (size, memory)
        layerzero.traffic(model, reset=True)
        one_pass(model, rank, 0)
        traffic = layerzero.traffic(model)
        for collective in ("gather", "hop1"):
            assert (traffic.calls.get(collective, 0) > 0) is (size > 1), (size, traffic)
        assert (traffic.bytes.get("gather", 0) > 0) is (size > 1 and not shares), (size, traffic)


def test_other_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shared_memory=False is not supported. Use one of \('auto', 'off'\)"):
        layerzero.LayerZeroConfig(shared_memory=False)


@on_ranks(shared_memory="auto")
def test_what_is_read_in_the_memory_of_others_is_counted_by_formula(rank: int) -> None:
    # Gradients of a micro-batch have the compute dtype, bf16; those of a step the masters' dtype, float64 here.
    for size, accumulation, sums, itemsize in ((2, "sharded", 3, 2), (4, "sharded", 3, 2), (2, "full", 1, 8)):
        model = shard(blocks(3), size=size, mp_policy=BF16, accumulation=accumulation)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        handles = get_state(model).handles
        numels = [handle.layout.numel for handle in handles]
        (transport,) = get_state(model).transports
        for step in range(3):
            layerzero.traffic(model, reset=True)
            rounds = transport._rounds
            for micro_batch in range(3):
                with layerzero.no_sync(model):
                    loss_of(model(batch(rank, step, micro_batch))).backward()
            assert transport._rounds == rounds, "no round of writes in micro-batches"
            update(optimizer)
            assert transport._rounds == rounds + 1, "one round of writes per optimizer step"
            traffic = layerzero.traffic(model)
            # (size - 1) / size of each sum is read from other ranks' memory.
            expected = sums * sum(numel * itemsize * (size - 1) // size for numel in numels)
            counted = (traffic.bytes["hop1"], traffic.calls["hop1"])
            assert counted == (expected, sums * len(handles)), (counted, expected, accumulation)
            assert traffic.predicted["hop1"] == expected and traffic.predicted["gather"] == 0, traffic
            assert traffic.bytes_by_axis["zero3"] == expected and traffic.bytes["gather"] == 0, traffic


@on_ranks(shared_memory="auto")
def test_the_report_counts_what_is_shared_once(rank: int) -> None:
    for size, policy in ((2, BF16), (4, BF16), (2, MixedPrecisionPolicy())):
        model, optimizer = exact_model(zero3_size=size, mp_policy=policy)
        in_lockstep(rank, (model, optimizer), _alone(), range(3))
        report = layerzero.memory(model)
        assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted, report
        lz_state = get_state(model)
        whole = sum(handle.layout.numel * handle.weights.zero3_shard.itemsize for handle in lz_state.handles)
        assert report.measured["zero3_shard"] == whole // size, "a rank's own part, as with collectives"
        assert report.measured["full_buffer"] == report.measured["cached_buffer"] == 0
        # Once per node: the weights, the buffers that other ranks read, and pages for counters.
        (transport,) = lz_state.transports
        parts = torch.tensor([transport.send_scratch.most_bytes])
        dist.all_reduce(parts, group=lz_state.mesh_info.zero3_control_comm.group)
        page = os.sysconf("SC_PAGE_SIZE")
        shared = report.shared_segment - int(parts)
        assert whole <= shared <= whole + 64 * len(lz_state.handles) + 8 * page, (report, parts)


def _alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = integer_net()
    return net, exact_sgd(net.parameters())


# --- ranks that cannot share ---


FAILS = (("create", 0), ("open", 3), ("create", 2))  # call that fails, and the rank on which it fails


def _cannot(rank: int) -> list[list[str]]:
    mesh, told = layerzero.init_mesh(2), []
    for call, limited in FAILS:
        fails = mock.patch.object(SharedSegment, call, side_effect=OSError("no room"))
        with logged() as lines, fails if rank == limited else nullcontext():
            model = layerzero.shard_model(integer_net(), mesh=mesh, units=IntegerNet.UNITS)
        told.append(lines)
        # The other node works, and shares.
        assert _shares(model) is (rank // 2 != limited // 2), rank
        files = len([name for name in os.listdir("/proc/self/fd") if "layerzero" in _target(name)])
        assert (files > 0) is _shares(model), files
        optimizer, (net, theirs) = layerzero.shard_optimizer(exact_sgd(model.parameters()), model), _alone()
        in_lockstep(rank, (model, optimizer), (net, theirs), range(3))
        assert_same_bits(model, net, "with and without shared memory")
        layerzero.close(model)
    return told


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def test_where_one_rank_cannot_share_its_zero3_group_uses_collectives_and_says_so_once() -> None:
    by_rank = run_ranks(_cannot)
    for number, (_, limited) in enumerate(FAILS):
        lines, first = [told[number] for told in by_rank], limited // 2 * 2
        assert [len(each) for each in lines] == [int(rank == first) for rank in range(4)], lines
        (line,) = lines[first]
        assert f"ranks {[first, first + 1]} use collectives instead of shared memory" in line, line
        assert "no room" in line, line


@pytest.mark.parametrize(
    ("folder", "limit", "used"),
    [(".", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")],
)
def test_a_container_that_is_full_has_no_shared_memory(
    folder: str, limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / folder
    where.mkdir(exist_ok=True)
    for name, text in (
        (limit, "max"),
        (used, "900000\n"),
        ("memory.stat", "anon 5\nactive_file 100\ninactive_file 20\n"),
    ):
        (where / name).write_text(text)
    assert available_memory(tmp_path) > 1_000_000, "no limit"
    (where / limit).write_text("1000000\n")
    assert available_memory(tmp_path) == 100_120
    monkeypatch.setattr(segment, "available_memory", lambda: available_memory(tmp_path))
    region = SegmentSizes(num_counters=4, common=1 << 16, part=1 << 16, predicted=1 << 12)
    file, _ = SharedSegment.create(region, 2)
    try:
        assert os.fstat(file).st_mode & 0o777 == 0o600, "the user's own"
    finally:
        os.close(file)
    with pytest.raises(OSError, match="are needed, 100120 are available"):
        SharedSegment.create(SegmentSizes(num_counters=4, common=1 << 16, part=1 << 16, predicted=1 << 16), 2)


# --- cleanup ---


@on_ranks(timeout=240, shared_memory="auto")
def test_models_that_go_leave_no_mapping_and_no_file(rank: int) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return maps.count("layerzero-"), sum("layerzero-" in _target(name) for name in os.listdir("/proc/self/fd"))

    mesh = layerzero.init_mesh(2)
    for index in range(50):
        model = layerzero.shard_model(blocks(1), mesh=mesh)
        assert _shares(model)
        if index % 10 == 0:
            optimizer = layerzero.shard_optimizer(sgd(model), model)
            one_pass(model, rank, 0)
            optimizer.step()
            assert held() >= (1, 1), "the test sees what it counts"
            del optimizer
        del model
        assert within(20, lambda: held() == (0, 0)), index  # the refresh of the step may keep it until it completes


def _train(model: nn.Module, rank: int) -> None:
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    for step in range(100_000):
        train_step(model, optimizer, step)


def _meet(model: nn.Module, rank: int) -> None:
    comm = get_state(model).mesh_info.zero3_control_comm
    for _ in range(100_000):
        memory = map_shared_segment(comm, SegmentSizes(num_counters=4, common=1 << 16, part=1 << 16, predicted=1 << 12))
        assert memory is not None
        assert memory.common(8, torch.int64, 0).sum() >= 0


def _go_on_until_killed(rank: int, act: Callable[[nn.Module, int], None], victim: int, delay: float) -> str:
    units = ("units.0", "units.1", "units.2")
    model = layerzero.shard_model(blocks(3), zero3_size=2, units=units, shared_memory="auto")
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return message_of(lambda: act(model, rank))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("act", [_train, _meet])
def test_a_rank_that_is_killed_at_any_moment_is_missed_and_leaves_nothing(
    act: Callable[[nn.Module, int], None], seed: int, tmp_path: Path
) -> None:
    delay, victim = random.Random(seed).uniform(0.0, 0.7), seed % 2  # the first rank has made the memory
    go_on = partial(_go_on_until_killed, act=act, victim=victim, delay=delay)
    (said,) = survivors(tmp_path, go_on, world_size=2, victim=victim).values()
    assert "Error: " in said and (act is _meet or f"rank {victim} has died or has exited" in said), said
    assert not [name for name in os.listdir("/dev/shm") if "layerzero" in name]


def end_while_a_refresh_flies(rank: int, folder: str) -> nn.Module:
    """Run a process that ends during a refresh; it keeps the model alive."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=15)  # the destructor of gloo waits this long
    store = dist.FileStore(f"{folder}/store", 4)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timeout)
    model = layerzero.shard_model(blocks(1), zero3_size=2, shared_memory="auto")
    dist.barrier()
    if rank >= 2:  # the other node never arrives
        time.sleep(150)
    layerzero.refresh(model)
    assert is_refreshing(get_state(model).handles[0].weights)
    assert "layerzero refresh" in {thread.name for thread in threading.enumerate()}
    return model


@pytest.mark.exhaustive
def test_a_process_may_end_while_a_refresh_is_in_flight(tmp_path: Path) -> None:
    module = "tests.comm.transport.test_shared_memory"
    program = f"import sys; from {module} import end_while_a_refresh_flies as go; kept = go({{}}, sys.argv[1])"
    ranks = [subprocess.Popen([sys.executable, "-c", program.format(rank), str(tmp_path)]) for rank in range(4)]
    try:
        codes = [process.wait(100) for process in ranks[:2]]
        assert codes == [0, 0] and [process.poll() for process in ranks[2:]] == [None, None], codes
    finally:
        for process in ranks:
            process.kill()
            process.wait()


# --- one missing process ---


def _sleep(rank: int) -> str:
    model = shard(blocks(3), size=2)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    one_pass(model, rank, 0)
    optimizer.step()
    if rank == 1:
        time.sleep(6)
        return ""
    return message_of(lambda: one_pass(model, rank, 1))


def test_a_rank_that_does_not_come_is_named_with_what_it_did_not_come_to() -> None:
    message, _ = run_ranks(_sleep, world_size=2, pg_timeout=3.0)
    assert message.startswith("CollectiveError") and "hop 1 of" in message and "failed on rank 0" in message, message
    assert "rank 1 did not take part within 3 s" in message, message


def _step_alone(rank: int, policy: MixedPrecisionPolicy) -> str:
    model = layerzero.shard_model(integer_net(), zero3_size=2, units=IntegerNet.UNITS, mp_policy=policy)
    with torch.no_grad():
        model(torch.zeros(2, 5))
    if rank == 1:
        time.sleep(6)
        return ""
    return message_of(lambda: layerzero.refresh(model))


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", [BF16, MixedPrecisionPolicy()])
def test_a_refresh_on_one_rank_only_is_an_error_within_the_timeout(policy: MixedPrecisionPolicy) -> None:
    message, _ = run_ranks(_step_alone, policy, world_size=2, pg_timeout=3.0)
    expected = "CollectiveError: layerzero: refresh failed on rank 0: rank 1 did not take part within 3 s "
    assert message.startswith(expected), message
