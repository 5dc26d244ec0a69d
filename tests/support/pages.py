"""Reader and runner for the code of README and docs.

HTML comments of a page, which readers do not see, say what its snippets need:

    <!-- ranks: 2 -->                           number of ranks that run the page; default 4
    <!-- needs: accelerate, peft -->            packages that the page needs; tests/integrations runs such pages
    <!-- write: zero3_size=2 | zero3_size=8 --> run the first text instead of the second in the next snippet that has it
    <!-- before                                 code to run before the next snippet: definitions that the reader has
    model = MyModel()
    -->
    <!-- after                                  code to run after the last snippet, to check its results
    assert ...
    -->
    <!-- not run: why -->                       the next snippet is only compiled

All snippets of a page run in order and share one namespace. It starts with ``torch``, ``nn`` and ``layerzero``; a name
that neither a snippet nor a ``before`` defines is an error.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import layerzero
from tests.support.loops import launched_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_COMMENT = re.compile(r"<!--\s*(before|after|ranks:|needs:|write:|not run:)(.*)", re.DOTALL)
_FENCE = re.compile(r"^( *)```(\S*)(?: (.*))?$")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Piece:
    """Snippet or comment of a page.

    Attributes:
        kind: ``before``, ``after``, ``write``, ``not run``, the language of a snippet, or ``file train.py``: a complete
            program with ``title="train.py"``, which has its own test.
        line: line number of the page at which `text` begins.
    """

    kind: str
    line: int
    text: str

    @property
    def shown(self) -> str:
        """Text that readers of the page see."""
        return "" if self.kind in {"before", "after", "write", "not run"} else self.text


@dataclass(frozen=True)
class Page:
    name: str
    ranks: int
    needs: tuple[str, ...]
    pieces: tuple[Piece, ...]

    def snippets(self, *languages: str) -> list[Piece]:
        return [piece for piece in self.pieces if piece.kind in languages]

    def left_out(self) -> list[Piece]:
        """Return the ``not run`` comments, with the reasons."""
        return [piece for piece in self.pieces if piece.kind == "not run"]


def read_page(path: Path) -> Page:
    ranks, needs, pieces = 4, (), []
    lines = path.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence:
            indent, language, options = fence.groups()
            title = _TITLE.search(options or "")
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            code = [line.removeprefix(indent) for line in lines[at + 1 : end]]
            kind = f"file {title[1]}" if title else language or "text"
            pieces.append(Piece(kind, at + 2, "\n".join(code) + "\n"))
            at = end
        elif lines[at].lstrip().startswith("<!--"):
            end = next(i for i in range(at, len(lines)) if "-->" in lines[i])
            comment = _COMMENT.match("\n".join(lines[at : end + 1]).strip().partition("-->")[0])
            if comment:
                kind, text = comment[1].rstrip(":"), comment[2]
                if kind == "ranks":
                    ranks = int(text)
                elif kind == "needs":
                    needs = tuple(name.strip() for name in text.split(","))
                else:
                    pieces.append(Piece(kind, at + 1, text if text.startswith("\n") else text.strip()))
            at = end
        at += 1
    return Page(path.relative_to(ROOT).as_posix(), ranks, needs, tuple(pieces))


def run_page(rank: int, page: Page) -> int:
    """Run a page's snippets in order, in a new folder that the ranks share; return their number."""
    told = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(told)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "layerzero": layerzero, "__name__": "__main__"}
    written: dict[str, str] = {}
    ran = 0
    skip = False
    with ExitStack() as stack:
        stack.enter_context(launched_program(TORCHELASTIC_RUN_ID="1"))
        stack.callback(os.chdir, Path.cwd())
        os.chdir(str(told[0]))
        for piece in page.pieces:
            if piece.kind == "write":
                ours, _, theirs = (text.strip() for text in piece.text.partition("|"))
                written[theirs] = ours
            elif piece.kind == "not run":
                skip = True
            elif piece.kind in {"before", "after"}:
                _execute(page, piece, names, {})
            elif piece.kind == "python":
                code = _execute(page, piece, None if skip else names, written)
                written = {theirs: ours for theirs, ours in written.items() if theirs not in code}
                ran += not skip
                skip = False
            elif skip:
                skip = False
    assert not written, f"{page.name}: no snippet has {list(written)}"
    return ran


def _execute(page: Page, piece: Piece, names: dict[str, Any] | None, written: dict[str, str]) -> str:
    """Compile a piece and run it if `names` is given; tracebacks show page and line."""
    code = piece.text
    for theirs, ours in written.items():
        code = code.replace(theirs, ours)
    compiled = compile("\n" * (piece.line - 1) + code, str(ROOT / page.name), "exec")
    if names is not None:
        exec(compiled, names)
    return piece.text
