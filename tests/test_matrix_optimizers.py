"""Optimizers that need whole parameters: each is updated by the rank that owns it, as one process would."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import layerzero
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    different,
    exact_sgd,
    full_gradients,
    integer_batch,
    integer_loss,
    integer_net,
    union,
)
from tests.support.ranks import BOTH, mesh_of, run_ranks

GRIDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # D, S


def owned_sgd(model: nn.Module) -> layerzero.ShardedOptimizer:
    """SGD that is made to step whole parameters."""
    return layerzero.shard_optimizer(exact_sgd(model.parameters()), model, elementwise=False)


def _follow_one_process(rank: int, world: int, zero3_size: int) -> None:
    for mode in ("sharded", "full"):
        for units in (IntegerNet.UNITS, None):
            case = f"{mode} {units}"
            net = integer_net()
            theirs = exact_sgd(net.parameters())
            model = layerzero.shard_model(integer_net(), mesh=mesh_of(zero3_size), units=units, accumulation=mode)
            held = dict(model.named_parameters())
            optimizer = owned_sgd(model)
            assert all(held[name] is p for name, p in model.named_parameters()), "the same objects"
            for step in range(4):
                batches = []
                for micro_batch in range(2):
                    with layerzero.no_sync(model) if micro_batch == 0 and step != 2 else nullcontext():
                        integer_loss(model, integer_batch(step=step, micro_batch=micro_batch, rank=rank)).backward()
                    batches += [integer_batch(step=step, micro_batch=micro_batch, rank=r) for r in range(world)]
                (2 * integer_loss(net, union(batches))).backward()
                if step == 3:  # the last one: what it leaves is not exact. The largest gradient is
                    ours = layerzero.clip_grad_norm_(model, 2.0**-3, float("inf"))
                    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0**-3, float("inf"))
                    assert torch.equal(ours, norm), case
                optimizer.step()
                theirs.step()
                assert_same_bits(model, net, f"{case} step {step}")
                wrong = different(full_gradients(model), {n: p.grad for n, p in net.named_parameters()})
                assert not wrong, wrong
                optimizer.zero_grad()
                theirs.zero_grad()


@BOTH
@pytest.mark.parametrize(("world", "zero3_size"), GRIDS)
def test_sgd_through_owners_has_the_bits_of_one_process(world: int, zero3_size: int, node_memory: str) -> None:
    run_ranks(_follow_one_process, world, zero3_size, world_size=world, node_memory=node_memory)
