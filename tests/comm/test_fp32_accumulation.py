"""Sums of gradients on backends that add in the dtype of the messages, and exchanges of unequal parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero
from layerzero import PrecisionPolicy
from layerzero.comm.collectives import Collective, Communicator, all_gather, reduce_scatter
from layerzero.comm.traffic_counters import TrafficCounters
from layerzero.device.buffer_pools import BufferPool
from tests.support import wrapped_gloo
from tests.support.graphs import batch, blocks, loss_of, shard
from tests.support.late_backend import NAME, register
from tests.support.models import different, full_parameters, update
from tests.support.ranks import mesh_of, on_ranks
from tests.support.wrapped_gloo import WrappedGloo, mesh_on

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODES = ("sharded", "full", "local")


def _steps(model: nn.Module, rank: int, optimizers: list[Any] | None = None) -> dict[str, Tensor]:
    if optimizers is None:
        optimizers = [layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)]
    for step in range(2):
        for micro_batch in range(2):
            with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                loss_of(model(batch(rank, step, micro_batch).float())).backward()
        update(*optimizers)
    return full_parameters(model)


@pytest.mark.exhaustive
@on_ranks(shared_memory="off", timeout=300)
def test_fp32_accumulation_gives_the_bits_and_bytes_of_gloo_on_other_backends(rank: int) -> None:
    register()
    for size, mode, policy in itertools.product((1, 2, 4), MODES, (BF16, MIXED)):
        case = size, mode, policy
        on_gloo, in_fp32, by_backend = (
            _train(rank, mesh, policy, mode, fp32=fp32)
            for mesh, fp32 in ((mesh_of(size), False), (mesh_on(NAME, size), True), (mesh_on(NAME, size), False))
        )
        assert not different(on_gloo.weights, in_fp32.weights), case
        assert on_gloo.sent == in_fp32.sent, case
        if policy is BF16:
            assert different(on_gloo.weights, by_backend.weights), (*case, "the backend adds in bf16")
        elif mode == "sharded" and size > 1:
            assert 2 * in_fp32.sent["hop1"] == by_backend.sent["hop1"], (
                *case,
                "its sums in fp32 need messages in fp32",
            )


class _Trained(NamedTuple):
    weights: dict[str, Tensor]
    sent: dict[str, int]  # bytes, by collective


def _train(rank: int, mesh: Any, policy: MixedPrecisionPolicy, mode: str, *, fp32: bool) -> _Trained:
    torch.manual_seed(0)
    model = shard(
        blocks(3).float(),
        mesh=mesh,
        mp_policy=PrecisionPolicy.of(policy, fp32_accumulation=fp32),
        accumulation=mode,
    )
    weights = _steps(model, rank)
    report = layerzero.memory(model)
    assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], (mode, policy, report)
    sent = layerzero.traffic(model).bytes
    return _Trained(weights, {hop: sent.get(hop, 0) for hop in ("hop1", "hop2")})


@pytest.mark.slow
@on_ranks(shared_memory="off")
def test_unequal_parts_of_matrix_optimizers_give_the_bits_of_gloo_on_other_backends(rank: int) -> None:
    register()
    found = []
    for mesh in (mesh_of(1), mesh_on(NAME, 1), mesh_of(2), mesh_on(NAME, 2)):
        torch.manual_seed(0)
        model = shard(blocks(3).float(), mesh=mesh)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        optimizers = [
            layerzero.shard_optimizer(torch.optim.Muon(matrices, lr=0.01), model),
            layerzero.shard_optimizer(torch.optim.AdamW(rest, lr=0.01), model),
        ]
        found.append(_steps(model, rank, optimizers))
        report = layerzero.memory(model)
        assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], report
    assert not different(found[0], found[1]) and not different(found[2], found[3])


class _Launches(TorchDispatchMode):
    """Names of the collectives that are launched, and the numbers of elements that they send."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_unequal_parts_of_16_ranks_take_one_collective() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=16)
    try:
        group = dist.group.WORLD
        assert group is not None
        comm = Communicator.over("replica", "replica", group, TrafficCounters(), "cpu")
        assert not comm.is_gloo and not comm.sums_locally
        parts = [15] * 16  # the fake group copies what a rank sends, and so needs equal parts
        with _Launches() as launches:
            all_gather(comm, Collective.REFRESH, torch.zeros(sum(parts)), torch.ones(15), parts=parts).wait()
        assert launches.seen == ["c10d::alltoall_"]
        with _Launches() as launches:
            pool = BufferPool.of(torch.device("cpu"))
            pending = reduce_scatter(
                comm, Collective.HOP2, torch.ones(sum(parts)), pool, wire=torch.float32, parts=parts
            )
            pending.wait()
        assert launches.seen == ["c10d::alltoall_base_"]
        assert [part.shape for part in pending.parts()] == [(15,)] * 16, "this rank adds the parts"
    finally:
        dist.destroy_process_group()


class _WritesLate(WrappedGloo):
    """Backend whose all-to-all reads its inputs at the launch, and writes all outputs in the wait."""

    NAME = "writes_late"

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        received = [torch.empty_like(part) for part in outputs]
        super().alltoall(received, tensors, opts)
        return _LateWrites(outputs, received)

    def launch(self, run: Callable[[], dist.Work], output: Tensor, given: Tensor) -> dist.Work:
        return run()


class _LateWrites(dist.Work):
    def __init__(self, outputs: list[Tensor], received: list[Tensor]) -> None:
        super().__init__()
        self._outputs, self._received = outputs, received

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for part, values in zip(self._outputs, self._received, strict=True):
            part.copy_(values)
        return True


@on_ranks(world_size=2)
def test_a_gather_of_unequal_parts_keeps_what_is_written_to_its_shard_meanwhile(rank: int) -> None:
    wrapped_gloo.register(_WritesLate)
    group = dist.new_group([0, 1], backend=_WritesLate.NAME)
    comm = Communicator.over("replica", "replica", group, TrafficCounters(), "cpu")
    parts = [3, 5]
    for in_place in (True, False):
        out = torch.zeros(sum(parts))
        own = out.split(parts)[rank]
        shard = (own if in_place else own.clone()).fill_(rank + 1)
        pending = all_gather(comm, Collective.REFRESH, out, shard, parts=parts, only_reads_shard=in_place)
        shard.fill_(9)
        pending.wait()
        assert shard.tolist() == [9] * parts[rank], "the write of the user survives"
        expected = [[1] * 3, [2] * 5]
        if in_place:
            expected[rank] = [9] * parts[rank]
        assert [part.tolist() for part in out.split(parts)] == expected, in_place
