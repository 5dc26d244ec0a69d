"""Collectives, memory and checkpoints of layerzero.megatron under Megatron's pipeline schedules."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
import layerzero.megatron
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import get_state
from tests.support.megatron_ranks import (
    HIDDEN,
    MICRO_BATCH,
    SEQUENCE,
    Case,
    assert_same,
    make_ours,
    make_reference,
    make_scheduler,
    megatron,
    micro_batch,
    optimizer_config,
    run,
    run_step,
    train,
    whole_weights,
)
from tests.support.ranks import on_ranks, run_ranks

PIPELINE = Case(pp=2, zero3_size=2)
INTERLEAVED = Case(pp=2, chunks=2, zero3_size=2)


def _counts(rank: int, cases: list[Case]) -> None:
    for case in cases:
        with megatron(case):
            chunks, optimizer = make_ours(case)
            scheduler = make_scheduler(optimizer)
            train(case, chunks, optimizer, scheduler, [0])
            for chunk in chunks:
                layerzero.traffic(chunk, reset=True)
            train(case, chunks, optimizer, scheduler, [1])
            for chunk in chunks:
                handles = len(get_state(chunk).handles)
                calls = layerzero.traffic(chunk).calls
                replicas = 4 // case.pp // case.zero3_size
                hop2s = case.micro_batches if case.accumulation == "local" else 1
                assert calls.get("hop2", 0) == (handles * hop2s if replicas > 1 else 0), (case, calls)
                assert calls.get("refresh", 0) == (handles if replicas > 1 else 0), (case, calls)
                if case.zero3_size == 1:
                    assert set(calls) <= {"hop2", "refresh", "metadata"}, (case, calls)
                # Full gradients wait, without any collective, for the backward that reduces.
                backwards = 1 if case.accumulation == "full" else case.micro_batches
                assert calls.get("hop1", 0) == (handles * backwards if case.zero3_size > 1 else 0), (case, calls)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", ["sharded", "full", "local"])
def test_each_handle_is_refreshed_once_and_reduced_as_its_mode_says(accumulation: str) -> None:
    pipelines = [
        case.but(accumulation=accumulation, zero3_size=size, align=align)
        for case in (PIPELINE, INTERLEAVED)
        for size, align in ((1, False), (2, False), (1, True))
    ]
    run_ranks(_counts, pipelines, world_size=4)
    run_ranks(_counts, [Case(zero3_size=2, accumulation=accumulation)], world_size=4)


def _holds(rank: int, cases: list[Case]) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: PLC0415

    for case in cases:
        with megatron(case):
            chunks, _ = make_ours(case)
            most = [0]

            def gathered(chunks: list[nn.Module] = chunks) -> int:
                return sum(
                    any(handle.gathered_bytes for handle in unit.handles)
                    for chunk in chunks
                    for unit in get_state(chunk).units
                )

            gather, communicate = Handle.gather, P2PCommunicator._communicate

            def count(handle: Handle, most: list[int] = most, gathered: Any = gathered, gather: Any = gather) -> None:
                gather(handle)
                most[0] = max(most[0], gathered())

            def nothing(self: Any, gathered: Any = gathered, send: Any = communicate, **kwargs: Any) -> Any:
                assert gathered() == 0, "gathered while the stage waits for another one"
                return send(self, **kwargs)

            with (
                mock.patch.object(Handle, "gather", count),
                mock.patch.object(P2PCommunicator, "_communicate", nothing),
            ):
                run_step(case, chunks, 0)
                run_step(case, chunks, 1)
            # The root, the computing unit and the prefetched one. In a backward also the first unit of the chunk, whose
            # input is not the output of a gathered unit, and the embedding or the output layer.
            assert 1 < most[0] <= 5, (case, most)
            units = max(len(get_state(chunk).units) for chunk in chunks)
            assert units > 5, "the bound must mean something"


def test_few_units_are_gathered_at_once_and_none_while_a_stage_waits() -> None:
    run_ranks(
        _holds,
        [PIPELINE.but(layers=12), INTERLEAVED.but(layers=24, micro_batches=2)],
        world_size=4,
        shared_memory="off",
    )


def _resumes(rank: int, folder: str, cases: list[Case]) -> None:
    for index, case in enumerate(cases):
        path = Path(folder) / str(index)
        with megatron(case):
            chunks, optimizer = make_ours(case)
            scheduler = make_scheduler(optimizer)
            train(case, chunks, optimizer, scheduler, range(3))
            layerzero.megatron.save(path, chunks, optimizer, {"scheduler": scheduler.state_dict(), "step": 3})
            expected = train(case, chunks, optimizer, scheduler, range(3, 5))

            resumed, optimizer = make_ours(case)
            scheduler = make_scheduler(optimizer)
            with pytest.raises(FileNotFoundError, match="contains no complete checkpoint"):
                layerzero.megatron.load(path / "elsewhere", resumed, optimizer)
            extra = layerzero.megatron.load(path, resumed, optimizer)
            scheduler.load_state_dict(extra["scheduler"])
            assert train(case, resumed, optimizer, scheduler, range(extra["step"], 5)) == expected
            for one, other in zip(chunks, resumed, strict=True):
                weights = whole_weights(other)
                for name, value in whole_weights(one).items():
                    assert torch.equal(value, weights[name]), name
            with pytest.raises(FileExistsError, match="not overwritten"):
                layerzero.megatron.save(path, resumed, optimizer)
            dist.barrier()
            layerzero.megatron.save(path.with_name(f"{index} again"), resumed, optimizer, {"step": 5})
            assert layerzero.megatron.load(path.with_name(f"{index} again"), chunks, None) == {"step": 5}


def test_a_checkpoint_resumes_exactly_on_the_same_layout(tmp_path: Path) -> None:
    fp16 = PIPELINE.but(dtype="float16", overflow_at=2)
    muon = PIPELINE.but(optimizer="muon")
    run_ranks(_resumes, str(tmp_path), [fp16, INTERLEAVED.but(zero3_size=1), muon], world_size=4)


@on_ranks(world_size=4)
def test_a_refresh_left_to_the_schedule_comes_before_the_next_forward(rank: int) -> None:
    case = INTERLEAVED.but(align=True, zero3_size=1)
    with megatron(case):
        chunks, optimizer = make_ours(case)
        for step in range(2):
            optimizer.zero_grad()
            run_step(case, chunks, step)
            # A graph of the current weights, which the step makes stale.
            tokens, labels, _ = micro_batch(case, 0, 0)
            stage = torch.randn(SEQUENCE, MICRO_BATCH, HIDDEN, requires_grad=True)
            chunks[1].module.set_input_tensor(stage)
            stale = chunks[1](tokens, torch.arange(SEQUENCE).expand_as(tokens), None, labels=labels).sum()
            for chunk in chunks:
                layerzero.traffic(chunk, reset=True)
            optimizer.step()
            handles = [len(get_state(chunk).handles) for chunk in chunks]
            refreshed = [layerzero.traffic(chunk).calls.get("refresh", 0) for chunk in chunks]
            assert refreshed == [handles[0], 0]  # the schedule refreshes the second chunk
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                stale.backward()
            optimizer.zero_grad()
            if step:
                for chunk, launch in zip(chunks, chunks[0].config.param_sync_func, strict=True):
                    launch(chunk.parameters())  # as the schedule does
                assert layerzero.traffic(chunks[1]).calls["refresh"] == handles[1]
            before = [run_step(case, chunks, 7, forward_only=True), run_step(case, chunks, 7, forward_only=True)]
            assert before[0] == before[1]
            refreshed = [layerzero.traffic(chunk).calls.get("refresh", 0) for chunk in chunks]
            assert refreshed == handles  # also where no schedule calls param_sync_func
            for chunk in chunks:
                layerzero.refresh(chunk)
            assert run_step(case, chunks, 7, forward_only=True) == before[0]  # the forward used the new weights


@contextlib.contextmanager
def fused_kernel() -> Iterator[mock.Mock]:
    """Stand-in for the CUDA kernel that adds a weight's gradient to ``main_grad``."""
    from megatron.core.tensor_parallel import layers  # noqa: PLC0415

    def accumulate(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t().float() @ inputs.float())

    kernel = mock.Mock()
    kernel.wgrad_gemm_accum_fp32.side_effect = accumulate
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield kernel


