"""Reductions over full sharded parameters and gradients are right or raise; they never cover this rank's part only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
from tests.support.models import IntegerNet, integer_batch, integer_net
from tests.support.ranks import mesh_of, on_ranks

WORLD = 4

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "norm in double": lambda p: torch.linalg.vector_norm(p, dtype=torch.double),
    "infinite norm": lambda p: torch.linalg.vector_norm(p, math.inf),
    "infinite norm of columns": lambda p: torch.linalg.vector_norm(p, math.inf, dim=0),
    "least norm": lambda p: torch.linalg.vector_norm(p + 9, -math.inf),
    "least norm of columns, kept": lambda p: torch.linalg.vector_norm(p + 9, -math.inf, dim=0, keepdim=True),
    "least norm in a list": lambda p: torch._foreach_norm([p + 9], -math.inf)[0],
    "norm in a list in double": lambda p: torch._foreach_norm([p], 2, dtype=torch.double)[0],
    "harmonic norm": lambda p: torch.linalg.vector_norm(p + 9, -1),
    "mean": lambda p: p.mean(),
    "mean of column sums": lambda p: p.mean(0).sum(),
    "mean over all dims": lambda p: p.mean(tuple(range(p.ndim))),
    "mean in double": lambda p: p.mean(dtype=torch.double),
    "mean over rows": lambda p: p.mean(0),
    "mean over rows, kept": lambda p: p.mean(0, keepdim=True),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "amax": lambda p: p.amax(),
    "amin": lambda p: (-p).amin(),
    "amax of columns": lambda p: p.amax(0),
    "amin of columns, kept": lambda p: p.amin(-p.ndim, keepdim=True),
    "amax over all dims": lambda p: (p - 9).amax(tuple(range(p.ndim))),
    "amin of booleans": lambda p: (p > -9).amin(0),
    "any": lambda p: (p > 3).any(),
    "all": lambda p: (p > -3).all(),
    "prod": lambda p: p.sign().prod(),
    "count": lambda p: (p > 0).sum(),
    "largest of integers": lambda p: p.to(torch.int32).max(),
    "is finite": lambda p: torch.isfinite(p).all(),
    "sum, doubled": lambda p: 2 * p.sum(),
    "root of a sum": lambda p: p.square().sum().sqrt(),
}


class Few(nn.Module):
    """Parameters with many, few and unequal numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = ((7, 3), (2, 5), (9,), (1,), (4, 4), (5, 1))
        drawn = [torch.randint(-8, 8, shape, generator=generator).float() for shape in shapes]
        self.all = nn.ParameterList(nn.Parameter(value) for value in drawn)

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(p.sum() for p in self.all)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@on_ranks(world_size=WORLD, pg_timeout=15)
def test_a_number_of_a_whole_parameter_is_that_of_one_process(rank: int, size: int) -> None:
    model, alone = layerzero.shard_model(Few(), mesh=mesh_of(size)), Few()
    for ours, theirs in zip(model.all, alone.all, strict=True):
        for name, reduce in REDUCTIONS.items():
            where = f"{name} of {list(theirs.shape)} with S = {size}"
            try:
                got, expected = reduce(ours), reduce(theirs)
            except NotImplementedError as error:
                raise AssertionError(where) from error
            torch.testing.assert_close(got.full_tensor(), expected, msg=lambda text, at=where: f"{at}: {text}")


READS: dict[str, Callable[[Tensor], Any]] = {
    "p.sum().item()": lambda p: p.sum().item(),
    "float(p.norm())": lambda p: float(p.norm()),
    "int": lambda p: int(p.sum()),
    "bool((p > 3).any())": lambda p: bool((p > 3).any()),
    "if p.max() is zero": lambda p: 1 if not p.max() else 2,
    "p.mean().item()": lambda p: p.mean().item(),
    "2 * sum": lambda p: (2 * p.detach().sum()).item(),
    "of a product": lambda p: (p.square() * 2).sum().item(),
    "one of the column sums": lambda p: p.sum(0)[0].item(),
    "equal": lambda p: bool((p == p.clone()).all()),
    "stacked": lambda p: torch.stack([p.norm(), p.norm()]).sum().item(),
}


@on_ranks(world_size=WORLD, pg_timeout=15)
def test_reading_a_part_as_if_it_were_the_whole_is_an_error_without_other_ranks(rank: int) -> None:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    inputs, targets = integer_batch(rank=rank)
    (model(inputs) * targets).sum().backward()
    optimizer.step()
    parameter = model.first.weight
    for tensor in (parameter, parameter.grad, optimizer.state_dict_by_name()["state"]["first.weight"]["exp_avg_sq"]):
        for name, read in READS.items():
            if rank == 0:  # as for logging; nothing is waited for
                with pytest.raises(RuntimeError, match=r"first\.weight.*full_tensor\(\)"):
                    pytest.fail(f"{name} is {read(tensor)}")
        with pytest.raises(
            NotImplementedError, match=r"first\.weight.*For a mean, divide a sum: x\.sum\(\) / x\.numel"
        ):
            tensor.abs().mean()
        whole = tensor.detach().full_tensor()
        average = tensor.abs().sum() / tensor.numel()
        assert average.full_tensor().item() == pytest.approx(whole.abs().mean().item())
        norm = tensor.norm().full_tensor().item()
        assert norm == pytest.approx(whole.norm().item()) and f"{tensor.norm()}"
        rows = tensor.to_local().spec.rows
        mine = whole[rows.start : rows.stop]
        for of_rows in (tensor.to_local().detach(), tensor.detach().to_local(), tensor.data.to_local()):
            assert of_rows.sum().item() == mine.sum().item() and len(of_rows) == len(mine)
            assert float(of_rows.square().mean()) == float(mine.square().mean()) or not len(rows)
            assert bool((of_rows == mine).all())
    penalty = sum(p.to_local().square().sum() for p in model.parameters())
    assert penalty.item() >= 0
    penalty.backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, error_if_nonfinite=True).full_tensor() > 0


@on_ranks(world_size=1)
def test_one_rank_has_the_whole(rank: int) -> None:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(1), units=IntegerNet.UNITS)
    expected = integer_net().first.weight
    assert model.first.weight.detach().sum().item() == expected.sum().item()
    assert float(model.first.weight.detach().mean()) == float(expected.mean().detach())
