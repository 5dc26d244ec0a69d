"""Format plain-text tables and sizes."""

from __future__ import annotations

from collections.abc import Sequence

_LARGE = ("", "k", "M", "G", "T", "P", "E")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a plain-text table with a header line.

    The first `left` columns are left-aligned. All other columns are right-aligned.
    """
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = []
    for line in lines:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text with a decimal unit, such as ``1.24 GB``."""
    number, power = nbytes, 0
    while abs(number) >= 999.5 and power + 1 < len(_LARGE):
        number, power = number / 1000, power + 1
    digits = 0 if power == 0 and number == int(number) else 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:.{digits}f} {_LARGE[power]}B"
