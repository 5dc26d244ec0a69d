"""Exceptions in a step: the model continues as if the step had never begun, or every rank raises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import layerzero
from tests.support.graphs import IN_FLIGHT, MODES, WORLD, Chain, batch, blocks, boom, loss_of, one_pass, sgd, shard
from tests.support.models import different, full_parameters, update
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow


class Fuse(nn.Module):
    """Identity that raises at the given call of this step: forward or recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise LookupError("boom")
        return x


class Fused(nn.Module):
    UNIT = True

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.inner = blocks(1)
        self.fuse = fuse

    def forward(self, x: Tensor) -> Tensor:
        # First, since a recomputation may stop early when it has all tensors.
        return self.inner(self.fuse(x))


def _make(reentrant: bool | None = None) -> tuple[Chain, Fuse]:
    fuse = Fuse()
    torch.manual_seed(0)
    return Chain(blocks(1), Fused(fuse), blocks(1), reentrant=reentrant), fuse


def _in_a_forward(model: nn.Module, fuse: Fuse, rank: int) -> None:
    fuse.left = 1
    model(batch(rank, 7).requires_grad_())


def _in_the_second_forward_of_two(model: nn.Module, fuse: Fuse, rank: int) -> None:
    fuse.left = 2
    IN_FLIGHT(model, rank, 7)


def _in_a_recomputation(model: nn.Module, fuse: Fuse, rank: int) -> None:
    loss = loss_of(model(batch(rank, 7).requires_grad_()))
    fuse.left = 1
    loss.backward()


def _in_a_loss(model: nn.Module, fuse: Fuse, rank: int) -> None:
    model(batch(rank, 7))
    boom()


def _in_a_backward(model: nn.Module, fuse: Fuse, rank: int) -> None:
    output = model(batch(rank, 7).requires_grad_())
    output.register_hook(boom)
    loss_of(output).backward()


def _in_a_hook(model: nn.Module, handle: RemovableHandle, rank: int, step: Callable[[], object] | None = None) -> None:
    try:
        one_pass(model, rank, 7)
        if step is not None:
            step()
    finally:
        handle.remove()


def _in_a_parameter_hook(model: nn.Module, fuse: Fuse, rank: int) -> None:
    _in_a_hook(model, model.units[1].inner.units[0].linear.weight.register_hook(boom), rank)


def _in_a_post_accumulate_hook(model: nn.Module, fuse: Fuse, rank: int) -> None:
    _in_a_hook(model, model.units[2].scale.register_post_accumulate_grad_hook(boom), rank)


def _in_the_optimizer(model: nn.Module, fuse: Fuse, rank: int) -> None:
    optimizer = next(iter(layerzero.engine.hooks.get_state(model).optimizers))
    _in_a_hook(model, optimizer.register_step_pre_hook(boom), rank, optimizer.step)


FAILURES: dict[str, tuple[Callable[[nn.Module, Fuse, int], None], bool | None]] = {
    "in a forward": (_in_a_forward, None),
    "in a forward, after one that is in flight": (_in_the_second_forward_of_two, None),
    "in a loss": (_in_a_loss, None),
    "in a backward": (_in_a_backward, None),
    "in a parameter hook": (_in_a_parameter_hook, None),
    "in a post-accumulate hook": (_in_a_post_accumulate_hook, None),
    "in a step hook": (_in_the_optimizer, None),
    "in a forward, reentrant checkpoint": (_in_a_forward, True),
    "in a forward, checkpoint": (_in_a_forward, False),
    "in a recomputation, reentrant checkpoint": (_in_a_recomputation, True),
    "in a recomputation, checkpoint": (_in_a_recomputation, False),
}


