"""Emulated optimizers of NVIDIA Apex: on sharded parameters they match torch in one process, or are refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

import layerzero
from layerzero import Offload, checkpoint, optimizers
from layerzero.optimizers.apex import with_preparation
from layerzero.optimizers.compatibility import kinds_that_need_full_params
from layerzero.optimizers.compatibility_trial import find_row_difference, group_kind, steps_matrices_separately
from tests.support import apex_emulation as apex
from tests.support.models import (
    IntegerNet,
    SideBySide,
    assert_close,
    assert_same_bits,
    backward,
    backward_alone,
    full_parameters,
    in_lockstep,
    integer_batch,
    integer_loss,
    integer_net,
    update,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
Factory = Callable[[Iterable[Tensor]], Optimizer]
MOMENTUM = {"lr": 2**-4, "momentum": 0.5}
# Adam divides by the gradient's magnitude: eps is far above the rounding noise of a gradient that cancels.
ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.25}
NO_LIMIT = {"max_grad_norm": float("inf")}

# Apex's and torch's classes. SGD is exact.
PAIRS: dict[str, tuple[Factory, Factory]] = {
    "FusedSGD": (lambda p: apex.FusedSGD(p, **MOMENTUM), lambda p: torch.optim.SGD(p, **MOMENTUM)),
    "FusedSGD without momentum": (lambda p: apex.FusedSGD(p, lr=2**-4), lambda p: torch.optim.SGD(p, lr=2**-4)),
    "FusedAdam": (lambda p: apex.FusedAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
    "FusedAdam with L2": (
        lambda p: apex.FusedAdam(p, **ADAM, adam_w_mode=False),
        lambda p: torch.optim.Adam(p, **ADAM),
    ),
    "FusedAdagrad": (
        lambda p: apex.FusedAdagrad(p, lr=0.1, eps=0.1, weight_decay=0.25),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.1, weight_decay=0.25),
    ),
}


def shard(net: nn.Module, zero3_size: int = 2, **settings: Any) -> nn.Module:
    units = IntegerNet.UNITS if isinstance(net, IntegerNet) else None
    return layerzero.shard_model(net, mesh=mesh_of(zero3_size), units=units, **settings)


def lacks_rows_at_the_end(model: nn.Module) -> bool:
    """Check that some rank has no rows of the last parameter, and some rank none of another one."""
    rows = [parameter.to_local().numel() for parameter in model.parameters()]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, rows[-1] == 0 and any(rows))
    return any(found)


# The emulation


def test_the_emulation_launches_nothing_after_the_last_chunk_of_the_last_tensor() -> None:
    for numbers, is_stepped in (((20, 3), True), ((20, 0), False), ((0, 20), True)):
        parameters = [nn.Parameter(torch.ones(number)) for number in numbers]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        apex.FusedSGD(parameters, lr=1.0).step()
        assert all(bool((parameter == 0).all()) == is_stepped for parameter in parameters if parameter.numel()), numbers
    with pytest.raises(AssertionError, match="table of tensors"):
        apex.launch(lambda *_: None, [[torch.ones(0)] * 110 + [torch.ones(1)]])


# Element-wise ones


def _updates_masters_of_bf16(rank: int, name: str) -> None:
    models, net = [shard(integer_net().bfloat16()) for _ in range(2)], integer_net()
    pair = [
        layerzero.shard_optimizer(factory(model.parameters()), model)
        for model, factory in zip(models, PAIRS[name], strict=True)
    ]
    for step in range(2):
        for model, optimizer in zip(models, pair, strict=True):
            integer_loss(model, [each.bfloat16() for each in integer_batch(step=step, rank=rank)]).backward()
            update(optimizer)
        ours, theirs = map(full_parameters, models)
        assert_close(ours, theirs, f"{name} in bf16")
        assert all(parameter.dtype == torch.float32 for parameter in ours.values()), "masters are fp32"
        if not step:
            backward_alone(net, step, world_size=dist.get_world_size())
            PAIRS[name][1](net.parameters()).step()
            assert_close(ours, dict(net.named_parameters()), f"{name} in one process")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("elementwise", [None, True])
@on_ranks()
def test_element_wise_classes_of_apex_follow_torch_in_one_process(
    rank: int, elementwise: bool | None, world_size: int
) -> None:
    for name, (ours, theirs) in PAIRS.items():
        for make in (integer_net, lambda: SideBySide(20)):
            for zero3_size in (1, 2):
                net, model = make(), shard(make(), zero3_size)
                assert lacks_rows_at_the_end(model)
                alone = theirs(net.parameters())
                optimizer = layerzero.shard_optimizer(ours(model.parameters()), model, elementwise=elementwise)
                in_lockstep(rank, (model, optimizer), (net, alone), range(3))
                if "SGD" in name:
                    assert_same_bits(model, net, name)
                else:
                    assert_close(full_parameters(model), dict(net.named_parameters()), name)
                assert "owner_gather" not in layerzero.traffic(model).calls, "rows are updated where they are"
    for name in ("FusedSGD", "FusedAdam"):
        _updates_masters_of_bf16(rank, name)


@on_ranks()
def test_the_users_word_that_they_need_whole_parameters_works_too(rank: int) -> None:
    for name in ("FusedSGD", "FusedAdam"):
        ours, theirs = PAIRS[name]
        net, model = integer_net(), shard(integer_net())
        optimizer = layerzero.shard_optimizer(ours(_by_ndim(model)), model, elementwise=False)
        in_lockstep(rank, (model, optimizer), (net, theirs(net.parameters())), range(3))
        assert_close(full_parameters(model), dict(net.named_parameters()), name)


def _by_ndim(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.ndim == 2]}, {"params": [p for p in parameters if p.ndim < 2]}]


class Late(nn.Module):
    """An IntegerNet that skips its first parameters in some forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = integer_net(1), integer_net(2)
        self.uses_late = True

    def forward(self, x: Tensor) -> Tensor:
        return self.early(x) + self.late(x) if self.uses_late else self.early(x)


