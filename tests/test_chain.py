"""A run that was resumed is proven equal to one that was not, by a chain of digests in its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero
from layerzero import checkpoint
from tests.support.bits import flip
from tests.support.checkpointing import sharded_net, train
from tests.support.ranks import run_ranks


def _run(rank: int, folder: str, plan: list[Any], start: int) -> list[Any]:
    """Steps from `start`, with what `plan` says of each; the links."""
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
    other = run_ranks(_run, str(tmp_path), [0, 1, 0, 0], 2)  # another sample on the way
    assert other[0][0]["weights"] == whole[0][1]["weights"], "that did not matter to the weights"
    assert all(a["head"] != b["head"] for a, b in zip(other[0], whole[0][1:], strict=True)), "but to all links since"


def _broken(rank: int, folder: str, world: int) -> None:
    model, optimizer = sharded_net(world // 2, seed=3, adam=True)
    chain = checkpoint.Chain(model, optimizer)
    extra = checkpoint.load(f"{folder}/step-2", model, optimizer)
    if world == 4:
        with pytest.raises(checkpoint.CheckpointError, match="random numbers of the ranks 0, 1, 2, 3 are others"):
            chain.resume(extra["chain"])
        checkpoint.set_random_states(extra["random"])
        assert chain.resume(extra["chain"])
    else:
        assert not chain.resume(extra["chain"]), "of as many ranks as made it alone random numbers are the same"
    state = optimizer.state_dict()["state"]["first.bias"]["exp_avg"].to_local()
    last = dict(model.named_parameters())["head.weight"].detach().to_local()
    for rows, what in ((state, "'optimizer state of first.bias'"), (last, "'head.weight'")):
        for turn in range(2):
            if len(rows):
                flip(rows, 0, 3)
            if turn == 0:
                with pytest.raises(checkpoint.CheckpointError, match=f"saved at step 2: {what}$"):
                    chain.resume(extra["chain"])
    with torch.no_grad():  # rows that have changed places
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
