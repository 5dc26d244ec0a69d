"""Each rank reads the written bytes or raises; data that it does not read costs it nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from xxhash import xxh3_128

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.checksums import CHUNK, ByteRange, ChecksumScheme, ChunkHasher, FileRecord, read_pieces
from layerzero.checkpoint.manifest import Manifest
from tests.support.checkpointing import everything, on_first_rank, sharded_net
from tests.support.damaging import flip_bit
from tests.support.models import different, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks

SMALL = ChecksumScheme("xxh3-128", 64)


def test_each_chunk_has_the_sum_of_its_bytes_however_they_come() -> None:
    draw = random.Random(0)
    for size in (0, 1, 63, 64, 65, 128, 1000):
        content = draw.randbytes(size)
        chunks = [content[start : start + 64] for start in range(0, size, 64)] or [b""]
        expected = "".join(xxh3_128(chunk).hexdigest() for chunk in chunks)
        for most in (1, 7, 64, 200, 1000):
            sums, at = ChunkHasher(SMALL), 0
            while at < size:
                step = draw.randint(1, most)
                sums.update(content[at : at + step])
                at += step
            assert sums.hexdigest() == expected and sums.size == size


def test_a_piece_is_read_and_only_its_chunks_are_compared(tmp_path: Path) -> None:
    draw = random.Random(0)
    content = draw.randbytes(1000)
    path, hasher = tmp_path / "file", ChunkHasher(SMALL)
    hasher.update(content)
    record = FileRecord("file", 1000, hasher.hexdigest())
    for _ in range(300):
        ends = sorted(draw.sample(range(1001), 4))
        spans = [(ends[0], ends[1]), (ends[2], ends[3])]
        harmed = draw.randrange(1000)
        path.write_bytes(content[:harmed] + bytes([content[harmed] ^ 1 << draw.randrange(8)]) + content[harmed + 1 :])
        read = {index for start, stop in spans for index in range(start // 64, -(-stop // 64))}
        into = [torch.zeros(stop - start, dtype=torch.uint8) for start, stop in spans]
        pieces = [ByteRange(*span, draw.choice([tensor, None])) for span, tensor in zip(spans, into, strict=True)]
        if harmed // 64 in read:
            with pytest.raises(
                CheckpointError, match=r"file is damaged: bytes .* do not match their recorded xxh3-128"
            ):
                read_pieces(path, pieces, record, SMALL)
            continue
        read_pieces(path, pieces, record, SMALL)
        read_pieces(path, [piece for piece in pieces if piece.into is not None])
        for piece in pieces:
            assert piece.into is None or bytes(piece.into.tolist()) == content[piece.start : piece.stop]
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="file is damaged: the file ends at byte 999"):
        read_pieces(path, [ByteRange(0, 1000, None)], record, SMALL)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*No such file"):
        read_pieces(tmp_path / "none", [ByteRange(0, 1000, None)], record, SMALL)


@contextmanager
def _without_xxhash() -> Iterator[None]:
    had = sys.modules.get("xxhash")
    sys.modules["xxhash"] = None  # type: ignore[assignment]
    ChecksumScheme.best.cache_clear()
    try:
        yield
    finally:
        del sys.modules["xxhash"]
        if had is not None:
            sys.modules["xxhash"] = had
        ChecksumScheme.best.cache_clear()


def _poor(rank: int, folder: Path) -> None:
    model, optimizer = sharded_net(1, steps=1)
    expected = everything(model, optimizer)
    checkpoint.save(folder / "fast", model, optimizer)
    assert Manifest.read(folder / "fast").scheme == ChecksumScheme("xxh3-128", CHUNK)
    with _without_xxhash():
        checkpoint.save(folder / "slow", model, optimizer)
        assert Manifest.read(folder / "slow").scheme == ChecksumScheme("sha256", CHUNK)
        other, its_optimizer = sharded_net(2, seed=1)
        checkpoint.load(folder / "slow", other, its_optimizer)
        assert not different(everything(other, its_optimizer), expected)
        assert checkpoint.latest(folder) == folder / "slow"
        with pytest.raises(ModuleNotFoundError, match=r"xxhash is not installed. Run: pip install xxhash"):
            checkpoint.load(folder / "fast", other, its_optimizer)
    checkpoint.load(folder / "slow", other, its_optimizer)
    if rank == 1:
        with _without_xxhash(), pytest.raises(ValueError, match="checksums by"):
            checkpoint.save(folder / "mixed", model, optimizer)
    else:
        with pytest.raises(ValueError, match='checksums by is "xxh3-128" on rank 0'):
            checkpoint.save(folder / "mixed", model, optimizer)


def test_without_xxhash_files_have_sha256_and_xxh3_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    run_ranks(_poor, tmp_path, world_size=2)
    assert {path.name for path in tmp_path.iterdir()} == {"fast", "slow"}


class Large(nn.Module):
    """Model whose files have several chunks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.one = nn.Parameter(torch.rand(1500, 1100, generator=generator))
        self.two = nn.Parameter(torch.rand(1301, 900, generator=generator))
        self.frozen = nn.Parameter(torch.rand(700, 99, generator=generator).bfloat16(), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.one.square().sum() + self.two.square().sum()


def _large(zero3_size: int) -> tuple[nn.Module, Optimizer]:
    model = layerzero.shard_model(Large(), mesh=mesh_of(zero3_size))
    return model, layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2**-4), model)


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    model().backward()
    update(optimizer)


