"""docs/troubleshooting.md quotes messages that the package has, and its links and names exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import layerzero
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
TEXT = PAGE.read_text(encoding="utf-8")
UNKNOWN = "…"
MAX_ENTRIES, MAX_LINES, MIN_WORDS = 45, 250, 2
# Messages of torch that the page explains beside those of layerzero.
FROM_TORCH = {
    "CUDA out of memory",
    "mat1 and mat2 must have the same dtype",
    "Input type (float) and bias type (c10::BFloat16) should be the same",
    "one of the variables needed for gradient computation has been modified by an inplace operation",
}


def entries(page: str) -> list[list[str]]:
    """Return the cells of each table row of a page, without headers."""
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return [row for row in cells if not row[0].startswith(("message", "---"))]


def quotes(page: str) -> list[str]:
    """Return the code spans in the first cell of each entry."""
    return [quote for row in entries(page) for quote in re.findall(r"`([^`]+)`", row[0])]


def templates(source: str) -> set[str]:
    """Return the strings of a module; a value that an f-string or a % format inserts reads as an ellipsis."""
    tree = ast.parse(source)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    skipped |= {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(str(p.value) if isinstance(p, ast.Constant) else UNKNOWN for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            found.add(node.value)
    return {normalized(text) for text in found}


def normalized(text: str) -> str:
    """Return a text with single spaces, and an ellipsis for each placeholder with its quotation marks."""
    text = re.sub(r"%[-+.\d]*[sdfr]|\{[\w.!:]*\}", UNKNOWN, " ".join(text.split()))
    return re.sub(rf"(['\"]?){UNKNOWN}+\1", UNKNOWN, text)


@functools.cache
def messages() -> frozenset[str]:
    """Return the strings of all modules of the package."""
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "layerzero").rglob("*.py"))]
    return frozenset(text for source in sources for text in templates(source))


def unknown_quotes(page: str) -> list[str]:
    """Return quotes that no message begins with. The start of a message may come from another string or a logger."""
    return [quote for quote in quotes(page) if quote not in FROM_TORCH and not _is_known(quote)]


def _is_known(quote: str) -> bool:
    text = normalized(quote).removeprefix("layerzero: ").strip(f"{UNKNOWN}:")
    if quote.startswith((UNKNOWN, "layerzero: ")):
        return bool(text) and any(text in message for message in messages())
    return any(message.startswith(normalized(quote)) for message in messages())


def test_every_quoted_message_is_in_the_source() -> None:
    assert unknown_quotes(TEXT) == []
    assert len(quotes(TEXT)) >= 30
    assert [quote for quote in quotes(TEXT) if len(re.findall(r"[A-Za-z_]{2,}", quote)) < MIN_WORDS] == []


def test_every_entry_has_a_symptom_a_cause_and_an_action() -> None:
    assert [row for row in entries(TEXT) if len(row) != 3 or not all(row)] == []


def test_the_page_is_short() -> None:
    assert len(entries(TEXT)) <= MAX_ENTRIES
    assert len(TEXT.splitlines()) <= MAX_LINES


def _headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        name, _, heading = target.partition("#")
        path = PAGE.parent / name if name else PAGE
        assert path.is_file(), target
        assert not heading or heading in _headings(path), target


def test_names_of_layerzero_exist() -> None:
    for name in set(re.findall(r"\blayerzero((?:\.[A-Za-z_]\w*)+)\(", TEXT)):
        functools.reduce(getattr, name[1:].split("."), layerzero)
