"""layerzero.megatron with context parallelism and mixtures of experts, compared with Megatron's own classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import layerzero.megatron
from layerzero.engine.hooks import get_state
from layerzero.megatron.model_checks import replicas_agree
from layerzero.megatron.parallel_groups import _layout_error
from tests.support.megatron_parallel import SequenceParallelNorm
from tests.support.megatron_ranks import (
    Case,
    Run,
    assert_same,
    make_chunks,
    make_config,
    make_ours,
    make_reference,
    megatron,
    run,
)
from tests.support.ranks import on_ranks, run_ranks


def assert_equal_but_for_rounding(ours: Run, theirs: Run, case: Case) -> None:
    # SGD moves weights by 1e-4, Adam by 1e-2, even if gradients are only rounding noise, as those of key biases.
    close = {"rtol": 1e-5, "atol": 1e-7 if case.optimizer == "sgd" else 2e-5} if case.dtype == "float32" else None
    assert_same(ours, theirs, case, close=close)


# Context parallelism

CONTEXT = Case(cp=2, layers=2, optimizer="sgd")


def of_whole_batches(case: Case, result: Run) -> Run:
    """Average the losses over replicas, by step and micro-batch, so that they are equal in any layout."""
    from megatron.core import parallel_state  # noqa: PLC0415

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = {
        (index // case.micro_batches, index % case.micro_batches * replicas + replica): loss
        for index, loss in enumerate(result.losses)
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    together = {key: loss for losses in gathered for key, loss in losses.items()}
    assert len(together) == case.steps * case.micro_batches * replicas
    return result._replace(losses=[together[key] for key in sorted(together)])


def _train_whole_sequences(rank: int, folder: str, cases: list[Case]) -> None:
    """Train with Megatron without context parallelism on the same data: more replicas, fewer micro-batches each."""
    wholes = [case.but(cp=1, micro_batches=case.micro_batches // case.cp) for case in cases]
    with megatron(wholes[0]):
        for index, whole in enumerate(wholes):
            result = of_whole_batches(whole, run(whole, make_reference))
            torch.save(tuple(result), Path(folder) / f"{index}-{rank}")


def _train_pieces(rank: int, folder: str, cases: list[Case]) -> None:
    with megatron(cases[0]):
        for index, case in enumerate(cases):
            theirs, ours = run(case, make_reference), run(case, make_ours)
            assert_equal_but_for_rounding(ours, theirs, case)
            # In both layouts this rank has the same stage and tensor rank.
            whole = Run(*torch.load(Path(folder) / f"{index}-{rank}", weights_only=True))
            assert_equal_but_for_rounding(of_whole_batches(case, ours), whole, case)


def compare_with_whole_sequences(folder: Path, *cases: Case) -> None:
    run_ranks(_train_whole_sequences, str(folder), cases)
    run_ranks(_train_pieces, str(folder), cases)


def test_context_parallel(tmp_path: Path) -> None:
    compare_with_whole_sequences(
        tmp_path,
        CONTEXT,
        CONTEXT.but(per_token=True, zero3_size=4, accumulation="full", micro_batches=2),
        CONTEXT.but(counted=True, rope=True, optimizer="adam", distributed=True, zero3_size=4, micro_batches=2),
    )


def test_context_parallel_stages(tmp_path: Path) -> None:
    stages = CONTEXT.but(pp=2)
    adam = stages.but(per_token=True, micro_batches=2, accumulation="full", tied=False, optimizer="adam")
    compare_with_whole_sequences(tmp_path, stages, adam)


def test_context_parallel_beside_tensor_parallel(tmp_path: Path) -> None:
    compare_with_whole_sequences(tmp_path, CONTEXT.but(tp=2, per_token=True))


# Mixtures of experts


def experts(**settings: Any) -> tuple[tuple[str, Any], ...]:
    mixture = {
        "num_moe_experts": 8,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_aux_loss_coeff": 0.5,  # of the same magnitude as the gradients of the loss
        "moe_ffn_hidden_size": 16,
        "moe_token_dispatcher_type": "allgather",
        "add_bias_linear": False,  # Megatron's experts add a bias in place to a tensor that autograd has saved
    }
    return tuple({**mixture, **settings}.items())


MIXTURE = Case(layers=2, optimizer="sgd", micro_batches=2, settings=experts())


@contextlib.contextmanager
def counted_tokens() -> Iterator[list[Tensor]]:
    """Record the tokens that reach each expert of this rank: one tensor, [experts], per forward of a layer."""
    from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: PLC0415

    counts: list[Tensor] = []
    forward = SequentialMLP.forward

    def counting(self: Any, states: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> Any:
        counts.append(tokens_per_expert.clone())
        return forward(self, states, tokens_per_expert, probabilities)

    with mock.patch.object(SequentialMLP, "forward", counting):
        yield counts


def _mixtures(rank: int, cases: list[Case]) -> None:
    with megatron(cases[0]), SequenceParallelNorm.used():
        for case in cases:
            theirs, ours = run(case, make_reference), run(case, make_ours)
            assert_equal_but_for_rounding(ours, theirs, case)


def test_experts() -> None:
    alltoall = experts(moe_token_dispatcher_type="alltoall", moe_router_topk=2, moe_shared_expert_intermediate_size=16)
    again = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    cases = [
        MIXTURE,
        MIXTURE.but(zero3_size=4, accumulation="full", settings=alltoall),
        MIXTURE.but(
            zero3_size=4, per_token=True, optimizer="adam", distributed=True, settings=experts(moe_z_loss_coeff=0.1)
        ),
        MIXTURE.but(accumulation="full", settings=experts(moe_router_load_balancing_type="global_aux_loss", **again)),
    ]
    run_ranks(_mixtures, cases)


def test_experts_of_stages() -> None:
    stages = MIXTURE.but(pp=2)
    run_ranks(_mixtures, [stages, stages.but(accumulation="full", tied=False, optimizer="adam", micro_batches=4)])


def test_experts_beside_tensor_parallel() -> None:
    run_ranks(_mixtures, [MIXTURE.but(tp=2, sequence_parallel=True)])


def test_experts_with_context_parallel(tmp_path: Path) -> None:
    compare_with_whole_sequences(tmp_path, CONTEXT.but(settings=experts()))
    # Megatron scales the auxiliary loss by the tokens of the rank here, not by those of the sequence
    run_ranks(_mixtures, [CONTEXT.but(per_token=True, zero3_size=4, settings=experts())])


def _starves(rank: int, cases: list[Case]) -> None:
    with megatron(cases[0]):
        for case in cases:
            theirs = run(case, make_reference)
            with counted_tokens() as counts:
                ours = run(case, make_ours)
            assert_equal_but_for_rounding(ours, theirs, case)
            own = torch.stack(counts).view(case.steps, case.micro_batches, case.layers, -1).sum(1)
            everywhere = own.clone()  # [steps, layers, experts]
            dist.all_reduce(everywhere)
            assert ((own == 0) & (everywhere > 0)).any(), "no expert that only other ranks reach"
            assert (everywhere == 0).any(), "no expert that no rank reaches"


def test_experts_that_no_token_reaches() -> None:
    many = MIXTURE.but(settings=experts(num_moe_experts=32, moe_aux_loss_coeff=0.01))
    run_ranks(_starves, [many, many.but(zero3_size=4, accumulation="full", optimizer="adam")])


def test_experts_under_a_loss_scale() -> None:
    half = MIXTURE.but(dtype="float16", overflow_at=1, settings=experts(moe_router_dtype="fp32"))
    run_ranks(_mixtures, [half])
    run_ranks(_mixtures, [half.but(pp=2, accumulation="full", per_token=True)])


# Expert parallelism


def expert_parallel(size: int, **settings: Any) -> tuple[tuple[str, Any], ...]:
    return experts(expert_model_parallel_size=size, moe_token_dispatcher_type="alltoall", **settings)


APART = MIXTURE.but(settings=expert_parallel(2))


def test_experts_apart() -> None:
    shared = expert_parallel(2, moe_router_topk=2, moe_shared_expert_intermediate_size=16)
    run_ranks(
        _mixtures,
        [
            APART,
            APART.but(zero3_size=4, accumulation="full", optimizer="adam", distributed=True),
            APART.but(zero3_size=1, per_token=True, settings=shared),
            APART.but(zero3_size=4, settings=experts(expert_model_parallel_size=2)),
        ],
    )


def test_experts_each_on_one_rank() -> None:
    each = APART.but(settings=expert_parallel(4))
    run_ranks(_mixtures, [each, each.but(zero3_size=1, accumulation="full"), each.but(zero3_size=4, optimizer="adam")])


def test_experts_apart_of_stages_beside_tensor_parallel() -> None:
    run_ranks(_mixtures, [APART.but(pp=2), APART.but(pp=2, zero3_size=1, tied=False, optimizer="adam")])
    gathering = experts(expert_model_parallel_size=2)  # the other dispatcher needs uneven gathers, which gloo lacks
    run_ranks(_mixtures, [APART.but(tp=2, sequence_parallel=True, settings=gathering)])


def test_experts_apart_under_a_loss_scale() -> None:
    half = APART.but(dtype="float16", overflow_at=1, settings=expert_parallel(2, moe_router_dtype="fp32"))
    run_ranks(_mixtures, [half, half.but(accumulation="full", per_token=True)])


def _own_sizes(rank: int, cases: list[Case]) -> None:
    """Compare with Megatron, and count the ranks over which the handles of experts and the others are sharded."""
    with megatron(cases[0]):
        for case in cases:
            theirs, (chunks, optimizer) = run(case, make_reference), make_ours(case)
            ours = run(case, lambda _, made=(chunks, optimizer): made)  # type: ignore[misc]
            assert_equal_but_for_rounding(ours, theirs, case)
            experts, others = set(), set()
            for handle in (handle for chunk in chunks for handle in get_state(chunk).handles):
                inside = [".mlp.experts." in member.name for member in handle.members]
                assert all(inside) or not any(inside)
                (experts if inside[0] else others).add(handle.mesh_info.zero3_size)
            assert (others, experts) == ({case.zero3_size}, {case.expert_zero3_size}), case
            assert replicas_agree(chunks)


def test_experts_with_a_zero3_size_of_their_own() -> None:
    full = {"accumulation": "full", "optimizer": "adam", "per_token": True}
    nodes = APART.but(zero3_size=4, expert_zero3_size=1)  # 2 nodes of 4 ranks; 4 ranks hold the same experts
    run_ranks(_own_sizes, [nodes, nodes.but(expert_zero3_size=2, **full), nodes.but(expert_zero3_size=4)], world_size=8)
    run_ranks(_own_sizes, [nodes.but(pp=2), nodes.but(pp=2, zero3_size=1, expert_zero3_size=2, **full)], world_size=8)
    common = MIXTURE.but(zero3_size=2, expert_zero3_size=4)  # without expert parallelism
    run_ranks(_own_sizes, [common, common.but(expert_zero3_size=1, **full), common.but(zero3_size=1)])
    run_ranks(_own_sizes, [common.but(pp=2, expert_zero3_size=1)])


@on_ranks()
def test_experts_apart_in_megatrons_loop(rank: int) -> None:
    case = APART.but(steps=1)
    with megatron(case):
        chunks, optimizer = make_ours(case)
        assert {group["is_expert_parallel"] for group in optimizer.param_groups} == {False, True}
        assert replicas_agree(chunks)
        experts = [handle for handle in get_state(chunks[0]).handles if handle.mesh_info.data_parallel == 2]
        assert len(experts) == case.layers
        if rank == 2:
            experts[0].weights.zero3_shard.view(torch.int32)[0] ^= 1
        assert not replicas_agree(chunks)
        with pytest.raises(
            ValueError,
            match=r"is neither a multiple nor a divisor of expert_model_parallel_size=4.*Use one of \[1, 2, 4, 12\]",
        ):
            raise _layout_error(3, range(12), range(0, 12, 4)) or AssertionError
        with pytest.raises(
            ValueError, match=r"expert_zero3_size=2 does not divide the 3 .*experts.*Use one of \[1, 3\]"
        ):
            raise _layout_error(3, range(12), range(0, 12, 4), 2) or AssertionError
        with pytest.raises(ValueError, match=r"ranks disagree: expert_zero3_size is "):
            layerzero.megatron.process_groups(2, 1 if rank else 2)
        config = make_config(case)
        models = make_chunks(case, config)
        config.gradient_accumulation_fusion = True
        with pytest.raises(ValueError, match="gradient_accumulation_fusion adds to full gradients"):
            layerzero.megatron.wrap(models, config, zero3_size=1, expert_zero3_size=2)


def _refuses(rank: int, settings: dict[str, int], match: str) -> None:
    case = MIXTURE.but(tp=2, sequence_parallel=True, settings=experts(**settings))
    with megatron(case), SequenceParallelNorm.used(), pytest.raises(ValueError, match=match):
        make_ours(case)


def test_experts_with_other_data_parallel_ranks_are_refused() -> None:
    run_ranks(_refuses, {"expert_tensor_parallel_size": 1}, r"Use 2, as tensor_model_parallel_size")
