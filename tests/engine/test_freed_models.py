"""The memory of a model is freed with the last reference to it, without Python's garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import layerzero
from layerzero import Offload
from layerzero.engine.hooks import get_state
from tests.support.graphs import IN_FLIGHT, Block, Chain, blocks, one_pass, sgd, shard
from tests.support.late_transfers import late
from tests.support.ranks import BOTH_SHARED_SLOW, on_ranks

WORLD = 4


def _train(net: Callable[[], nn.Module], rank: int, passes: Any, **settings: Any) -> dict[str, weakref.ref[Any]]:
    model = shard(net(), **settings)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    average = layerzero.EMA(model)
    for step in range(2):
        with layerzero.no_sync(model):
            passes(model, rank, step)
        passes(model, rank, step)
        layerzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        average.update()
        optimizer.zero_grad()
    with torch.no_grad():
        next(model.parameters()).mul_(1)
    passes(model, rank, 2)
    with average.swapped(), layerzero.unsharded(model):
        pass
    layerzero.full_state_dict(model)
    lz_state = get_state(model)
    handle = lz_state.handles[-1]
    kept = {"model": model, "lz_state": lz_state, "optimizer": optimizer, "average": average, "handle": handle}
    tensors = {
        "master": handle.weights.master,
        "ZeRO-3 shard": handle.weights.zero3_shard,
        "full buffer": handle.weights.full_buffer,
    }
    return {name: weakref.ref(each) for name, each in (kept | tensors).items()}


@pytest.mark.slow
@BOTH_SHARED_SLOW
@on_ranks(world_size=WORLD)
def test_a_model_and_its_optimizer_are_freed_without_the_garbage_collector(
    rank: int, shared_memory: str | None
) -> None:
    nested = Chain(Chain(Block(), Block()), Block())
    cases: list[tuple[str, Callable[[], nn.Module], Any, dict[str, Any]]] = [
        ("first", blocks, one_pass, {}),  # torch imports a module and keeps the frames of the caller
        ("blocks", blocks, one_pass, {}),
        ("full", blocks, one_pass, {"accumulation": "full"}),
        ("in flight", blocks, IN_FLIGHT, {}),
        ("nested", lambda: nested, one_pass, {}),
        ("checkpointed", lambda: Chain(Block(reentrant=False), Block(reentrant=True)), one_pass, {}),
        ("offloaded", blocks, one_pass, {"offload": Offload(grads=True)}),
    ]
    for name, net, passes, settings in cases:
        gc.collect()
        gc.disable()
        try:
            with late():
                left = _train(net, rank, passes, **settings)
            if name == "nested":
                nested = None  # type: ignore[assignment]
            alive = [kind for kind, weak in left.items() if weak() is not None]
            assert name == "first" or not alive, f"{name}: {alive}"
        finally:
            gc.enable()


@on_ranks(world_size=2)
def test_a_part_of_a_model_that_is_gone_says_so(rank: int) -> None:
    model = shard(blocks())
    part = model.units[0]
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=r"part of a sharded model that was garbage collected. Keep a reference"):
        part(torch.ones(1, 4))
