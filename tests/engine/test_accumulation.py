"""No gradient is lost or counted twice with any mix of `no_sync`, `zero_grad` and clipping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import layerzero
from tests.support.accumulating import MODES, WORLD, alone, answer_of, assert_step, backward, prepare
from tests.support.models import (
    IntegerNet,
    different,
    exact_sgd,
    full_gradients,
    integer_batch,
    integer_loss,
    integer_net,
    union,
)
from tests.support.ranks import BOTH, on_ranks, run_ranks


@on_ranks()
def test_zero_grad_of_one_optimizer_leaves_the_gradients_of_another(rank: int) -> None:
    both, second = alone([[0, 1]])[0].gradients, alone([[1]])[0].gradients
    for mode, inside_no_sync in itertools.product(MODES, (False, True)):
        model, optimizer = prepare(mode)
        del optimizer
        one, other = (
            layerzero.shard_optimizer(exact_sgd(parameters), model)
            for parameters in (model.first.parameters(), [*model.second.parameters(), *model.head.parameters()])
        )
        backward(model, rank, 0, inside_no_sync=inside_no_sync)
        one.zero_grad()
        backward(model, rank, 1, inside_no_sync=False)
        expected = {name: second[name] if name.startswith("first") else both[name] for name in both}
        wrong = different(full_gradients(model), expected)
        assert not wrong, f"{mode}, inside no_sync: {inside_no_sync}: {wrong}"
        one.step()
        other.step()


def _norm_alone(net: nn.Module, norm_type: float) -> Tensor:
    """Clip to a quarter of the norm; return that norm."""
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), math.inf, norm_type)
    torch.nn.utils.clip_grad_norm_(net.parameters(), norm.item() / 4, norm_type)
    return norm


def torch_clips(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).full_tensor()


def _clip(rank: int, sizes: tuple[tuple[int, str], ...]) -> None:
    for zero3_size, mode in sizes:
        model, optimizer = prepare(mode, zero3_size=zero3_size)
        every_rank_holds_rows = all(0 not in parameter.to_local().shape for parameter in model.parameters())
        for norm_type, clip in itertools.product((2.0, math.inf, 1.0), (torch_clips, layerzero.clip_grad_norm_)):
            if clip is torch_clips and math.isinf(norm_type) and not every_rank_holds_rows:
                continue  # torch.norm has no maximum of an empty tensor; see the tests below
            case = f"S={zero3_size} {mode} norm {norm_type} {clip.__name__}"
            net = integer_net()
            integer_loss(net, union([integer_batch(rank=r) for r in range(WORLD)])).backward()
            expected = _norm_alone(net, norm_type)
            backward(model, rank, 0, inside_no_sync=clip is layerzero.clip_grad_norm_)
            norm = clip(model, expected.item() / 4, norm_type)
            assert norm.ndim == 0 and norm.dtype == torch.float32, case
            torch.testing.assert_close(norm, expected, msg=lambda text, case=case: f"{case}: {text}")
            for name, gradient in full_gradients(model).items():
                torch.testing.assert_close(gradient, net.get_parameter(name).grad, msg=f"{case}: {name}")
            optimizer.zero_grad()


@pytest.mark.default_sample(1)
@BOTH
def test_clipping_uses_the_norm_of_the_whole_model(shared_memory: str | None) -> None:
    alone = () if shared_memory is None else ((1, "sharded"),)  # without shared memory
    run_ranks(_clip, (*alone, (2, "sharded"), (2, "full"), (4, "full")), shared_memory=shared_memory)


def _backward_of_layer(rank: int, rows: int) -> tuple[nn.Module, Tensor]:
    """Return a sharded layer with one weight [rows, 4] after a backward, and its full expected gradient."""
    model = layerzero.shard_model(nn.Linear(4, rows, bias=False), zero3_size=2)
    model(torch.tensor([[1.0, -2.0, 3.0, 4.0 * rank]])).sum().backward()
    return model, torch.tensor([1.0, -2.0, 3.0, 6.0]).expand(rows, 4)


@on_ranks()
def test_clipping_where_every_rank_holds_rows_or_most_hold_none(rank: int) -> None:
    for rows, clip in ((8, torch_clips), (8, layerzero.clip_grad_norm_), (1, layerzero.clip_grad_norm_)):
        for norm_type in (math.inf, 2.0):
            model, gradient = _backward_of_layer(rank, rows)
            expected = torch.linalg.vector_norm(gradient, norm_type)
            torch.testing.assert_close(clip(model, 0.5, norm_type), expected, msg=f"norm {norm_type}")
            torch.testing.assert_close(model.weight.grad.full_tensor(), 0.5 * gradient / expected)
            assert len(model.weight.to_local()) in ((2,) if rows == 8 else (0, 1))
    # torch's clipping, before its first collective: an error on one rank leaves the other ranks waiting.
    norms = {
        "linalg": lambda model: torch.linalg.vector_norm(model.weight.grad, math.inf).to_local().item(),
        "foreach": lambda model: torch._foreach_norm([model.weight.grad], math.inf)[0].to_local().item(),
    }
    model, _ = _backward_of_layer(rank, 1)
    largest = 6.0 if model.weight.to_local().numel() else 0.0
    for name, norm in norms.items():
        answer = answer_of(norm, model)
        assert answer == f"gave {largest}" or "layerzero.clip_grad_norm_" in answer, f"{name}: {answer}"


@on_ranks()
def test_clipping_between_backwards_clips_what_has_come_so_far(rank: int) -> None:
    # Clipping reduces the gradients that no_sync left. Later contributions add to the clipped one, as in one process.
    for mode, inside_no_sync in itertools.product(MODES, (False, True)):
        net = integer_net()
        model, optimizer = prepare(mode)
        for index in range(2):
            integer_loss(net, union([integer_batch(micro_batch=index, rank=r) for r in range(WORLD)])).backward()
            expected = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            backward(model, rank, index, inside_no_sync=inside_no_sync)
            torch.testing.assert_close(layerzero.clip_grad_norm_(model, 1.0), expected)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, net.get_parameter(name).grad, msg=f"{mode} {inside_no_sync} {name}")
        optimizer.step()


USES: dict[str, Callable[[nn.Module], object]] = {
    "full_tensor": lambda model: model.first.weight.grad.full_tensor(),
    "arithmetic": lambda model: model.first.weight.grad + 1,
    "in place": lambda model: model.first.weight.grad.mul_(0.5),
    "norm": lambda model: model.first.weight.grad.norm(),
    "local values": lambda model: model.first.weight.grad.to_local().sum(),
    "torch's clipping": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "any": lambda model: model.first.weight.grad.any(),
    "clone": lambda model: model.first.weight.grad.clone(),
    "full_tensor of an alias": lambda model: model.first.weight.grad.detach().full_tensor(),
}


@on_ranks()
def test_an_unreduced_gradient_refuses_to_be_used_and_is_not_lost(rank: int) -> None:
    (expected,) = alone([[0, 1]])
    wrong = {}
    for mode, pattern in itertools.product(MODES, ("uu", "ru")):  # r: a reduced gradient exists already
        case = f"{mode}, {pattern}"
        model, optimizer = prepare(mode)
        backward(model, rank, 0, inside_no_sync=pattern[0] == "u")
        backward(model, rank, 1, inside_no_sync=True)
        for use, value in USES.items():
            text = answer_of(value, model)
            if "no_sync" not in text or "zero_grad" not in text:  # it names the reason and a remedy
                wrong[f"{case}, {use}"] = text
        assert_step(model, optimizer, expected, f"{case}, after the refusals")
    assert not wrong, "\n".join(f"{case}: {text}" for case, text in wrong.items())


@on_ranks()
def test_no_sync_ends_with_its_block_and_nests(rank: int) -> None:
    (expected,) = alone([[0]])
    model, optimizer = prepare("sharded")
    with pytest.raises(ZeroDivisionError), layerzero.no_sync(model):
        raise ZeroDivisionError
    backward(model, rank, 0, inside_no_sync=False)
    assert not different(full_gradients(model), expected.gradients), "no_sync ended with its block"
    optimizer.zero_grad()
    with layerzero.no_sync(model):
        with layerzero.no_sync(model):
            pass
        layerzero.traffic(model, reset=True)
        backward(model, rank, 0, inside_no_sync=False)
        assert "hop2" not in layerzero.traffic(model).calls, "the end of the inner block ended the outer one"
    assert_step(model, optimizer, expected, "nested no_sync")


@on_ranks()
def test_what_counts_is_where_backward_runs(rank: int) -> None:
    # The context around backward() counts.
    for forward_inside, backward_inside in itertools.product((False, True), repeat=2):
        (expected,) = alone([[0]])
        model, optimizer = prepare("sharded")
        with layerzero.no_sync(model) if forward_inside else nullcontext():
            loss = integer_loss(model, integer_batch(rank=rank))
        layerzero.traffic(model, reset=True)
        with layerzero.no_sync(model) if backward_inside else nullcontext():
            loss.backward()
        reduced = layerzero.traffic(model).calls.get("hop2", 0) > 0
        assert reduced != backward_inside, f"forward inside {forward_inside}, backward inside {backward_inside}"
        assert_step(model, optimizer, expected, f"forward inside {forward_inside}, backward inside {backward_inside}")


@on_ranks(pg_timeout=15)
def test_a_rank_joins_the_backward_of_others_if_its_gradients_were_all_zeroed_or_dropped(rank: int) -> None:
    model = layerzero.shard_model(integer_net(), zero3_size=1, units=IntegerNet.UNITS)
    first = [*model.first.parameters()]
    rest = [p for name, p in model.named_parameters() if not name.startswith("first")]
    one, other = (layerzero.shard_optimizer(exact_sgd(parameters), model) for parameters in (first, rest))
    integer_loss(model, integer_batch(rank=rank)).backward()
    one.zero_grad(set_to_none=False)
    layerzero.traffic(model, reset=True)
    layerzero.clip_grad_norm_(model, math.inf)
    assert "hop2" not in layerzero.traffic(model).calls, "the other optimizer still has gradients"
    other.zero_grad()
    if rank:
        integer_loss(model, integer_batch(step=1, rank=rank)).backward()
    layerzero.clip_grad_norm_(model, math.inf)
    plain = integer_net()
    for each in range(1, WORLD):
        (integer_loss(plain, integer_batch(step=1, rank=each)) / WORLD).backward()
    assert not different(full_gradients(model), {name: p.grad for name, p in plain.named_parameters()})
