"""Train a small GPT of megatron-core with layerzero, in Megatron's own 1F1B schedule.

    torchrun --nproc-per-node 4 examples/train_megatron.py

runs two pipeline stages of two data-parallel ranks each. It needs megatron-core and, without GPUs, the replacements of
CUDA in tests/support/megatron_cpu.py. All layerzero code is in `build`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stdlib_text import WindowSampler, load_corpus
from torch import Tensor, nn

import layerzero
import layerzero.megatron

MIB = 2**20


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tensor", type=int, default=1, help="tensor-parallel ranks")
    add("--pipeline", type=int, default=2, help="pipeline stages")
    add("--zero3-size", type=int, default=2, help="data-parallel ranks that share the compute weights")
    add("--accumulation", choices=["sharded", "full", "local"], default="sharded", help="where gradients add up")
    add("--micro-batches", type=int, default=4, metavar="A", help="per optimizer step")
    add("--batch-size", type=int, default=4, help="sequences per rank and micro-batch")
    add("--seq-len", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=4, help="transformer layers, over all stages")
    add("--width", type=int, default=128, help="hidden size")
    add("--steps", type=int, default=60, help="optimizer steps")
    add("--checkpoint", help="folder to save to at the end")
    return parser.parse_args(argv)


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return chunk, optimizer and learning-rate scheduler of this rank."""
    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415
    from megatron.core.optimizer import OptimizerConfig  # noqa: PLC0415
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: PLC0415
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: PLC0415
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    parallel_state.initialize_model_parallel(
        args.tensor, pipeline_model_parallel_size=args.pipeline, create_gloo_process_groups=False
    )
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        batch_p2p_comm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    torch.manual_seed(0)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(0)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=args.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )

    # These replace Megatron's DistributedDataParallel and get_megatron_optimizer.
    chunks = layerzero.megatron.wrap(model, config, zero3_size=args.zero3_size, accumulation=args.accumulation)
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, min_lr=3e-4, weight_decay=0.01, clip_grad=1.0)
    optimizer = layerzero.megatron.ShardedMegatronOptimizer(chunks, settings)
    config.grad_scale_func = optimizer.scale_loss

    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=3e-3,
        min_lr=3e-4,
        lr_warmup_steps=min(10, args.steps // 4),
        lr_decay_steps=args.steps,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return chunks[0], optimizer, scheduler


def forward_step(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    tokens, labels = next(batches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def train(args: argparse.Namespace) -> list[float]:
    """Train; return the loss of each step, on the last pipeline stage."""
    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: PLC0415

    chunk, optimizer, scheduler = build(args)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    sampler = WindowSampler(
        load_corpus(max_bytes=2_000_000).train, args.seq_len, args.batch_size, args.micro_batches, replicas
    )
    device = torch.cuda.current_device()
    speaks = (
        replica == 0
        and parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    schedule = functools.partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        model=chunk,
        num_microbatches=args.micro_batches,
        seq_length=args.seq_len,
        micro_batch_size=args.batch_size,
    )
    losses: list[float] = []
    for step in range(args.steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [sampler.batch(step=step, micro_batch=m, rank=replica) for m in range(args.micro_batches)]
        reduced = schedule(data_iterator=iter([(b.inputs.to(device), b.targets.to(device)) for b in batches]))
        updated, norm, _ = optimizer.step()
        if updated:
            scheduler.step(1)
        losses += [float(sum(entry["loss"] for entry in reduced)) / len(reduced)] if reduced else []
        if speaks and (step % 10 == 0 or step + 1 == args.steps):
            print(f"step {step:4d}  loss {losses[-1]:.3f}  gradient norm {norm:.3f}", flush=True)
    if args.checkpoint:
        layerzero.megatron.save(args.checkpoint, [chunk], optimizer, {"scheduler": scheduler.state_dict()})
    if speaks:
        print(report(chunk, args.steps))
    parallel_state.destroy_model_parallel()
    return losses


def report(chunk: nn.Module, steps: int) -> str:
    memory, traffic = layerzero.memory(chunk).measured, layerzero.traffic(chunk)
    held = ", ".join(f"{kind} {memory[kind] / MIB:.2f}" for kind in ("zero1_shard", "zero3_shard", "optimizer"))
    calls = ", ".join(f"{name} {count / steps:g}" for name, count in sorted(traffic.calls.items()))
    return f"this rank holds, in MiB: {held}\nexchanges per step: {calls}"


def main(argv: list[str] | None = None) -> list[float]:
    args = parse_args(argv)
    place: Any = contextlib.nullcontext()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.support.megatron_cpu import cpu_instead_of_cuda  # noqa: PLC0415

        place = cpu_instead_of_cuda()
    owns_group = not dist.is_initialized()
    if owns_group:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        with place:
            return train(args)
    finally:
        if owns_group:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
