"""Sockets and messages of a rank grow with S + R, and communicators connect when the model is built."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import Codecs
from layerzero.comm.collectives import Communicator, PendingSmallGather, all_gather_small
from layerzero.comm.mesh_info import mesh_of_ranks
from layerzero.comm.model_ranks import DelayedRankMaximum
from layerzero.engine.hooks import get_state
from layerzero.engine.used_params import PendingUsage
from tests.support import wrapped_gloo
from tests.support.logs import logged
from tests.support.models import different, full_parameters, integer_batch, integer_loss, integer_net, train
from tests.support.ranks import mesh_of, on_ranks

pytestmark = pytest.mark.slow

WORLD = 4


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@on_ranks(world_size=8, shared_memory="off")
def test_descriptors_and_messages_of_a_rank_grow_with_the_two_axes(rank: int) -> None:
    models, opened, pair = [], {}, range(rank // 2 * 2, rank // 2 * 2 + 2)
    for ranks, size in ((pair, 2), (range(4), 2), (range(8), 2), (range(4), 4)):
        if rank in ranks:
            before, messages = len(os.listdir("/proc/self/fd")), []
            models.append(layerzero.shard_model(Two(), mesh=mesh_of_ranks(ranks, size, "cpu")))
            opened[len(ranks), size] = len(os.listdir("/proc/self/fd")) - before

            def gather(comm: Communicator, *more: Any) -> PendingSmallGather:
                messages.append(comm.size - 1)  # noqa: B023
                return all_gather_small(comm, *more)

            with mock.patch("layerzero.engine.used_params.all_gather_small", gather):
                models[-1](torch.ones(1, 2)).sum().backward()
                assert models[-1].used.weight.grad is not None and models[-1].unused.weight.grad is None
            assert sum(messages) == size - 1 + len(ranks) // size - 1, "one to each rank of both axes"
        dist.barrier()
    if rank < 4:
        # Each of the last three models creates six groups, with those of its mesh: three along the axis whose group of
        # the mesh exists already, and three or four along the other one.
        assert opened[8, 2] - opened[4, 2] == 3 * 2, opened
        assert opened[4, 4] - opened[4, 2] == 4 * 3 - (3 + 3), opened


def test_a_late_maximum_is_complete_one_collective_later_for_each_further_axis() -> None:
    replicas, size = 2, 3
    ranks = {(r, s): DelayedRankMaximum(2, 1) for r in range(replicas) for s in range(size)}
    said = torch.arange(4 * len(ranks), dtype=torch.uint8).view(4, replicas, size)  # by call and rank
    heard = []
    for call in said:
        sent = {(r, s): each.outgoing(call[r, s].view(1)) for (r, s), each in ranks.items()}
        rows = [torch.stack([sent[r, s][0] for s in range(size)]) for r in range(replicas)]
        columns = [torch.stack([sent[r, s][1] for r in range(replicas)]) for s in range(size)]
        heard.append({int(each.receive([rows[r], columns[s]])) for (r, s), each in ranks.items()})
    assert heard == [{0}, {int(said[0].max())}, {int(said[1].max())}, {int(said[2].max())}]


@pytest.mark.parametrize("zero3_size", [1, 2, 4])
@on_ranks(world_size=WORLD)
def test_texts_and_numbers_reach_all_ranks_along_the_axes(rank: int, zero3_size: int) -> None:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(zero3_size))
    model_ranks = get_state(model).ranks
    long = '"\\' * (rank + 1)
    assert model_ranks.all_gather_text(long) == ['"\\' * (other + 1) for other in range(WORLD)]
    numbers = torch.full((3,), rank + 5)
    model_ranks.broadcast_numbers(numbers)
    assert numbers.tolist() == [5, 5, 5]
    dist.barrier()  # a rank that returns closes its connections, to which other ranks may still be connecting


class Halves(nn.Module):
    """Ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: Tensor, which: str) -> Tensor:
        return sum(getattr(self, name)(x) for name in which.split())


