"""Passes of one model: which calls a backward pass reaches, and how it begins."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero.engine.gradient_reducer import GradientReducer
from layerzero.engine.hooks import get_state
from layerzero.engine.passes import BackwardPass, ForwardPass, UnitCall
from tests.support.graphs import Block, Chain, batch, blocks, loss_of, shard
from tests.support.launches import launches_of
from tests.support.models import IntegerNet, integer_net
from tests.support.ranks import on_ranks, run_ranks

# --- calls whose outputs the loss does not use, which only some ranks keep alive ---


class Towers(nn.Module):
    """Towers for a text and for an image, of which the loss uses only the first.

    Args:
        order: names of the towers in the order of their calls. The text tower is a chain of units.
    """

    def __init__(self, order: str) -> None:
        super().__init__()
        self.text, self.image, self.order = blocks(3, own=False), Block(), order

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: getattr(self, name)(x) for name in self.order.split()}


class Sampled(nn.Module):
    """Chain that runs twice. Only the input of the second run is computed from the output of the first one."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.text = blocks(3, own=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.text(x)
        return {"image": first, "text": self.text(x + (first > 0))}


def _keep(kept: list[Tensor], output: Tensor) -> None:
    kept.append(output)


def _leave_in_a_cycle(kept: list[Tensor], output: Tensor) -> None:
    cycle: list[object] = [output]
    cycle.append(cycle)


def _launches(rank: int, make: Callable[[str], nn.Module], order: str, hold: Callable[..., None]) -> list[list[str]]:
    """Return the launches of each step on this rank. Only rank 0 keeps the unused output."""
    torch.manual_seed(0)
    model = shard(make(order), units={Block, Chain}, shared_memory="off")
    launches, kept, steps = launches_of(model), list[Tensor](), []
    gc.disable()
    try:
        for step in range(4):
            outputs = model(batch(rank, step))
            loss, unused = loss_of(outputs.pop("text")), outputs.pop("image")
            if rank == 0:
                hold(kept, unused)
            del unused
            loss.backward()
            # The threads of gloo launch hop 2.
            steps.append([name for name in launches.names if not name.startswith("hop2")])
            launches.events.clear()
            kept.clear()
    finally:
        gc.enable()
    return steps


@pytest.mark.parametrize("hold", [_keep, _leave_in_a_cycle])
@pytest.mark.parametrize(
    ("make", "order"), [(Towers, "image text"), (Towers, "text image"), (Sampled, "")], ids=["first", "last", "twice"]
)
def test_launches_do_not_depend_on_which_outputs_a_rank_keeps(
    make: Callable[[str], nn.Module], order: str, hold: Callable[..., None]
) -> None:
    kept, dropped = run_ranks(_launches, make, order, hold, world_size=2, pg_timeout=5)
    assert kept == dropped
    # From the second step on, no gather is launched for the unused output, and no reduction waits for its backward.
    last = [name for name in kept[-1] if name.startswith(("gather ", "hop1"))]
    backward = ["gather text.units.2", "gather text.units.1", "hop1 text.units.2", "gather text.units.0"]
    backward += ["hop1 text.units.1", "hop1 text.units.0"] + (["hop1 image"] if order else [])
    assert last[-len(backward) :] == backward and last.count("gather image") == bool(order), last


def _launches_of_two_forwards(rank: int) -> list[str]:
    """Return the launches of backward passes through two forward passes, which use different outputs."""
    model = shard(Towers("image text"), units={Block, Chain}, shared_memory="off")
    launches = launches_of(model)
    for step in range(4):
        first, second = model(batch(rank, step)), model(batch(rank, step + 10))
        (loss_of(first["text"] + first["image"]) + loss_of(second["text"])).backward()
    return [name for name in launches.names if not name.startswith("hop2")]


def test_forwards_of_one_backward_that_use_different_outputs_lead_to_equal_launches() -> None:
    first, *others = run_ranks(_launches_of_two_forwards, world_size=4, pg_timeout=5)
    assert others == [first] * 3


@on_ranks(world_size=1)
def test_a_call_that_the_backward_does_not_reach_is_passed_over(rank: int) -> None:
    """Check that a call with an unused output drops out of the chain of calls, also while a graph contains it."""
    model = layerzero.shard_model(integer_net(), zero3_size=1, units=IntegerNet.UNITS)
    root, first, second, head = get_state(model).units
    for unused in range(4):
        for not_expected in ((), {(first, 0)}):
            forward = ForwardPass(root, get_state(model).units, expected=[], not_expected=not_expected)
            forward.called = [root, first, second]
            calls = [UnitCall(unit, around=()) for unit in (first, second, first, root)]
            for call in calls:
                call.record_return(forward)
            assert [call.key[1] for call in calls] == [0, 0, 1, 0]
            reached = [call for call in calls if call is not calls[unused]]
            followers = [call.next_call(reached) for call in reached]
            assert followers == [*reached[1:], None], unused
            assert list(reached[-1].ended_handles(None)) == list(head.handles), "the unit that was not called"
            for call, follower in itertools.pairwise(reached):
                again = follower is calls[2] and not not_expected
                expected = [] if again else list(follower.unit.handles)
                assert list(call.ended_handles(follower)) == expected, "of the first expected call only"


@on_ranks(world_size=2)
def test_threads_that_enter_a_backward_at_the_same_time_begin_it_once(rank: int) -> None:
    """Let a second thread enter while the first one waits in begin(), as autograd does with one thread per device."""
    model = shard(blocks(2))
    scheduler, begin = get_state(model).scheduler, GradientReducer.begin
    entered: list[BackwardPass] = []
    threads: list[threading.Thread] = []

    @torch.no_grad()  # grad mode belongs to the thread
    def enter() -> None:
        entered.append(scheduler._enter_backward("a parameter"))

    def slow_begin(self: GradientReducer, *, reduces: bool) -> None:
        threads.append(threading.Thread(target=enter))
        threads[-1].start()
        time.sleep(0.05)
        begin(self, reduces=reduces)

    def watch(gradient: torch.Tensor) -> None:
        entered.append(scheduler._enter_backward("a parameter"))

    handle = model.units[0].linear.weight.register_hook(watch)
    loss = loss_of(model(batch(rank, 0)))
    in_backward = mock.patch("layerzero.engine.scheduler.in_backward", lambda: True)  # as in a thread of autograd
    with mock.patch.object(GradientReducer, "begin", slow_begin), in_backward:
        loss.backward()
    handle.remove()
    threads[0].join()
    assert len(threads) == 1
    assert len(entered) == 2 and entered[0] is entered[1]
