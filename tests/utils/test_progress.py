"""Long work prints what it does on standard error of the first rank, and short work prints nothing."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from layerzero import plan, verify
from layerzero.checkpoint.safetensors_files import write_safetensors
from layerzero.planning import Cluster, TransformerShape
from layerzero.utils.progress import Progress
from tests.support.ranks import run_ranks
from tests.support.snippets import MyTransformer, batch

AT_ONCE = mock.patch("layerzero.utils.progress._INTERVAL", 0)


def work(shown: bool = True) -> None:
    with Progress("work", shown=shown) as progress:
        for part in (1, 2):
            progress.update(f"part {part}")


@pytest.mark.parametrize(
    ("is_terminal", "printed"),
    [
        (False, "layerzero: work: part 1\nlayerzero: work: part 2\n"),
        (True, "\r\x1b[Klayerzero: work: part 1\r\x1b[Klayerzero: work: part 2\r\x1b[K"),
    ],
)
def test_a_line_replaces_the_one_before_on_a_terminal(is_terminal: bool, printed: str) -> None:
    with redirect_stderr(io.StringIO()) as said, mock.patch.object(said, "isatty", return_value=is_terminal):
        work()
        assert said.getvalue() == "", "short work"
        with AT_ONCE:
            work(shown=False)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert said.getvalue() == "", "other ranks and threads"
            work()
            assert said.getvalue() == printed
            said.close()
            work()  # without an error


def test_plans_and_writes_say_how_far_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with AT_ONCE:
        plan(TransformerShape(layers=1, hidden=64, vocab=64, heads=2), Cluster(nodes=1, accelerators=2))
        write_safetensors(tmp_path / "a", {"x": ((8,), torch.float32)}, lambda _: [torch.zeros(8)])
    lines = capsys.readouterr().err.splitlines()
    assert {"layerzero: plan: zero3_size=2", "layerzero: write of a: 32 B of 32 B"} <= set(lines)


def make_batch(index: int, rank: int) -> torch.Tensor:
    return batch(10 * index + rank)


def _verify(rank: int) -> list[str]:
    with AT_ONCE, redirect_stderr(io.StringIO()) as said:
        verify(MyTransformer, make_batch, optimizer_fn=partial(torch.optim.SGD, lr=0.1), steps=1, zero3_sizes=[2])
    return said.getvalue().splitlines()


def test_verify_says_which_run_it_trains_on_the_first_rank() -> None:
    first, second = run_ranks(_verify, world_size=2)
    assert first[0] == "layerzero: verify, one process: step 1 of 1" and second == []
    assert first[-1] == "layerzero: verify, layerzero with zero3_size=2: step 1 of 1"
