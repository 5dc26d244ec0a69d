"""Weights that stay sharded over fewer ranks between forward and backward: ``reshard_after_forward=2`` of S = 4."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.graphs import (
    IN_FLIGHT,
    WORLD,
    Block,
    Case,
    Chain,
    batch,
    blocks,
    boom,
    compare,
    freeze,
    loss_of,
    one_pass,
    run_script,
    sgd,
)
from tests.support.graphs import shard as shard_over
from tests.support.models import BF16, different, full_parameters, update
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow

shard = partial(shard_over, size=WORLD)


# --- the same bits ---


def _accumulated(model: nn.Module, rank: int, step: int) -> None:
    for micro_batch in range(3):
        with layerzero.no_sync(model) if hasattr(model, "no_sync") and micro_batch < 2 else nullcontext():
            loss_of(model(batch(rank, step, micro_batch))).backward()


def _some_units(model: nn.Module, rank: int, step: int) -> None:
    """Leave out another unit in each step."""
    for micro_batch in range(2):
        model.order = [place for place in range(3) if place != (step + micro_batch) % 3]
        one_pass(model, rank, step)
    model.order = range(3)


def _thrown_away(model: nn.Module, rank: int, step: int) -> None:
    """Run forwards without a backward, with and without gradients, before and inside training."""
    model(batch(rank, step, 1))
    with torch.no_grad():
        model(batch(rank, step, 2))
    loss = loss_of(model(batch(rank, step).requires_grad_()))
    with torch.no_grad():
        model(batch(rank, step, 2))
    loss.backward()


def _part(model: nn.Module, rank: int, step: int) -> None:
    """Call a unit alone, and leave a part of the graph out of the backward."""
    x = batch(rank, step).requires_grad_()
    first, second = model.units[0](x), model(x)
    loss_of(first).backward()
    loss_of(second).backward()


CASES = {
    "plain": Case(blocks),
    "several in flight": Case(blocks, IN_FLIGHT),
    "no_sync": Case(blocks, _accumulated),
    "unused units": Case(blocks, _some_units),
    "thrown away": Case(blocks, _thrown_away),
    "parts of it": Case(blocks, _part),
    "checkpointed": Case(lambda: blocks(reentrant=False), IN_FLIGHT),
    "checkpointed, reentrant": Case(lambda: blocks(reentrant=True), IN_FLIGHT),
    "parts of units checkpointed": Case(lambda: Chain(Block(reentrant=False), Block(reentrant=True)), IN_FLIGHT),
    "nested": Case(lambda: Chain(Block(), blocks(2), Block()), IN_FLIGHT),
    "one unit twice": Case(lambda: Chain(Block(), Block(), order=(0, 1, 1, 0)), IN_FLIGHT),
    "frozen": Case(lambda: freeze(blocks(), "units.1", "units.0.linear.bias"), IN_FLIGHT),
}


def _trained(rank: int, case: Case, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = shard(case.make(), **settings)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    for step in range(3):
        case.step(model, rank, step)
        update(optimizer)
        assert layerzero.memory(model).measured["full_buffer"] == 0
    return full_parameters(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
@on_ranks(world_size=WORLD)
def test_post_forward_shards_on_two_of_four_ranks_train_to_the_bits_of_freed_weights(rank: int, name: str) -> None:
    case = CASES[name]
    compare(rank, name, case, size=WORLD, reshard_after_forward=2)
    for mode, prefetch in (("sharded", 1), ("full", 2)):
        settings = {"accumulation": mode, "prefetch": prefetch}
        hows = (
            (True, 2, False) if mode == "sharded" else (True, 2)
        )  # gathered: as ranks of engine/test_autograd_graphs.py keep them
        freed, *others = (_trained(rank, case, reshard_after_forward=how, **settings) for how in hows)
        assert not any(different(other, freed) for other in others), (name, settings)


@on_ranks(world_size=WORLD)
def test_they_do_in_bf16_too(rank: int) -> None:
    found = [
        _trained(rank, Case(lambda: blocks().float(), _floats), mp_policy=BF16, reshard_after_forward=kept)
        for kept in (True, 2)
    ]
    assert not different(*found)


def _floats(model: nn.Module, rank: int, step: int) -> None:
    losses = [loss_of(model(batch(rank, step, micro_batch).float())) for micro_batch in range(2)]
    for loss in losses:
        loss.backward()


@on_ranks(world_size=8, timeout=300, pg_timeout=100)
def test_groups_are_neighbors_of_one_node(rank: int) -> None:
    """Check D = 8, S = 4: two groups of two ranks in each of two ZeRO-3 groups."""
    found = [_trained(rank, Case(blocks, IN_FLIGHT), reshard_after_forward=kept) for kept in (True, 2)]
    assert not different(*found)
    model = shard(blocks(), reshard_after_forward=2)
    comm = get_state(model).mesh_info.subgroup_comm(2)
    assert dist.get_process_group_ranks(comm.group) == [rank // 2 * 2, rank // 2 * 2 + 1]


# --- memory and traffic ---


@on_ranks(world_size=WORLD)
def test_gathers_of_a_backward_are_among_two_ranks_and_counted(rank: int) -> None:
    groups = []
    for kept in (True, 2):
        model = shard(blocks(), reshard_after_forward=kept)
        groups.append(len(get_state(model).mesh_info.groups._held))
    assert groups[1] == groups[0] + 1, "one communicator more, and only where it is used"
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    sizes = [
        handle.weights.full_buffer.numel() * handle.weights.full_buffer.element_size()
        for handle in get_state(model).handles
    ]
    whole = sum(sizes)
    for step in range(3):
        layerzero.traffic(model, reset=True)
        loss = loss_of(model(batch(rank, step)))
        assert layerzero.memory(model).measured["full_buffer"] == whole // 2, "a half on each of two ranks"
        forward = layerzero.traffic(model)
        loss.backward()
        update(optimizer)
        traffic = layerzero.traffic(model)
        assert forward.bytes["gather"] == traffic.bytes["gather"] == whole * 3 // 4
        assert forward.calls.get("regather", 0) == 0 and traffic.calls["regather"] == len(sizes)
        assert traffic.bytes["regather"] == whole // 2
        assert traffic.bytes_by_axis["zero3"] == whole * 3 // 4 + whole // 2 + traffic.bytes["hop1"]
        for collective in ("gather", "regather"):
            assert traffic.predicted[collective] == traffic.bytes[collective]
        assert step < 2 or not traffic.calls.get("gather_order"), "predicted"
    layerzero.traffic(model, reset=True)
    with torch.no_grad():
        model(batch(rank, 0))
    assert layerzero.memory(model).measured["full_buffer"] == 0, "a forward without gradients frees as usual"
    model(batch(rank, 0)), model(batch(rank, 0))
    calls = layerzero.traffic(model).calls
    assert (calls["gather"], calls["regather"]) == (2 * len(sizes), len(sizes)), "the second forward regathers"
    model = shard(blocks(), reshard_after_forward=2)
    for script, gathers in (("F0 F1 F2 B0 B1 B2", 1), ("F0 F1 B0 F2 B1 F3 B2 B3", 1), ("F0 F1 B1 B0", 2)):
        layerzero.traffic(model, reset=True)
        run_script(model, rank, 0, script=script)
        calls = layerzero.traffic(model).calls
        passes = script.count("F") + script.count("B")
        assert (calls["gather"], calls["regather"]) == (gathers * len(sizes), (passes - gathers) * len(sizes)), script
        assert layerzero.memory(model).measured["full_buffer"] == 0
    # Another backward, as of a chunked loss, between a forward and its backward.
    model = shard(blocks(), reshard_after_forward=2)
    head = model.units[2]
    layerzero.traffic(model, reset=True)
    hidden = model(batch(rank, 0))
    head(batch(rank, 1)).sum().backward()
    hidden.sum().backward()
    assert layerzero.traffic(model).calls["regather"] >= 3, "the root and the other units"


@on_ranks(world_size=WORLD)
def test_a_unit_that_is_called_twice_has_its_post_forward_shard_for_both_backwards(rank: int) -> None:
    """Call a unit twice; the backward of the later call must not free weights of the earlier one."""
    model = shard(Chain(Block(), Block(), order=(0, 1, 1, 0)), reshard_after_forward=2)
    one_pass(model, rank, 0)
    layerzero.traffic(model, reset=True)
    one_pass(model, rank, 0)
    calls = layerzero.traffic(model).calls
    assert (calls["gather"], calls["regather"]) == (3, 5), "the second call of unit 0 and all backwards regather"
    assert layerzero.memory(model).measured["full_buffer"] == 0


@on_ranks(world_size=WORLD)
def test_each_unit_may_have_its_own_setting_where_all_ranks_is_true_and_one_is_false(rank: int) -> None:
    def chosen(name: str, module: nn.Module) -> bool | int:
        return {"units.0": 2, "units.1": 1, "units.2": 4}.get(name, True)

    model = shard(blocks(), reshard_after_forward=chosen, prefetch=0)
    lz_state = get_state(model)
    assert [unit.reshard_after_forward for unit in lz_state.units] == [True, 2, False, True]
    assert [type(unit.reshard_after_forward) for unit in lz_state.units] == [bool, int, bool, bool]
    loss = loss_of(model(batch(rank, 0)))
    assert [(unit.name, unit.gathered, unit.has_post_forward_shard) for unit in lz_state.units] == [
        ("", False, False),
        ("units.0", False, True),
        ("units.1", True, False),
        ("units.2", False, False),
    ]
    loss.backward()
    assert not any(unit.gathered or unit.has_post_forward_shard for unit in lz_state.units)
    compare(rank, "by unit", Case(blocks, IN_FLIGHT), size=WORLD, reshard_after_forward=chosen)


# --- end of kept weights ---


class Greedy(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


@on_ranks(world_size=WORLD)
def test_changed_weights_failures_and_graphs_that_nobody_comes_back_for_end_it(rank: int) -> None:
    """Check that kept weights are dropped when weights change, and that failed or graph-free passes keep none.

    Weights kept for an abandoned forward stay until the weights change.
    """
    for change in ("step", "edit", "load"):
        model = shard(blocks(), reshard_after_forward=2)
        alone = shard(blocks(), reshard_after_forward=True)
        alone.load_state_dict(model.state_dict())
        for each in (model, alone):
            optimizer = layerzero.shard_optimizer(sgd(each), each)
            one_pass(each, rank, 0)
            each(batch(rank, 1))  # abandoned
            if change == "step":
                optimizer.step()
            elif change == "edit":
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.mul_(2.0)
            else:
                each.load_state_dict({name: torch.full(p.shape, 0.5) for name, p in each.named_parameters()})
        assert change != "step" or layerzero.memory(model).measured["full_buffer"] == 0
        layerzero.traffic(model, reset=True)
        with torch.no_grad():
            assert torch.equal(model(batch(rank, 2)), alone(batch(rank, 2))), change
        calls = layerzero.traffic(model).calls
        assert calls["gather"] == 4 and not calls.get("regather"), change

    model = shard(Greedy(Block(), Block()), reshard_after_forward=2)
    model(batch(rank, 0))
    assert layerzero.memory(model).measured["full_buffer"] == 0, "its output has no graph"

    model = shard(blocks(), reshard_after_forward=2)
    for place in ("units.1", "units.2"):
        for backward in (False, True):
            there = (lambda module, args, output: output.register_hook(boom) and None) if backward else boom
            hook = model.get_submodule(place).register_forward_hook(there)
            with pytest.raises(LookupError):
                one_pass(model, rank, 0)
            hook.remove()
            for parameter in model.parameters():
                parameter.grad = None
            with torch.no_grad():
                model(batch(rank, 0))
            assert layerzero.memory(model).measured["full_buffer"] == 0, (place, backward)

    # A write to gathered weights raises and has no effect.
    before = model(batch(rank, 0)).detach()
    hook = model.units[1].register_forward_pre_hook(_damage)
    with pytest.raises(RuntimeError, match="changed in place while it was gathered"):
        model(batch(rank, 0))
    hook.remove()
    assert torch.equal(model(batch(rank, 0)), before)


@torch.no_grad()
def _damage(module: nn.Module, args: object) -> None:
    module.linear.weight.add_(1.0)


@pytest.mark.parametrize(("prefetch", "steps"), [(1, 0), (0, 3)])
@on_ranks(world_size=WORLD, pg_timeout=4)
def test_ranks_that_keep_other_units_than_their_node_are_told_and_do_not_hang(
    rank: int, prefetch: int, steps: int
) -> None:
    """Run a forward without a graph on one rank: it gathers among all ranks, but the others among two."""
    model = shard(blocks(), reshard_after_forward=2, prefetch=prefetch)
    for step in range(steps):
        one_pass(model, rank, step)
    with torch.set_grad_enabled(rank != 0):
        model(batch(rank, 0))
    with pytest.raises(RuntimeError, match=r"layerzero: .*gather") as raised:
        loss_of(model(batch(rank, 1))).backward()
    if "different orders" in (said := str(raised.value)):
        orders = said.split("different orders: ")[1].split(". Every rank", maxsplit=1)[0].split("; ")
        assert len({order.split(": ", 1)[1] for order in orders}) > 1, "equal orders are no difference"
        assert "'the root (kept)'" in said and "without gradients or one of their passes failed" in said
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, said)
    assert sum("different orders" in each for each in found) >= 2, found


@on_ranks(world_size=WORLD)
def test_units_inside_reentrant_checkpoints_have_no_post_forward_shard(rank: int) -> None:
    for reentrant, kept in ((False, 4), (True, 1)):
        model = shard(blocks(reentrant=reentrant), reshard_after_forward=2)
        layerzero.traffic(model, reset=True)
        one_pass(model, rank, 0)
        assert layerzero.traffic(model).calls.get("regather", 0) == kept, (reentrant, layerzero.traffic(model).calls)


# --- settings ---


@on_ranks(world_size=WORLD)
def test_numbers_of_ranks_that_cannot_be_are_refused_on_all_ranks(rank: int) -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        (3, ValueError, r"reshard_after_forward is 3.*zero3_size=4.*unit ''.*Use one of \[1, 2, 4\]"),
        (8, ValueError, "reshard_after_forward is 8, which does not divide the zero3_size=4"),
        (0, ValueError, "reshard_after_forward is 0, which is not positive. Use a divisor of zero3_size"),
        (-2, ValueError, "reshard_after_forward is -2, which is not positive. Use a divisor"),
        (2.0, TypeError, r"reshard_after_forward must be a bool, the number of ranks .* got 2\.0"),
        (
            lambda name, module: 3 if name else True,
            ValueError,
            r"the result of reshard_after_forward\('units\.0', module\) is 3",
        ),
    ]
    for value, kind, text in refused:
        with pytest.raises(kind, match=text):
            shard(blocks(), reshard_after_forward=value)
    for value in (2, 3, lambda name, module: 8):
        model = shard_over(blocks(), size=1, reshard_after_forward=value)
        assert all(unit.reshard_after_forward is True for unit in get_state(model).units), "nothing is gathered"
    for value in (2 if rank else True, lambda name, module: 2 if rank else 4):
        with pytest.raises(ValueError, match=r"ranks disagree.*reshard_after_forward"):
            shard(blocks(), reshard_after_forward=value)