def _fuses(rank: int, cases: list[Case]) -> None:
    for case in cases:
        with megatron(case):
            theirs = run(case, make_reference)
            fused = case.but(settings=(("gradient_accumulation_fusion", True),))
            with fused_kernel() as kernel:
                ours = run(fused, make_ours)
            assert kernel.wgrad_gemm_accum_fp32.called
        assert_same(ours, theirs, case)


def test_gradient_accumulation_fusion_may_stay_on() -> None:
    run_ranks(_fuses, [PIPELINE.but(accumulation="full", steps=3), INTERLEAVED.but(zero3_size=1, steps=3)])
    run_ranks(_fuses, [Case(accumulation="full", steps=3)])


@on_ranks(world_size=4)
def test_functions_of_megatron_that_need_whole_parameters_raise_and_full_tensors_are_loaded(rank: int) -> None:
    case = PIPELINE
    with megatron(case):
        chunks, _ = make_ours(case)
        from megatron.core.distributed import finalize_model_grads  # noqa: PLC0415

        # If a training script could set this after wrap, tied embeddings would not be summed.
        chunks[0].config.finalize_model_grads_func = finalize_model_grads
        with pytest.raises(AttributeError, match="ddp_config"):
            run_step(case, chunks, 0)
        with pytest.raises(NotImplementedError, match=r"layerzero.megatron.save"):
            chunks[0].state_dict_for_save_checkpoint()
        state = layerzero.full_state_dict(chunks[0], rank0_only=False)
        doubled = {name: value * 2 if isinstance(value, Tensor) else value for name, value in state.items()}
        chunks[0].load_state_dict(doubled)
        for name, value in layerzero.full_state_dict(chunks[0], rank0_only=False).items():
            assert not isinstance(value, Tensor) or torch.equal(value, doubled[name]), name


