"""The table of docs/scale.md has the results of its formulas, which are those of 64 ranks that train and save."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero import checkpoint
from layerzero.doctor.machine import needed_descriptors
from tests.support.counting_store import counted_store
from tests.support.models import full_parameters
from tests.support.ranks import run_ranks

RANKS, SIZE = 64, 8
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def tree_groups(rank: int, ranks: int) -> list[int]:
    """Return the sizes of the groups that a rank connects to at its first save."""
    sizes, width = [], 1
    while width < ranks:
        start = rank - rank % (4 * width)
        sizes.append(len(range(start, min(ranks, start + 4 * width), width)))
        if start != rank:
            break
        width *= 4
    return [size for size in sizes if size > 1]


def operations(groups: list[int], agreements: int, rank: int, ranks: int) -> int:
    """Return the operations of a rank on the store that connect gloo groups and compare the ranks."""
    return sum(2 * size + 1 for size in groups) + agreements * (6 if rank else 2 * ranks + 8)


def test_the_page_has_the_results_of_the_formulas() -> None:
    rows = [line.strip("| \n").split(" | ")[2:] for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    columns = list(zip(*rows, strict=True))
    for ranks, column in zip((64, 1024, 4096, 16384), columns, strict=True):
        axes = [SIZE] * 4 + [ranks // SIZE] * 3
        first, few = tree_groups(0, ranks), tree_groups(1, ranks)
        most = 9 * len(first) + 12
        numbers = [sum(axes) + 1, 4 * len(first) + 4, sum(few) + 4, operations(axes, 2, 1, ranks), most]
        hsdp = [SIZE, ranks // SIZE]
        numbers += [sum(hsdp), operations(hsdp, 0, 1, ranks), 2 * ranks + 8]
        assert [f"{number:,}" for number in numbers] == list(column), ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _sharded(zero3_size: int) -> tuple[nn.Module, Any]:
    model = layerzero.shard_model(Net(), mesh=layerzero.init_mesh(zero3_size), units=[nn.Linear])
    return model, layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)


def _descriptors() -> tuple[int, int]:
    """Return the numbers of file descriptors and of sockets of this process."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(link) for link in links if os.path.lexists(link)]  # without that of the listing itself
    return len(links), sum(link.startswith("socket:") for link in links)


def _train_and_save(rank: int, folder: Path) -> tuple[list[tuple[int, ...]], dict[str, Tensor]]:
    found: list[tuple[int, ...]] = [_descriptors()]
    with counted_store() as store:
        model, optimizer = _sharded(SIZE)
        found.append((*_descriptors(), store.operations))
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        before, nbytes = store.operations, store.nbytes
        checkpoint.save(folder / "one", model, optimizer)
        found.append((*_descriptors(), store.operations - before, store.nbytes - nbytes))
    checkpoint.save_async(folder / "two", model, optimizer).wait()
    assert _descriptors() == found[-1][:2]
    trained = full_parameters(model)
    return found, trained if rank == 0 else {}


def _load(rank: int, folder: Path, trained: dict[str, Tensor]) -> None:
    model, optimizer = _sharded(SIZE // 2)
    checkpoint.load(folder / "two", model, optimizer)
    loaded = full_parameters(model)
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sixty_four_ranks_train_save_and_connect_as_the_formulas_say(tmp_path: Path) -> None:
    """32 ranks then load what 64 ranks have saved."""
    results = run_ranks(_train_and_save, tmp_path, world_size=RANKS, timeout=400, pg_timeout=120)
    axes = [SIZE] * 4 + [RANKS // SIZE] * 3
    for rank, ((before, model, saved), _) in enumerate(results):
        groups = tree_groups(rank, RANKS)
        assert model[1] - before[1] == sum(axes) + 1, (rank, "with a connection to the store")
        assert model[2] == operations(axes, 2, rank, RANKS), rank
        assert saved[1] - model[1] == sum(groups) <= SIZE + RANKS // SIZE, rank
        assert saved[2] == operations(groups, 2, rank, RANKS), rank
        assert saved[3] < 64 << 10, rank
        # Before the model, the ranks are connected by torch's group of all ranks.
        assert saved[0] - before[0] <= needed_descriptors(SIZE, RANKS // SIZE) - RANKS, rank
    run_ranks(_load, tmp_path, results[0][1], world_size=RANKS // 2, timeout=200, pg_timeout=120)
