"""The table of stored tensors: each tensor is covered exactly once, and the first of several ranks writes a chunk."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from layerzero.checkpoint.contents import CheckpointContents, check_chunks
from layerzero.checkpoint.json_codec import StoredTensor

Chunk = tuple[tuple[int, ...], tuple[int, ...]]


def _rows(*bounds: int, width: int = 6) -> list[Chunk]:
    return [((start, 0), (stop - start, width)) for start, stop in pairwise(bounds)]


def _stored(shape: tuple[int, ...], chunks: list[Chunk]) -> dict[str, StoredTensor]:
    return {"w": StoredTensor(shape, torch.float32, tuple(("file", *chunk) for chunk in chunks))}


COLUMNS = [((0, 0), (4, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4))]  # columns whose rows are split differently


COVERED: list[tuple[tuple[int, ...], list[Chunk]]] = [
    ((4, 6), _rows(0, 4)),
    ((4, 6), _rows(0, 1, 3, 4)[::-1]),
    ((4, 6), [*_rows(0, 4), ((4, 0), (0, 6))]),  # a rank without rows
    ((4, 6), COLUMNS),
    ((2, 3, 4), [((0, 0, 0), (2, 1, 4)), ((0, 1, 0), (1, 2, 4)), ((1, 1, 0), (1, 2, 4))]),
    ((0, 6), []),
    ((), [((), ())]),
]
REFUSED: list[tuple[tuple[int, ...], list[Chunk]]] = [
    ((4, 6), []),
    ((4, 6), _rows(0, 3)),
    ((4, 6), _rows(1, 4)),
    ((4, 6), _rows(0, 5)),
    ((4, 6), [*_rows(0, 2), *_rows(1, 4)]),
    ((4, 6), [*_rows(0, 4), *_rows(0, 4)]),
    ((4, 6), [*_rows(0, 1, 2), *_rows(3, 4)]),
    ((4, 6), COLUMNS[:2]),
    ((4, 6), _rows(0, 4, width=5)),
    ((4, 6), [((0,), (24,))]),
    ((4, 6), [((-1, 0), (5, 6))]),
    ((), []),
    ((), [((), ()), ((), ())]),
]


def test_chunks_must_cover_a_tensor_without_gaps_and_overlaps() -> None:
    for shape, chunks in COVERED:
        check_chunks(_stored(shape, chunks))
    for shape, chunks in REFUSED:
        with pytest.raises(ValueError, match=r"^w (of shape|has an invalid chunk)"):
            check_chunks(_stored(shape, chunks))


def test_the_first_rank_writes_a_chunk_that_several_ranks_have() -> None:
    def chunks(*bounds: int) -> list[Any]:
        return [("w", "float32", torch.Size([4, 6]), *map(torch.Size, chunk)) for chunk in _rows(*bounds)]

    contents, kept = CheckpointContents.of_ranks({}, {}, [], [("a", chunks(0, 2)), ("b", chunks(0, 2, 4))])
    assert kept == [[0], [1]]
    assert contents.tensors == {
        "w": StoredTensor((4, 6), torch.float32, (("a", (0, 0), (2, 6)), ("b", (2, 0), (2, 6)))),
    }
