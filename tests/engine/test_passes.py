"""Passes of one model: which calls a backward pass reaches, and how it begins."""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch
from torch import Tensor, nn

import layerzero
from layerzero.engine.gradient_reducer import GradientReducer
from layerzero.engine.hooks import get_state
from layerzero.engine.passes import BackwardPass
from tests.support.graphs import Block, Chain, batch, blocks, loss_of, shard
from tests.support.ranks import on_ranks


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

    def watch(gradient: Tensor) -> None:
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


class ValueHead(Chain):
    """Chain that also returns a value, which it computes from the output of its first unit."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.units[0](x)
        value = (x * self.scale).sum(1, keepdim=True)
        for unit in self.units[1:]:
            x = unit(x)
        return x * self.scale, value


@on_ranks(world_size=2)
def test_a_backward_that_reaches_a_second_output_later_gathers_each_unit_once(rank: int) -> None:
    for prefetch in (0, 1, 2, "explicit"):
        model: nn.Module = shard(
            ValueHead(Block(), Block(), Block()), prefetch=1 if prefetch == "explicit" else prefetch
        )
        if prefetch == "explicit":
            model.set_modules_to_backward_prefetch([model.units[2]])
        output, value = model(batch(rank, 0))
        layerzero.traffic(model, reset=True)
        (loss_of(output) + loss_of(value)).backward()
        assert layerzero.traffic(model).calls["gather"] == 4, prefetch
