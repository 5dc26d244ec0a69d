"""The table of docs/scale.md has the results of its formulas."""

from __future__ import annotations

from pathlib import Path

SIZE = 8
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
