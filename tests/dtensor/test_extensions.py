"""Parameters whose tensor subclass implements FSDP2's all-gather extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import Offload
from layerzero.engine.hooks import get_state
from tests.support.graphs import IN_FLIGHT, MODES, WIDTH, WORLD, Case, batch, compare, one_pass, sgd, shard
from tests.support.models import update
from tests.support.ranks import on_ranks, run_ranks, run_sharing

pytestmark = pytest.mark.slow

FP64 = torch.float64


class Inner(torch.Tensor):
    """Tensor subclass that keeps its values in one plain tensor, which operators see."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Inner:
        made: Inner = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )
        made.values = values
        return made

    def __init__(self, values: Tensor) -> None:
        """Do nothing: __new__ does everything."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Inner:
        assert context is None and inner["values"].shape == size
        return cls(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map_only(cls, lambda t: t.values, args), **(kwargs or {}))
        return cls(out) if func is torch.ops.aten.detach.default else out


def rounded(values: Tensor) -> Tensor:
    return values.bfloat16().to(values.dtype)


def coded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row in 8 bits, and its scale."""
    scale = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return torch.round(values / scale).to(torch.int8), scale


class Rounded(Inner):
    """Gathered in bf16; modules compute with a plain tensor in memory other than the gathered one."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        return (self.values.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (arrived,) = outputs
        if out is not None:
            out.copy_(arrived)
            return None
        made = arrived.to(dtype)
        return made, (arrived, made)


class Coded(Inner):
    """Gathered as two tensors; modules compute with another class, :class:`Gathered`."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> Any:
        assert mesh.ndim == 1 and dist.get_rank() in mesh.mesh.tolist() and isinstance(module, Layer)
        assert (tuple(outer_size), tuple(outer_stride)) == (
            (WIDTH, WIDTH),
            (WIDTH, 1),
        ) and mp_policy.param_dtype is None
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert type(self.values) is Tensor and mesh.size() * self.values.shape[0] >= WIDTH
        return coded(self.values), mesh.size()

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        numbers, scale = outputs
        assert metadata in (1, 2, 4) and dtype == FP64
        if out is not None:
            assert (
                isinstance(out, Gathered) and out.numbers.untyped_storage()._cdata == numbers.untyped_storage()._cdata
            )
            return None
        return Gathered(numbers, scale, dtype), outputs


class Gathered(torch.Tensor):
    """Integers and scales that present as floating point; supports only the operators that FSDP2 calls."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Gathered:
        made: Gathered = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, strides=numbers.stride(), dtype=dtype)
        made.numbers, made.scale = numbers, scale
        return made

    def __init__(self, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """Do nothing: __new__ does everything."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale, args[0].dtype)
        if func is torch.ops.aten.as_strided.default:
            rows = args[1][0]
            return cls(args[0].numbers[:rows], args[0].scale[:rows], args[0].dtype)
        raise NotImplementedError(func)


class Multiply(torch.autograd.Function):
    """Multiply by the gathered weight; one process computes the same value from its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, code: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.code = code
        return x @ Multiply.whole(weight, code).T

    @staticmethod
    def whole(weight: Tensor, code: bool) -> Tensor:
        if isinstance(weight, Gathered):
            return weight.numbers * weight.scale
        if not code:
            return rounded(weight)
        numbers, scale = coded(weight)
        return numbers * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        return gradient @ Multiply.whole(weight, ctx.code), gradient.T @ x, None


class Layer(nn.Module):
    """Layer with a weight of a subclass beside plain parameters."""

    UNIT = True

    def __init__(self, kind: type[Inner]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=FP64) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=FP64))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Multiply.apply(x, self.weight, self.kind is Coded) + self.bias)


class Net(nn.Module):
    """Net that calls one of its layers twice, and one in a checkpoint."""

    def __init__(self, kind: type[Inner]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=FP64))  # the root's only weight
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = layer(x)
        return Multiply.apply(checkpoint(self.layers[2], x, use_reentrant=False), self.weight, self.kind is Coded)


def wrap(model: nn.Module) -> nn.Module:
    """Convert the layers' weights to the class, as packages do."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.weight = nn.Parameter(module.kind(module.weight.detach()))
    return model


def _trained(rank: int, kind: type[Inner]) -> None:
    case = Case(lambda: Net(kind), IN_FLIGHT, prepare=wrap)
    for size in (1, 2, 4):
        compare(rank, f"{kind.__name__} over {size}", case, *MODES, {"units": None}, size=size)
    compare(rank, "kept among two", case, reshard_after_forward=2, size=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (run_ranks, Coded),
        (run_sharing, Rounded),
        pytest.param(run_ranks, Rounded, marks=pytest.mark.exhaustive),
        pytest.param(run_sharing, Coded, marks=pytest.mark.exhaustive),
    ],
)
def test_a_parameter_of_a_class_is_trained_as_in_one_process(run: Callable[..., Any], kind: type[Inner]) -> None:
    run(_trained, kind, world_size=WORLD)


