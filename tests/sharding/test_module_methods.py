"""Manual control with FSDP2's method names: when units are gathered and freed, and which gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.graphs import MODES, WIDTH, WORLD, Block, Case, batch, blocks, compare, loss_of, shard
from tests.support.launches import launches_of
from tests.support.logs import logged
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

MICRO_BATCHES = 2
GATHER = ("launched", "gather")  # kind and collective of an event


def gathers(model: nn.Module) -> int:
    """Return the number of gathers since the last call."""
    return layerzero.traffic(model, reset=True).calls.get("gather", 0)


def full_buffers(model: nn.Module) -> int:
    return layerzero.memory(model).measured["full_buffer"]


def pass_through(model: nn.Module, rank: int, step: int = 0) -> None:
    loss_of(model(batch(rank, step))).backward()


# --- correct results in all modes ---


def unsharded_ahead(model: nn.Module, rank: int, step: int) -> None:
    if not hasattr(model, "unshard"):
        return pass_through(model, rank, step)
    handles = [unit.unshard(async_op=True) for unit in (model, *model.units)]
    handles[0].wait()
    output = model(batch(rank, step))
    for unit in (*model.units, model):
        unit.reshard()
    loss_of(output).backward()
    assert model.units[0].unshard() is None
    return model.units[0].reshard()


def stay_for_micro_batches(model: nn.Module, rank: int, step: int) -> None:
    for micro_batch in range(MICRO_BATCHES):
        is_last = micro_batch + 1 == MICRO_BATCHES
        if hasattr(model, "unshard"):
            model.set_requires_all_reduce(is_last)
            model.set_reshard_after_backward(is_last)
            model.set_reshard_after_forward(is_last, recurse=False)
        pass_through(model, rank, step + 7 * micro_batch)


def by_lists(model: nn.Module, rank: int, step: int) -> None:
    """Prefetch two units in the forward, the nearer one last. In the backward prefetch one, and one unnecessarily."""
    if hasattr(model, "unshard"):
        first, second, third = model.units
        model.set_modules_to_forward_prefetch([first])
        first.set_modules_to_forward_prefetch([third, second])
        third.set_modules_to_backward_prefetch([second])
        second.set_modules_to_backward_prefetch([first, third])
    pass_through(model, rank, step)


WAYS = {"unsharded ahead": unsharded_ahead, "stay": stay_for_micro_batches, "by lists": by_lists}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(world_size=WORLD)
def test_gradients_are_those_of_one_process(rank: int, way: str) -> None:
    for settings in (*MODES, {"size": 4, "reshard_after_forward": 2}, {"size": 1}):
        compare(rank, way, Case(blocks, WAYS[way]), **settings)


@on_ranks(world_size=WORLD, shared_memory="auto")
def test_gradients_are_those_of_one_process_in_shared_memory(rank: int) -> None:
    for way, step in WAYS.items():
        compare(rank, way, Case(blocks, step))


# --- each method does what it says ---


@on_ranks(world_size=WORLD)
def test_reshard_keeps_edits_of_full_parameters(rank: int) -> None:
    model = shard(blocks())
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        model.units[0].linear.weight.fill_(2)
        model.units[0].reshard()
    assert (model.units[0].linear.weight.full_tensor() == 2).all()


def _unshard(rank: int) -> None:
    model = shard(blocks(), prefetch=0)
    first, second, _ = model.units
    gathers(model)
    first.unshard()
    assert gathers(model) == 1 and full_buffers(model) > 0
    with pytest.raises(RuntimeError, match=r"mixes a plain tensor.*layerzero\.gathered"):
        batch(rank, 0) @ first.linear.weight
    with torch.no_grad():
        second(batch(rank, 0))  # frees what it gathered
        assert gathers(model) == 1 and full_buffers(model) > 0
        first(batch(rank, 0))
        assert gathers(model) == 0 and full_buffers(model) == 0
    first.unshard(async_op=True)
    first.unshard()
    pass_through(model, rank)
    assert gathers(model) == 8 and full_buffers(model) == 0
    first.unshard()
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.step()
    assert full_buffers(model) == 0
    gathers(model)
    pass_through(model, rank)  # with new weights
    assert gathers(model) == 8

    with layerzero.gathered(first), pytest.raises(RuntimeError, match=r"reshard\(\) of units.0 was called during"):
        first.reshard()
    first.register_forward_hook(lambda *_: second.unshard())
    pass_through(model, rank)
    assert full_buffers(model) == 0
    with layerzero.unsharded(model):
        gathers(model)
        model.unshard()
        assert gathers(model) == 0


def _when_it_is_freed(rank: int) -> None:
    model = shard(blocks(), prefetch=0)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    pass_through(model, rank)
    gathers(model)
    model.set_reshard_after_forward(False)
    pass_through(model, rank)
    assert gathers(model) == 4
    model.set_reshard_after_forward(True)
    model.units[2].set_reshard_after_forward(False)
    pass_through(model, rank)
    assert gathers(model) == 7
    with pytest.raises(ValueError, match="expects a bool, got 2"):
        model.set_reshard_after_forward(2)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    pass_through(model, rank)
    assert gathers(model) == 4 and full_buffers(model) > 0
    pass_through(model, rank)
    assert gathers(model) == 0
    assert isinstance(model.units[0].linear.weight, torch.distributed.tensor.DTensor)
    optimizer.step()
    assert full_buffers(model) == 0
    optimizer.zero_grad()
    model.set_reshard_after_backward(True)
    pass_through(model, rank)
    assert full_buffers(model) == 0
    model.set_reshard_after_forward(True, recurse=False)
    gathers(model)
    pass_through(model, rank)
    assert gathers(model) == 5

    kept = shard(blocks(), 4, reshard_after_forward=2)
    kept.set_reshard_after_forward(True)
    pass_through(kept, rank)
    assert "regather" not in layerzero.traffic(kept).calls


def _prefetched(rank: int) -> None:
    model = shard(blocks(4), prefetch=0)
    units = model.units
    model.set_modules_to_forward_prefetch([units[0], units[1]])
    units[0].set_modules_to_forward_prefetch([units[2]])
    units[3].set_modules_to_backward_prefetch([units[1], units[2]])
    launches = launches_of(model)
    pass_through(model, rank)
    launches.detach()
    seen = [each for each in launches.events if each.kind == "begun" or (each.kind, each.collective) == GATHER]
    launched = [event.name for event in seen if event.kind == "launched"]
    forward, backward = launched[:5], launched[5:]
    assert forward == ["the root", "units.0", "units.1", "units.2", "units.3"]
    assert backward == ["the root", "units.3", "units.1", "units.2", "units.0"]
    assert [event.kind for event in seen[:4]] == ["launched", "launched", "launched", "begun"]
    units[0].set_modules_to_forward_prefetch([])
    pass_through(model, rank)
    for wrong, error, text in (
        ([units[0].linear], ValueError, "neither a model that"),
        (units[0], TypeError, "expects a list of units, got one Block"),
        ([shard(blocks())], ValueError, "belongs to a different model"),
    ):
        with pytest.raises(error, match=text):
            units[1].set_modules_to_backward_prefetch(wrong)


def _reduced(rank: int) -> None:
    model = shard(blocks())

    def hops() -> tuple[int, int]:
        layerzero.traffic(model, reset=True)
        pass_through(model, rank)
        calls = layerzero.traffic(model).calls
        return calls.get("hop1", 0), calls.get("hop2", 0)

    assert hops() == (4, 4)
    model.set_requires_all_reduce(False)
    assert hops() == (4, 0)
    model.set_requires_gradient_sync(True)  # sets both, as FSDP2's does
    assert hops() == (4, 4)
    model.set_requires_gradient_sync(False)
    model.set_requires_all_reduce(True)  # but nothing is reduced
    assert hops() == (4, 0)
    model.set_requires_gradient_sync(True, recurse=True)
    assert hops() == (4, 4)
    unit = get_state(model).units[1].modules[0]
    for method in (unit.set_requires_gradient_sync, unit.set_requires_all_reduce):
        method(False)
        assert hops() == (4, 0), "one unit holds back all units"
        method(True, recurse=False)
        assert hops() == (4, 4)
    model.set_requires_gradient_sync(False)
    unit.set_requires_gradient_sync(True)
    assert hops() == (4, 0), "other units are held back"
    model.set_requires_gradient_sync(True)


@on_ranks(world_size=WORLD)
def test_each_does_what_it_says(rank: int) -> None:
    _unshard(rank)
    _when_it_is_freed(rank)
    _prefetched(rank)
    _reduced(rank)


class Own(Block):
    def reshard(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@on_ranks(world_size=WORLD)
def test_methods_of_the_user_stay_and_the_log_says_so(rank: int) -> None:
    with logged() as lines:
        model = layerzero.shard_model(nn.Sequential(Own(), Own()), mesh=mesh_of(2), units={Own})
    assert model[0].reshard() == "mine" and model[0].unshard() is None
    said = [line for line in lines if "reshard" in line]
    assert len(said) == 1 and "the Own defines its own reshard" in said[0], lines
    assert model(batch(rank, 0)).shape == (3, WIDTH)


def _ahead_of_others(rank: int, change: Callable[[nn.Module, int], object]) -> str:
    model = shard(blocks())
    pass_through(model, rank)
    try:
        change(model, rank % 2)
        pass_through(model, rank)
    except RuntimeError as error:
        return str(error)
    return "no error"


def unshard_another(model: nn.Module, place: int) -> None:
    model.units[place].unshard()


def stay_on_some(model: nn.Module, place: int) -> None:
    model.units[1].set_reshard_after_forward(bool(place))


def list_others(model: nn.Module, place: int) -> None:
    model.set_modules_to_forward_prefetch([model.units[place]])


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [unshard_another, stay_on_some, list_others])
def test_ranks_that_disagree_get_an_error_that_names_both_orders(change: Callable[[nn.Module, int], object]) -> None:
    for text in run_ranks(_ahead_of_others, change, world_size=WORLD, pg_timeout=20):
        assert "gather units in different orders" in text, text
