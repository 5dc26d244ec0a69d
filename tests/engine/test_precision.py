"""Low-precision compute with fp32 masters, compared with a reference written by hand."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import PrecisionPolicy
from layerzero.engine.reduction_spec import ReductionSpec
from tests.support import late_backend
from tests.support.graphs import batch, blocks, loss_of, shard
from tests.support.models import different, full_gradients, full_parameters, integer_batch, integer_loss, integer_net
from tests.support.ranks import BOTH, BOTH_SHARED_SLOW, mesh_of, on_ranks, run_ranks
from tests.support.wrapped_gloo import mesh_on

WORLD = 4
SIZES = (1, 2, 4)
ACCUMULATIONS = ("sharded", "full", "local")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

LR, MOMENTUM = 2**-4, 0.5


class Smooth(nn.Module):
    """A small net with a norm and a nonlinearity; every result is rounded."""

    UNITS = ("up", "down")

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.norm = nn.LayerNorm(5)
            self.up = nn.Linear(5, 9)
            self.down = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Scale(nn.Module):
    """Outputs its weight, which shows the compute weight; the caller chooses its gradient."""

    def __init__(self, *values: float, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, x: Tensor | float = 1) -> Tensor:
        return self.weight * x


POLICY = [each.name for each in dataclasses.fields(PrecisionPolicy)]


def _sharded(model: nn.Module, size: int, **settings: Any) -> nn.Module:
    policy = {key: settings.pop(key) for key in POLICY if key in settings}
    units = settings.pop("units", getattr(model, "UNITS", None))
    return layerzero.shard_model(
        model, mesh=mesh_of(size), units=units, mp_policy=PrecisionPolicy(**policy), **settings
    )


def _sgd(model: nn.Module) -> layerzero.ShardedOptimizer:
    return layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), model)


# --- the reference ---


def _step_by_hand(model: nn.Module, micro_batches: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return fp32 mean gradients, and fp32 masters after a step; weights and activations are in bf16."""
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
    for rank, micro_batch in itertools.product(range(WORLD), range(micro_batches)):
        weights = {name: master.to(BF16).requires_grad_() for name, master in masters.items()}

        def compute(x: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
            return torch.func.functional_call(model, weights, (x.to(BF16),))

        integer_loss(compute, integer_batch(rank=rank, micro_batch=micro_batch)).backward()
        for name, weight in weights.items():
            gradients[name] += weight.grad.float() / WORLD
    return gradients, {name: master - LR * gradients[name] for name, master in masters.items()}


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_integers_train_exactly_as_by_hand_in_every_reduce_dtype(rank: int) -> None:
    gradients, masters = _step_by_hand(integer_net(), 2)
    for case in itertools.product(SIZES, ACCUMULATIONS, (FP32, BF16, None)):
        size, accumulation, reduce_dtype = case
        model = _sharded(integer_net(), size, param_dtype=BF16, reduce_dtype=reduce_dtype, accumulation=accumulation)
        optimizer = _sgd(model)
        for micro_batch in range(2):
            with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                integer_loss(model, integer_batch(rank=rank, micro_batch=micro_batch)).backward()
        assert not different(full_gradients(model), gradients), case
        optimizer.step()
        assert not different(full_parameters(model), masters), case


# --- updates below the resolution of bf16 ---


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_updates_below_bf16_resolution_add_up_in_the_master_and_reach_the_weight(rank: int) -> None:
    for size, dtype in ((1, FP32), (2, BF16)):
        model = _sharded(Scale(1, 1, 1, 1, 1, dtype=dtype), size, param_dtype=BF16)
        optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=2.0**-16), model)
        for update in range(256):  # each 2^-16; bf16 has steps of 2^-8 below 1
            output = model()
            assert output.dtype == BF16 and (output == 1).all() == (update <= 128), (size, update)
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if update == 0:
                assert (model.weight.full_tensor() == 1 - 2**-16).all(), size
        assert (model.weight.full_tensor() == 1 - 2**-8).all(), size
        assert (model() == 1 - 2**-8).all(), size


# --- the dtypes of the two reductions ---

# Rank 0 has a gradient of 256, the others have 1. The mean, 64.75, takes 9 bits, and so do 256 + 1 and its fractions.
# If bf16 is sent between more than one rank, a backend may add in bf16 or in fp32. The result of hop 1 is rounded to
# bf16 before hop 2 sends it.
EXACT, ROUNDED, EITHER = {True}, {False}, {True, False}
COLLECTIVES = [
    # zero3_size, reduce_dtype, replica_reduce_dtype
    (1, None, None, EITHER),
    (1, BF16, None, EITHER),
    (1, FP32, None, EXACT),
    (1, FP32, BF16, EITHER),
    (1, BF16, FP32, EXACT),  # hop 1 is between a rank and itself
    (2, None, None, ROUNDED),
    (2, FP32, None, EXACT),
    (2, FP32, BF16, ROUNDED),
    (2, BF16, FP32, EITHER),
    (4, BF16, None, EITHER),
    (4, FP32, None, EXACT),
    (4, FP32, BF16, EXACT),  # hop 2 is between a rank and itself
    (4, BF16, FP32, EITHER),
]