# Steps that use the parameters at the end of a launch.
PATTERNS = ((False, True, True), (False, False, True), (True, False, True))
LATE: dict[str, tuple[Factory, Factory]] = {
    "momentum": PAIRS["FusedSGD"],
    "nesterov": (
        lambda p: apex.FusedSGD(p, **MOMENTUM, nesterov=True),
        lambda p: torch.optim.SGD(p, **MOMENTUM, nesterov=True),
    ),
    "dampening": (
        lambda p: apex.FusedSGD(p, **MOMENTUM, dampening=0.5, weight_decay=0.5),
        lambda p: torch.optim.SGD(p, **MOMENTUM, dampening=0.5, weight_decay=0.5),
    ),
    # Apex counts steps per group, torch per parameter.
    "Adam": (lambda p: apex.FusedAdam(p, **ADAM), lambda p: apex.FusedAdam(p, **ADAM)),
}


@on_ranks()
def test_a_first_gradient_that_comes_late_leaves_other_momenta_alone(rank: int) -> None:
    for name, (ours, theirs) in LATE.items():
        for pattern in PATTERNS:
            net, model = Late(), shard(Late())
            alone, optimizer = theirs(net.parameters()), ours(model.parameters())
            optimizer = layerzero.shard_optimizer(optimizer, model)
            for step, uses_late in enumerate(pattern):
                net.uses_late = model.uses_late = uses_late
                in_lockstep(rank, (model, optimizer), (net, alone), [step])
                assert_close(full_parameters(model), dict(net.named_parameters()), f"{name} {pattern} {step}")
            if name in ("momentum", "nesterov"):
                assert_same_bits(model, net, name)


def test_weight_decay_after_momentum_is_no_part_of_a_late_momentum() -> None:
    results = []
    for steps in ((["late"], ["late"]), (["early"], ["early", "late"], ["late"])):
        parameters = {name: nn.Parameter(torch.arange(1.0, 4.0)) for name in ("late", "early")}
        settings = {**MOMENTUM, "dampening": 0.5, "weight_decay": 0.5, "wd_after_momentum": True}
        optimizer = apex.FusedSGD(parameters.values(), **settings)
        for used in steps:
            for name, parameter in parameters.items():
                parameter.grad = torch.ones_like(parameter) if name in used else None
            with_preparation(optimizer, optimizer.step)()
        results.append(parameters["late"].detach())
    torch.testing.assert_close(*results)


@on_ranks()
def test_groups_that_are_added_to_fused_adam_are_stepped(rank: int) -> None:
    for adds_before in (False, True):
        net, model = integer_net(), shard(integer_net())
        first, *others = model.parameters()
        fused = apex.FusedAdam([first], **ADAM)
        if adds_before:
            fused.add_param_group({"params": others, "lr": 0.05})
        optimizer = layerzero.shard_optimizer(fused, model)
        if not adds_before:
            optimizer.add_param_group({"params": others, "lr": 0.05})
        first, *others = net.parameters()
        alone = torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.05}], **ADAM)
        in_lockstep(rank, (model, optimizer), (net, alone), range(3))
        assert_close(full_parameters(model), dict(net.named_parameters()), f"{adds_before=}")


