"""The final gradient stays in the accumulator, apart from later contributions; see engine/gradient_storage.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from layerzero import PrecisionPolicy
from layerzero.engine.gradient_storage import AliasedStorage
from tests.support.accumulating import MODES, WORLD, alone, answer_of, assert_step, backward, gradients_of, prepare
from tests.support.models import (
    Step,
    different,
    exact_sgd,
    full_gradients,
    integer_batch,
    integer_loss,
    integer_net,
    union,
)
from tests.support.ranks import BOTH, BOTH_SHARED_SLOW, mesh_of, on_ranks, run_ranks

# Backwards outside (r) and inside (u) no_sync, and steps (s). Gradients are dropped by z (to None), k (to zeros) and
# d (one parameter of a handle), and written by w. f freezes or unfreezes a unit, e is a forward without a
# backward, x is a failing backward followed by z.
ODD_ORDERS = (
    *("rr", "rrr", "rur", "ruur", "urur", "ruru", "rsr", "rsur", "rurs"),
    *("rzr", "rkr", "ruzr", "rukr", "ukur", "rkur", "rkk"),
    *("rdr", "rdur", "rudr", "rudur", "uurdr", "rudd", "rdsur", "rdud"),
    *("rfrfr", "rfur", "rufur", "rfurfr", "rxr", "ruxur", "rxurr", "uzfew"),
)
BF16, F64, SLOW = torch.bfloat16, torch.float64, pytest.mark.slow
# Sums of these orders are exact in bf16.
EXACT_IN_BF16 = ("rur", "ruur", "urur", "rzur", "ruzr", "rukr", "ukur", "rdur", "rudr", "rufur", "ruxur")


def _fail(model: nn.Module, rank: int, index: int) -> None:
    """Raise in the last unit of a backward, after the others were reduced inside the ZeRO-3 group."""
    handle = model.first.weight.register_hook(_raise)
    with pytest.raises(LookupError):
        backward(model, rank, index, inside_no_sync=False)
    handle.remove()


def _raise(_: Tensor) -> None:
    raise LookupError


def _run_odd_order(rank: int, script: str, model: nn.Module, optimizer: Optimizer, case: str) -> None:
    net = integer_net()
    theirs = exact_sgd(net.parameters())
    for index, action in enumerate(script):
        if action in "ru":
            integer_loss(net, union([integer_batch(micro_batch=index, rank=r) for r in range(WORLD)])).backward()
            backward(model, rank, index, inside_no_sync=action == "u")
        elif action == "d":
            model.second.weight.grad = net.second.weight.grad = None
        elif action == "f":
            for parameter in (*model.second.parameters(), *net.second.parameters()):
                parameter.requires_grad_(not parameter.requires_grad)
        elif action == "w":
            for parameter in (*model.parameters(), *net.parameters()):
                parameter.grad = torch.ones_like(parameter.detach())
        elif action == "e":
            model(integer_batch()[0])
        elif action == "s":
            theirs.step()
            optimizer.step()
        else:
            if action == "x":
                _fail(model, rank, index)
            for each in (theirs, optimizer):
                each.zero_grad(set_to_none=action != "k")
        if action == "r":
            wrong = different(full_gradients(model), gradients_of(net))
            assert not wrong, f"{case}: gradients of {wrong} after {script[: index + 1]}"
    theirs.step()
    assert_step(model, optimizer, Step([], gradients_of(net), dict(net.named_parameters())), case)


def _odd_orders(rank: int, zero3_size: int, mode: str, settings: dict[str, Any], scripts: Sequence[str]) -> None:
    mesh = mesh_of(zero3_size)
    for script in scripts:
        model, optimizer = prepare(mode, zero3_size=None, mesh=mesh, **settings)
        _run_odd_order(rank, script, model, optimizer, f"S={zero3_size} {settings} {mode} {script}")


@pytest.mark.default_sample(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("zero3_size", "mode", "settings", "scripts"),
    [
        pytest.param(2, "sharded", {}, ODD_ORDERS[:9], id="backwards and steps"),
        pytest.param(2, "sharded", {}, ODD_ORDERS[9:16], id="all forgotten"),
        pytest.param(2, "sharded", {}, ODD_ORDERS[16:], id="some forgotten, frozen, failed"),
        pytest.param(
            2,
            "sharded",
            {"mp_policy": PrecisionPolicy(replica_reduce_dtype=F64)},
            ODD_ORDERS[::5],
            id="copies are sent",
            marks=SLOW,
        ),
        pytest.param(2, "full", {}, ODD_ORDERS[1::3], id="full"),
        pytest.param(
            2, "sharded", {"mp_policy": PrecisionPolicy(accumulation_dtype=BF16)}, EXACT_IN_BF16, id="sharded in bf16"
        ),
        pytest.param(
            2,
            "full",
            {"mp_policy": PrecisionPolicy(accumulation_dtype=BF16)},
            EXACT_IN_BF16[::2],
            id="full in bf16",
            marks=SLOW,
        ),
        pytest.param(1, "sharded", {}, ODD_ORDERS[2::5], id="S = 1"),
        pytest.param(4, "sharded", {}, ODD_ORDERS[3::5], id="S = 4"),
    ],
)
@BOTH_SHARED_SLOW
def test_a_final_gradient_and_later_contributions_never_mix(
    zero3_size: int, mode: str, settings: dict[str, Any], scripts: Sequence[str], shared_memory: str
) -> None:
    run_ranks(_odd_orders, zero3_size, mode, settings, scripts, shared_memory=shared_memory)


def _is_never_set_aside(
    self: AliasedStorage, *, keep: bool, vacate: Callable[..., None] = AliasedStorage.set_aside
) -> None:
    assert not keep, "a gradient that nobody wants any more is moved"
    vacate(self, keep=keep)


def _usual_loop(rank: int) -> None:
    with mock.patch.object(AliasedStorage, "set_aside", _is_never_set_aside):
        model, optimizer = prepare("sharded")
        for step in range(3):
            for index in range(3):
                backward(model, rank, index, inside_no_sync=index < 2, step=step)
            layerzero.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, rank, 0, inside_no_sync=False)
        with pytest.raises(AssertionError, match="nobody wants"):  # the test would detect it
            backward(model, rank, 1, inside_no_sync=False)


@BOTH
def test_the_usual_loop_moves_no_gradient(shared_memory: str) -> None:
    run_ranks(_usual_loop, shared_memory=shared_memory)


@on_ranks()
def test_a_kept_gradient_is_refused_inside_a_backward_and_shows_the_sum_after_it(rank: int) -> None:
    for mode in MODES:
        model, optimizer = prepare(mode)
        answers = []
        backward(model, rank, 0, inside_no_sync=False)
        kept = model.second.weight.grad
        handle = model.first.weight.register_hook(
            lambda _, answers=answers, kept=kept: answers.append(answer_of(Tensor.norm, kept))
        )
        backward(model, rank, 1, inside_no_sync=False)
        handle.remove()
        assert len(answers) == 1 and "while a backward runs" in answers[0], answers
        assert torch.equal(kept.full_tensor(), alone([[0, 1]])[0].gradients["second.weight"]), mode
        assert torch.equal(kept.full_tensor(), model.second.weight.grad.full_tensor()), mode
        optimizer.zero_grad()
