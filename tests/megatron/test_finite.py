"""A NaN in the gradient of one rank stops all ranks before the step, as in Megatron's wrapper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
import layerzero.megatron
from layerzero.engine.hooks import get_state
from tests.support import megatron_ranks
from tests.support.megatron_ranks import (
    Case,
    make_chunks,
    make_config,
    make_ours,
    make_reference,
    make_scheduler,
    megatron,
    optimizer_config,
    run_step,
    whole_weights,
)
from tests.support.ranks import on_ranks, run_ranks

ODD = 1  # the rank whose gradient is not finite
DATA = Case(zero3_size=2, micro_batches=2, layers=2, optimizer="sgd")
SPOILT = {False: "mlp.linear_fc1.weight", True: "input_layernorm.weight"}  # by whether all tensor ranks hold it


class Poison:
    """Hook that puts a bad value into a gradient on the odd rank, in the second of two micro-batches, while armed."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.armed = False
        self._calls = 0

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if not self.armed or dist.get_rank() != ODD:
            return None
        self._calls += 1
        spoilt = gradient.clone()
        spoilt.view(-1)[3] = self.value
        return spoilt if self._calls % 2 == 0 else None


@contextmanager
def poisoned(value: float = math.nan, *, whole: bool = False) -> Iterator[Poison]:
    """Register a :class:`Poison` on one parameter of a layer of each model made inside, before it is wrapped."""
    poison = Poison(value)

    def make(case: Case, config: Any) -> list[nn.Module]:
        chunks = make_chunks(case, config)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith(SPOILT[whole]) and ".0." in name:
                    parameter.register_hook(poison)
        return chunks

    with mock.patch.object(megatron_ranks, "make_chunks", make):
        yield poison


def scheduled(case: Case, make: Callable[[Case], tuple[list[nn.Module], Any]]) -> tuple[list[nn.Module], Any]:
    """Make the optimizer with the learning rates and weight decays that Megatron's scheduler sets in the groups."""
    chunks, optimizer = make(case)
    make_scheduler(optimizer).step(1)
    return chunks, optimizer


def step(case: Case, chunks: list[nn.Module], optimizer: Any, number: int) -> Any:
    zero(chunks, optimizer)
    run_step(case, chunks, number)
    return optimizer.step()


def zero(chunks: list[nn.Module], optimizer: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def close(ours: list[nn.Module], theirs: list[nn.Module], case: Case) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        expected = whole_weights(reference)
        for name, value in whole_weights(mine).items():
            torch.testing.assert_close(
                value, expected[name], rtol=2e-4, atol=2e-5, msg=lambda m, case=case: f"{case}: {m}"
            )


def _stop_as_megatron(rank: int, cases: list[Case], value: float) -> None:
    for case in cases:
        with megatron(case), poisoned(value) as poison:
            theirs, optimizer = scheduled(case, make_reference)
            theirs[0].ddp_config.check_for_nan_in_grad = True
            step(case, theirs, optimizer, 0)
            poison.armed = True
            if rank == ODD:
                with pytest.raises(RuntimeError, match=r"Rank 1.*local grad norm"):
                    step(case, theirs, optimizer, 1)
                theirs[0].ddp_config.check_for_nan_in_grad = False  # the others wait for the data that it has not sent
                theirs[0].finish_grad_sync()
            else:
                zero(theirs, optimizer)
                run_step(case, theirs, 1)
            poison.armed = False
            step(case, theirs, optimizer, 2)

            ours, optimizer = scheduled(case, make_ours)
            step(case, ours, optimizer, 0)
            with pytest.raises(ValueError, match="force_all_reduce=True is not supported"):
                ours[0].config.finalize_model_grads_func(ours, force_all_reduce=True)
            before = whole_weights(ours[0])
            poison.armed = True
            with pytest.raises(RuntimeError, match="not finite, and no parameter has been updated") as raised:
                step(case, ours, optimizer, 1)
            poison.armed = False
            text = str(raised.value)
            assert f"rank {ODD}: 'module.decoder.layers.0.{SPOILT[False]}' (unit " in text, text
            assert text.count("rank ") == 1, text
            after = whole_weights(ours[0])
            assert all(torch.equal(before[name], after[name]) for name in before), case
            step(case, ours, optimizer, 2)  # the remedy, which begins with zero_grad_buffer()
            close(ours, theirs, case)


def test_a_nan_stops_every_rank_before_the_step_and_is_told_by_rank_and_parameter() -> None:
    cases = [DATA, DATA.but(accumulation="full"), DATA.but(zero3_size=1)]
    run_ranks(_stop_as_megatron, cases, math.nan, world_size=4)


def test_so_does_an_infinity() -> None:
    run_ranks(_stop_as_megatron, [DATA], math.inf, world_size=2)


def _stop_all(rank: int, case: Case, whole: bool) -> None:
    with megatron(case), poisoned(whole=whole) as poison:
        ours, optimizer = make_ours(case)
        poison.armed = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"rank {ODD}: .*{SPOILT[whole]}.*zero_grad_buffer"):
                step(case, ours, optimizer, 0)
        poison.armed = False
        assert step(case, ours, optimizer, 0)[0]


def test_ranks_of_other_stages_and_tensor_ranks_stop_too() -> None:
    run_ranks(_stop_all, DATA.but(pp=2), False, world_size=4)
    # Parameters that all tensor ranks hold count in the norm of the first one only.
    run_ranks(_stop_all, DATA.but(tp=2, zero3_size=1), True, world_size=4)


@on_ranks(world_size=2)
def test_a_dynamic_loss_scale_skips_a_constant_one_stops_and_the_check_can_be_turned_off(rank: int) -> None:
    case = DATA.but(dtype="float16")
    with megatron(case), poisoned() as poison:
        ours, optimizer = make_ours(case)
        assert all(handle.inspector is None for handle in get_state(ours[0]).handles)
        poison.armed = True
        assert step(case, ours, optimizer, 0) == (False, None, None)
        poison.armed = False
    constant = lambda case: dataclasses.replace(optimizer_config(case), loss_scale=8.0)  # noqa: E731
    with megatron(DATA), poisoned() as poison, mock.patch.object(megatron_ranks, "optimizer_config", constant):
        ours, optimizer = make_ours(DATA)
        poison.armed = True
        with pytest.raises(RuntimeError, match=rf"rank {ODD}: "):
            step(DATA, ours, optimizer, 0)
    with megatron(DATA), poisoned() as poison:
        config = make_config(DATA)
        ours = layerzero.megatron.wrap(
            megatron_ranks.make_chunks(DATA, config), config, zero3_size=2, check_for_nan_in_grad=False
        )
        optimizer = layerzero.megatron.ShardedMegatronOptimizer(ours, optimizer_config(DATA))
        poison.armed = True
        succeeded, norm, _ = step(DATA, ours, optimizer, 0)  # as in Megatron without the check
        assert succeeded and math.isnan(norm)
