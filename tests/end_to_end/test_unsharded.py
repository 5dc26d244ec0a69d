"""`layerzero.unsharded` of a model, of its parts, and with each of its arguments."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import layerzero
from layerzero import Offload
from layerzero.full_state import _full_parameter, _Options
from tests.dtensor.test_tensor_parallel import Net as TensorParallelNet
from tests.dtensor.test_tensor_parallel import net as tensor_parallel_net
from tests.dtensor.test_tensor_parallel import parallel
from tests.support.models import different, full_parameters, integer_batch, integer_loss, refusal_of, union
from tests.support.ranks import BOTH, on_ranks

pytestmark = pytest.mark.slow

WORLD = 4


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Nested(nn.Module):
    """Root with its own parameters, units inside units, and a weight tied across units."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.first = nn.Linear(5, 6)
        self.block = Block(nn.Linear(6, 6))
        self.other = nn.Linear(6, 6)
        self.other.weight = self.block.inner.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.shift
        return self.head((self.block(hidden) + self.other(hidden)).relu())


def nested(seed: int = 0) -> Nested:
    """Return a Nested with weights in {-1, 0, 1}."""
    generator, net = torch.Generator().manual_seed(seed), Nested()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return net


UNITS = ["first", "block", "block.inner", "other", "head"]


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    return layerzero.shard_model(model, **{"units": UNITS, "zero3_size": 2} | settings)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"zero3_size": 1},
    {"zero3_size": 4},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    {"offload": Offload(optimizer=True)},
)
PARTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the model": lambda model: model,
    "a unit": lambda model: model.first,
    "a unit with a unit inside": lambda model: model.block,
    "a unit inside a unit": lambda model: model.block.inner,
    "a unit that holds a tied weight": lambda model: model.other,
    "several units": lambda model: nn.ModuleList([model.first, model.head]),
    "a module around the model": nn.Sequential,
}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.sample(1)
@BOTH
@on_ranks(world_size=WORLD)
def test_parts_are_full_inside_and_sharded_outside(rank: int, shared_memory: str | None) -> None:
    for settings in SETTINGS:
        alone = nested()
        with _quiet():
            model = _shard(nested(), **settings)
        for what, part_of in PARTS.items():
            for rank0_only in (False, True):
                for cpu in (False, True):
                    part = part_of(model)
                    inside = {id(p) for module in part_of(alone).modules() for p in module._parameters.values()}
                    with layerzero.unsharded(part, rank0_only=rank0_only, offload_to_cpu=cpu):
                        for name, theirs in alone.named_parameters():
                            ours = model.get_parameter(name)
                            if id(theirs) in inside and (rank == 0 or not rank0_only):
                                assert type(ours) is nn.Parameter and ours.device.type == "cpu", (what, name)
                                assert torch.equal(ours, theirs) and ours.dtype == torch.float32, (what, name)
                            else:
                                assert isinstance(ours, DTensor), (what, name)
                        if isinstance(model.block.inner.weight, DTensor):
                            assert isinstance(model.other.weight, DTensor), what
                        else:  # tied in all its modules
                            assert model.other.weight is model.block.inner.weight, what
                    assert all(isinstance(p, DTensor) for p in model.parameters()), (what, rank0_only)
        model(torch.ones(2, 5)).sum().backward()


class _OnDevice(Tensor):
    """Tensor that can be moved to the host."""

    def cpu(self) -> Tensor:
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_each_tensor_is_moved_to_the_host_once_it_is_gathered(offload_to_cpu: bool) -> None:
    span = SimpleNamespace(model_parallel=None, gather=lambda rows: rows.as_subclass(_OnDevice))
    options = _Options(False, False, offload_to_cpu, False)
    made = _full_parameter(SimpleNamespace(spec=span), torch.ones(2), options)  # type: ignore[arg-type]
    assert isinstance(made, nn.Parameter) and isinstance(made, _OnDevice) is not offload_to_cpu


