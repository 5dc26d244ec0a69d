"""A backward that raised is followed by another one: its gradients are right, or an error says what to do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerzero
from tests.support.graphs import WORLD, Chain, batch, blocks, boom, loss_of, one_pass, sgd, shard
from tests.support.models import different, full_gradients, full_parameters
from tests.support.ranks import on_ranks


def _fail(model: nn.Module, loss: Tensor, where: str = "units.1.linear.weight") -> None:
    handle = model.get_parameter(where).register_hook(boom)
    with pytest.raises(LookupError, match="boom"):
        loss.backward()
    handle.remove()


def _losses(model: nn.Module, rank: int, count: int = 2) -> list[Tensor]:
    return [loss_of(model(batch(rank, step).requires_grad_())) for step in range(count)]


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant checkpoint", "checkpoint"])
@on_ranks(world_size=WORLD)
def test_the_backward_of_another_graph_works_as_if_the_failed_one_had_not_begun(
    rank: int, reentrant: bool | None
) -> None:
    for settings in ({}, {"shared_memory": "auto"}, {"accumulation": "full"}, {"reshard_after_forward": False}):
        results = []
        for fails in (False, True):
            torch.manual_seed(0)
            model = shard(blocks(3, reentrant=reentrant), **settings)
            optimizer = layerzero.shard_optimizer(sgd(model), model)
            failing, loss = _losses(model, rank)
            if fails:
                _fail(model, failing)
                model.zero_grad()
            del failing
            loss.backward()
            gradients = full_gradients(model)
            optimizer.step()
            results.append((gradients, full_parameters(model)))
            assert layerzero.memory(model).measured["full_buffer"] == 0, settings
        for expected, found in zip(*results, strict=True):
            assert found and not different(found, expected), settings


@on_ranks(world_size=WORLD)
def test_a_gradient_that_arrives_before_any_unit_is_reached_is_kept(rank: int) -> None:
    """Begin the second backward at a parameter: its result saves no tensor, and no hook of a unit runs before."""
    model = shard(blocks(2))
    failing = loss_of(model(batch(rank, 0)))
    unit = model.units[0]
    with layerzero.gathered(unit):
        loss = unit.linear.bias.sum() * (rank + 1)
    _fail(model, failing)
    loss.backward()
    gradients = full_gradients(model)
    assert list(gradients) == ["units.0.linear.bias"]
    assert torch.equal(gradients["units.0.linear.bias"], torch.full((6,), 2.5, dtype=torch.float64))


@on_ranks(world_size=WORLD)
def test_a_backward_is_refused_while_incomplete_gradients_exist(rank: int) -> None:
    model = shard(blocks(3))
    one_pass(model, rank, 0)
    failing, loss = _losses(model, rank)
    _fail(model, failing)
    with pytest.raises(RuntimeError, match=r"gradients are incomplete. Call zero_grad\(\)"):
        loss.backward()


@on_ranks(world_size=WORLD)
def test_a_backward_inside_a_forward_may_follow_a_failed_one(rank: int) -> None:
    """Fail in a backward of a unit's own loss inside the forward of the root, which then goes on."""

    class Inner(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for fails in self.fails:
                with layerzero.no_sync(self.model[0]):
                    loss = loss_of(self.units[1](x.detach().requires_grad_()))
                    if fails:
                        _fail(self, loss)
                    else:
                        loss.backward()
            return super().forward(x)

    results = []
    for fails in ((False,), (True, False)):
        torch.manual_seed(0)
        model = Inner(*blocks(3).units)
        model.fails, model.model = fails, [model]
        shard(model)
        one_pass(model, rank, 0)
        results.append(full_gradients(model))
    assert results[0] and not different(*results)


# --- a step after a failed backward ---


@on_ranks(world_size=WORLD)
def test_a_step_without_zero_grad_is_refused_even_if_there_was_no_gradient_before(rank: int) -> None:
    for use in ("step", "clip"):
        model = shard(blocks(3))
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        _fail(model, *_losses(model, rank, 1))
        with pytest.raises(RuntimeError, match=r"gradients are incomplete. Call zero_grad\(\)"):
            optimizer.step() if use == "step" else layerzero.clip_grad_norm_(model, 1.0)


def _drop_one_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


ZERO_GRAD: dict[str, Callable[[nn.Module, layerzero.ShardedOptimizer], object]] = {
    "of the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "of the optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "of the model": lambda model, optimizer: model.zero_grad(),
    "of the model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "of a wrapper": lambda model, optimizer: nn.Sequential(model).zero_grad(),
    "one by one": lambda model, optimizer: _drop_one_by_one(model),
}


@pytest.mark.parametrize("way", ZERO_GRAD)
@on_ranks(world_size=WORLD)
def test_a_step_after_zero_grad_changes_nothing(rank: int, way: str) -> None:
    for earlier, uses in itertools.product((True, False), ("step", "refused step", "clip")):
        model = shard(blocks(3))
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        before = full_parameters(model)
        if earlier:
            one_pass(model, rank, 0)
        _fail(model, *_losses(model, rank, 1))
        if uses == "refused step":
            with pytest.raises(RuntimeError, match=r"gradients are incomplete. Call zero_grad\(\) of the model"):
                optimizer.step()
        ZERO_GRAD[way](model, optimizer)
        if uses == "clip":
            assert layerzero.clip_grad_norm_(model, 1.0) == 0
        optimizer.step()
        assert not different(full_parameters(model), before), (uses, earlier)
        one_pass(model, rank, 1)
        gradients = full_gradients(model)
        model.zero_grad()
        one_pass(model, rank, 1)
        assert gradients and not different(full_gradients(model), gradients), (uses, earlier)


@on_ranks(world_size=WORLD)
def test_a_trained_parameter_of_no_optimizer_does_not_hinder_the_next_step(rank: int) -> None:
    model = shard(blocks(3))
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.units.parameters(), lr=0.1), model)
    _fail(model, *_losses(model, rank, 1))
    optimizer.zero_grad()
    optimizer.step()
    one_pass(model, rank, 0)
    assert len(full_gradients(model)) == 7


@on_ranks(world_size=WORLD)
def test_reading_grad_in_a_backward_does_not_end_it(rank: int) -> None:
    """Read in a hook, in a forward around the backward, and in another thread."""
    model = shard(blocks(3))
    one_pass(model, rank, 0)
    expected = full_gradients(model)
    model.zero_grad()
    seen: list[Tensor | None] = []

    def read(*_: object) -> None:
        seen.append(model.scale.grad)

    def read_in_thread(*_: object) -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    for hook in (read, read_in_thread):
        model.units[1].linear.weight.register_hook(hook)
    one_pass(model, rank, 0)
    assert seen == [None, None]
    assert not different(full_gradients(model), expected)


@on_ranks(world_size=WORLD)
def test_a_backward_that_fails_inside_unsharded_leaves_the_full_parameters_there(rank: int) -> None:
    model = shard(blocks(2))
    loss = loss_of(model(batch(rank, 0)))
    with layerzero.unsharded(model):
        with pytest.raises(RuntimeError, match="was replaced in the sharded model"):
            loss.backward()
        assert model.scale.shape == (6,) and not hasattr(model.scale, "full_tensor")
        with torch.no_grad():
            model(batch(rank, 1))
    model.zero_grad()
    one_pass(model, rank, 0)
    assert len(full_gradients(model)) == 5