@on_ranks(world_size=WORLD)
def test_its_masters_are_plain_in_states_and_checkpoints(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = shard(wrap(Net(Coded)))
    assert {type(p._local_tensor).__name__ for p in model.parameters()} == {"LocalShard"}
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    assert [p.numel() for p in model.parameters()].count(WIDTH * WIDTH) == 4
    one_pass(model, rank, 0)
    update(optimizer)
    state = layerzero.full_state_dict(model, rank0_only=False)
    assert {type(value) for value in state.values()} == {Tensor}
    layerzero.checkpoint.save(tmp_path / "saved", model, optimizer)
    torch.manual_seed(1)
    fresh = shard(wrap(Net(Coded)), size=4)
    other = layerzero.shard_optimizer(torch.optim.AdamW(fresh.parameters()), fresh)
    layerzero.checkpoint.load(tmp_path / "saved", fresh, other)
    alone = Net(Coded)
    alone.load_state_dict(state)
    assert torch.equal(fresh(batch(rank, 1)), alone(batch(rank, 1)))
    with layerzero.unsharded(fresh), torch.no_grad():
        assert torch.equal(fresh(batch(rank, 1)), alone(batch(rank, 1)))
    layerzero.load_full_state_dict(fresh, state)
    one_pass(fresh, rank, 1)
    one_pass(model, rank, 1)
    optimizer.step()
    other.step()
    ours, theirs = (layerzero.full_state_dict(each, rank0_only=False) for each in (model, fresh))
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-10, atol=1e-13) for name in ours)


