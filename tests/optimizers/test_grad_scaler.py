"""torch's GradScaler decides the same on all ranks as in one process."""

from __future__ import annotations

import contextlib
import itertools
import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.optim import Optimizer

import layerzero
from layerzero.dtensor.local_shard import plain
from tests.support.models import (
    IntegerNet,
    assert_close,
    different,
    exact_model,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_net,
    update,
)
from tests.support.ranks import on_ranks, run_ranks

WORLD = 4
MICRO_BATCHES = 2
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    "fp16 on the wire": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}
# Added to the gradient of `spike` by rank 1, by step: two overflows in a row, recovery, a NaN, minus infinity.
SPIKES = (0.0, math.inf, math.inf, 0.0, 0.0, math.nan, 0.0, -math.inf, 0.0)


class SpikyNet(IntegerNet):
    """An IntegerNet with a parameter of one row, owned by one rank, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.spike = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.ones(7, 2))

    def forward(self, x: Tensor, spike: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), (self.spike * spike).sum()


def spiky_net() -> SpikyNet:
    net = SpikyNet()
    net.load_state_dict(integer_net().state_dict(), strict=False)
    return net


def loss_of(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    output, spike = outputs
    return 8 * (output * targets).sum(1).mean() + spike


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)


def spike_of(spikes: tuple[float, ...], step: int, micro_batch: int, rank: int) -> Tensor:
    """Return the spike, [1]. The overflow is in the first micro-batch, so that it has to survive no_sync."""
    return torch.tensor([spikes[step] if rank == 1 and micro_batch == 0 else 1.0])


class Reference(NamedTuple):
    """Step of one process with torch's scaler."""

    norm: float
    scaler: dict[str, float]
    parameters: dict[str, Tensor]
    momentum: dict[str, Tensor]


@cache
def reference(dtype: torch.dtype) -> list[Reference]:
    """Return the steps of one process that computes in `dtype`, each rank's samples separately for equal rounding."""
    net, scaler, record = spiky_net(), make_scaler(), []
    optimizer = exact_sgd(net.parameters())
    for step in range(len(SPIKES)):
        for micro_batch in range(MICRO_BATCHES):
            for rank in range(WORLD):
                inputs, targets = integer_batch(step=step, micro_batch=micro_batch, rank=rank)
                weights = {name: p.to(dtype) for name, p in net.named_parameters() if name != "unused"}
                spike = spike_of(SPIKES, step, micro_batch, rank)
                outputs = functional_call(net, weights, (inputs.to(dtype), spike.to(dtype)))
                scaler.scale(loss_of(outputs, targets) / MICRO_BATCHES).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= WORLD
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
        momentum = {
            name: optimizer.state[p]["momentum_buffer"].clone()
            for name, p in net.named_parameters()
            if p in optimizer.state
        }
        record.append(Reference(norm.item(), scaler.state_dict(), parameters, momentum))
    return record


def backward(
    model: nn.Module, scaler: torch.amp.GradScaler, rank: int, step: int, *, spikes: tuple[float, ...] = SPIKES
) -> None:
    """Run the micro-batches of one step, the first ones inside no_sync."""
    for micro_batch in range(MICRO_BATCHES):
        inputs, targets = integer_batch(step=step, micro_batch=micro_batch, rank=rank)
        with layerzero.no_sync(model) if micro_batch + 1 < MICRO_BATCHES else contextlib.nullcontext():
            outputs = model(inputs, spike_of(spikes, step, micro_batch, rank))
            scaler.scale(loss_of(outputs, targets) / MICRO_BATCHES).backward()


def clip_by_torch(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).full_tensor()


CLIPS = {"layerzero": layerzero.clip_grad_norm_, "torch": clip_by_torch}
# Precision, accumulation, and the function that clips after an explicit unscale_.
CASES = (
    ("fp32", "sharded", None),
    ("fp32", "full", "torch"),
    ("fp16", "sharded", "layerzero"),
    ("fp16", "full", None),
    ("fp16 on the wire", "sharded", "torch"),
    ("fp16 on the wire", "full", "layerzero"),
)


def shard(mesh: DeviceMesh, net: nn.Module | None = None, **settings: object) -> tuple[nn.Module, Optimizer]:
    return exact_model(net or spiky_net(), mesh=mesh, **settings)


def assert_rows(tensors: dict[str, DTensor], expected: dict[str, Tensor], case: str, *, exact: bool = True) -> None:
    """Compare this rank's rows with those of full tensors, without a collective."""
    assert tensors.keys() == expected.keys(), case
    for name, tensor in tensors.items():
        rows = tensor.to_local().spec.rows
        theirs = expected[name][rows.start : rows.stop]
        if exact:
            assert torch.equal(plain(tensor), theirs), f"{case}, {name}: {plain(tensor)} instead of {theirs}"
        else:
            torch.testing.assert_close(plain(tensor), theirs, rtol=1e-2, atol=1e-2)


def momentum_of(optimizer: Optimizer) -> dict[str, DTensor]:
    return {name: values["momentum_buffer"] for name, values in optimizer.state_dict_by_name()["state"].items()}