class Own(apex.FusedAdam):
    """A user's subclass of an Apex optimizer."""


Own.__module__ = __name__


def test_a_derived_class_is_tried_out_like_any_other() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    optimizer = Own(parameters, **ADAM)
    assert kinds_that_need_full_params(optimizer, CPU) == set()
    assert optimizer.param_groups_master == [{"params": [None, None]}] and not optimizer.state
    for kind in (apex.FusedAdam, apex.FusedAdagrad):
        assert find_row_difference(kind(parameters), CPU) is None, "names say what a trial would find"
    assert find_row_difference(apex.FusedLAMB(parameters, **NO_LIMIT), CPU) is not None
    with pytest.raises(ValueError, match="capturable=True"):
        kinds_that_need_full_params(Own(parameters, capturable=True), CPU)


def test_apexs_own_classes_are_known_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (apex.FusedAdam, apex.FusedSGD, apex.FusedAdagrad):
        optimizer = kind([nn.Parameter(torch.ones(3, 2))], lr=1.0)
        monkeypatch.setattr(kind, "step", lambda self: pytest.fail("its kernels were launched"))
        assert kinds_that_need_full_params(optimizer, CPU) == set()


# An optimizer that needs full parameters


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
@on_ranks()
def test_fused_lamb_updates_whole_parameters(rank: int, zero3_size: int) -> None:
    for own in ({}, {"use_nvlamb": True, "weight_decay": 0.0}, {"adam_w_mode": False, "grad_averaging": False}):
        net, model = integer_net(), shard(integer_net(), zero3_size)
        settings = {"lr": 0.1, **own, **NO_LIMIT}
        optimizer = layerzero.shard_optimizer(apex.FusedLAMB(_by_ndim(model), **settings), model)
        in_lockstep(rank, (model, optimizer), (net, apex.FusedLAMB(_by_ndim(net), **settings)), range(3))
        assert_close(full_parameters(model), dict(net.named_parameters()), f"{settings}")


def test_a_stack_of_matrices_is_put_together_for_apex() -> None:
    # Not so for other settings: without weight decay, LAMB treats each element separately. A stack may be empty.
    lamb = apex.FusedLAMB([nn.Parameter(torch.ones(2, 2, 2))], weight_decay=0.0, **NO_LIMIT)
    assert not steps_matrices_separately(lamb, CPU, 3)


# Refusals


class FusedFuture(apex.FusedAdagrad):
    """A class that a later Apex might have."""


FusedFuture.__module__ = "apex.optimizers.future"

REFUSED: dict[str, tuple[Factory, str]] = {
    "global norm": (
        apex.FusedLAMB,
        r"FusedLAMB\(max_grad_norm=1.0\).*norm of all gradients.*layerzero.clip_grad_norm_",
    ),
    "one list of norms": (apex.FusedNovoGrad, "FusedNovoGrad of NVIDIA Apex.*norms of all gradients.*Use FusedAdam"),
    "copies": (apex.FusedMixedPrecisionLamb, "FusedMixedPrecisionLamb of NVIDIA Apex.*copies.*Use FusedAdam"),
    "unknown": (FusedFuture, "FusedFuture of NVIDIA Apex.*has no rules for this class.*Use FusedAdam"),
    "contrib": (apex.DistributedFusedAdam, "DistributedFusedAdam of apex.contrib.*shards or copies.*Use FusedAdam"),
    "master weights": (
        lambda p: apex.FusedAdam(p, capturable=True, master_weights=True),
        r"FusedAdam\(master_weights=True\).*fp32 copies.*mp_policy",
    ),
    "capturable": (lambda p: apex.FusedAdam(p, capturable=True), r"FusedAdam\(capturable=True\).*CUDA graphs.*Leave"),
}


@pytest.mark.parametrize("elementwise", [None, True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_by_name_whatever_the_user_says(case: str, elementwise: bool | None) -> None:
    make, text = REFUSED[case]
    with pytest.raises(ValueError, match=text) as raised:
        kinds_that_need_full_params(make([nn.Parameter(torch.ones(3, 2))]), CPU, elementwise)
    assert "elementwise" not in str(raised.value), "no advice that would not help"


def test_what_else_would_train_something_else_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2))]
    with pytest.raises(ValueError, match=r"FusedLAMB is not element-wise.*norms of full parameters.*Leave elementwise"):
        kinds_that_need_full_params(apex.FusedLAMB(parameters, **NO_LIMIT), CPU, elementwise=True)
    initialized = apex.FusedSGD(parameters, lr=1.0)
    initialized._amp_stash = object()
    with pytest.raises(ValueError, match=r"FusedSGD was passed to apex\.amp.*mp_policy"):
        kinds_that_need_full_params(initialized, CPU)
    lamb = apex.FusedLAMB(parameters, **NO_LIMIT)
    assert kinds_that_need_full_params(lamb, CPU) == {group_kind(lamb.param_groups[0])}


