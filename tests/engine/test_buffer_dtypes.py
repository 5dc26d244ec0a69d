"""Buffers cast by `buffer_dtype` keep their original dtype in state dicts and checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import PrecisionPolicy
from tests.support.ranks import on_ranks, run_ranks

WORLD = 2


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("wide", torch.randn(3, dtype=torch.float64))
        self.register_buffer("already", torch.randn(2).bfloat16())
        self.register_buffer("temporary", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.randn(()))
        self.tied = nn.Module()
        self.tied.register_buffer("scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)) * self.scale


def _shard() -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return layerzero.shard_model(
        Net(), units=["inner"], zero3_size=2, mp_policy=PrecisionPolicy.of(policy, buffer_dtype=torch.bfloat16)
    )


def _expected(plain: nn.Module) -> dict[str, Tensor]:
    """Return buffers rounded to bf16, in their original dtype."""
    names = {name for name, _ in plain.named_buffers(remove_duplicate=False)}
    return {
        name: value.bfloat16().to(value.dtype) if value.is_floating_point() else value
        for name, value in plain.state_dict().items()
        if name in names
    }


def _assert_same(state: dict[str, object], expected: dict[str, Tensor], prefix: str = "") -> None:
    for name, value in expected.items():
        saved = state[prefix + name]
        assert isinstance(saved, Tensor) and saved.dtype == value.dtype and torch.equal(saved, value), name


def _round_trips(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = _shard()
    expected = _expected(plain)
    assert model.inner.table.dtype == model.scale.dtype == torch.bfloat16 and len(expected) == 9
    _assert_same(model.state_dict(), expected)
    _assert_same(nn.Sequential(model).state_dict(), expected, "0.")
    inner = {name.removeprefix("inner."): value for name, value in expected.items() if name.startswith("inner.")}
    _assert_same(model.inner.state_dict(), inner)
    assert model.state_dict(keep_vars=True)["inner.table"] is model.inner.table
    full = layerzero.full_state_dict(model, rank0_only=False)
    _assert_same(full, expected)
    options = StateDictOptions(full_state_dict=True)
    _assert_same(get_model_state_dict(model, options=options), expected)
    assert "inner.temporary" not in model.state_dict()

    loaded = Net()  # an unsharded model
    loaded.load_state_dict(full)
    _assert_same(loaded.state_dict(), expected)

    path = Path(folder)
    layerzero.checkpoint.save(path / "own", model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "dcp")
    for how in ("own", "dcp", "full", "set"):
        torch.manual_seed(1 + rank)
        other = _shard()
        if how == "own":
            layerzero.checkpoint.load(path / "own", other)
        elif how == "dcp":
            state = {"model": other.state_dict()}
            dcp.load(state, checkpoint_id=path / "dcp")
            other.load_state_dict(state["model"])
        elif how == "full":
            layerzero.load_full_state_dict(other, full)
        else:
            set_model_state_dict(other, full, options=options)
        assert other.inner.table.dtype == torch.bfloat16
        _assert_same(other.state_dict(), expected)
    into = layerzero.shard_model(Net(), zero3_size=1)  # without buffer_dtype, and back
    layerzero.checkpoint.load(path / "own", into)
    _assert_same(into.state_dict(), expected)
    layerzero.checkpoint.save(path / "fp32", into)
    other = _shard()
    layerzero.checkpoint.load(path / "fp32", other)
    _assert_same(other.state_dict(), expected)
    with layerzero.unsharded(model.inner):
        assert model.inner.table.dtype == torch.float32 and model.norm.running_mean.dtype == torch.bfloat16
    assert model.inner.table.dtype == torch.bfloat16


def test_states_hold_buffers_in_their_original_dtype(tmp_path: Path) -> None:
    run_ranks(_round_trips, str(tmp_path), world_size=WORLD)


@on_ranks(world_size=WORLD)
def test_buffers_that_are_written_or_replaced_in_a_context_are_kept_in_the_cast_dtype(rank: int) -> None:
    model = _shard()
    with layerzero.unsharded(model.inner, rank0_only=True):
        assert model.inner.table.dtype == (torch.float32 if rank == 0 else torch.bfloat16), "with the parameters"
    for value, context in enumerate((layerzero.unsharded, layerzero.full_precision), 1):
        with torch.inference_mode(), context(model):
            model.inner.table = torch.full((5,), float(value))
        table = model.inner.table
        assert table.dtype == torch.bfloat16 and (table == value).all() and not table.is_inference(), context
        with context(model):
            model.inner.table.add_(1)
            model.inner.wide = None
        assert torch.equal(model.inner.table, torch.full((5,), value + 1.0).bfloat16()), context
        assert model.inner.wide is None
