"""Half a minute of random programs; `make soak` runs them for longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.soak import soak
from tests.support.lasting import Held, growth, held_over
from tests.support.monkey import OPERATIONS, Operation, Program, Setting, _Monkey, failure_of, program_of, shrunk
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


def test_a_failure_shrinks_to_what_it_needs() -> None:
    program = program_of(3).operations
    needed = [program[7], program[22], program[39]]

    def fails(operations: tuple[Operation, ...]) -> bool:
        places = [operations.index(each) if each in operations else -1 for each in needed]
        return -1 not in places and places == sorted(places)

    assert shrunk(program, fails) == tuple(needed)


def test_programs_are_long_and_differ_and_do_everything() -> None:
    programs = [program_of(seed) for seed in range(60)]
    assert all(len(program.operations) == 40 for program in programs)
    assert programs[5] == program_of(5) and len(set(programs)) == 60
    assert {name for program in programs for name, _ in program.operations} == set(OPERATIONS)
    settings = [program.setting for program in programs]
    assert {s.dtype for s in settings} == {"fp32", "bf16", "fp16"} and {s.size for s in settings} == {1, 2, 4}
    assert {s.muon for s in settings} == {True, False} and {s.shared_memory for s in settings} == {"auto", "off"}


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


def test_what_grows_is_noticed() -> None:
    before = Held(1 << 30, 1 << 20, 10, 20, 6, 40)
    assert growth([[before, before]]) is None
    for name in Held._fields:
        more = before._replace(**{name: getattr(before, name) + (100 << 20 if name in ("resident", "tensors") else 9)})
        assert f"['{name}']" in (growth([[before, before], [before, more]]) or "")
