# ruff: noqa: PLC0415 (Megatron is imported where the stand-ins are in place)
"""Tiny GPT in megatron-core's schedules on gloo ranks, trained with layerzero and, for reference, with Megatron."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.megatron_cpu import cpu_instead_of_cuda
from tests.support.megatron_parallel import layer_spec, on_this_rank, sum_over_pieces

if multiprocessing.parent_process() is not None and find_spec("megatron"):
    with cpu_instead_of_cuda():  # import Megatron once before the fork, because it takes seconds on each rank
        pass

SEQUENCE, MICRO_BATCH, VOCABULARY, HIDDEN = 8, 2, 32, 16


@dataclass(frozen=True)
class Case:
    """Settings of one training run.

    Attributes:
        chunks: number of model chunks of a pipeline rank; more than one: interleaved schedule.
        tied: input embedding and output layer share a weight.
        counted: the loss function returns its number of tokens, as Megatron-LM's does; masks then hide the same number
            of tokens on each context-parallel rank.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    zero3_size: int = 2
    expert_zero3_size: int | None = None
    micro_batches: int = 4
    steps: int = 3
    tied: bool = True
    dtype: str = "float32"
    optimizer: str = "adam"
    accumulation: str = "sharded"
    per_token: bool = False
    counted: bool = False
    rope: bool = False
    distributed: bool = False
    align: bool = False
    clip: float = 1.0
    layers: int = 4
    sequence_parallel: bool = False
    overflow_at: int | None = None  # step in which the gradients of one data-parallel rank overflow
    settings: tuple[tuple[str, Any], ...] = ()  # settings of TransformerConfig

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


Make = Callable[["Case"], tuple[list[nn.Module], Any]]


class Run(NamedTuple):
    """Results of a training run on this rank."""

    losses: list[float]  # losses of all micro-batches in order, on the last stage
    steps: list[tuple[bool, float | None, float | None]]  # results of optimizer.step()
    weights: list[dict[str, Tensor]]  # full weights, by chunk
    scales: list[float]


@contextlib.contextmanager
def megatron(case: Case) -> Iterator[None]:
    """Initialize Megatron's process groups for `case`, on the CPU; restore torch at the end."""
    with cpu_instead_of_cuda():
        from megatron.core import parallel_state

        settings = dict(case.settings)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            context_parallel_size=case.cp,
            virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
            expert_model_parallel_size=settings.get("expert_model_parallel_size", 1),
            expert_tensor_parallel_size=settings.get("expert_tensor_parallel_size"),
            create_gloo_process_groups=False,
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


# A tiny GPT and its data


def make_config(case: Case) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, case.dtype)
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        sequence_parallel=case.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        fp16=case.dtype == "float16",
        bf16=case.dtype == "bfloat16",
        batch_p2p_comm=False,
        batch_p2p_sync=False,
        gradient_accumulation_fusion=dict(case.settings).get("gradient_accumulation_fusion", False),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=case.per_token,
        **{key: value for key, value in case.settings if key != "gradient_accumulation_fusion"},
    )


def make_chunks(case: Case, config: Any) -> list[nn.Module]:
    """Return this rank's part of the model, with the same weights in every call."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(7)
    chunks: list[nn.Module] = []
    for chunk in range(case.chunks):
        stage = chunk if case.chunks > 1 else None
        model = GPTModel(
            config,
            layer_spec(config),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope" if case.rope else "learned_absolute",
            vp_stage=stage,
        )
        if config.fp16 or config.bf16:
            model = Float16Module(config, model)
        chunks.append(model)
    return chunks


def micro_batch(case: Case, step: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and loss mask, [MICRO_BATCH, SEQUENCE] each, of micro-batch `number` of a step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
    mask = (torch.rand(MICRO_BATCH, SEQUENCE, generator=generator) < 0.8).float()
    mask[:, 0] = 1.0
    if case.counted:
        mask[:, 1::2] = 1.0 - mask[:, ::2]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask


def forward_step(case: Case, scale: float, batches: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    tokens, labels, mask = next(batches)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    tokens, labels, mask, positions = on_this_rank(tokens, labels, mask, positions)
    return model(tokens, positions, None, labels=labels), functools.partial(_loss, case, mask, scale)


def _loss(case: Case, mask: Tensor, scale: float, output: Tensor) -> Any:
    """Return the loss in the form that Megatron's schedule expects; the reported loss is that of full sequences."""
    total = (output.float() * mask).sum() * scale
    whole, tokens = sum_over_pieces(total, mask.sum())
    if case.per_token or case.counted:
        return total, mask.sum().to(torch.int), {"loss": whole if case.per_token else whole / tokens}
    return total / tokens, {"loss": whole / tokens}


def optimizer_config(case: Case) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer=case.optimizer,
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        sgd_momentum=0.9,
        clip_grad=case.clip,
        fp16=case.dtype == "float16",
        bf16=case.dtype == "bfloat16",
        params_dtype=getattr(torch, case.dtype),
        initial_loss_scale=2.0**12,
        min_loss_scale=1.0,
        loss_scale_window=3,
        hysteresis=1,
        use_distributed_optimizer=case.distributed,
        log_num_zeros_in_grad=True,
        muon_fp32_matmul_prec="highest",  # with less, Newton-Schulz iterations run in bf16, and amplify rounding
    )