def _storages() -> int:
    """Return the bytes of all storages that a tensor refers to."""
    gc.collect()
    held = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and not each.is_meta and type(each) in (Tensor, nn.Parameter):
            storage = each.untyped_storage()
            held[storage._cdata] = storage.nbytes()
    return sum(held.values())


def _await_bytes(expected: int) -> None:
    """Wait for freed memory: a gloo thread may hold a collective's tensors for a moment after it ends."""
    deadline = time.monotonic() + 10
    while (held := _storages()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held == expected


@on_ranks(world_size=WORLD)
def test_a_unit_takes_the_memory_of_a_unit(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    model = layerzero.shard_model(model, units=[str(i) for i in range(4)], zero3_size=2)
    unit = 4 * 256 * 256
    for rank0_only in (False, True):
        before = _storages()
        for block in model:
            with layerzero.unsharded(block, rank0_only=rank0_only):
                _await_bytes(before + (unit if rank == 0 or not rank0_only else 0))
        with layerzero.unsharded(model[0]), layerzero.unsharded(model[1]):
            _await_bytes(before + 2 * unit)
        _await_bytes(before)


@pytest.mark.sample(1)
@BOTH
@on_ranks(world_size=WORLD)
def test_gradients_are_those_of_one_process_and_are_written_back(rank: int, shared_memory: str | None) -> None:
    for settings in SETTINGS[:3] + SETTINGS[4:]:
        alone = nested()
        with _quiet():
            model = _shard(nested(), **settings)
        with layerzero.unsharded(model, with_grads=True):
            assert all(p.grad is None for p in model.parameters())
        integer_loss(model, integer_batch(rank=rank)).backward()
        integer_loss(alone, union([integer_batch(rank=r) for r in range(WORLD)])).backward()
        model.head.bias.grad = None
        alone.head.bias.grad = None
        for part_of in PARTS.values():
            part, same = part_of(model), part_of(alone)
            with layerzero.unsharded(part, with_grads=True):
                for ours, theirs in zip(part.parameters(), same.parameters(), strict=True):
                    assert (ours.grad is None) is (theirs.grad is None)
                    if theirs.grad is not None:
                        assert torch.equal(ours.grad, theirs.grad)
            with layerzero.unsharded(part):
                assert all(p.grad is None for p in part.parameters())
        for rank0_only in (False, True):
            with layerzero.unsharded(model, with_grads=True, writeback=True, rank0_only=rank0_only), torch.no_grad():
                for net in (model, alone) if rank == 0 or not rank0_only else (alone,):
                    net.first.weight.grad.mul_(2)
                    net.first.weight.add_(1)
                    net.head.weight.grad = None
                    net.head.bias.grad = torch.ones(3)
                    net.shift.grad = torch.full((6,), 3.0)
            for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert torch.equal(ours.full_tensor(), theirs), name
                assert (ours.grad is None) is (theirs.grad is None), name
                if theirs.grad is not None:
                    assert torch.equal(ours.grad.full_tensor(), theirs.grad), name
        for net in (model, alone):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            (layerzero.shard_optimizer(optimizer, model) if net is model else optimizer).step()
        assert not different(full_parameters(model), dict(alone.named_parameters())), settings


@BOTH
@on_ranks(world_size=WORLD)
def test_edits_of_a_part_are_kept_and_those_of_the_first_rank_are_sent(rank: int, shared_memory: str | None) -> None:
    for settings in SETTINGS[:4]:
        alone, model = nested(), _shard(nested(), **settings)
        for part in ("first", "block", "block.inner", "other"):
            for rank0_only in (False, True):
                with layerzero.unsharded(model.get_submodule(part), writeback=True, rank0_only=rank0_only):
                    for net in (model, alone) if rank == 0 or not rank0_only else (alone,):
                        for parameter in net.get_submodule(part).parameters():
                            parameter.detach().add_(1)
                assert not different(full_parameters(model), dict(alone.named_parameters())), (part, rank0_only)
        dtype = torch.bfloat16 if "mp_policy" in settings else torch.float32
        x = torch.ones(2, 5)
        assert torch.equal(model(x), alone.to(dtype)(x.to(dtype))), "compute weights follow"


@on_ranks(world_size=WORLD)
def test_forwards_inside_compute_with_what_is_full_there(rank: int) -> None:
    alone = nested()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    model, x = _shard(nested(), mp_policy=policy), torch.randn(2, 6)
    with torch.no_grad():
        with layerzero.unsharded(model.block, rank0_only=True):
            if rank == 0:
                assert torch.equal(model.block(x), alone.block(x))
                assert torch.equal(model.block.inner(x), alone.block.inner(x))
                with pytest.raises(RuntimeError, match=r"forward of other.*'other\.bias' is sharded"):
                    model.other(x)
            else:
                with pytest.raises(RuntimeError, match=r"forward of block.*rank0_only"):
                    model.block(x)
        refused = pytest.raises(RuntimeError, match=r"forward of the root.*'shift' is sharded")
        with layerzero.unsharded(model.first), layerzero.unsharded(model.block), refused:
            model(x)
        with layerzero.unsharded(model):
            assert torch.equal(model(x[:, :5]), alone(x[:, :5]))
    wide = _shard(nested(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    with layerzero.unsharded(wide), torch.no_grad():
        assert wide.first(x[:, :5]).dtype == torch.float64
    with layerzero.unsharded(model.block), pytest.raises(RuntimeError, match=r"torch.no_grad\(\)"):
        model.block(x)
    model(x[:, :5]).sum().backward()


def _enter(module: nn.Module, **options: bool) -> None:
    with layerzero.unsharded(module, **options):
        pass


@on_ranks(world_size=WORLD, pg_timeout=30)
def test_what_cannot_be_is_refused_on_every_rank(rank: int) -> None:
    model = _shard(nested())
    with layerzero.unsharded(model.block, rank0_only=True):
        assert "already active for parameter 'block.scale'" in refusal_of(lambda: _enter(model))
        assert "already active" in refusal_of(lambda: _enter(model.other))  # whose weight is tied to the block's
        _enter(model.first)
    message = refusal_of(lambda: _enter(model.first if rank == 1 else model.head))
    assert '"head"' in message and '"first" on rank 1' in message, message
    message = refusal_of(lambda: _enter(model.first, rank0_only=rank != 2))
    assert "rank0_only" in message and "2" in message, message
    with layerzero.no_sync(model):
        integer_loss(model, integer_batch(rank=rank)).backward()
    message = refusal_of(lambda: _enter(model, with_grads=True))
    assert "not reduced yet" in message and "with_grads=True" in message, message
    _enter(model)  # sends no gradient
    assert "hop2" not in layerzero.traffic(model).calls
    layerzero.clip_grad_norm_(model, 1e9)
    _enter(model, with_grads=True)

    def differ() -> None:
        with layerzero.unsharded(model.first, writeback=True, with_grads=True), torch.no_grad():
            model.first.weight.grad.add_(rank == 3)

    before = full_parameters(model)
    assert "first.weight .grad" in (message := refusal_of(differ)), message

    def fail() -> None:
        with layerzero.unsharded(model.first, writeback=True, rank0_only=True), torch.no_grad():
            if rank == 0:
                model.first.weight.zero_()
                raise ValueError("of the user")

    assert "of the user" in refusal_of(fail)
    assert not different(full_parameters(model), before)

    def untie() -> None:
        with layerzero.unsharded(model, writeback=True):
            model.other.weight = nn.Parameter(torch.ones(6, 6))
            model.block.inner.weight = nn.Parameter(torch.zeros(6, 6))

    assert "tied in 2 places" in refusal_of(untie)
    with layerzero.unsharded(model, writeback=True):  # in either place
        model.other.weight = nn.Parameter(torch.ones(6, 6))
    assert torch.equal(model.block.inner.weight.full_tensor(), torch.ones(6, 6))
    assert "no parameter that layerzero.shard_model has sharded" in refusal_of(lambda: _enter(nn.Linear(2, 2)))
    lost = _shard(nested()).first
    assert "garbage collected" in refusal_of(lambda: _enter(lost))


@on_ranks(world_size=WORLD, pg_timeout=30)
def test_gradients_that_one_rank_dropped_or_a_backward_left_are_refused_on_every_rank(rank: int) -> None:
    model = _shard(nested())
    integer_loss(model, integer_batch(rank=rank)).backward()
    if rank == 1:
        model.first.bias.grad = None
    assert "first.bias .grad" in (message := refusal_of(partial(_enter, model, with_grads=True))), message
    model.first.bias.grad = None
    _enter(model, with_grads=True)

    def interrupt(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: 1 / 0)

    hook = model.first.register_forward_hook(interrupt)
    with pytest.raises(ZeroDivisionError):
        integer_loss(model, integer_batch(rank=rank)).backward()
    hook.remove()
    assert "its gradients are incomplete" in (message := refusal_of(partial(_enter, model, with_grads=True))), message
    assert "its gradients are incomplete" in (message := refusal_of(model.first.weight.grad.norm)), message
    model.zero_grad()
    _enter(model, with_grads=True)


@on_ranks(world_size=WORLD)
def test_units_of_several_modules_and_modules_of_several_models(rank: int) -> None:
    """Unshard a unit of several modules, and a module with two sharded models."""
    keyed = {"first": "ends", "head": "ends"}
    model = _shard(nested(), units=lambda name, module: keyed.get(name, False))
    with layerzero.unsharded(model.first):
        assert torch.equal(model.first.weight, nested().first.weight) and isinstance(model.head.weight, DTensor)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'head\.weight' is sharded"):
            model.first(torch.ones(2, 5))
    both = nn.ModuleDict({"a": _shard(nested(1)), "b": _shard(nested(2), zero3_size=4)})
    with layerzero.unsharded(both, writeback=True), torch.no_grad():
        for parameter in both.parameters():
            parameter.add_(1)
    for key, seed in (("a", 1), ("b", 2)):
        expected = {name: p + 1 for name, p in nested(seed).named_parameters()}
        assert not different(full_parameters(both[key]), expected)
    assert dist.get_rank() == rank and copy.copy(both) is not None


@on_ranks(world_size=WORLD)
def test_parts_that_tensor_parallelism_has_cut_are_not_shown_on_one_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = tensor_parallel_net()
    for settings in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        model = layerzero.shard_model(parallel(mesh["tp"]), mesh=mesh["dp"], units=TensorParallelNet.UNITS, **settings)
        assert "'blocks.0.up.weight' (3 like it) is sharded by tensor or expert parallelism" in refusal_of(
            partial(_enter, model.blocks[0], rank0_only=True)
        )
        if not settings:
            integer_loss(model, integer_batch(rank=mesh["dp"].get_local_rank())).backward()
            integer_loss(alone, union([integer_batch(rank=r) for r in range(2)])).backward()
        with mock.patch.object(DeviceMesh, "device_type", "cuda"):
            message = refusal_of(partial(_enter, model.blocks[0], offload_to_cpu=True))
        assert "is a DTensor on a mesh of cuda devices" in message, message
        with layerzero.unsharded(model.blocks[0], with_grads=not settings, offload_to_cpu=True), torch.no_grad():
            weight = model.blocks[0].up.weight
            assert torch.equal(weight.full_tensor(), alone.blocks[0].up.weight)
            if not settings:
                assert torch.equal(weight.grad.full_tensor(), alone.blocks[0].up.weight.grad)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
        with layerzero.full_precision(model), torch.no_grad():  # tensor parallelism adds in another order
            torch.testing.assert_close(model(x), alone(x), rtol=1e-6, atol=1e-6)