def _addresses(model: nn.Module, optimizer: Any) -> list[int]:
    found = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    states = (optimizer.state[parameter] for parameter in model.parameters() if parameter in optimizer.state)
    return found + [values[key].data_ptr() for values in states for key in ("exp_avg", "exp_avg_sq")]


def _save_large(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = _large(2)
    _step(model, optimizer)
    checkpoint.save(folder / "one", model, optimizer, {"same": model.one})
    return everything(model, optimizer)


def _load_large(rank: int, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    world_size = dist.get_world_size()
    model, optimizer = _large(world_size)
    checkpoint.load(folder / "one", model, optimizer)  # the optimizer has no state yet
    assert not (wrong := different(everything(model, optimizer), expected)), wrong
    _step(model, optimizer)
    before = everything(model, optimizer)
    addresses = _addresses(model, optimizer)
    for file in ("rank-00000.safetensors", "rank-00001.safetensors"):
        size = (folder / "one" / file).stat().st_size
        assert size > CHUNK + 8
        for offset in (CHUNK - 1, CHUNK, CHUNK + 5, size - 4):
            on_first_rank(flip_bit, folder / "one" / file, offset)
            with pytest.raises(CheckpointError, match=f"{file} is damaged: bytes"):
                checkpoint.load(folder / "one", model, optimizer)
            assert not different(everything(model, optimizer), before)
            on_first_rank(flip_bit, folder / "one" / file, offset)
    same = checkpoint.load(folder / "one", model, optimizer)["same"]
    assert not (wrong := different(everything(model, optimizer), expected)), wrong
    assert _addresses(model, optimizer) == addresses, "read into the memory that was there"
    assert torch.equal(same.full_tensor(), expected["model.one"])
    assert not same.to_local().numel() or same.to_local().data_ptr() not in addresses
    _step(model, optimizer)
    assert not (wrong := different(everything(model, optimizer), before)), wrong


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_large_files_are_read_in_place_on_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    expected = run_ranks(_save_large, tmp_path, world_size=2)[0]
    run_ranks(_load_large, tmp_path, expected, world_size=world_size)


class Trap(nn.Module):
    """Module that damages a file when its extra state is restored, between the first and the second read."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(8, 4))
        self.harmed: Path | None = None

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        if self.harmed is not None:
            flip_bit(self.harmed)

    def forward(self) -> torch.Tensor:
        return self.one.square().sum()


@on_ranks(world_size=2)
def test_a_file_that_changes_between_two_readings_is_an_error_that_lasts_until_a_load_succeeds(
    rank: int, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "no-optimizer", layerzero.shard_model(Trap(), mesh=mesh_of(2)))
    model = layerzero.shard_model(Trap(), mesh=mesh_of(2))
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2**-4), model)
    _step(model, optimizer)
    for name in ("one", "two"):
        checkpoint.save(tmp_path / name, model, optimizer)
    expected = everything(model, optimizer)
    _step(model, optimizer)
    model.harmed = tmp_path / "one" / "rank-00001.safetensors" if rank == 1 else None
    model().backward()
    with pytest.raises(
        CheckpointError,
        match=r"rank-00001.* is damaged: .*The first read of this file succeeded, but the second failed: a load of",
    ):
        checkpoint.load(tmp_path / "one", model, optimizer)
    said = "has failed halfway, and the model and the optimizer are partly loaded. Load this or another checkpoint"
    for use in (model, optimizer.step, lambda: checkpoint.save(tmp_path / "three", model, optimizer)):
        with pytest.raises(RuntimeError, match=said):
            use()
    model.harmed = None
    with pytest.raises(CheckpointError, match=r"rank-00001.* is damaged: bytes"):
        checkpoint.load(tmp_path / "one", model, optimizer)  # this load changes nothing, so the model stays unusable
    with pytest.raises(RuntimeError, match=said):
        model()
    with pytest.warns(UserWarning, match="skipped the entries") if rank == 0 else nullcontext():
        checkpoint.load(tmp_path / "no-optimizer", model, optimizer, strict=False)
    with pytest.raises(RuntimeError, match=said):
        model()
    checkpoint.load(tmp_path / "no-optimizer", model)
    model()
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    checkpoint.load(tmp_path / "two", model, optimizer)
    assert not (wrong := different(everything(model, optimizer), expected)), wrong
    optimizer.zero_grad()
    _step(model, optimizer)
    checkpoint.save(tmp_path / "three", model, optimizer)
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "three", "no-optimizer"}
