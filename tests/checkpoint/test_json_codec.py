"""``extra``: values of every kind are restored unchanged, each on its rank."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import layerzero
from layerzero import checkpoint
from tests.support.checkpointing import WithBuffers, everything, sharded_net, train
from tests.support.models import different
from tests.support.ranks import mesh_of, on_ranks, run_ranks

EXTRA = {
    "step": 7,
    "loss": 0.1,
    "nothing": None,
    "text": "ß",
    "raw": b"\x00\xff",
    "infinite": [float("inf"), float("-inf"), float("nan")],
    "pair": (1, (2.5, "x")),
    "by number": {1: "a", 2: {"b": (True, False)}},
    "$odd": {"$tensor": "not one"},
    "milestones": Counter({30: 1, 80: 2}),
    "ordered": OrderedDict(b=1, a=2),
    "dtype": torch.bfloat16,
    "tensor": torch.arange(6).view(2, 3),
    "scalar": torch.tensor(3, dtype=torch.uint8),
    "empty": torch.zeros(0, 3),
    "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16).expand(3, 2),
    "numpy": np.random.RandomState(3).get_state()[1],
    "count": np.int64(5),
    "empties": ({}, [], ()),
}


def _shown(value: Any) -> str:
    """Return a text with the types, order and values of nested values; NumPy scalars count as Python scalars."""
    plain = tree_map_only((Tensor, np.ndarray), lambda array: (type(array), array.dtype, array.tolist()), value)
    return repr(tree_map_only(np.generic, lambda scalar: scalar.item(), plain))


def _extra(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    ema = layerzero.EMA(model)
    ema.update()
    torch.manual_seed(100 + rank)
    random.seed(rank)
    extra = {
        **EXTRA,
        "scheduler": scheduler.state_dict(),
        "ema": ema.state_dict(),
        "rng": checkpoint.per_rank({"torch": torch.get_rng_state(), "python": random.getstate(), "rank": rank}),
    }
    checkpoint.save(f"{folder}/one", model, optimizer, extra)
    drawn = torch.rand(3), random.random()
    again, its_optimizer = sharded_net(1, seed=1)
    its_scheduler = torch.optim.lr_scheduler.MultiStepLR(its_optimizer, [9], gamma=0.5)
    loaded = checkpoint.load(f"{folder}/one", again, its_optimizer)
    assert _shown({key: loaded[key] for key in EXTRA}) == _shown(EXTRA)
    assert loaded["rng"]["rank"] == rank
    torch.set_rng_state(loaded["rng"]["torch"])
    random.setstate(loaded["rng"]["python"])
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
    its_scheduler.load_state_dict(loaded["scheduler"])
    its_optimizer.step()
    for _ in range(3):
        scheduler.step()
        its_scheduler.step()
        assert its_scheduler.get_last_lr() == scheduler.get_last_lr()
    its_ema = layerzero.EMA(again)
    its_ema.update()
    its_ema.load_state_dict(loaded["ema"])
    averages = [
        {name: average.full_tensor() for name, average in e.state_dict()["averages"].items()} for e in (ema, its_ema)
    ]
    assert not different(*averages)


def _extra_elsewhere(rank: int, folder: str) -> None:
    model, _ = sharded_net(1, seed=1)
    loaded = checkpoint.load(f"{folder}/one", model)
    assert loaded["rng"] is None, "other ranks' random numbers are nobody's here"
    assert _shown({key: loaded[key] for key in EXTRA}) == _shown(EXTRA)


def test_extra_comes_back_with_its_types(tmp_path: Path) -> None:
    run_ranks(_extra, str(tmp_path))
    run_ranks(_extra_elsewhere, str(tmp_path), world_size=2)


def _refused_extra(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    for extra, error, said in (
        ({"a": [{"b": object()}]}, TypeError, "extra.a.0.b: a builtins.object cannot"),
        ({"step": lambda: 0}, TypeError, "extra.step"),
        ({"rank": rank}, ValueError, r"extra\.rank is .*per_rank"),
        ({"seeds": torch.tensor([rank])}, ValueError, "extra.seeds"),
        ({"only": 1} if rank else {}, ValueError, "extra"),
        ({"a": checkpoint.per_rank(checkpoint.per_rank(1))}, TypeError, "per_rank cannot be nested"),
    ):
        with pytest.raises((error, RuntimeError), match=said):
            checkpoint.save(f"{folder}/refused", model, optimizer, extra)
    with pytest.raises((TypeError, RuntimeError), match="shard_optimizer"):
        checkpoint.save(f"{folder}/refused", model, torch.optim.SGD([torch.zeros(1)]))
    other, other_optimizer = sharded_net(2)
    with pytest.raises((ValueError, RuntimeError), match="belongs to another model"):
        checkpoint.save(f"{folder}/refused", other, optimizer)
    teacher = layerzero.shard_model(torch.nn.Linear(3, 3), mesh=mesh_of(2))
    like = r"extra\.teacher has the sharding of 'weight' of another model .*Store its full_tensor"
    with pytest.raises((TypeError, RuntimeError), match=like):
        checkpoint.save(f"{folder}/refused", model, optimizer, {"teacher": teacher.weight.detach()})
    namesake = layerzero.shard_model(torch.nn.ModuleDict({"first": torch.nn.Linear(9, 9)}), mesh=mesh_of(2))
    with pytest.raises((TypeError, RuntimeError), match=r"the sharding of 'first\.weight' of another model"):
        checkpoint.save(f"{folder}/refused", model, optimizer, {"teacher": namesake["first"].weight.detach()})
    same_sharding, _ = sharded_net(2, seed=1)  # sharded like the model, so that a load can reshard it
    checkpoint.save(f"{folder}/twin", model, optimizer, {"teacher": same_sharding.first.weight.detach()})
    loaded = checkpoint.load(f"{folder}/twin", model, optimizer)["teacher"]
    assert torch.equal(loaded.full_tensor(), same_sharding.first.weight.detach().full_tensor())
    whole = {"teacher": teacher.weight.detach().full_tensor()}
    checkpoint.save(f"{folder}/teacher", model, optimizer, whole)
    assert torch.equal(checkpoint.load(f"{folder}/teacher", model, optimizer)["teacher"], whole["teacher"])
    with pytest.raises((ValueError, RuntimeError), match="path is"):
        checkpoint.save(f"{folder}/refused-{rank}", model, optimizer)
    with layerzero.unsharded(model), pytest.raises(RuntimeError, match="unsharded"):
        checkpoint.save(f"{folder}/refused", model, optimizer)
    del other_optimizer


def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_refused_extra, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["teacher", "twin"], "and leaves nothing"


@on_ranks(world_size=2)
def test_a_module_that_refuses_its_extra_state_on_one_rank_is_an_error_on_all(rank: int, tmp_path: Path) -> None:
    model = layerzero.shard_model(WithBuffers(seed=0), mesh=mesh_of(2))
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model)
    checkpoint.save(f"{tmp_path}/one", model, optimizer)
    other = layerzero.shard_model(WithBuffers(seed=1), mesh=mesh_of(2))
    its_optimizer = layerzero.shard_optimizer(torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.5), other)
    before = everything(other, its_optimizer)
    takes = other.counting.set_extra_state

    def refuse(state: dict[str, int]) -> None:
        raise KeyError("a file of this machine")

    if rank == 1:
        other.counting.set_extra_state = refuse
    began = time.monotonic()
    with pytest.raises(KeyError if rank == 1 else RuntimeError, match="a file of this machine"):
        checkpoint.load(f"{tmp_path}/one", other, its_optimizer)
    assert time.monotonic() - began < 20, "nobody waits for a rank that has failed"
    assert not different(everything(other, its_optimizer), before), "and nothing has been changed"
    other.counting.set_extra_state = takes
    checkpoint.load(f"{tmp_path}/one", other, its_optimizer)
    loaded, saved = everything(other, its_optimizer), everything(model, optimizer)
    assert different(loaded, saved) == ["buffer.scratch"], "it is in no checkpoint"