@on_ranks(world_size=WORLD, pg_timeout=20)
def test_one_rank_may_read_a_gradient_before_it_meets_the_others(rank: int) -> None:
    """Read a gradient on rank 0 only, before all ranks take part in a collective of the user."""
    relay = PendingUsage.relay

    def relay_late(pending: PendingUsage) -> None:
        time.sleep(0.2)
        relay(pending)

    if rank > 1:
        PendingUsage.relay = relay_late  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = layerzero.shard_model(Halves(), mesh=mesh_of(2))
    for _ in range(3):
        model(
            torch.ones(1, 3), "first second never" if rank == 0 else "first" if rank < 3 else "second"
        ).sum().backward()
        if rank == 0:
            assert model.second.weight.grad is not None
        dist.barrier()
        model_ranks = get_state(model).ranks
        assert model_ranks.all_gather_text(str(rank)) == list("0123"), (
            "launched after what was sent about used parameters"
        )
        assert model.first.weight.grad is not None and model.second.weight.grad is not None
        model.zero_grad()
    PendingUsage.relay = relay  # type: ignore[method-assign]


class _Connecting(wrapped_gloo.WrappedGloo):
    """Backend that waits for all ranks at the first launch of each operation and at a larger message, like NCCL."""

    NAME = "connecting"
    built = False  # no group may connect after this point

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._largest: dict[str, int] = {}  # bytes, by name of the operation

    def launch(self, run: Callable[[], dist.Work], output: Tensor, given: Tensor) -> dist.Work:
        operation = sys._getframe(1).f_code.co_name.removesuffix("_base")
        nbytes = 1 if operation == "alltoall" else max(output.nbytes, given.nbytes)
        if nbytes > self._largest.get(operation, 0):
            said = f"{operation} of {self.size()} ranks, {nbytes} bytes, connects after the model was built"
            assert not _Connecting.built, f"{said}: {self._largest}"
            self._gloo.barrier(dist.BarrierOptions()).wait()
            self._largest[operation] = nbytes
        return run()


CODED = {"codecs": Codecs(hop2=layerzero.Int8Blocks())}


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
@on_ranks(world_size=WORLD, pg_timeout=30)
def test_no_communicator_connects_after_the_model_was_built(rank: int, zero3_size: int) -> None:
    wrapped_gloo.register(_Connecting)
    mesh = wrapped_gloo.mesh_on(_Connecting.NAME, zero3_size)
    for settings in ({}, {"accumulation": "full"}, {"reshard_after_forward": 1}, {"sync_module_states": False}, CODED):
        found = []
        for each in (mesh, mesh_of(zero3_size)):
            _Connecting.built = False
            torch.manual_seed(0)
            model = layerzero.shard_model(integer_net(), mesh=each, units=["first", "second"], **settings)
            optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model)
            _Connecting.built = True
            with layerzero.no_sync(model):
                integer_loss(model, integer_batch(rank=rank)).backward()
            train(model, optimizer, rank, range(2))
            integer_loss(model, integer_batch(rank=rank)).backward()
            layerzero.clip_grad_norm_(model, 1.0)
            optimizer.step()
            _Connecting.built = False
            with layerzero.unsharded(model):
                pass
            found.append(full_parameters(model))
        assert not different(*found), settings


@on_ranks(world_size=2)
def test_the_first_rank_logs_the_cost_of_connections(rank: int) -> None:
    wrapped_gloo.register(_Connecting)
    _Connecting.built = False
    log = logging.getLogger("layerzero")
    with logged() as lines, mock.patch.object(log, "isEnabledFor", lambda level: True):
        layerzero.shard_model(integer_net(), mesh=mesh_of(2))
        assert not any("connected" in line for line in lines), "gloo connects by itself"
        layerzero.shard_model(integer_net(), mesh=wrapped_gloo.mesh_on(_Connecting.NAME, 2))
    said = [line for line in lines if line.startswith("connected 2 communicators in ")]
    assert len(said) == (rank == 0), lines


@on_ranks(world_size=WORLD, pg_timeout=30)
def test_pairs_connect_when_an_optimizer_needs_full_matrices(rank: int) -> None:
    wrapped_gloo.register(_Connecting)
    _Connecting.built = False
    model = layerzero.shard_model(integer_net(), mesh=wrapped_gloo.mesh_on(_Connecting.NAME, 2))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = layerzero.shard_optimizer(torch.optim.Muon(matrices, lr=2.0**-6), model)
    assert any(handle.gradients.replica_part_sizes for handle in get_state(model).handles), "of unequal sizes"
    _Connecting.built = True
    for _ in range(2):
        integer_loss(model, integer_batch(rank=rank)).backward()
        optimizer.step()