def make_scheduler(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


# Training


def make_reference(case: Case) -> tuple[list[nn.Module], Any]:
    """Return chunks and optimizer with Megatron's own data-parallel wrapper."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import get_megatron_optimizer, muon

    config = make_config(case)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=case.distributed
    )
    chunks: list[nn.Module] = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(make_chunks(case, config))
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    if case.optimizer == "muon" and hasattr(muon, "TensorParallelMuon"):  # Megatron-Core 0.16
        get_megatron_optimizer = muon.get_megatron_muon_optimizer
    optimizer = get_megatron_optimizer(optimizer_config(case), chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def make_ours(
    case: Case, *, change: Callable[[Any], nn.Module] | None = None, **settings: Any
) -> tuple[list[nn.Module], Any]:
    """Return sharded chunks and their optimizer.

    Args:
        change: maps the experts of each layer to their replacement.
        settings: arguments of the optimizer.
    """
    import layerzero.megatron

    config = make_config(case)
    modules = make_chunks(case, config)
    layers = [m for chunk in modules for m in chunk.modules() if hasattr(m, "local_expert_indices")]
    for layer in layers if change is not None else ():
        layer.experts = change(layer.experts)
    chunks = layerzero.megatron.wrap(
        modules,
        config,
        zero3_size=case.zero3_size,
        expert_zero3_size=case.expert_zero3_size,
        accumulation=case.accumulation,
        align_grad_reduce=case.align,
        align_param_refresh=case.align,
    )
    optimizer = layerzero.megatron.ShardedMegatronOptimizer(chunks, optimizer_config(case), **settings)
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def run_step(case: Case, chunks: Sequence[nn.Module], step: int, *, forward_only: bool = False) -> list[float]:
    """Run forwards and backwards of one step with Megatron's schedule; return the losses on the last stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    batches = [micro_batch(case, step, index * replicas + replica) for index in range(case.micro_batches)]
    iterators = [iter(batches) for _ in chunks]
    overflows = step == case.overflow_at and replica == replicas - 1
    reduced = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, case, 1e35 if overflows else 1.0),
        data_iterator=iterators if case.chunks > 1 else iterators[0],
        model=list(chunks) if case.chunks > 1 else chunks[0],
        num_microbatches=case.micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=forward_only,
    )
    return [float(entry["loss"]) for entry in reduced]


def train(
    case: Case, chunks: list[nn.Module], optimizer: Any, scheduler: Any, steps: Sequence[int]
) -> tuple[list[float], list[Any], list[float]]:
    """Train; return the losses, the result of each step, and the loss scale after it."""
    losses: list[float] = []
    results, scales = [], []
    for step in steps:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses += run_step(case, chunks, step)
        result = optimizer.step()
        if result[0]:
            scheduler.step(1)
        results.append(result)
        scales.append(float(optimizer.get_loss_scale()))
    return losses, results, scales


def whole_weights(chunk: nn.Module) -> dict[str, Tensor]:
    import layerzero
    from layerzero.megatron import ShardedChunk

    if isinstance(chunk, ShardedChunk) and chunk.groups.expert_zero1 is not None:  # this rank's experts
        state = {name.removeprefix("module."): p.full_tensor() for name, p in chunk.named_parameters()}
    elif isinstance(chunk, ShardedChunk):
        state = layerzero.full_state_dict(chunk, rank0_only=False)
    else:
        state = chunk.module.state_dict()
        for name, parameter in chunk.module.named_parameters():
            if hasattr(parameter, "main_param") and not getattr(parameter, "main_param_sharded", False):
                state[name] = parameter.main_param
    return {
        name.removeprefix("module."): value.detach().clone().float()
        for name, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def run(case: Case, make: Callable[[Case], tuple[list[nn.Module], Any]]) -> Run:
    chunks, optimizer = make(case)
    losses, results, scales = train(case, chunks, optimizer, make_scheduler(optimizer), range(case.steps))
    return Run(losses, results, [whole_weights(chunk) for chunk in chunks], scales)


def assert_same(ours: Run, theirs: Run, case: Case, *, close: dict[str, Any] | None = None) -> None:
    if close is None:
        close = {"rtol": 2e-4, "atol": 2e-5} if case.dtype == "float32" else {"rtol": 5e-3, "atol": 2e-3}
    torch.testing.assert_close(ours.losses, theirs.losses, **close, msg=lambda m: f"losses of {case}: {m}")
    assert ours.scales == theirs.scales
    for step, (mine, reference) in enumerate(zip(ours.steps, theirs.steps, strict=True)):
        assert mine[0] == reference[0], (step, case)
        assert (mine[1] is None) == (reference[1] is None), (step, case)
        if mine[1] is not None:
            assert math.isclose(mine[1], reference[1], rel_tol=close["rtol"]), (step, mine, reference, case)
            # The gradients of key biases are zero except for rounding.
            assert abs(mine[2] - reference[2]) <= case.layers * HIDDEN, (step, mine, reference, case)
    for mine, reference in zip(ours.weights, theirs.weights, strict=True):
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(mine[name], value, **close, msg=lambda m, n=name: f"{n} of {case}: {m}")