@on_ranks(world_size=2)
def test_the_host_and_dtypes_that_apex_does_not_update_are_refused_when_an_optimizer_is_wrapped(rank: int) -> None:
    with pytest.warns(UserWarning, match="optimizer=True"):
        model = shard(integer_net(), offload=Offload(optimizer=True))
    for kind in (apex.FusedAdam, apex.FusedLAMB):
        settings = NO_LIMIT if kind is apex.FusedLAMB else {}
        with pytest.raises(NotImplementedError, match=rf"Apex's {kind.__name__}.*Offload.optimizer=True.*need CUDA"):
            layerzero.shard_optimizer(kind(model.parameters(), **settings), model)
    layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)

    net = integer_net()
    net.extra = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    model = shard(net, ignored_params={net.extra})
    text = "Apex's FusedSGD does not update a parameter of torch.bfloat16.*only float32 and float16.*mp_policy"
    with pytest.raises(ValueError, match=text):
        layerzero.shard_optimizer(apex.FusedSGD(model.parameters(), lr=1.0), model)
    layerzero.shard_optimizer(apex.FusedAdam(model.parameters(), lr=1.0), model)
    sharded = [parameter for parameter in model.parameters() if parameter is not net.extra]
    optimizer = layerzero.shard_optimizer(apex.FusedSGD(sharded, lr=1.0), model)
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [net.extra]})
    net.extra.requires_grad_(False)
    optimizer.add_param_group({"params": [net.extra]})
    net.extra.requires_grad_(True)
    net.extra.grad = torch.ones_like(net.extra)
    with pytest.raises(ValueError, match=text):
        optimizer.step()


# Optimizers of other packages


class Fussy(Optimizer):
    """SGD with momentum that rejects empty tensors, counts the steps of each parameter, and has evaluation weights."""

    def __init__(self, params: Iterable[Any], lr: float = 2**-4) -> None:
        super().__init__(params, {"lr": lr})

    def used(self) -> Iterable[Tensor]:
        for group in self.param_groups:
            for parameter in group["params"]:
                values = [value for value in self.state.get(parameter, {}).values() if isinstance(value, Tensor)]
                assert all(tensor.numel() for tensor in (parameter, *values)), "an empty tensor"
                assert parameter.grad is None or parameter.grad.shape == parameter.shape
                yield parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.used():
            if parameter.grad is not None:
                values = self.state[parameter]
                values["step"] = values.get("step", 0) + 1
                values.setdefault("momentum_buffer", torch.zeros_like(parameter)).mul_(0.5).add_(parameter.grad)
                parameter.sub_(values["momentum_buffer"], alpha=self.param_groups[0]["lr"])

    @torch.no_grad()
    def negate(self) -> None:
        for parameter in self.used():
            parameter.neg_()


