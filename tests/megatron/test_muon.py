"""Megatron's Muon inside layerzero.megatron, compared with Megatron's own wrapper and optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch.optim import Optimizer

from layerzero.engine.hooks import get_state
from layerzero.megatron import ShardedMegatronOptimizer
from layerzero.megatron.muon import muon_and_adamw, split_groups
from layerzero.megatron.versions import release
from tests.megatron.test_parallel import APART, MIXTURE, assert_equal_but_for_rounding
from tests.support.megatron_parallel import SequenceParallelNorm
from tests.support.megatron_ranks import Case, make_ours, make_reference, megatron, optimizer_config, run
from tests.support.ranks import on_ranks, run_ranks

MUON = Case(optimizer="muon", layers=2)


def _trains(rank: int, cases: list[Case]) -> None:
    with megatron(cases[0]), SequenceParallelNorm.used():
        for case in cases:
            theirs, (chunks, optimizer) = run(case, make_reference), make_ours(case)
            ours = run(case, lambda _, made=(chunks, optimizer): made)  # type: ignore[misc]
            assert_equal_but_for_rounding(ours, theirs, case)
            for sharded in optimizer.sharded:
                names = [name for group in sharded.param_groups for name in sharded.parameter_names(group)]
                owned = {name for name in names if sharded.owned(name) is not None}
                assert any("linear_qkv.weight" in name for name in owned), owned
                others = ("word_embeddings", "norm", "bias", "output_layer")
                assert not any(each in name for name in owned for each in others), owned


def test_muon() -> None:
    run_ranks(_trains, [MUON, MUON.but(zero3_size=4, accumulation="full"), MUON.but(zero3_size=1, dtype="bfloat16")])
    run_ranks(_trains, [MUON.but(pp=2), MUON.but(pp=2, zero3_size=1, tied=False)])
    run_ranks(_trains, [MUON.but(pp=2, chunks=2, layers=4, align=True)])
    run_ranks(_trains, [MUON.but(tp=2, sequence_parallel=True)])


def test_muon_with_experts() -> None:
    apart = APART.but(optimizer="muon", zero3_size=4)
    run_ranks(_trains, [apart, apart.but(expert_zero3_size=1)])
    run_ranks(_trains, [MIXTURE.but(optimizer="muon", expert_zero3_size=4)])
    run_ranks(_trains, [apart.but(pp=2, zero3_size=2, accumulation="full")])


def _trains_from_groups(rank: int) -> None:
    adam = MUON.but(optimizer="adam")
    with megatron(MUON), SequenceParallelNorm.used():
        expected, (chunks, _) = run(MUON, make_ours), make_ours(adam)
        muon = replace(optimizer_config(MUON), optimizer="adam")

        def make(groups: list[dict[str, Any]]) -> Optimizer:
            return muon_and_adamw(chunks[0], split_groups(groups), muon)

        optimizer = ShardedMegatronOptimizer(chunks, muon, make_optimizer=make)
        found = run(MUON, lambda _: (chunks, optimizer))
        assert found.losses == expected.losses
        assert any(optimizer.sharded[0].owned(name) is not None for name in get_state(chunks[0]).members)


def test_an_optimizer_of_the_user_may_need_full_parameters() -> None:
    run_ranks(_trains_from_groups)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True, "bf16": False}, "with fp16, as in Megatron. Use bf16"),
    ({"muon_tp_mode": "distributed"}, "muon_tp_mode='distributed' with tensor parallelism. Use 'blockwise'"),
    ({"optimizer": "adaptive_muon"}, "optimizer='adaptive_muon' is not supported. Use 'adam', 'sgd' or 'muon'"),
]


@on_ranks()
def test_settings_that_muon_does_not_have_here_are_refused(rank: int) -> None:
    case = MUON.but(tp=2, optimizer="adam")
    with megatron(case):
        chunks, _ = make_ours(case)
        muon = replace(optimizer_config(case), optimizer="muon")
        refused = [*REFUSED, ({"muon_scalar_optimizer": "lion"}, "Use 'adam'")] if release() >= (0, 19) else REFUSED
        for changes, match in refused:
            with pytest.raises(ValueError, match=match):
                ShardedMegatronOptimizer(chunks, replace(muon, **changes))
        name = "muon" if release() < (0, 19) else "emerging_optimizers"
        missing = mock.patch(f"megatron.core.optimizer.{name}.HAVE_EMERGING_OPTIMIZERS", new=False)
        with missing, pytest.raises(ImportError, match="needs the package emerging_optimizers"):
            ShardedMegatronOptimizer(chunks, muon)
        chunks, optimizer = make_ours(MUON.but(tp=2))
        with pytest.raises(NotImplementedError, match="distrib_optim_sharding_type is not supported with Muon"):
            optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fully_reshardable"})
