"""`layerzero.full_precision`: evaluation with masters, gathered per unit, compared with one process in fp32."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import Codecs, PrecisionPolicy
from layerzero.engine.hooks import get_state
from tests.support.graphs import boom
from tests.support.models import full_parameters, update
from tests.support.ranks import BOTH, BOTH_SHARED_EXHAUSTIVE, every_nth_setting, on_ranks

pytestmark = pytest.mark.slow

WORLD = 4
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Net(nn.Module):
    """Root with its own parameters, layers with buffers, and a transposed weight."""

    def __init__(self, width: int = 24, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.embed.weight = nn.Parameter(torch.randn(5, width).mT)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 3)
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.shift


SETTINGS: tuple[dict[str, Any], ...] = (
    {"zero3_size": 2},
    {"zero3_size": 1},
    {"zero3_size": 4},
    {"zero3_size": 2, "prefetch": 0, "reshard_after_forward": False},
    {"zero3_size": 4, "reshard_after_forward": 2, "accumulation": "full"},
    {"zero3_size": 4, "codecs": Codecs(gather=layerzero.Float8Rows())},
)


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    units = {"units": {Layer, nn.Linear}, "mp_policy": PrecisionPolicy.of(LOW, buffer_dtype=torch.bfloat16)}
    return layerzero.shard_model(model, **units | settings)


def _alone(model: nn.Module, like: Net) -> Net:
    """Run one process in fp32 with a model's masters and buffers."""
    alone = copy.deepcopy(like)
    alone.load_state_dict(layerzero.full_state_dict(model, rank0_only=False))
    return alone.eval()


