"""User-written gradients, and graphs through parameters while they are sharded."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import layerzero
from layerzero import Offload
from layerzero.dtensor.lazy_grad import plain_access
from layerzero.engine.grad_attribute import GradAttribute
from layerzero.engine.gradient_reducer import GradientReducer
from layerzero.engine.hooks import get_state
from tests.support.graphs import (
    MODES,
    WORLD,
    Chain,
    assert_same_gradients,
    batch,
    blocks,
    loss_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.models import update
from tests.support.ranks import on_ranks, run_ranks


def _pair(settings: dict[str, Any], count: int = 3, **more: Any) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model and the same model in one process. One unit is not used, unless `more` has an order."""
    torch.manual_seed(0)
    alone = blocks(count, **({"order": (0, 2)} | more))
    return shard(copy.deepcopy(alone), **settings), alone


def _scale(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * factor


def _step(*optimizers: Any) -> None:
    update(*optimizers)


class Uneven(nn.Module):
    """Matrix, and a parameter beside which its rows are on few ranks: `torch.chunk` would place them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 3))
        self.other = nn.Parameter(torch.zeros(9, 5))
        self.like = nn.Parameter(torch.zeros(4, 3))

    def forward(self) -> Tensor:
        return self.matrix.sum() + self.other.sum() + self.like.sum()


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_a_gradient_that_is_sharded_otherwise_reaches_its_rows(rank: int, world_size: int) -> None:
    """Assign gradients as a plain tensor, as FSDP2 would shard them, replicated, and as another parameter's rows."""
    full = torch.arange(12.0).view(4, 3)
    kinds: list[Callable[[nn.Module], Tensor]] = [
        lambda model: full,
        lambda model: distribute_tensor(full, model.matrix.device_mesh, model.matrix.placements),
        lambda model: distribute_tensor(full, model.matrix.device_mesh, [Replicate()] * model.matrix.device_mesh.ndim),
        lambda model: model.like.grad.copy_(full),
    ]
    for size in {1, 2, dist.get_world_size()}:
        for after_backward in (True, False):
            for kind in kinds[: 4 if after_backward else 3]:
                model = layerzero.shard_model(Uneven(), zero3_size=size)
                optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
                if after_backward:
                    model().backward()
                model.matrix.grad = kind(model)
                optimizer.step()
                assert torch.equal(model.matrix.detach().full_tensor(), -full)


def _decay(model: nn.Module) -> None:
    """Add the gradient of a penalty to existing gradients, or set it where there is none."""
    for parameter in model.parameters():
        pull = parameter.detach() * 0.25
        if parameter.grad is None:
            parameter.grad = pull
        else:
            parameter.grad.add_(pull)


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_gradients_written_by_hand_count_like_those_of_a_backward(rank: int) -> None:
    """Change gradients by hand. r: a backward outside no_sync; d, x: changes; s: a step on the sum over ranks."""
    for settings in (*MODES[:2], {"size": 1}, {"size": 4}):
        for script in ("drd", "rdr", "rxr", "d", "drsrd", "rsdr"):
            model, alone = _pair(settings)  # of the unused unit, the gradient is the written one, or None
            optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
            for step, action in enumerate(script):
                if action == "r":
                    one_pass(model, rank, step)
                    _scale(alone, WORLD)
                    for r in range(WORLD):
                        one_pass(alone, r, step)
                    _scale(alone, 1 / WORLD)
                elif action == "d":
                    _decay(model)
                    _decay(alone)
                elif action == "x":
                    _scale(model, 2)
                    _scale(alone, 2)
                else:
                    _step(*optimizers)
            layerzero.clip_grad_norm_(model, float("inf"))
            _scale(alone, WORLD)
            assert_same_gradients(model, alone, (settings, script))


def _penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum((p.to_local() if isinstance(p, DTensor) else p).square().sum() for p in model.parameters())


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_a_penalty_on_local_rows_is_a_part_of_the_loss(rank: int) -> None:
    """Add a penalty on this rank's rows, which each count once; autograd writes its gradient to ``.grad``."""
    for settings in (*MODES, {"size": 1}, {"size": 4}):
        for pattern in ("rr", "rrn", "uur", "rur"):  # r: outside no_sync, u: inside, n: inside, without a penalty
            model, alone = _pair(settings)
            for step, where in enumerate(pattern):
                with layerzero.no_sync(model) if where in "un" else nullcontext():
                    penalty = 0 if where == "n" else _penalty(model)
                    (loss_of(model(batch(rank, step))) + penalty).backward()
                for r in range(WORLD):
                    (loss_of(alone(batch(r, step))) + (0 if where == "n" else _penalty(alone))).backward()
            if pattern.endswith("n"):
                layerzero.clip_grad_norm_(model, float("inf"))
            assert_same_gradients(model, alone, (settings, pattern))


class _Scaled(nn.Module):
    """Five rows, which are sharded unevenly, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x) * self.scale


PENALTIES: dict[str, Callable[[_Scaled], Any]] = {
    "square().sum()": lambda m: m.o.weight.square().sum(),
    "** 2": lambda m: (m.o.weight**2).sum(),
    "norm()": lambda m: m.o.weight.norm(),
    "linalg.norm": lambda m: torch.linalg.norm(m.o.weight),
    "abs().sum()": lambda m: m.o.weight.abs().sum(),
    "mean()": lambda m: m.o.weight.mean(),
    "a product": lambda m: (m.o.weight.exp() * m.o.weight.square()).sum(),
    "norm of a product": lambda m: (2 * m.o.weight).norm(),
    "foreach": lambda m: sum(torch._foreach_norm([m.o.weight, m.o.bias])),
    "all": lambda m: sum(p.square().sum() for p in (m.o.weight, *m.parameters())),
    "stack": lambda m: torch.stack([p.norm() for p in (m.o.weight, m.o.bias)]).sum(),
}


REDUCTIONS_OVER_ROWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda p: p.sum(0),
    lambda p: p.mean(0, keepdim=True),
    lambda p: p.amax(0),
    lambda p: p.sum(0).abs(),
)
WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda x: x.fill_(1),
    lambda x: x.__imul__(2),
    lambda x: x.__setitem__(0, 1.0),
    lambda x: torch._foreach_mul_([x], 2.0),
    lambda x: F.leaky_relu(x, 0.01, inplace=True),
    lambda x: F.leaky_relu(x, 0.01, True),
)


def _assert_writes_are_noticed(parameter: Tensor) -> None:
    """Assert that a write to a tensor computed from `parameter` raises, or that its gradient is right."""
    for write in WRITES:
        for tensor in (torch.tanh(parameter), parameter[:, :2]):
            with pytest.raises(NotImplementedError, match=r"outside torch\.no_grad.*'o\.weight'.*autograd tracks"):
                write(tensor)
    for alias in (lambda x: x, Tensor.detach, lambda x: x[:, :1]):
        output = torch.tanh(parameter)  # needed in the backward
        with torch.no_grad():
            alias(output).mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.to_local().sum().backward()
    detached, doubled = (parameter * 2).detach_(), (parameter * 2).requires_grad_(True)
    assert not detached.requires_grad and doubled.requires_grad
    with torch.no_grad():
        doubled.mul_(0.5)  # the backward does not need it
    (gradient,) = torch.autograd.grad(doubled.to_local().sum(), parameter)
    assert bool((gradient.to_local() == 2).all())


@on_ranks(world_size=2)
def test_a_penalty_on_a_sharded_parameter_is_refused_by_name_with_the_way_out(rank: int) -> None:
    named_error = r"parameter '{}'.*to_local\(\).*weight_decay.*layerzero\.gathered"
    for settings in ({"zero3_size": 2}, {"zero3_size": 1}, {"zero3_size": 2, "units": ["o"]}):
        model = layerzero.shard_model(_Scaled(), **settings)
        one_row = layerzero.shard_model(nn.Linear(3, 1), zero3_size=settings["zero3_size"])
        weight = named_error.format("o.weight")
        for name, penalty in PENALTIES.items():
            before = penalty(model)  # and after the forward: autograd runs the younger one first
            loss = model(torch.ones(2, 3)).sum()
            for number in (before, penalty(model)):
                with pytest.raises(RuntimeError, match=weight):
                    loss + 0.1 * number
                with pytest.raises(RuntimeError, match=weight):
                    loss += number
            assert torch.equal(number.detach().full_tensor(), before.detach().full_tensor()), name  # for logging
            with torch.no_grad():
                loss + number  # to print it
        with pytest.raises(RuntimeError, match=named_error.format("scale")):
            loss + model.scale**2
        with pytest.raises(RuntimeError, match=r"'o\.weight'.*gathered only while"):
            torch.ones(2, 3) @ model.o.weight.T
        for backward in (
            lambda model=model: model.o.weight.square().sum().backward(),
            lambda model=model: torch.autograd.grad(model.o.weight.square().sum(), model.o.weight),
            lambda model=model, loss=loss: (loss + model.o.weight.norm().full_tensor()).backward(),
        ):
            with pytest.raises(RuntimeError, match=weight):
                backward()
        for reduce in REDUCTIONS_OVER_ROWS:
            for parameter in (model.o.weight, one_row.weight):
                reduced = reduce(parameter)
                with pytest.raises(RuntimeError, match=r"a loss mixes .*weight"):
                    reduced.backward(torch.ones_like(reduced))
                assert parameter.grad is None
        with torch.no_grad():
            loss + 0.1 * model.o.weight.square().sum()  # to print it
            model.o.weight[:, :2].fill_(0.5)
        _assert_writes_are_noticed(model.o.weight)
        plain, number = torch.ones(3, dtype=torch.float64, requires_grad=True), torch.ones((), requires_grad=True)
        assert model.o.weight.type_as(plain).dtype == torch.float64
        for other in (plain, number):
            for parameter in (model.o.weight, model.scale, model.scale**2):
                with pytest.raises(RuntimeError, match=r"mul mixes a plain tensor with parameter"):
                    parameter * other
        model.zero_grad()
        local = (2 * model.o.weight).to_local().sum() + (3 * model.scale).to_local().sum()
        (0 * model(torch.ones(2, 3)).sum() + local).backward()
        assert torch.equal(model.o.weight.grad.full_tensor(), torch.full((5, 3), 2.0))
        assert model.scale.grad.full_tensor() == 3


@on_ranks(world_size=1)
def test_one_process_may_do_as_it_likes(rank: int) -> None:
    alone, model = _Scaled(), _Scaled()
    model.load_state_dict(alone.state_dict())
    model = layerzero.shard_model(model, zero3_size=1)
    penalty = 0.5 * (model.o.weight**2).sum().full_tensor()
    assert torch.equal(penalty, 0.5 * (alone.o.weight**2).sum())
    loss = model(torch.ones(2, 3)).sum()
    with pytest.raises(RuntimeError, match=r"parameter 'o\.weight'.*to_local\(\)"):
        loss + (model.o.weight**2).sum()  # torch refuses to mix plain tensors and DTensors only in the backward
    (loss + (model.o.weight**2).sum().full_tensor()).backward()
    (model.o.weight**2).sum().backward()
    (alone(torch.ones(2, 3)).sum() + 2 * (alone.o.weight**2).sum()).backward()
    torch.testing.assert_close(model.o.weight.grad.full_tensor(), alone.o.weight.grad)


def _delete(model: nn.Module) -> None:
    for parameter in model.parameters():
        del parameter.grad


def _set(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


# First reader of .grad after a backward, on the model and, once or once per rank, in one process.
ASKS: dict[str, tuple[Callable[[nn.Module], object], int]] = {
    "nothing, but the optimizer": (lambda model: None, 1),
    "a read": (lambda model: [p.grad for p in model.parameters()], 1),
    "a read of one that nobody has used": (lambda model: model.units[3].linear.bias.grad, 1),
    "set": (_set, WORLD),
    "deleted": (_delete, 1),
    "zero_grad": (lambda model: model.zero_grad(), 1),
    "torch's norm": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf")), 1),
    "a penalty alone": (lambda model: _penalty(model).backward(), WORLD),  # through no unit, unseen by the engine
}
ORDERS = [(0, 2), (0, 2), (0, 1), (0, 1)]  # no rank uses all units, and no rank uses the last one


def _pass(model: nn.Module, rank: int, step: int) -> None:
    model.order = ORDERS[rank]
    one_pass(model, rank, step)


def _pass_alone(alone: nn.Module, step: int) -> None:
    for rank in range(WORLD):
        _pass(alone, rank, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        MODES[:2],
        pytest.param(({"size": 1}, {"offload": Offload(grads=True)}), marks=pytest.mark.exhaustive),
        pytest.param(({"offload": Offload(optimizer=True)},), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@on_ranks(world_size=WORLD)
def test_gradients_of_which_others_have_to_tell_are_there_when_they_are_asked_for(
    rank: int, settings: Sequence[dict[str, Any]]
) -> None:
    warnings.filterwarnings("ignore", r"Offload\(", UserWarning)  # its purpose on a CPU
    for each in settings:
        for name, (ask, times) in ASKS.items():
            model, alone = _pair(each, 4)
            optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
            for step, passes in enumerate((1, 1, 2)):
                for number in range(passes):
                    _pass(model, rank, 10 * step + number)
                    _pass_alone(alone, 10 * step + number)
                with plain_access():
                    known = any(p.grad is not None for p in model.parameters())
                # The first backward has more agreements, and waits; before the last one there were some.
                assert known is (step != 1), (each, name, step)
                if step > 0:
                    ask(model)
                    for _ in range(times):
                        ask(alone)
                    if name == "set":
                        _scale(alone, WORLD)
                if name == "nothing, but the optimizer":
                    _scale(alone, 1 / WORLD)
                else:
                    assert_same_gradients(model, alone, (each, name, step))
                _step(*optimizers)
            for parameter_name, parameter in alone.named_parameters():
                ours = model.get_parameter(parameter_name).detach().full_tensor()
                torch.testing.assert_close(ours, parameter.detach(), msg=f"{each}, {name}")


def _late(rank: int) -> tuple[nn.Module, nn.Module]:
    """Return a model after a second backward whose result is unread, and the one-process model."""
    model, alone = _pair({}, 4)
    for step in range(2):
        model.zero_grad()
        alone.zero_grad()
        _pass(model, rank, step)
        _pass_alone(alone, step)
    assert get_state(model).gradients.lazy_grad.pending
    return model, alone


def _interrupt(rank: int) -> None:
    """Interrupt the publication of gradients at each place in turn."""
    for publications in range(6):
        _interrupt_after(publications, rank)


def _interrupt_after(publications: int, rank: int) -> None:
    """Interrupt after `publications` handles have published gradients; 0: after the agreement; 5: after all."""
    publish, take = GradAttribute.publish, GradientReducer._take_agreed
    model, alone = _late(rank)
    left = [publications]

    def interrupted(shown: GradAttribute, *, agreed: bool) -> None:
        publish(shown, agreed=agreed)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    def taken(sync: GradientReducer, agreement: Any) -> None:
        take(sync, agreement)
        if left[0] == 0:
            left[0] = -1
            raise KeyboardInterrupt

    with (
        mock.patch.object(GradAttribute, "publish", interrupted),
        mock.patch.object(GradientReducer, "_take_agreed", taken),
        pytest.raises(KeyboardInterrupt),
    ):
        model.units[0].linear.weight.grad  # noqa: B018
    assert_same_gradients(model, alone, publications)


def _read_in_threads(rank: int) -> None:
    model, alone = _late(rank)
    with ThreadPoolExecutor(4) as threads:
        norms = list(threads.map(lambda p: None if p.grad is None else p.grad.to_local().norm(), model.parameters()))
    assert len(norms) == len(list(model.parameters()))
    assert_same_gradients(model, alone, "")


def _read_under_modes(rank: int) -> None:
    for mode in (torch.inference_mode(), torch.device("meta")):
        model, alone = _late(rank)
        with mode:
            assert model.units[3].linear.bias.grad is None
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # writes to them
        assert_same_gradients(model, alone, mode)


def _drop(rank: int) -> None:
    model, _ = _late(rank)
    parameter = model.units[0].linear.weight
    gone = weakref.ref(model)
    del model
    assert gone() is None, "without the garbage collector"
    with pytest.raises(RuntimeError, match=r"deleted before its gradients were read. Keep a reference"):
        parameter.grad  # noqa: B018


def _freeze_late(rank: int) -> None:
    """Freeze a unit; it takes effect at the next forward, and present gradients stay."""
    model, alone = _late(rank)
    for net in (model, alone):
        net.units[1].requires_grad_(False)
    _pass(model, rank, 2)
    _pass_alone(alone, 2)
    assert_same_gradients(model, alone, "")


def _hook_late(rank: int) -> None:
    for ranks in (range(WORLD), (0, 3)):  # that have one
        model, called = shard(blocks(3)), []
        if rank in ranks:
            model.units[1].linear.weight.register_post_accumulate_grad_hook(called.append)
        for step in range(3):
            _pass(model, rank, step)
            expected = [model.units[1].linear.weight] * (step + 1) if rank in ranks else []
            assert called == expected, "also where this rank has not used it"


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("what", [_interrupt, _read_in_threads, _read_under_modes, _drop, _freeze_late, _hook_late])
def test_what_is_due_is_settled_once_whatever_comes_between(what: Callable[[int], None]) -> None:
    run_ranks(what, world_size=WORLD, shared_memory="off")


@on_ranks(world_size=WORLD)
def test_who_holds_a_gradient_sees_in_it_what_a_later_backward_has_added(rank: int) -> None:
    for settings in MODES:
        model = shard(blocks(3), **settings)
        for step in range(3):
            held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} if step == 2 else {}
            model.order = (0, 2) if rank < 2 else (0, 1)
            with layerzero.no_sync(model) if step == 1 else nullcontext():
                one_pass(model, rank, step)
        seen = {name: gradient.full_tensor() for name, gradient in held.items()}  # the parameters have not been read
        assert seen and all(torch.equal(seen[n], model.get_parameter(n).grad.full_tensor()) for n in seen), settings


@on_ranks(world_size=2)
def test_only_the_gradient_that_was_zeroed_can_be_read_before_the_reduction(rank: int) -> None:
    model = shard(blocks(1), 2)
    linear = model.units[0].linear
    with layerzero.no_sync(model):
        one_pass(model, rank, 0)
    linear.weight.grad.zero_()
    linear.weight.grad.to_local().sum()  # may be read
    with pytest.raises(RuntimeError, match="not reduced yet"):  # of the same handle
        linear.bias.grad.to_local().sum()
    with layerzero.no_sync(model):
        one_pass(model, rank, 1)
    for gradient in (linear.weight.grad, linear.bias.grad):
        with pytest.raises(RuntimeError, match="not reduced yet"):
            gradient.to_local().sum()


@on_ranks(world_size=WORLD)
def test_an_edit_between_forward_and_backward_is_an_error(rank: int) -> str:
    for size in (1, 2, 4):
        model = shard(blocks(), size)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        loss = loss_of(model(batch(rank, 0)))
        with torch.no_grad():
            model.units[1].linear.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"units\.1.*changed between a forward and its backward") as caught:
            loss.backward()
        optimizer.zero_grad()
        one_pass(model, rank, 1)
    return str(caught.value)


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_a_backward_reaches_the_parameters_that_it_is_given(rank: int) -> None:
    """Pass the parameters of one unit to each backward pass, as in a loop for a GAN that is one model."""
    for settings in (*MODES, {"size": 1}, {"size": 4}):
        model, alone = _pair(settings, order=None)
        optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
        for step, part in enumerate((2, 0, 1, 0)):
            for micro_batch in range(2):
                inputs = {r: batch(r, step, micro_batch).requires_grad_() for r in range(WORLD)}
                x = inputs[rank].detach().requires_grad_()
                with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                    loss_of(model(x)).backward(inputs=[x, *model.units[part].parameters()])
                for each in inputs.values():
                    loss_of(alone(each)).backward(inputs=[each, *alone.units[part].parameters()])
                torch.testing.assert_close(x.grad, inputs[rank].grad, rtol=1e-10, atol=1e-12)
            assert_same_gradients(model, alone, (settings, step))
            _step(*optimizers)
        loss_of(model(batch(rank, 0))).backward()  # to all parameters
        for r in range(WORLD):
            loss_of(alone(batch(r, 0))).backward()
        assert_same_gradients(model, alone, settings)

        parameters = list(model.parameters())
        for unused in ({}, {"allow_unused": True}, {"materialize_grads": True}):
            with pytest.raises(RuntimeError, match=r"autograd\.grad found no gradient for parameter 'scale'"):
                torch.autograd.grad(loss_of(model(batch(rank, 0))), parameters, **unused)
        rows, unused = model.scale.to_local(), torch.ones(2, requires_grad=True)
        gradient, none = torch.autograd.grad(rows.square().sum(), [model.scale, unused], allow_unused=True)
        assert torch.equal(gradient.to_local(), 2 * rows) and none is None
        term = model.scale.to_local().square().sum()
        _, zeros = torch.autograd.grad(term, [model.scale, unused], retain_graph=True, materialize_grads=True)
        assert torch.equal(zeros, torch.zeros(2))
        with pytest.raises(RuntimeError, match="Set allow_unused=True"):
            torch.autograd.grad(term, [model.scale, unused])

        model.zero_grad()
        model.scale.requires_grad_(False)
        loss = loss_of(model(batch(rank, 0)))
        model.scale.requires_grad_(True)  # between the forward and the backward
        loss.backward(inputs=parameters)
        assert model.scale.grad is None and model.units[0].linear.weight.grad is not None


_NOT_GATHERED = r"units\.0\.linear\.weight(?s:.*)Call model\(x\), not model\.forward\(x\)"
MISUSES: dict[str, Callable[[Chain, Tensor], Tensor]] = {
    "which is not differentiable": lambda model, x: model.units[0].linear.weight.full_tensor().square().sum(),
    _NOT_GATHERED: lambda model, x: (x @ model.units[0].linear.weight).sum(),
    f"{_NOT_GATHERED}()": lambda model, x: model.units[0].linear(x).sum(),
}


@on_ranks(world_size=WORLD)
def test_a_loss_on_sharded_parameters_is_an_error(rank: int) -> None:
    for message, term in MISUSES.items():
        model = shard(blocks())
        with warnings.catch_warnings(), pytest.raises((RuntimeError, ValueError, NotImplementedError), match=message):
            warnings.simplefilter("ignore")  # torch's, on how it reduces such sums
            (loss_of(model(batch(rank, 0))) + term(model, batch(rank, 1))).backward()
    assert model.units[0].linear.weight.full_tensor().shape == (6, 6), "to look at it is fine"
