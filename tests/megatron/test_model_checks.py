"""Parameter norms that Megatron's training loop computes over the full model, compared with one process."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.megatron.model_checks import params_norm, replicas_agree
from tests.support.megatron_ranks import Case, make_ours, megatron, run_step
from tests.support.ranks import on_ranks, run_ranks


def _norms(rank: int, case: Case) -> tuple[float, list[float]]:
    """Return the norm, and the sum of squares of this rank's part of the model, without parts of other ranks."""
    with megatron(case):
        chunks, _ = make_ours(case)
        first_tensor_rank = dist.get_rank(chunks[0].groups.tensor) == 0
        first_replica = dist.get_rank(chunks[0].groups.zero1) == 0
        squares = []
        for chunk in chunks:
            whole = layerzero.full_state_dict(chunk, rank0_only=False)
            for name, parameter in chunk.module.named_parameters():
                counted = first_tensor_rank or getattr(parameter, "tensor_model_parallel", False)
                if first_replica and counted and not getattr(parameter, "shared", False):
                    squares.append(float(whole[name].double().square().sum()))
        return params_norm(chunks), squares


@pytest.mark.parametrize("case", [Case(tp=2), Case(tp=1, pp=2), Case(tp=2, pp=2, zero3_size=1)], ids=str)
def test_the_norm_of_all_weights_counts_each_once(case: Case) -> None:
    told = run_ranks(_norms, case, world_size=4)
    expected = math.sqrt(sum(square for _, squares in told for square in squares))
    assert {round(norm / expected, 5) for norm, _ in told} == {1.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [Case(zero3_size=2), Case(zero3_size=1, pp=2)], ids=["two replicas", "two stages"])
@on_ranks(world_size=4)
def test_replicas_that_differ_are_noticed(rank: int, case: Case, dtype: str) -> None:
    with megatron(case):
        chunks, optimizer = make_ours(case.but(dtype=dtype))
        assert replicas_agree(chunks)
        run_step(case.but(dtype=dtype), chunks, 0)
        optimizer.step()
        assert replicas_agree(chunks, cross_check=True)
        if rank == 3:
            get_state(chunks[0]).handles[-1].weights.zero3_shard[0] += 1
        assert not replicas_agree(chunks), "told on all ranks of the model"
