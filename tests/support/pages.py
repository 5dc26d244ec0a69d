"""The code of README and docs, and how it is run.

A page says in comments that readers do not see what its snippets need beside what they say themselves:

    <!-- ranks: 2 -->                           how many ranks run the page; 4 by default
    <!-- needs: accelerate, peft -->            packages without which it is not run; tests/integrations runs it then
    <!-- write: zero3_size=2 | zero3_size=8 --> the former is run in place of the latter, until a snippet has had it
    <!-- before                                 code that is run before the next snippet: what the reader has already
    model = MyModel()
    -->
    <!-- after                                  code that is run after the last one: that it has done what it promises
    assert ...
    -->
    <!-- not run: why -->                       the next snippet is only compiled

All snippets of a page share one namespace, in their order. It begins with ``torch``, ``nn`` and ``layerzero``; a name
that is in neither a snippet nor a ``before`` is an error.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import layerzero
from tests.support.loops import launched

__all__ = ["PAGES", "ROOT", "Page", "Piece", "read_page", "run_page"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_COMMENT = re.compile(r"<!--\s*(before|after|ranks:|needs:|write:|not run:)(.*)", re.DOTALL)
_FENCE = re.compile(r"^( *)```(\S*)(?: (.*))?$")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Piece:
    """Some lines of a page.

    Attributes:
        kind: ``before``, ``after``, ``write``, ``not run``, the language of a snippet, or ``file train.py``, a whole
            program with ``title="train.py"``, which has a test of its own.
        line: of the page, on which `text` begins.
    """

    kind: str
    line: int
    text: str


@dataclass(frozen=True)
class Page:
    name: str
    ranks: int
    needs: tuple[str, ...]
    pieces: tuple[Piece, ...]

    def snippets(self, *languages: str) -> list[Piece]:
        return [piece for piece in self.pieces if piece.kind in languages]

    def left_out(self) -> list[Piece]:
        """Why snippets are not run."""
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
    """Run a page's snippets in its order, in a new folder that the ranks share; how many."""
    told = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(told)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "layerzero": layerzero, "__name__": "__main__"}
    written: dict[str, str] = {}
    ran = 0
    skip = False
    with ExitStack() as stack:
        stack.enter_context(launched(TORCHELASTIC_RUN_ID="1"))
        for name in ("init_process_group", "destroy_process_group"):  # the ranks have met already
            stack.enter_context(mock.patch.object(dist, name))
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
    """Run a piece, if there is a namespace for it; where a line fails, the page and its line are told."""
    code = piece.text
    for theirs, ours in written.items():
        code = code.replace(theirs, ours)
    compiled = compile("\n" * (piece.line - 1) + code, str(ROOT / page.name), "exec")
    if names is not None:
        exec(compiled, names)
    return piece.text
