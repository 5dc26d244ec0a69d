"""Registered forward methods, and forwards inside `layerzero.unsharded`."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import layerzero
from tests.support.graphs import MODES, WIDTH, WORLD, Block, Case, assert_same_gradients, batch, compare, shard
from tests.support.models import TiedTransformer, full_parameters
from tests.support.ranks import mesh_of, on_ranks, run_ranks, run_sharing


class Coder(Block):
    """Unit with a second method that computes with its parameters."""

    def code(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return gain * torch.tanh(x @ self.linear.weight) + self.linear.bias


class AutoEncoder(nn.Module):
    """Trains through `encode` and `decode`, which read a parameter of the root; its forward calls both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(), Coder()
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.failing = False

    def encode(self, x: Tensor) -> Tensor:
        coded = self.encoder.code(self.encoder(x), gain=2.0) + self.shift
        if self.failing:
            raise LookupError("in the midst of encode")
        return coded

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(self.decoder.code(z) * self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def later(self, x: Tensor) -> Any:
        yield self.decode(x)


def _register(model: nn.Module) -> nn.Module:
    for module, name in ((model, "encode"), (model, "decode"), (model.encoder, "code"), (model.decoder, "code")):
        layerzero.register_forward_method(module, name)
    return model


def _is_sharded(model: nn.Module) -> bool:
    return isinstance(model.shift, DTensor)


def _by_root(model: nn.Module, rank: int, step: int) -> None:
    if _is_sharded(model):
        layerzero.register_forward_method(model, "encode")
        layerzero.register_forward_method(model, "decode")
    model.decode(model.encode(batch(rank, step))).sum().backward()


def _by_methods(model: nn.Module, rank: int, step: int) -> None:
    if _is_sharded(model):
        _register(model)
    x = batch(rank, step)
    model.decode(model.encode(x)).sum().backward()
    z = model.encode(x + 1)  # two graphs in flight
    (model.decode(z.detach()).sum() + z.square().sum() + model(x).sum()).backward()
    model.encoder.code(x).sum().backward()  # a unit called by itself
    with torch.no_grad():
        model.decode(model.encode(x))


def _trained(rank: int) -> None:
    for settings in (*MODES, {"size": 1}, {"size": 4}, {"units": None}):
        compare(
            rank,
            "methods",
            Case(AutoEncoder, _by_root if settings.get("units", ()) is None else _by_methods),
            **settings,
        )


@pytest.mark.parametrize("run", [run_ranks, pytest.param(run_sharing, marks=pytest.mark.slow)])
def test_methods_are_trained_as_in_one_process(run: Any) -> None:
    run(_trained, world_size=WORLD)


@on_ranks(world_size=WORLD)
def test_what_is_no_method_of_a_sharded_module_is_refused(rank: int) -> None:
    model = shard(AutoEncoder())
    with pytest.raises(AttributeError, match="sing"):
        layerzero.register_forward_method(model, "sing")
    with pytest.raises(TypeError, match=r"shift is a .*, not a method"):
        layerzero.register_forward_method(model, "shift")
    with pytest.raises(TypeError, match="computes after it returns"):
        layerzero.register_forward_method(model, "later")
    with pytest.raises(ValueError, match=r"Linear is neither a model .* nor a unit"):
        layerzero.register_forward_method(model.encoder.linear, "extra_repr")
    with pytest.raises(TypeError, match="got str"):
        layerzero.register_forward_method("model", "encode")
    with pytest.raises(RuntimeError, match="only while the forward of its unit runs"):
        model.encoder.code(batch(rank, 0))  # not registered
    _register(model)
    once = model.encode
    layerzero.register_forward_method(model, "encode")
    assert model.encode is once and once.__name__ == "encode" and once.__doc__ == AutoEncoder.encode.__doc__

    # A failing method leaves nothing gathered, and the model usable.
    alone = AutoEncoder()
    torch.manual_seed(0)
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    layerzero.load_full_state_dict(model, alone.state_dict())
    model.failing = True
    with pytest.raises(LookupError):
        model.encode(batch(rank, 0))
    assert layerzero.memory(model).measured["full_buffer"] == 0
    model.failing = False
    model.encode(batch(rank, 0)).sum().backward()
    for r in range(WORLD):
        alone.encode(batch(r, 0)).sum().backward()
    assert_same_gradients(model, alone, "after a failure")
    dead = weakref.ref(model)
    del model, once
    assert dead() is None  # without the garbage collector


class Speaker(TiedTransformer):
    """Generates greedily; each token is a forward of the root inside `generate`."""

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            bias = self.norm.bias.sum()  # a parameter of the root, read by the method itself
            tokens = torch.cat([tokens, (self(tokens)[:, -1:] + bias).argmax(-1)], dim=1)
        return tokens


@on_ranks(world_size=WORLD)
def test_generation_is_that_of_one_process(rank: int) -> None:
    alone = Speaker()
    model = layerzero.shard_model(copy.deepcopy(alone), mesh=mesh_of(2), units=Speaker.UNITS)
    layerzero.register_forward_method(model, "generate")
    prompt, _ = Speaker.batch(step=0, rank=rank // 2 * 2)
    for count in (3, 5, 1):
        assert torch.equal(model.generate(prompt, count), alone.generate(prompt, count))
        assert layerzero.memory(model).measured["full_buffer"] == 0
    # Training continues in between.
    Speaker.loss(model, Speaker.batch(step=1, rank=rank)).backward()
    assert torch.equal(model.generate(prompt, 2), alone.generate(prompt, 2))


@on_ranks(world_size=WORLD)
def test_inputs_and_outputs_of_methods_are_cast(rank: int) -> None:
    seen = []

    class Asking(Block):
        def code(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, self.linear.weight.dtype))
            return self.linear(x)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = layerzero.shard_model(nn.Sequential(Asking()).float(), mesh=mesh_of(2), units={Asking}, mp_policy=policy)
    layerzero.register_forward_method(model[0], "code")
    output = model[0].code(batch(rank, 0).float())
    assert seen == [(torch.bfloat16, torch.bfloat16)] and output.dtype == torch.float32


# --- forwards inside unsharded ---


def _inside(rank: int) -> None:
    torch.manual_seed(0)
    alone = AutoEncoder()
    for settings in (*MODES, {"size": 1}):
        model = _register(shard(copy.deepcopy(alone), **settings))
        x = batch(rank, 0)
        before = layerzero.traffic(model).calls.get("gather", 0)
        with layerzero.unsharded(model):
            with torch.no_grad():
                assert torch.equal(model(x), alone(x))
                assert torch.equal(model.encode(x), alone.encode(x))
                assert torch.equal(model.encoder(x), alone.encoder(x))
                if rank == 0:  # no collective runs
                    assert torch.equal(model(x + 1), alone(x + 1))
            with torch.inference_mode():
                assert torch.equal(model(x), alone(x))
            with pytest.raises(RuntimeError, match=r"inside layerzero.unsharded.*torch.no_grad\(\)"):
                model(x)
        assert layerzero.traffic(model).calls.get("gather", 0) == before
        with layerzero.unsharded(model, writeback=True), torch.no_grad():
            model.shift.mul_(2)
            changed = model(x)
        assert torch.equal(model(x), changed)
        alone_changed = copy.deepcopy(alone)
        with torch.no_grad():
            alone_changed.shift.mul_(2)
        assert torch.equal(changed, alone_changed(x))
        model(x).sum().backward()
        for r in range(WORLD):
            alone_changed(batch(r, 0)).sum().backward()
        assert_same_gradients(model, alone_changed, settings)
        assert full_parameters(model).keys() == dict(alone.named_parameters()).keys()


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("run", [run_ranks, run_sharing])
def test_forwards_without_gradients_run_on_whole_parameters(run: Any) -> None:
    run(_inside, world_size=WORLD)


@on_ranks(world_size=WORLD)
def test_a_forward_inside_unsharded_computes_in_the_precision_of_the_masters(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    alone = AutoEncoder().float()
    model = shard(copy.deepcopy(alone), mp_policy=policy)
    layerzero.load_full_state_dict(model, alone.state_dict())
    with layerzero.unsharded(model), torch.no_grad():
        output = model(batch(0, 0).bfloat16())  # computed with the masters
    with layerzero.unsharded(model):
        whole = {name: p.clone() for name, p in model.named_parameters()}
    alone.load_state_dict(whole)
    with torch.no_grad():
        assert torch.equal(output, alone(batch(0, 0).bfloat16().float()))
