"""The final gradient stays in the accumulator, apart from later contributions; see engine/gradient_storage.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from layerzero import Offload, PrecisionPolicy
from layerzero.engine.gradient_storage import AliasedStorage
from tests.support.accumulating import MODES, WORLD, alone, answer_of, assert_step, backward, gradients_of, prepare
from tests.support.graphs import boom
from tests.support.late_transfers import LateTransfers, late
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

# Backwards outside (r) and inside (u) no_sync, and steps (s). Gradients are dropped in the ways of FORGET and by d (one
# parameter of a handle), and written by w. f freezes or unfreezes a unit, e is a forward without a
# backward, x is a failing backward followed by z.
ODD_ORDERS = (
    *("rr", "rrr", "rur", "ruur", "urur", "ruru", "rsr", "rsur", "rurs"),
    *("uuu", "uur", "urr", "ruu"),
    *("rzr", "rkr", "ruzr", "rukr", "ukur", "rkur", "rkk"),
    *("rdr", "rdur", "rudr", "rudur", "uurdr", "rudd", "rdsur", "rdud"),
    *("rfrfr", "rfur", "rufur", "rfurfr", "rxr", "ruxur", "rxurr", "uzfew"),
)
# Sums of these orders are exact in bf16.
EXACT_IN_BF16 = (
    *("rrrr", "uuur", "uuuu", "rur", "ruur", "urur", "rzur", "ruzr", "rukr", "ukur", "rdur", "rudr"),
    *("rufur", "ruxur", "fufur"),
)


def _forget_one_by_one(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


FORGET: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    "z": lambda model, optimizer: optimizer.zero_grad(),
    "k": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "m": lambda model, optimizer: model.zero_grad(),
    "n": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p": _forget_one_by_one,
}


def _fail(model: nn.Module, rank: int, index: int) -> None:
    """Raise in the last unit of a backward, after the others were reduced inside the ZeRO-3 group."""
    handle = model.first.weight.register_hook(boom)
    with pytest.raises(LookupError):
        backward(model, rank, index, inside_no_sync=False)
    handle.remove()


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
            forget = FORGET.get(action, FORGET["z"])
            forget(net, theirs)
            forget(model, optimizer)
        if action == "r" or action in FORGET:
            wrong = different(full_gradients(model), gradients_of(net))
            assert not wrong, f"{case}: gradients of {wrong} after {script[: index + 1]}"
    theirs.step()
    assert_step(model, optimizer, Step([], gradients_of(net), dict(net.named_parameters())), case)


IN_BF16 = {"mp_policy": PrecisionPolicy(accumulation_dtype=torch.bfloat16)}
IN_FP64 = {"mp_policy": PrecisionPolicy(replica_reduce_dtype=torch.float64)}
OFFLOADED, ALL_OFFLOADED = ({"offload": Offload(grads=True, optimizer=optimizer)} for optimizer in (False, True))


def _mode_of_unit(name: str, module: nn.Module) -> str:
    return {"first": "full", "second": "local"}.get(name, "sharded")


CASES: dict[str, tuple[int, Any, dict[str, Any], Sequence[str]]] = {
    "backwards and steps": (2, "sharded", {}, ODD_ORDERS[:13]),
    "all forgotten": (2, "sharded", {}, ODD_ORDERS[13:20]),
    "some forgotten, frozen, failed": (2, "sharded", {}, ODD_ORDERS[20:]),
    "copies are sent": (2, "sharded", IN_FP64, ODD_ORDERS[::5]),
    "full": (2, "full", {}, ODD_ORDERS[1::3]),
    "local": (2, "local", {}, ODD_ORDERS[::4]),
    "S = 1": (1, "sharded", {}, ODD_ORDERS[2::5]),
    "S = 4": (4, "sharded", {}, ODD_ORDERS[3::5]),
    "S = 4, full": (4, "full", {}, ODD_ORDERS[4::5]),
    "sharded in bf16": (2, "sharded", IN_BF16, EXACT_IN_BF16),
    "full in bf16": (2, "full", IN_BF16, EXACT_IN_BF16[::2]),
    "S = 1 in bf16": (1, "sharded", IN_BF16, EXACT_IN_BF16[1::2]),
    "S = 4 in bf16": (4, "full", IN_BF16, EXACT_IN_BF16[1::3]),
    "sharded, offloaded": (2, "sharded", OFFLOADED, ODD_ORDERS[::3]),
    "full, offloaded": (2, "full", ALL_OFFLOADED, ODD_ORDERS[2::4]),
    "local, offloaded": (2, "local", ALL_OFFLOADED, ODD_ORDERS[3::5]),
    "sharded in bf16, offloaded": (2, "sharded", IN_BF16 | OFFLOADED, EXACT_IN_BF16),
    "S = 1, offloaded": (1, "sharded", ALL_OFFLOADED, ODD_ORDERS[::6]),
    "S = 4, offloaded": (4, "full", OFFLOADED, ODD_ORDERS[1::6]),
    "copies are sent, offloaded": (2, "sharded", IN_FP64 | OFFLOADED, ODD_ORDERS[1::5]),
    "a mode for each unit, in bf16": (2, _mode_of_unit, IN_BF16, EXACT_IN_BF16[::2]),
    "full in bf16, offloaded": (2, "full", IN_BF16 | ALL_OFFLOADED, EXACT_IN_BF16[1::2]),
}


def _run_odd_orders(rank: int, zero3_size: int, mode: Any, settings: dict[str, Any], scripts: Sequence[str]) -> None:
    mesh = mesh_of(zero3_size)
    for script in scripts:
        with late() if "offload" in settings else nullcontext():
            model, optimizer = prepare(mode, zero3_size=None, mesh=mesh, **settings)
        _run_odd_order(rank, script, model, optimizer, f"S={zero3_size} {settings} {mode} {script}")


@pytest.mark.default_sample(3)
@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CASES)
@BOTH_SHARED_SLOW
@on_ranks()
def test_a_final_gradient_and_later_contributions_never_mix(rank: int, case: str, shared_memory: str) -> None:
    _run_odd_orders(rank, *CASES[case])


@on_ranks()
def test_an_engine_that_does_not_wait_for_copies_is_noticed(rank: int) -> None:
    with (
        mock.patch.object(LateTransfers, "wait", lambda self, mark: None),
        pytest.raises(AssertionError, match="gradients of"),
    ):
        _run_odd_orders(rank, 2, "full", OFFLOADED, ["uur"])


# In shared memory, and in the default tests, one case of each kind suffices: the others do the same to each parameter.
@pytest.mark.default_sample(1)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "shared_memory"),
    [
        *(pytest.param(way, "off", marks=[pytest.mark.slow] * (way not in "zk")) for way in FORGET),
        ("p", None),
        ("n", None),
    ],
    ids=str,
)
def test_zero_grad_drops_everything_unreduced_contributions_too(way: str, shared_memory: str) -> None:
    scripts = [f"{first}{way}s{way}{last}" for first, last in (("rr", "r"), ("ru", "r"), ("uu", "u"))]
    run_ranks(_forget_in_every_mode, scripts, shared_memory=shared_memory)


def _forget_in_every_mode(rank: int, scripts: Sequence[str]) -> None:
    for mode in MODES:
        _run_odd_orders(rank, 2, mode, {}, scripts)


def _is_never_set_aside(
    self: AliasedStorage, *, keep: bool, vacate: Callable[..., None] = AliasedStorage.set_aside
) -> None:
    assert not keep, "a gradient that nobody wants any more is moved"
    vacate(self, keep=keep)


@BOTH
@on_ranks()
def test_the_usual_loop_moves_no_gradient(rank: int, shared_memory: str) -> None:
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
