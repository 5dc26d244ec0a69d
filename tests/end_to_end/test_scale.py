"""The tables of docs/scale.md have the results of their formulas, which are those of real ranks that are counted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import layerzero
from benchmarks.scale import FSDP2, HYBRIDS, SCHEMES, Job
from layerzero import checkpoint
from layerzero.comm.process_groups import ModelGroups
from layerzero.doctor.machine import needed_descriptors
from tests.support import counting_backend
from tests.support.counting_store import counted_store
from tests.support.models import full_parameters
from tests.support.ranks import on_ranks, run_ranks

RANKS, SIZE = 64, 8
SHORT_ADDRESSES, MANY_AT_ONCE = ("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER",), ("GLOO_ENABLE_STORE_V2_API",)
DATA_PARALLEL = (4096, 16384)
MICRO_BATCHES, NUMEL = 3, 64 * 64
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


def kilobytes(groups: list[int], *, short: bool) -> int:
    """Return the kB of addresses that a rank reads to connect gloo groups, for a host name of two characters."""
    return round(sum(size * (154 + (0 if short else 8 * size)) for size in groups) / 1000)


def _rows(table: int) -> list[list[str]]:
    """Return the cells of a table of the page, without its head and its column of labels."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    return [line.strip("| ").split(" | ")[1:] for line in tables[table].splitlines()[2:]]


def test_the_page_has_the_connections_that_the_formulas_give() -> None:
    columns = list(zip(*[row[1:] for row in _rows(0)], strict=True))
    for ranks, column in zip(DATA_PARALLEL, columns, strict=True):
        axes, hsdp = [SIZE] * 4 + [ranks // SIZE] * 3, [SIZE, ranks // SIZE]
        first, few = tree_groups(0, ranks), tree_groups(1, ranks)
        most = 9 * len(first) + 12
        assert sum(few) + 4 == 8
        assert list(column) == [
            f"{sum(axes) + 1:,} ({sum(hsdp):,})",
            str(4 * len(first) + 4),
            f"{operations(axes, 2, 1, ranks):,} ({operations(hsdp, 0, 1, ranks):,})",
            *(f"{number:,}" for number in (most, 2 * ranks + 8)),
            *(f"{kilobytes(axes, short=short):,} ({kilobytes(hsdp, short=short):,})" for short in (False, True)),
        ], ranks


def test_the_page_has_the_traffic_that_the_formulas_give() -> None:
    job = Job(DATA_PARALLEL[-1], SIZE, micro_batches=4, units=33, numel=10**9)
    expected = []
    for scheme in SCHEMES:
        step = job.traffic(scheme)
        messages, nbytes = step.messages_inside + step.messages_between, (step.bytes_inside, step.bytes_between)
        expected.append([f"{messages:,.0f}", *(f"{number / 1e9:.2f}" for number in nbytes)])
    assert [[cell.rpartition(": ")[2] for cell in row] for row in _rows(1)] == expected


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


@on_ranks(world_size=4)
def test_two_variables_of_gloo_shorten_addresses_and_read_many_at_once(rank: int) -> None:
    counts, groups, world = [], ModelGroups(), dist.group.WORLD
    assert world is not None
    for variables in ((), SHORT_ADDRESSES, SHORT_ADDRESSES + MANY_AT_ONCE):
        with mock.patch.dict(os.environ, dict.fromkeys(variables, "1")), counted_store() as store:
            group = groups.new(range(4), like=world, device_type="cpu").group
            counts.append((store.operations, store.nbytes))
        dist.all_reduce(number := torch.ones(1), group=group)
        assert number.item() == 4
    (default, nbytes), (short, fewer_bytes), (many, _) = counts
    assert default == short == operations([4], 0, rank, 4)
    assert nbytes - fewer_bytes == 5 * 4 * 8, "eight bytes for each rank, in the address written and all that are read"
    assert many == default - 4, "no wait before each address"


@on_ranks(world_size=2)
def test_ranks_must_agree_on_short_addresses(rank: int) -> None:
    variables, found = dict.fromkeys(SHORT_ADDRESSES, "1") if rank else {}, "is 0 on rank 0 and 1 on rank 1"
    with mock.patch.dict(os.environ, variables), pytest.raises(ValueError, match=f"{SHORT_ADDRESSES[0]} {found}"):
        layerzero.init_mesh(2)


# --- messages and bytes of a step ---

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _stack() -> nn.Sequential:
    """Return three units of NUMEL parameters without padding, of which the last is in the root."""
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))


def _fully_sharded(mesh: Any) -> tuple[nn.Module, Any]:
    model = _stack()
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _hybrid(mesh: Any, scheme: str) -> tuple[nn.Module, Any]:
    accumulation, _, reshards = scheme.partition(", ")
    model = layerzero.shard_model(
        _stack(),
        mesh=mesh,
        units=["0", "1"],
        mp_policy=POLICY,
        accumulation=accumulation,
        reshard_after_forward="step" if reshards else True,
    )
    return model, layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def _step(model: Any, optimizer: Any, scheme: str) -> None:
    """Take a step that sends gradients between nodes once, if the scheme can."""
    skip = model.set_requires_gradient_sync if scheme in HYBRIDS else model.set_requires_all_reduce
    for index in range(MICRO_BATCHES):
        skip(index == MICRO_BATCHES - 1)
        model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("world_size", "node_size"), [(4, 2), *(pytest.param(8, size, marks=pytest.mark.slow) for size in (2, 4))]
)
@on_ranks()
def test_a_step_sends_what_the_formulas_say(rank: int, world_size: int, node_size: int) -> None:
    nodes, one_axis = counting_backend.meshes(node_size)
    for scheme in SCHEMES:
        hybrid = scheme in HYBRIDS
        model, optimizer = _hybrid(nodes, scheme) if hybrid else _fully_sharded(one_axis if scheme == FSDP2 else nodes)
        _step(model, optimizer, scheme)  # the next one also gathers along the replica axis
        counting_backend.messages.clear()
        counting_backend.nbytes.clear()
        _step(model, optimizer, scheme)
        sent: list[Any] = [None] * world_size
        dist.all_gather_object(sent, (dict(counting_backend.messages), dict(counting_backend.nbytes)))
        totals = [
            sum(
                number
                for source, counts in enumerate(sent)
                for target, number in counts[kind].items()
                if (source // node_size == target // node_size) is inside
            )
            / world_size
            for kind in (0, 1)
            for inside in (True, False)
        ]
        kept = () if hybrid else (NUMEL,)  # FSDP2 does not free the root after the forward
        assert totals == pytest.approx(Job(world_size, node_size, MICRO_BATCHES, 3, 3 * NUMEL, kept).traffic(scheme)), (
            scheme
        )


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
