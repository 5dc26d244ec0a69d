"""Gradient sums that wait in shared memory for hop 1: same results as with collectives, and no early overwrite."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import Offload, PrecisionPolicy
from layerzero.engine.hooks import get_state
from layerzero.shared_memory.buffers import SharedBufferPool
from tests.support.graphs import batch, blocks, loss_of, sgd, shard
from tests.support.models import (
    assert_close,
    backward,
    backward_alone,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_net,
    update,
)
from tests.support.ranks import every_nth_setting, on_ranks
from tests.support.ranks import run_sharing as run_ranks

pytestmark = pytest.mark.slow

POLICIES = (
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    MixedPrecisionPolicy(param_dtype=torch.float16),
)


def _seeded(count: int) -> nn.Module:
    torch.manual_seed(0)
    return blocks(count).float()


def _backwards_without_a_step(model: nn.Module, rank: int, naps: random.Random) -> list[dict[str, Tensor]]:
    """Return final gradients after each of several steps with reducing backwards in between."""
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    seen = []
    for step in range(2):
        for micro_batch in range(4):
            with layerzero.no_sync(model) if micro_batch in (0, 3) else nullcontext():
                loss = loss_of(model(batch(rank, step, micro_batch).float()))
                time.sleep(naps.uniform(0, 0.01))
                loss.backward()
        layerzero.clip_grad_norm_(model, 1.0)  # which reduces what the last one left
        seen.append(full_gradients(model))
        update(optimizer)
    return [*seen, full_parameters(model)]


def _like_collectives(rank: int, sizes: Sequence[int], seed: int, stride: int) -> None:
    widened = PrecisionPolicy.of(POLICIES[1], replica_reduce_dtype=torch.float32)
    settings = [
        *itertools.product(sizes, POLICIES, ("sharded", "full", "local"), ({},)),
        *itertools.product(sizes, [widened], ("full",), ({},)),
        *itertools.product(sizes, POLICIES[:1], ("sharded",), ({"reshard_after_forward": False}, {"prefetch": 3})),
    ]
    for size, policy, mode, more in settings[::stride]:
        off, auto = (
            _backwards_without_a_step(
                shard(_seeded(3), size=size, mp_policy=policy, accumulation=mode, shared_memory=memory, **more),
                rank,
                random.Random(100 * seed + 10 * rank + size),
            )
            for memory in ("off", "auto")
        )
        wrong = [different(theirs, ours) for theirs, ours in zip(off, auto, strict=True)]
        assert not any(wrong), (size, policy, mode, wrong)
        assert all(gradient.isfinite().all() and gradient.any() for gradient in off[0].values())


@pytest.mark.sample(1)
@every_nth_setting(2)
@pytest.mark.parametrize(("world", "sizes"), [(3, (3,)), (4, (2,))])
def test_backwards_that_reduce_several_times_a_step_give_the_bits_of_collectives(
    world: int, sizes: tuple[int, ...], stride: int
) -> None:
    run_ranks(_like_collectives, sizes, 0, stride, world_size=world)


@on_ranks(world_size=2, shared_memory="auto")
def test_a_neighbor_that_reads_late_reads_what_was_sent(rank: int) -> None:
    """Delay the reads of rank 1 from memory that rank 0 writes again in its next backward."""
    net = integer_net()
    model = layerzero.shard_model(integer_net(), zero3_size=2, accumulation="full")
    optimizer, alone = layerzero.shard_optimizer(exact_sgd(model.parameters()), model), exact_sgd(net.parameters())
    parts = SharedBufferPool.parts

    def late(self: SharedBufferPool, *args: Any) -> Any:
        if rank == 1:
            time.sleep(0.2)
        return parts(self, *args)

    with mock.patch.object(SharedBufferPool, "parts", late):
        for step in range(3):
            for micro_batch in (2 * step, 2 * step + 1):  # each of them reduces
                backward(model, rank, micro_batch)
                backward_alone(net, micro_batch, world_size=2)
            update(optimizer, alone)
    assert not different(full_parameters(model), dict(net.named_parameters()))


@on_ranks(world_size=4, shared_memory="auto")
def test_offloaded_sums_are_read_all_the_same(rank: int) -> None:
    """Offload sums, which are copied before others read them. The device is the CPU, hence the warning."""
    with pytest.warns(UserWarning, match="there is no device memory to free"):
        model = shard(_seeded(2), size=2, accumulation="full", offload=Offload(grads=True))
    ours = _backwards_without_a_step(model, rank, random.Random(0))
    theirs = _backwards_without_a_step(shard(_seeded(2), size=2, shared_memory="off"), rank, random.Random(0))
    assert get_state(model).transports[0].send_scratch.kept_bytes == 0
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, "offloaded")