def _train(rank: int, fails: list[Any], reentrant: bool | None, settings: dict[str, Any], accumulated: int) -> Any:
    """Train three steps of two micro-batches. In the second and third a failure of `fails` comes first."""
    model, fuse = _make(reentrant)
    shard(model, **settings)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    for step in range(3):
        if fails and step:
            with layerzero.no_sync(model):
                for micro_batch in range(accumulated):
                    one_pass(model, rank, 20 + micro_batch)
            with pytest.raises(LookupError, match="boom"):
                fails[step - 1](model, fuse, rank)
            optimizer.zero_grad()
        with layerzero.no_sync(model):
            one_pass(model, rank, step)
        one_pass(model, rank, step + 10)
        update(optimizer)
    assert layerzero.memory(model).measured["full_buffer"] == 0, settings
    return full_parameters(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "reentrant",
    [None, pytest.param(True, marks=pytest.mark.exhaustive), False],
    ids=["plain", "reentrant checkpoint", "checkpoint"],
)
@on_ranks(world_size=WORLD, pg_timeout=20)
def test_after_a_failure_training_goes_on_with_the_bits_of_a_run_without(rank: int, reentrant: bool | None) -> None:
    """Fail twice in a run; other modes swap the order."""
    names = [name for name, (_, kind) in FAILURES.items() if kind is reentrant]
    for index, settings in enumerate((*MODES, {"size": 4})):
        accumulated = index % 2
        expected = _train(rank, [], reentrant, settings, accumulated)
        for first in range(0, len(names), 2):
            two = [names[first], names[(first + 1) % len(names)]][:: 1 if index < 2 else -1]
            ours = _train(rank, [FAILURES[name][0] for name in two], reentrant, settings, accumulated)
            assert not different(ours, expected), (two, settings, accumulated)


@on_ranks(world_size=WORLD)
def test_an_interrupted_pass_leaves_nothing_behind(rank: int) -> None:
    """Press Ctrl-C in a notebook: torch runs no hooks, and the next cell continues with or without zero_grad."""
    for place, forgets in itertools.product(("forward", "backward"), (True, False)):
        results = []
        for interrupts in (False, True):
            model, _ = _make()
            shard(model)
            optimizer = layerzero.shard_optimizer(sgd(model), model)
            for step in range(3):
                if interrupts and step == 1:
                    handle = _interrupt_in(model, place)
                    with pytest.raises(KeyboardInterrupt):
                        one_pass(model, rank, 9)
                    handle.remove()
                    if forgets or place == "backward":
                        model.zero_grad()
                one_pass(model, rank, step)
                assert all(p.grad is not None for p in model.parameters()), (place, forgets)
                update(optimizer)
            assert layerzero.memory(model).measured["full_buffer"] == 0
            results.append(full_parameters(model))
        assert not different(*results), (place, forgets)


def _interrupt_in(model: nn.Module, place: str) -> Any:
    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    inner = model.units[1].inner.units[0].linear
    return inner.register_forward_hook(stop) if place == "forward" else inner.weight.register_hook(stop)


@on_ranks(world_size=WORLD)
def test_a_step_on_half_a_backward_is_refused(rank: int) -> None:
    model, fuse = _make()
    shard(model)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    one_pass(model, rank, 0)
    with pytest.raises(LookupError):
        _in_a_parameter_hook(model, fuse, rank)
    with pytest.raises(RuntimeError, match=r"(?s)incomplete.*zero_grad"):
        optimizer.step()


# --- on one rank only ---


def _fail_on_rank_2(rank: int, fail: Any, reentrant: bool | None) -> str:
    model, fuse = _make(reentrant)
    shard(model)
    one_pass(model, rank, 0)
    try:
        if rank == 2:
            fail(model, fuse, rank)
        for step in range(1, 4):
            one_pass(model, rank, step)
    except LookupError:
        raise  # this rank stops, as in a training script
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["in a forward", "in a backward", "in a recomputation, checkpoint"])
def test_a_failure_on_one_rank_is_an_error_on_the_others_within_the_timeout(name: str) -> None:
    """Fail on one rank. The pool kills all ranks 5 seconds later and reports a hanging rank as missing."""
    with pytest.raises(AssertionError, match=r"(?s)rank 2.*boom") as caught:
        run_ranks(_fail_on_rank_2, *FAILURES[name], world_size=WORLD, pg_timeout=2)
    assert "had not returned" not in str(caught.value)