def _saves_and_loads(rank: int, path: Path, saves: bool, is_fussy: bool) -> None:
    net, model = Late(), shard(Late())
    assert lacks_rows_at_the_end(model)
    alone = torch.optim.SGD(net.parameters(), **MOMENTUM)
    ours = Fussy(model.parameters()) if is_fussy else apex.FusedSGD(model.parameters(), **MOMENTUM)
    optimizer = layerzero.shard_optimizer(ours, model)
    for step, uses_late in enumerate((False, True, True)):
        net.uses_late = model.uses_late = uses_late
        backward_alone(net, step)
        update(alone)
        if saves:
            backward(model, rank, step)
            update(optimizer)
    if not saves:
        checkpoint.load(path, model, optimizer)
    assert_same_bits(model, net, "trained" if saves else "loaded")
    for name, values in optimizer.state_dict_by_name()["state"].items():
        steps = None if not is_fussy else 2 if name.startswith("late") else 3
        assert values.get("step") == steps, "also where there are no rows"
        momentum = alone.state[net.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(values["momentum_buffer"].full_tensor(), momentum), name
    for master, values in optimizer.inner.state.items():
        assert values["momentum_buffer"].shape == master.shape
    if saves:
        checkpoint.save(path, model, optimizer)
    if is_fussy:
        optimizer.negate()
        with torch.no_grad():
            torch._foreach_neg_(list(net.parameters()))
        assert_same_bits(model, net, "a method of the optimizer inside")
    backward(model, rank, 3)
    backward_alone(net, 3, world_size=dist.get_world_size())
    optimizer.step()
    alone.step()
    assert_same_bits(model, net, "after it")


def _saves_and_loads_adam(rank: int, path: Path, saves: bool) -> None:
    """Save, or load and step. FusedAdam counts steps in its group, so the bias correction shows a lost count."""
    ours, theirs = PAIRS["FusedAdam"]
    net, model = integer_net(), shard(integer_net())
    alone, optimizer = theirs(net.parameters()), layerzero.shard_optimizer(ours(model.parameters()), model)
    if saves:
        for step in range(2):
            backward(model, rank, step)
            update(optimizer)
        checkpoint.save(path, model, optimizer)
        return
    for step in range(2):
        backward_alone(net, step, world_size=4)
        update(alone)
    checkpoint.load(path, model, optimizer)
    assert optimizer.param_groups[0]["step"] == 2
    backward(model, rank, 2)
    backward_alone(net, 2, world_size=dist.get_world_size())
    optimizer.step()
    alone.step()
    assert_close(full_parameters(model), dict(net.named_parameters()), "FusedAdam")


def _save_and_load_all(rank: int, folder: Path, saves: bool) -> None:
    for is_fussy in (True, False):
        _saves_and_loads(rank, folder / f"{is_fussy=}", saves, is_fussy)
    _saves_and_loads_adam(rank, folder / "adam", saves)


def test_no_optimizer_but_torchs_own_sees_an_empty_tensor_and_states_load_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(_save_and_load_all, tmp_path, True)
    run_ranks(_save_and_load_all, tmp_path, False, world_size=2)


# The choice of layerzero.optimizers


def on_cuda(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter that reports a CUDA device, on any machine."""
    with FakeTensorMode():
        return nn.Parameter(torch.empty(2, 3, device="cuda", dtype=dtype))


def test_apex_is_taken_where_it_can_serve_all_parameters(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    apex.install(monkeypatch)
    caplog.set_level(logging.INFO, logger="layerzero")
    adamw, sgd = optimizers.adamw([on_cuda(torch.bfloat16)], weight_decay=0.5), optimizers.sgd([on_cuda()], lr=0.5)
    assert [type(each) for each in (adamw, sgd)] == [apex.FusedAdam, apex.FusedSGD]
    assert [optimizers.implementation(each) for each in (adamw, sgd)] == ["apex", "apex"]
    assert "AdamW on cuda: NVIDIA Apex's FusedAdam" in caplog.text
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.5, "bias_correction": True}
    assert adamw.defaults.items() >= settings.items() and adamw.adam_w_mode
    settings = {"lr": 0.5, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}
    assert sgd.defaults.items() >= settings.items()
    for build, reason in (
        (lambda: optimizers.adamw([nn.Parameter(torch.ones(2)), on_cuda()]), "all parameters on CUDA"),
        (
            lambda: optimizers.adamw([on_cuda(), on_cuda(torch.float64)]),
            "FusedAdam supports only float32, bfloat16, float16",
        ),
        (lambda: optimizers.sgd([on_cuda(), on_cuda(torch.bfloat16)]), "FusedSGD supports only float32, float16"),
        (lambda: optimizers.adamw([on_cuda()], amsgrad=True), "does not support amsgrad"),
        (lambda: optimizers.adamw([{"params": [on_cuda()], "maximize": True}]), "does not support maximize"),
        (lambda: optimizers.sgd([on_cuda()], momentum=0.5, dampening=0.5), "does not support dampening"),
    ):
        caplog.clear()
        assert optimizers.implementation(build()) == "fused", reason
        assert reason in caplog.text


@pytest.mark.parametrize("extension", [False, True], ids=["no extension", "extension"])
def test_another_project_called_apex_is_ignored(
    extension: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="layerzero")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("imported = True\n")
    if extension:
        (tmp_path / "amp_C.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    apex.uninstall(monkeypatch)
    for build in (optimizers.adamw, optimizers.sgd):
        assert optimizers.implementation(build([on_cuda()])) == "fused"
    missing = "apex.optimizers" if extension else "amp_C"
    assert (
        f"on cuda: torch's fused kernels, because NVIDIA Apex was not found (No module named '{missing}')"
        in caplog.text
    )
    assert ("apex" in sys.modules) == extension, "without NVIDIA's extension nothing of that name is imported"
