"""A chain of digests in checkpoints proves that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero import checkpoint
from tests.dtensor.test_tensor_parallel import Net, parallel
from tests.support.bits import flip
from tests.support.checkpointing import WithBuffers, sharded_net, train
from tests.support.models import exact_sgd, integer_batch, integer_loss
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow


def _run(rank: int, folder: str, plan: list[Any], start: int) -> list[Any]:
    """Train from `start` as `plan` says for each step; return the links of the chain."""
    torch.manual_seed(rank + 100 * start)
    model, optimizer = sharded_net(2, seed=start, adam=True)
    chain = checkpoint.Chain(model, optimizer)
    if start:
        extra = checkpoint.load(f"{folder}/step-{start}", model, optimizer)
        checkpoint.set_random_states(extra["random"])
        chain.resume(extra["chain"])
    links = []
    for step, what in enumerate(plan, start):
        chain.saw(step, torch.tensor([rank, step]), [what, {"rank": rank}])
        torch.rand(())
        train(model, optimizer, range(step, step + 1))
        if step % 2:
            links.append(chain.link(step + 1))
            if not start:
                extra = {"chain": links[-1], "random": checkpoint.random_states(7, step + 1)}
                checkpoint.save(f"{folder}/step-{step + 1}", model, optimizer, extra)
    return links


def test_a_resumed_run_has_the_links_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = run_ranks(_run, str(tmp_path), [0] * 6, 0)
    assert all(links == whole[0] for links in whole), "the same on all ranks"
    again = run_ranks(_run, str(tmp_path), [0] * 4, 2)
    assert [link["head"] for link in again[0]] == [link["head"] for link in whole[0][1:]]
    other = run_ranks(_run, str(tmp_path), [0, 1, 0, 0], 2)  # another sample in between
    assert other[0][0]["weights"] == whole[0][1]["weights"], "that did not matter to the weights"
    assert all(a["head"] != b["head"] for a, b in zip(other[0], whole[0][1:], strict=True)), "but to all links since"


def _broken(rank: int, folder: str, world: int) -> None:
    model, optimizer = sharded_net(world // 2, seed=3, adam=True)
    chain = checkpoint.Chain(model, optimizer)
    extra = checkpoint.load(f"{folder}/step-2", model, optimizer)
    if world == 4:
        with pytest.raises(checkpoint.CheckpointError, match="random states of the ranks 0, 1, 2, 3 differ"):
            chain.resume(extra["chain"])
        checkpoint.set_random_states(extra["random"])
        assert chain.resume(extra["chain"])
    else:
        assert not chain.resume(extra["chain"]), "of as many ranks as made it alone random numbers are the same"
    state = optimizer.state_dict_by_name()["state"]["first.bias"]["exp_avg"].to_local()
    last = dict(model.named_parameters())["head.weight"].detach().to_local()
    for rows, what in ((state, "'optimizer state of first.bias'"), (last, "'head.weight'")):
        for turn in range(2):
            if len(rows):
                flip(rows, 0, 3)
            if turn == 0:
                said = rf"saved at step 2, because these tensors differ: {what}\. Load"
                with pytest.raises(checkpoint.CheckpointError, match=said):
                    chain.resume(extra["chain"])
    with torch.no_grad():  # swapped rows
        whole = last.flip(0).clone()
        last.copy_(whole)
    if world == 1:
        with pytest.raises(checkpoint.CheckpointError, match=r"'head\.weight'"):
            chain.resume(extra["chain"])


@pytest.mark.parametrize("world", [4, 2])
def test_what_is_not_what_was_saved_is_named(tmp_path: Path, world: int) -> None:
    run_ranks(_run, str(tmp_path), [0] * 2, 0)
    run_ranks(_broken, str(tmp_path), world, world_size=world)


def _matrices(rank: int, size: int) -> dict[str, int]:
    model = layerzero.shard_model(torch.nn.Linear(6, 5, bias=False), mesh=layerzero.init_mesh(size))
    with torch.no_grad():
        model.weight.fill_(0.5)
    muon = layerzero.shard_optimizer(torch.optim.Muon(model.parameters(), lr=0.125), model, elementwise=False)
    model(torch.ones(2, 6)).sum().backward()
    muon.step()
    return checkpoint.Chain(model, muon).link(1)["weights"]


def test_the_state_of_owned_parameters_is_digested_once_whoever_owns_them() -> None:
    found = [run_ranks(_matrices, size, world_size=world)[0] for world, size in ((4, 2), (4, 4), (2, 1))]
    assert found[0] == found[1] == found[2] and found[0].keys() == {"weight", "optimizer state of weight"}


def _in_parts(tp: int, seed: int) -> tuple[Any, Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    model = layerzero.shard_model(parallel(mesh["tp"], seed), zero3_size=ranks // tp, units=Net.UNITS)
    return model, layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2**-4), model)


def _saved_in_parts(rank: int, folder: str) -> None:
    model, optimizer = _in_parts(2, 0)
    integer_loss(model, integer_batch(step=0, rank=rank // 2)).backward()
    optimizer.step()
    chain = checkpoint.Chain(model, optimizer)
    extra = {"chain": chain.link(1), "random": checkpoint.random_states(7, 1)}
    checkpoint.save(f"{folder}/one", model, optimizer, extra)


def _resumed_in_parts(rank: int, folder: str, tp: int) -> bool:
    model, optimizer = _in_parts(tp, 1)
    extra = checkpoint.load(f"{folder}/one", model, optimizer)
    checkpoint.set_random_states(extra["random"])
    chain = checkpoint.Chain(model, optimizer)
    found = chain.resume(extra["chain"])
    state = optimizer.state_dict_by_name()["state"]["blocks.0.down.weight"]["exp_avg"].to_local()
    if state.numel():
        flip(state, 0, 3)
    with pytest.raises(checkpoint.CheckpointError, match=r"'optimizer state of blocks\.0\.down\.weight'\. Load"):
        chain.resume(extra["chain"])
    return found


def test_digests_of_tensor_parallel_parts_are_those_of_the_whole(tmp_path: Path) -> None:
    run_ranks(_saved_in_parts, str(tmp_path))
    for world, tp in ((4, 2), (4, 4), (2, 1)):
        assert run_ranks(_resumed_in_parts, str(tmp_path), tp, world_size=world) == [world == 4] * world


def _buffers(rank: int) -> None:
    model = layerzero.shard_model(WithBuffers(), mesh=mesh_of(2))
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    chain = checkpoint.Chain(model, optimizer)
    with torch.no_grad():
        model.seen.fill_(rank + 1)  # a checkpoint stores those of the first rank
    link = chain.link(1)
    with torch.no_grad():
        model.seen.fill_(1)
        model.scratch.fill_(9)  # is in no checkpoint
    assert chain.resume(link)
    with torch.no_grad():
        model.seen[2] = 5
    with pytest.raises(
        checkpoint.CheckpointError, match=r"saved at step 1, because these tensors differ: 'seen'\. Load"
    ):
        chain.resume(link)


def test_a_buffer_that_is_not_what_was_saved_is_named() -> None:
    run_ranks(_buffers, world_size=2)


def _seen(rank: int) -> None:
    model, optimizer = sharded_net(1)

    def heads(*values: object) -> list[str]:
        found = []
        for value in values:
            chain = checkpoint.Chain(model, optimizer)
            chain.saw(value)
            found.append(chain.link(1)["head"])
        return found

    matrix = torch.arange(6).view(2, 3)
    alike = heads(matrix.t(), matrix.t().contiguous())
    assert alike[0] == alike[1]
    assert len(set(heads(matrix, matrix.t(), matrix.flatten(), matrix.int(), [0, 1, 2, 3, 4, 5]))) == 5
    assert len(set(heads(np.array(3), np.int32(4), np.arange(3), np.arange(3.0), range(3), {"a": 1}, {"b": 1}))) == 7
    assert len(set(heads({"a": 1, "b": (2, "x")}, {"b": [2, "x"], "a": 1}))) == 1, "whatever the order of a dict"
    for odd in ({"a", "b"}, iter([1]), (each for each in "ab"), object(), [time]):
        with pytest.raises(TypeError, match=r"cannot compare a .* between processes"):
            heads(odd)


def test_what_was_seen_is_told_apart_or_refused() -> None:
    run_ranks(_seen, world_size=1)
