"""Half a minute of random programs; `make soak` runs them for longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.soak import soak
from tests.support.lasting import growth, held_over
from tests.support.monkey import Program, Setting, _Monkey, failure_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

# Programs that failed once, in their shortest form.
FOUND = {
    "hop 2 of a sharded handle and of a full one that comes from hop 1, in an order of timing": Program(
        Setting(2, "fp32", "by unit", "off", muon=False), (("train", 312152194),) * 6
    ),
    "an edit that has not come to the other replica, taken for a corruption": Program(
        Setting(2, "fp32", "full", "off", muon=False), (("edit", 63076928), ("fingerprint", 800677643))
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_not_found_again(name: str, tmp_path: Path) -> None:
    failure = failure_of(FOUND[name], str(tmp_path))
    assert failure is None, failure


def test_random_programs_do_what_a_plain_model_does() -> None:
    _, failure = soak(30, first=0)
    assert failure is None, failure


def _lied_to(rank: int, folder: str) -> None:
    ape = _Monkey(rank, Setting(2, "bf16", "full", "off", muon=True), folder)
    draw = random.Random(0)
    ape.train(draw)
    ape.compare("train")
    with torch.no_grad():
        ape.net.second.bias[-1] += 1
    with pytest.raises(AssertionError, match=r"after nothing: parameters \['second.bias'\]"):
        ape.compare("nothing")
    ape.save(draw)
    with torch.no_grad():
        ape.net.head.weight.zero_()
    with pytest.raises(AssertionError, match="outputs differ"):
        ape.evaluate(draw)


def test_a_model_that_is_not_the_same_is_noticed(tmp_path: Path) -> None:
    run_ranks(_lied_to, str(tmp_path))


def test_nothing_grows_over_many_operations(tmp_path: Path) -> None:
    held = held_over(tmp_path, Setting(2, "bf16", "sharded", "auto", muon=False), seed=0, operations=160, marks=2)
    assert growth(held) is None, growth(held)