@pytest.mark.slow
@on_ranks(world_size=WORLD, shared_memory="off")
def test_reductions_use_the_dtypes_asked_for(rank: int) -> None:
    for accumulation in ACCUMULATIONS:
        for size, reduce_dtype, replica_reduce_dtype, allowed in COLLECTIVES:
            case = (accumulation, size, reduce_dtype, replica_reduce_dtype)
            model = _sharded(
                Scale(*[1.0] * 16),
                size,
                param_dtype=BF16,
                reduce_dtype=reduce_dtype,
                replica_reduce_dtype=replica_reduce_dtype,
                accumulation=accumulation,
            )
            layerzero.traffic(model, reset=True)
            (model() * (256 if rank == 0 else 1)).sum().backward()
            assert model.weight.grad.dtype == FP32, case
            gradient = model.weight.grad.full_tensor()
            assert (gradient == 64.75).all().item() in allowed, (case, gradient)
            assert ((gradient - 64.75).abs() <= 0.75).all(), (case, gradient)

            sent = layerzero.traffic(model).bytes
            # Sums that layerzero itself adds in fp32 are sent in the compute dtype.
            hop1_bytes = (reduce_dtype or BF16 if accumulation == "full" else BF16).itemsize
            hop2_dtype = replica_reduce_dtype or reduce_dtype or BF16
            hop2_bytes = (BF16 if accumulation == "local" and size == 1 else hop2_dtype).itemsize
            assert sent.get("hop1", 0) == 16 * (size - 1) // size * hop1_bytes, (case, sent)
            assert sent.get("hop2", 0) == 16 // size * (WORLD // size - 1) // (WORLD // size) * hop2_bytes, (case, sent)


def _keep_tiny_gradients(rank: int, added_by_the_backend: bool) -> None:
    policy, tiny = MixedPrecisionPolicy(param_dtype=torch.float16), 2.0**-23  # twice the smallest number of fp16
    late_backend.register()
    for size in SIZES:
        mesh = mesh_on(late_backend.NAME, size) if added_by_the_backend else mesh_of(size)
        for accumulation in ACCUMULATIONS:
            model = layerzero.shard_model(Scale(*[1.0] * 8), mesh=mesh, mp_policy=policy, accumulation=accumulation)
            for gradient in (tiny, -(2.0**14)):  # their sum is too large for fp16
                (model() * gradient).sum().backward()
                assert (model.weight.grad.full_tensor() == gradient).all(), (size, accumulation, model.weight.grad)
                model.weight.grad = None
                with layerzero.no_sync(model):
                    (model() * 0).sum().backward()
                (model() * gradient).sum().backward()
                assert (model.weight.grad.full_tensor() == gradient).all(), (size, accumulation, model.weight.grad)
                model.weight.grad = None


@pytest.mark.default_sample(1)
@BOTH
def test_tiny_and_large_fp16_gradients_arrive(shared_memory: str | None) -> None:
    run_ranks(_keep_tiny_gradients, False, shared_memory=shared_memory)


def test_tiny_and_large_fp16_gradients_arrive_where_the_backend_adds_them_up() -> None:
    run_ranks(_keep_tiny_gradients, True)


@pytest.mark.slow
@BOTH_SHARED_SLOW
@on_ranks(world_size=WORLD)
def test_what_is_added_up_here_lands_as_it_was_computed_and_adds_up_to_the_same_bits(
    rank: int, shared_memory: str | None
) -> None:
    plan, policy = ReductionSpec.plan, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)

    def as_fp32(*args: Any, adds_hop1: bool, **kwargs: Any) -> ReductionSpec:
        return plan(*args, adds_hop1=False, **kwargs)

    for size, accumulation in ((2, "sharded"), (4, "sharded"), (2, "full")):
        weights, scratch = [], []
        for how in (plan, as_fp32):
            torch.manual_seed(0)
            with mock.patch.object(ReductionSpec, "plan", how):
                model = shard(blocks(4).float(), size=size, mp_policy=policy, accumulation=accumulation)
            optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
            for step in range(3):
                for micro_batch in range(2):
                    with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                        loss_of(model(batch(rank, step, micro_batch).float())).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(full_parameters(model))
            scratch.append(layerzero.memory(model).measured["reduce_buffer"])
        assert not different(*weights), (size, accumulation, "the bits of fp32 on the wire")
        if accumulation == "full" or layerzero.traffic(model).transport == "shared_memory":  # which counts pages
            assert scratch[0] == scratch[1], scratch
        else:
            assert scratch[0] < 0.75 * scratch[1], scratch