def _step(model: nn.Module, optimizer: Any, rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    model.train()
    loss = model(torch.randn(4, 5)).float().square().sum()
    loss.backward()
    update(optimizer)
    return loss.detach()


@every_nth_setting(4)
@BOTH_SHARED_EXHAUSTIVE
@on_ranks(world_size=WORLD, timeout=240)
def test_outputs_are_those_of_one_process_in_fp32_and_training_goes_on_unchanged(
    rank: int, shared_memory: str | None, stride: int
) -> None:
    for settings in SETTINGS[::stride]:
        torch.manual_seed(0)
        plain = Net()
        model, same = _shard(copy.deepcopy(plain), **settings), _shard(copy.deepcopy(plain), **settings)
        optimizers = [layerzero.shard_optimizer(torch.optim.AdamW(m.parameters(), lr=0.1), m) for m in (model, same)]
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        for step in range(3):
            losses = [_step(m, o, rank, step) for m, o in zip((model, same), optimizers, strict=True)]
            assert torch.equal(*losses), settings
            alone = _alone(model, plain)
            model.eval()
            with torch.no_grad():
                expected = alone(x)
                with layerzero.full_precision(model):
                    for _ in range(2):
                        output = model(x)
                        assert output.dtype == torch.float32 and torch.equal(output, expected), (settings, step)
                    assert torch.equal(model.layers[1](alone.embed(x)), alone.layers[1](alone.embed(x)))
                    buffer = model.layers[0].norm.running_mean
                    assert buffer.dtype == torch.float32
                assert model(x).dtype == torch.bfloat16 and not torch.equal(model(x).float(), expected)
                with torch.inference_mode(), layerzero.full_precision(model):
                    assert torch.equal(model(x), expected)
            assert model.layers[0].norm.running_mean.dtype == torch.bfloat16
        for ours, theirs in zip(full_parameters(model).values(), full_parameters(same).values(), strict=True):
            assert torch.equal(ours, theirs), settings
        for ours, theirs in zip(model.buffers(), same.buffers(), strict=True):
            assert torch.equal(ours, theirs), settings


@pytest.mark.sample(1)
@BOTH
@on_ranks(world_size=WORLD)
def test_units_are_gathered_one_by_one_and_counted(rank: int, shared_memory: str | None) -> None:
    width, layers = 64, 6
    for size in (1, 2, 4):
        for prefetch in (0, 1, 2):
            net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            units = [str(layer) for layer in range(layers)]
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            model = layerzero.shard_model(net, zero3_size=size, units=units, mp_policy=policy, prefetch=prefetch)
            unit, full = 4 * width * width, get_state(model).pools.full
            full.limit = 0  # cache nothing, so that most_bytes counts simultaneously gathered bytes
            with torch.no_grad(), layerzero.full_precision(model):
                for _ in range(2):  # the gather order is known
                    model(torch.zeros(1, width))
                layerzero.traffic(model, reset=True)
                full.most_bytes = 0
                model(torch.zeros(1, width))
                assert full.most_bytes == (1 + prefetch) * unit, (size, prefetch, full.most_bytes / unit)
                assert layerzero.memory(model).measured["full_buffer"] == 0
            traffic = layerzero.traffic(model)
            replicas = WORLD // size
            sent = {"replica": (replicas - 1) * unit // WORLD, "zero3": (size - 1) * unit // size}
            assert traffic.bytes["unshard"] == layers * sum(sent.values()), (size, prefetch)
            assert traffic.bytes.get("gather", 0) == 0 and traffic.calls.get("gather_order", 0) == 0
            assert {axis: traffic.bytes_by_axis.get(axis, 0) for axis in sent} == {
                k: layers * v for k, v in sent.items()
            }


@on_ranks(world_size=WORLD)
def test_a_backward_may_come_after_it(rank: int) -> None:
    """Run a full-precision forward between a training forward and its backward; a forward updates buffers."""
    torch.manual_seed(0)
    plain = Net()
    models = [_shard(copy.deepcopy(plain), zero3_size=2, reshard_after_forward=False) for _ in range(2)]
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    for number, model in enumerate(models):
        loss = model(x).float().sum()
        if number:
            model.eval()
            with torch.no_grad(), layerzero.full_precision(model):
                model(x)
            model.train()
        loss.backward()
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())
    alone = _alone(models[0], plain).train()
    with torch.no_grad(), layerzero.full_precision(models[0]):
        assert torch.equal(models[0](x), alone(x))
    for ours, theirs in zip(models[0].buffers(), alone.buffers(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


def _two_layers(zero3_size: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return _shard(layers, zero3_size=zero3_size, units={nn.Linear}, mp_policy=LOW)


@on_ranks(world_size=WORLD)
def test_what_it_cannot_do_is_refused_and_the_model_stays_usable(rank: int) -> None:
    model = _two_layers(zero3_size=2)
    x = torch.ones(1, 4)
    loss = model(x).sum()
    context = layerzero.full_precision(model)
    with context:
        with pytest.raises(RuntimeError, match=r"inside layerzero.full_precision.*torch.no_grad\(\)"):
            model(x)
        with pytest.raises(RuntimeError, match=r"backward.*inside layerzero.full_precision"):
            loss.backward()
        for other in (layerzero.full_precision, layerzero.unsharded):
            with (
                pytest.raises(RuntimeError, match=r"inside layerzero\.full_precision[.,].*Leave the context"),
                other(model),
            ):
                pass
        assert layerzero.full_state_dict(model, rank0_only=False).keys() == model.state_dict().keys()
        failing = model[1].register_forward_pre_hook(boom)
        with torch.no_grad(), pytest.raises(LookupError, match="boom"):
            model(x)
        failing.remove()
        with torch.no_grad():
            model(x)
    with (
        layerzero.unsharded(model),
        pytest.raises(RuntimeError, match=r"inside layerzero\.unsharded\. Leave"),
        layerzero.full_precision(model),
    ):
        pass
    model.zero_grad()
    loss = model(x).sum()

    def evaluate(_: Tensor) -> None:
        with layerzero.full_precision(model):
            pass

    loss.register_hook(evaluate)
    with pytest.raises(RuntimeError, match="full_precision was called during a backward"):
        loss.backward()
    with (
        layerzero.full_precision(model),
        pytest.raises(RuntimeError, match=r"gathered of 0.*inside layerzero.full_precision.*torch.no_grad\(\)"),
        layerzero.gathered(model[0]),
    ):
        pass
    with layerzero.full_precision(model), torch.no_grad(), layerzero.gathered(model[0]):
        assert model[0].weight.dtype == torch.float32
    model.zero_grad()
    model(x).sum().backward()

    def edit(module: nn.Module, args: Any) -> None:
        module.weight.add_(1)

    handle = model[0].register_forward_pre_hook(edit)
    with torch.no_grad(), layerzero.full_precision(model):
        with pytest.raises(RuntimeError, match="changed in place"):
            model(x)
        handle.remove()
        model(x)  # with regathered weights
    ema = layerzero.EMA(model)
    ema.update()
    with ema.swapped(), layerzero.full_precision(model), torch.no_grad():
        model(x)


@on_ranks(world_size=2, pg_timeout=10)
def test_a_rank_inside_gathered_refuses_it_on_all_ranks(rank: int) -> None:
    model = _two_layers(zero3_size=1)
    with torch.no_grad():
        model(torch.ones(1, 4))
    text = r"layerzero\.full_precision is not possible inside layerzero\.gathered"
    with ExitStack() as stack:
        if rank == 1:
            stack.enter_context(torch.no_grad())
            stack.enter_context(layerzero.gathered(model[0]))
        with pytest.raises(RuntimeError, match=text), layerzero.full_precision(model):
            pass
    with layerzero.full_precision(model), torch.no_grad():
        model(torch.ones(1, 4))


@BOTH
@on_ranks(world_size=WORLD, pg_timeout=20)
def test_replicas_that_call_other_units_are_told(rank: int, shared_memory: str | None) -> None:
    model = _two_layers(zero3_size=2)
    text = r"(?s)different orders.*all data-parallel ranks"
    with torch.no_grad(), layerzero.full_precision(model), pytest.raises(RuntimeError, match=text):
        for unit in model if rank < 2 else reversed(model):  # replicas differ, which is allowed elsewhere
            unit(torch.ones(1, 4))