@on_ranks(world_size=WORLD)
def test_what_it_takes_and_sends_is_counted(rank: int) -> None:
    for size in (1, 2, 4):
        for sharing in ("off", "auto"):
            model = shard(wrap(nn.Sequential(Layer(Coded), Layer(Coded))), size=size, shared_memory=sharing)
            optimizer = layerzero.shard_optimizer(sgd(model), model)
            layerzero.traffic(model, reset=True)
            for step in range(3):
                one_pass(model, rank, step)
                update(optimizer)
            memory, traffic = layerzero.memory(model), layerzero.traffic(model)
            measured = {kind: size for kind, size in memory.measured.items() if size and kind != "optimizer"}
            assert {kind: size for kind, size in memory.predicted.items() if size} == measured, (size, sharing)
            layer, (plain, extended) = get_state(model).units[1], get_state(model).units[1].handles
            rows = -(-WIDTH // WORLD) * WORLD  # padding included
            others = plain.weights.full_buffer.nbytes if plain.weights.needs_gather else 0
            assert layer.gathered_footprint.nbytes == rows * WIDTH + rows * 8 + others, "int8 rows and fp64 scales"
            assert extended.weights.needs_gather == (size > 1) and not extended.weights.buffer.read_by_peers
            if size > 1:
                assert traffic.predicted["gather"] == traffic.bytes["gather"]
            # In each forward and backward of a layer: the two inputs, and the plain parameters in the gathered dtype.
            assert traffic.calls.get("gather", 0) == 12 * (0 if size == 1 else 3)


@on_ranks(world_size=WORLD)
def test_it_follows_steps_edits_and_modes_of_torch(rank: int) -> None:
    """Cover old graphs, writes, inference, and parameters that stay gathered."""
    for kind, settings in ((Coded, {}), (Rounded, {"reshard_after_forward": False})):
        model = shard(wrap(Net(kind)), **settings)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        with torch.inference_mode():
            seen = model(batch(rank, 0))
        output = model(batch(rank, 0))
        assert torch.equal(output, seen)
        output.sum().backward()
        update(optimizer)
        assert not torch.equal(model(batch(rank, 0)), seen)
        one_pass(model, rank, 0)
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        one_pass(model, rank, 0)
        state = layerzero.full_state_dict(model, rank0_only=False)
        alone = Net(kind)
        alone.load_state_dict(state)
        assert torch.equal(model(batch(rank, 0)), alone(batch(rank, 0)))
        model = shard(wrap(nn.Sequential(Layer(kind))), **settings)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        output = model(batch(rank, 0))  # its graph has saved no other weight
        output.sum().backward(retain_graph=True)
        update(optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@on_ranks(world_size=WORLD)
def test_it_may_come_on_meta_or_frozen_and_keeps_nothing_alive(rank: int) -> None:

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            assert type(parameter) is nn.Parameter
            nn.init.constant_(parameter, 0.5)

    with torch.device("meta"):
        model = wrap(Net(Coded))
    shard(model, size=4, param_init_fn=fill)
    state = layerzero.full_state_dict(model, rank0_only=False)
    assert all((value == 0.5).all() for value in state.values()) and len(state) == 7
    frozen = wrap(Net(Coded))
    frozen.layers.requires_grad_(False)
    frozen.layers[0].weight.mark = "set by the user"
    shard(frozen, size=4)
    assert frozen.layers[0].weight.mark == "set by the user"
    one_pass(frozen, rank, 0)
    assert [name for name, p in frozen.named_parameters() if p.grad is not None] == ["weight"]
    old = wrap(Net(Coded))
    held = list(old.parameters())
    shard(old, size=4)
    assert all(p.values.untyped_storage().nbytes() == 0 for p in held if isinstance(p, Inner))


class OneHook(Inner):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        raise AssertionError


class Two(Rounded):
    """Subclass with two inner tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], None

    @property
    def scale(self) -> Tensor:
        return self.values[:1].float()


class Odd(Rounded):
    """Violates the protocol in the way that `way` says."""

    way = ""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        if self.way == "raises" and dist.get_rank() == 1:
            raise ArithmeticError("no way to send it")
        if self.way == "not a pair":
            return self.values
        if self.way == "a number":
            return (self.values.sum(),), None
        if self.way == "unequal":
            return (self.values[dist.get_rank() :],), None
        if self.way == "later":
            return (self.values.float(),), None
        return super().fsdp_pre_all_gather(mesh)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if self.way == "no pair":
            return outputs[0]
        if self.way == "integers":
            return outputs[0].int(), outputs
        if self.way == "small":
            return outputs[0][1:], outputs
        return super().fsdp_post_all_gather(outputs, metadata, dtype, out=out)


@on_ranks(world_size=2)
def test_what_does_not_keep_to_the_protocol_is_told_on_every_rank(rank: int) -> None:
    for kind, text in (
        (OneHook, "a OneHook, which has only one of fsdp_pre_all_gather and fsdp_post_all_gather"),
        (
            Two,
            r"a Two, whose values are in values \[6, 6\] torch.float64, scale \[1, 6\] torch.float32.*one inner tensor",
        ),
    ):
        model = nn.Sequential(Layer(kind))
        with pytest.raises(ValueError, match=rf"parameter '0.weight' is {text}"):
            shard(wrap(model))
    model = shard(wrap(nn.Sequential(Layer(Rounded))))
    with pytest.raises(ValueError, match=r"full_precision: parameter '0.weight'"), layerzero.full_precision(model):
        pass
    with pytest.raises(
        ValueError, match=r"Offload.params=True. is not supported for parameter '0.weight'.* class Rounded"
    ):
        shard(wrap(nn.Sequential(Layer(Rounded))), offload=Offload(params=True))
    transposed = nn.Sequential(Layer(Rounded))
    transposed[0].weight = nn.Parameter(Rounded(torch.randn(WIDTH, WIDTH, dtype=FP64).T))
    with pytest.raises(ValueError, match="that is not contiguous"):
        shard(transposed)
    tied = nn.Sequential(Layer(Rounded), nn.Linear(WIDTH, WIDTH, dtype=FP64))
    tied[0].weight = nn.Parameter(Rounded(tied[1].weight))
    with pytest.raises(ValueError, match=r"'1.weight' shares memory with '0.weight'.*Sharding would separate"):
        shard(tied)
    tied[0].weight = nn.Parameter(Rounded(torch.ones(WIDTH, WIDTH, dtype=FP64)))
    tied[1].weight = nn.Parameter(Rounded(tied[0].weight.values), requires_grad=False)
    with pytest.raises(ValueError, match=r"assign one parameter to both modules.*Otherwise copy the values"):
        shard(tied)
    for way, error, text in (
        ("raises", (ArithmeticError, RuntimeError), "no way to send it"),
        ("not a pair", TypeError, r"(?s)'0.weight' returned .* Return .inputs of the all-gather, metadata."),
        ("a number", TypeError, "returned Tensor of shape .* as an input of the all-gather. Return plain tensors"),
        ("unequal", ValueError, "fsdp_pre_all_gather of parameter '0.weight': ranks disagree: inputs is"),
        ("no pair", TypeError, "fsdp_post_all_gather of parameter '0.weight' returned a .*Return .gathered tensor"),
        ("integers", TypeError, "returned a tensor of torch.int32, but modules need a floating-point tensor"),
        (
            "small",
            ValueError,
            r"of shape \[5, 6\], which is smaller than the parameter. Return a tensor of shape \[6, 6\]",
        ),
    ):
        Odd.way = way
        with pytest.raises(error, match=text):
            shard(wrap(nn.Sequential(Layer(Odd))))
    Odd.way = ""
    model = shard(wrap(nn.Sequential(Layer(Odd))))
    one_pass(model, rank, 0)
    Odd.way = "later"
    with pytest.raises(RuntimeError, match="Return inputs of the same shapes and dtypes in every gather"):
        one_pass(model, rank, 0)
    Odd.way = ""
    model.zero_grad()
    one_pass(model, rank, 0)