def _groups(rank: int) -> tuple[list[int], list[int]]:
    with megatron(Case(tp=2, cp=2)):
        groups = layerzero.megatron.process_groups(2)
        return (
            torch.distributed.get_process_group_ranks(groups.zero1),
            torch.distributed.get_process_group_ranks(groups.zero3),
        )


def test_context_parallel_ranks_are_data_parallel_ones() -> None:
    evens, odds = [0, 2, 4, 6], [1, 3, 5, 7]
    for rank, (zero1, zero3) in enumerate(run_ranks(_groups, world_size=8)):
        whole = odds if rank % 2 else evens
        assert zero1 == whole
        assert zero3 == (whole[:2] if rank < 4 else whole[2:])


@on_ranks(world_size=4)
def test_overrides_see_names_and_true_shapes(rank: int) -> None:
    case = Case(tp=2, zero3_size=2, tied=False)
    with megatron(case):
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate  # noqa: PLC0415

        chunks, _ = make_ours(case)
        seen: dict[str, tuple[int, ...]] = {}

        def spared(parameter: nn.Parameter, name: str) -> bool:
            seen[name] = tuple(parameter.shape)
            return parameter.ndim == 1

        overrides = {
            ParamKey(with_name_predicate=ParamWithNamePredicate("spared", spared)): {"wd_mult": 0.0},
            ParamKey(name="*output_layer.weight"): {"lr_mult": 0.1},
        }
        groups = layerzero.megatron.ShardedMegatronOptimizer(
            chunks, optimizer_config(case), config_overrides=overrides
        ).param_groups
        assert seen["module.decoder.layers.0.mlp.linear_fc1.weight"] == (32, 16)  # this tensor rank's half
        by_settings = {(group["wd_mult"], group["lr_mult"]): len(group["params"]) for group in groups}
        vectors = sum(len(shape) == 1 for shape in seen.values())
        assert by_settings == {(0.0, 1.0): vectors, (1.0, 1.0): len(seen) - vectors - 1, (1.0, 0.1): 1}


@on_ranks(world_size=4)
def test_an_overflow_on_one_rank_is_heeded_by_all_ranks_of_the_model(rank: int) -> None:
    case = Case(tp=2, pp=2, zero3_size=1, dtype="float16")
    for culprit in (0, 3):
        with megatron(case):
            chunks, optimizer = make_ours(case)
            before, scale = whole_weights(chunks[0]), float(optimizer.get_loss_scale())
            run_step(case, chunks, 0)
            if rank == culprit:
                next(rows for rows in chunks[0].gradient_rows().values() if rows.numel()).flatten()[0] = float("inf")
            assert optimizer.step() == (False, None, None)
            assert float(optimizer.get_loss_scale()) == scale / 2
            for name, value in whole_weights(chunks[0]).items():
                assert torch.equal(value, before[name]), name
            optimizer.zero_grad()
            run_step(case, chunks, 1)
            updated, norm, _ = optimizer.step()
            assert updated and norm is not None and 0 < norm < 100


@on_ranks(world_size=4)
def test_ranks_in_different_numbers_of_groups_do_not_wait_for_each_other(rank: int) -> None:
    with megatron(PIPELINE):
        layerzero.megatron.process_groups(1)
    with megatron(Case()):
        assert layerzero.megatron.process_groups(2).zero3.size() == 2


def test_megatron_is_imported_when_it_is_needed() -> None:
    code = "import sys, layerzero, layerzero.megatron; sys.exit('megatron' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