# --- inputs and outputs ---


class Probe(nn.Module):
    """Records the dtypes of its inputs, and passes the first one through a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, extra: dict[str, Any] | None = None, *, index: Tensor | None = None) -> Tensor:
        tensors = [x, *(extra or {}).get("more", []), *([] if index is None else [index])]
        self.seen = [tensor.dtype for tensor in tensors]
        return x * self.weight


class Probes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Probe()
        self.inner = Probe()

    def forward(self, x: Tensor) -> dict[str, Any]:
        index = torch.tensor([1])
        first = self.inner(x, {"more": [x.double(), torch.ones(2)]}, index=index)
        return {"parts": (self.outer(first), index), "text": "unchanged"}


@on_ranks(world_size=WORLD)
def test_inputs_are_cast_if_asked_and_outputs_to_the_output_dtype(rank: int) -> None:
    for size in SIZES:
        for cast_inputs in (True, False):
            for output_dtype in (None, FP32, FP64):
                case = (size, cast_inputs, output_dtype)
                model = _sharded(
                    Probes(),
                    size,
                    units=["inner"],
                    param_dtype=BF16,
                    output_dtype=output_dtype,
                    cast_forward_inputs=cast_inputs,
                )
                x = torch.ones(3, requires_grad=True)
                output = model(x)
                # Floating-point inputs of each unit are cast; integers never are.
                expected = [BF16] * 3 if cast_inputs else [FP32, FP64, FP32]
                assert model.inner.seen == [*expected, torch.int64], (case, model.inner.seen)
                computed = BF16 if cast_inputs else FP32
                assert model.outer.seen == [output_dtype or computed], (case, model.outer.seen)
                assert output["text"] == "unchanged" and output["parts"][1].dtype == torch.int64, case
                promoted = torch.promote_types(output_dtype or computed, BF16)
                assert output["parts"][0].dtype == output_dtype or promoted == output["parts"][0].dtype, case
                output["parts"][0].sum().backward()
                assert x.grad.dtype == FP32 and (x.grad == 1).all(), case


# --- masters of models in other dtypes ---


@on_ranks(world_size=WORLD)
def test_low_precision_model_gets_fp32_masters_and_computes_as_before(rank: int) -> None:
    for size in SIZES:
        for dtype in (BF16, torch.float16):
            original = Smooth().to(dtype)
            model = _sharded(copy.deepcopy(original), size)
            output = model(torch.ones(1, 5, dtype=dtype))
            assert output.dtype == dtype, (size, dtype)  # param_dtype None: computes in the model's dtype
            output.float().sum().backward()
            for name, p in model.named_parameters():
                assert p.dtype == p.grad.dtype == FP32, (size, dtype, name)
            state = layerzero.full_state_dict(model, rank0_only=False)
            assert not different(state, {name: value.float() for name, value in original.state_dict().items()}), size


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_frozen_parameter_keeps_its_bits_and_has_no_gradient_and_no_optimizer_bytes(rank: int) -> None:
    third = torch.tensor([1 / 3, 2 / 3, 1 + 2**-20, 5.0, 7.0], dtype=FP64)  # not representable in a smaller dtype
    for size in SIZES:
        for dtype in (BF16, FP32, FP64):
            for param_dtype in (None, BF16):
                case = (size, dtype, param_dtype)
                model = integer_net()
                model.first.requires_grad_(False)
                model.second.bias.requires_grad_(False)
                model.register_parameter("constant", nn.Parameter(third.to(dtype), requires_grad=False))
                frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
                model = _sharded(model, size, param_dtype=param_dtype)
                optimizer = _sgd(model)
                for step in range(2):
                    integer_loss(model, integer_batch(step=step, rank=rank)).backward()
                    optimizer.step()
                parameters = dict(model.named_parameters())
                for name, value in frozen.items():
                    p = parameters[name]
                    assert p.dtype == value.dtype and torch.equal(p.full_tensor(), value), (case, name)
                    assert p.grad is None and not p.requires_grad and not optimizer.state.get(p), (case, name)
                assert all(p.grad is not None for name, p in parameters.items() if name not in frozen), case
                rows = sum(p.to_local().numel() for name, p in parameters.items() if name not in frozen)
                assert layerzero.memory(model).measured["optimizer"] == 4 * rows, case