def follow(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int,
    references: list[Reference],
    clip: str | None,
    case: str,
    exact: bool,
) -> list[object]:
    """Train along the steps of one process; return the values that all ranks see."""
    scaler, seen = make_scaler(), []
    for step, theirs in enumerate(references):
        where = f"{case}, step {step}"
        version = [plain(p).clone() for p in model.parameters()]
        backward(model, scaler, rank, step)
        assert model.unused.grad is None, where
        if clip is not None:
            scaler.unscale_(optimizer)
            norm = CLIPS[clip](model, 1e6)  # a norm so large that finite gradients stay unchanged
            tolerance = 1e-6 if exact else 1e-3
            torch.testing.assert_close(norm.item(), theirs.norm, equal_nan=True, rtol=tolerance, atol=0)
            seen.append(str(norm.item()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.state_dict())
        assert scaler.state_dict() == theirs.scaler, where
        assert_rows(dict(model.named_parameters()), theirs.parameters, where, exact=exact)
        assert_rows(momentum_of(optimizer), theirs.momentum, where, exact=exact)
        if not math.isfinite(SPIKES[step]):
            assert all(map(torch.equal, version, map(plain, model.parameters()))), f"{where} was not skipped"
    return seen


def _follow(rank: int, zero3_size: int, references: dict[torch.dtype, list[Reference]]) -> object:
    mesh, seen = layerzero.init_mesh(zero3_size), []
    for precision, accumulation, clip in CASES:
        policy = POLICIES[precision]
        model, optimizer = shard(mesh, mp_policy=policy, accumulation=accumulation)
        exact = "wire" not in precision  # a sum of micro-batches or ranks sent as fp16 may be rounded
        case = f"S={zero3_size} {precision} {accumulation} clipped by {clip}"
        theirs = references[policy.param_dtype or torch.float32]
        seen += follow(model, optimizer, rank, theirs, clip, case, exact)
    return seen, model.spike.to_local().numel()


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "zero3_size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(zero3_size: int) -> None:
    references = {dtype: reference(dtype) for dtype in (torch.float32, torch.float16)}
    scales = [step.scaler["scale"] for step in references[torch.float16]]
    assert scales == [16.0, 8.0, 4.0, 4.0, 8.0, 4.0, 4.0, 2.0, 2.0], "the reference itself skips, backs off and grows"
    seen, rows = zip(*run_ranks(_follow, zero3_size, references), strict=True)
    assert all(other == seen[0] for other in seen)
    assert sorted(rows) == [0, 0, 0, 1], "only one rank owns what overflows"


@on_ranks()
def test_clipping_sees_unscaled_gradients(rank: int) -> None:
    for clip in CLIPS.values():
        model, optimizer = shard(layerzero.init_mesh(2))
        net, scaler = spiky_net(), make_scaler()
        theirs = exact_sgd(net.parameters())
        for step in range(2):
            backward(model, scaler, rank, step, spikes=(1.0, 1.0))
            scaler.unscale_(optimizer)
            norm = clip(model, 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            for micro_batch, peer in itertools.product(range(MICRO_BATCHES), range(WORLD)):
                inputs, targets = integer_batch(step=step, micro_batch=micro_batch, rank=peer)
                (loss_of(net(inputs, torch.ones(1)), targets) / MICRO_BATCHES / WORLD).backward()
            their_norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            update(theirs)
            torch.testing.assert_close(norm, their_norm)
        assert_close(full_parameters(model), dict(net.named_parameters()), str(clip))


def _norms_of_nonfinite(rank: int) -> list[str]:
    model, optimizer = shard(layerzero.init_mesh(2))
    norms = []
    for value, norm_type in itertools.product((math.nan, -math.nan, -math.inf), (1.0, 2.0, math.inf)):
        for raises in (True, False):
            inputs, targets = integer_batch(rank=rank)
            loss_of(model(inputs, torch.tensor([value if rank == 1 else 1.0])), targets).backward()
            if raises:
                with pytest.raises(RuntimeError, match="norm"):
                    layerzero.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
            else:
                norms.append(str(layerzero.clip_grad_norm_(model, 1.0, norm_type).item()))
            optimizer.zero_grad()
    for refused in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
            layerzero.clip_grad_norm_(model, refused)
    return norms


def test_a_gradient_that_is_not_finite_on_one_rank_gives_that_norm_on_all() -> None:
    assert run_ranks(_norms_of_nonfinite) == [["nan"] * 6 + ["inf"] * 3] * WORLD


class PartlyUsed(SpikyNet):
    """Net in which `spike` is used only if it is given."""

    def forward(self, x: Tensor, spike: Tensor | None) -> tuple[Tensor, Tensor]:
        output = IntegerNet.forward(self, x)
        return (output + 0 if spike is None else output + self.spike * spike), torch.zeros(())


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
@on_ranks()
def test_unscaling_what_no_sync_has_left_unreduced_is_refused(rank: int, zero3_size: int) -> None:
    mesh = layerzero.init_mesh(zero3_size)
    for accumulation in ("sharded", "full", "local"):
        net = PartlyUsed()
        net.load_state_dict(spiky_net().state_dict())
        model, optimizer = shard(mesh, net, accumulation=accumulation)
        scaler = make_scaler()
        before = full_parameters(model)
        inputs, targets = integer_batch(rank=rank)
        with layerzero.no_sync(model):
            # The owner of `spike` is not the rank that uses it.
            scaler.scale(loss_of(model(inputs, torch.ones(1) if rank == 1 else None), targets)).backward()
        for use in (scaler.unscale_, scaler.step):
            with pytest.raises(RuntimeError, match="no_sync"):
                use(optimizer)
        with pytest.raises(RuntimeError, match="no_sync"):
            clip_by_torch(model, 1.0)
        assert not different(full_parameters(model), before), "nothing was stepped"
        # Nothing is lost: the next backward outside no_sync reduces it.
        scaler.scale(0 * loss_of(model(inputs, None), targets)).backward()
        scaler.unscale_(optimizer)
        scaled_once = full_gradients(model)["spike"].item()
        assert scaled_once == 8 * integer_batch(rank=1)[1].sum(1).mean() / WORLD
        scaler.step(optimizer)
        scaler.update()
        assert model.spike.detach().full_tensor().item() == -(2**-4) * scaled_once
