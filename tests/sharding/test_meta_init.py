"""Models built on meta: training raises on memory that no initialization, load or user has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero import PrecisionPolicy
from layerzero.sharding.meta_init import fill_sentinel, has_sentinel
from tests.support.ranks import mesh_of, on_ranks, run_ranks

INV_FREQ = r"no values were written to 'rotary.inv_freq'.*non-persistent.*param_init_fn.*model\.rotary\.inv_freq ="


class Rotary(nn.Module):
    """Module with a non-persistent buffer that no state holds, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.table(), persistent=False)

    @staticmethod
    def table() -> Tensor:
        return 10.0 ** -torch.arange(4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq.to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)  # persistent buffers, an integer among them
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(self.rotary(x))))


def _on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def _nothing(module: nn.Module) -> None:
    """Initialize nothing, since a load follows."""


def _tables_only(module: nn.Module) -> None:
    if isinstance(module, Rotary):
        module.inv_freq.copy_(module.table())


def _all(module: nn.Module) -> None:
    """Initialize through ``.data``, as many functions do; version counters do not change."""
    _tables_only(module)
    if isinstance(module, nn.BatchNorm1d):
        module.reset_running_stats()
    for parameter in module.parameters(recurse=False):
        parameter.data.normal_()


def _forget_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_()
        module.bias.data[:-1] = 0.0  # but the last
    else:
        _all(module)


def _shard(init: Callable[[nn.Module], None], **settings: object) -> nn.Module:
    return layerzero.shard_model(_on_meta(), mesh=mesh_of(2), units={nn.Linear}, param_init_fn=init, **settings)


def _x() -> Tensor:
    return torch.arange(20.0).view(5, 4)


def _source() -> Net:
    torch.manual_seed(7)
    return Net()


def _refused(model: nn.Module, match: str) -> None:
    for _ in range(2):  # the error persists
        with pytest.raises(RuntimeError, match=match):
            model(_x())


def _same_as(source: nn.Module, model: nn.Module) -> None:
    assert torch.equal(model(_x()), source(_x()))
    model(_x()).sum().backward()


@on_ranks(world_size=2)
def test_a_buffer_that_no_state_holds_and_nothing_has_written_is_refused_at_the_first_forward(rank: int) -> None:
    source = _source()
    model = _shard(_nothing)
    layerzero.load_full_state_dict(model, source.state_dict())
    _refused(model, INV_FREQ)
    model.rotary.inv_freq = Rotary.table()
    _same_as(source, model)
    for settings in ({"mp_policy": PrecisionPolicy(buffer_dtype=torch.bfloat16)}, {"sync_module_states": False}):
        model = _shard(_nothing, **settings)
        layerzero.load_full_state_dict(model, source.state_dict())
        _refused(model, INV_FREQ)
    model.rotary.inv_freq.copy_(Rotary.table())
    _same_as(source, model)


@on_ranks(world_size=2)
def test_parameters_that_nothing_has_written_are_refused_at_the_first_forward(rank: int) -> None:
    source = _source()
    model = _shard(_tables_only)
    _refused(model, r"no values were written to .*'norm\.num_batches_tracked', 'first\.weight'.*load_full_state_dict")
    layerzero.load_full_state_dict(model, source.state_dict())
    _same_as(source, model)
    # One missing row counts as unwritten, like a full parameter.
    _refused(_shard(_forget_bias), r"no values were written to '(first|head)\.bias'.* after")


def _right_recipes(rank: int, folder: str) -> None:
    source = _source()
    for settings in ({}, {"sync_module_states": False}, {"mp_policy": PrecisionPolicy(buffer_dtype=torch.float32)}):
        model = _shard(_tables_only, **settings)
        layerzero.load_full_state_dict(model, source.state_dict())
        _same_as(source, model)
    saved = layerzero.shard_model(_source(), mesh=mesh_of(2))
    layerzero.checkpoint.save(folder, saved)
    model = _shard(_tables_only)
    layerzero.checkpoint.load(folder, model)
    _same_as(_source(), model)
    _shard(_all)(_x()).sum().backward()
    _shard(_all if rank == 0 else _nothing)(_x()).sum().backward()  # all ranks get rank 0's values


def test_recipes_that_write_everything_in_the_end_are_left_alone(tmp_path: Path) -> None:
    run_ranks(_right_recipes, str(tmp_path / "checkpoint"), world_size=2)


@on_ranks(world_size=2)
def test_ranks_that_initialize_for_themselves_hear_of_one_that_did_not(rank: int) -> None:
    model = _shard(_all if rank == 0 else _tables_only, sync_module_states=False)
    said = "no values were written to .*'first.weight'"
    if rank == 0:
        said = "rank 1 failed with RuntimeError: " + said
    _refused(model, said)
    layerzero.load_full_state_dict(model, _source().state_dict())
    _same_as(_source(), model)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
def test_the_mark_is_seen_until_everything_is_written(dtype: torch.dtype) -> None:
    tensor = torch.empty(3, 2, dtype=dtype)
    fill_sentinel(tensor)
    assert has_sentinel(tensor)
    tensor[:2] = 1
    few_bits = dtype in (torch.int64, torch.uint8, torch.bool)  # if a written value could equal the mark
    assert has_sentinel(tensor) is not few_bits
    tensor[2:] = 0
    assert not has_sentinel(tensor)
    for value in () if few_bits else (float("nan"), -float("nan"), float("inf")):
        assert not has_sentinel(torch.full((2,), value, dtype=dtype)), "a NaN that was written is no mark"
    empty = torch.empty(0, dtype=dtype)
    fill_sentinel(empty)
    assert not has_sentinel(empty)
