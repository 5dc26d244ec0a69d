"""Train a small GPT on the standard library's source text, sharded with layerzero.

    torchrun --nproc-per-node 4 examples/train_gpt.py

runs four ranks on this machine and treats them as two nodes of two ranks (`--zero3-size 2`). Without a GPU
the program uses gloo on the CPU and needs one to two minutes on two cores. It prints the validation loss before and
after training, memory and traffic of the run, the costs of other sharding schemes for the same model (see
scheme_costs.py), and a sample of text. It needs tqdm. With `--picture FILE`, it draws the losses and the costs. With
`--checkpoints FOLDER` you can stop and restart the program, even with another number of ranks.

To adapt the program, change `build`. One call shards the model, and one call shards each optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig, generate, next_token_loss
from scheme_costs import Cost, scheme_costs
from stdlib_text import IGNORED, Batch, WindowSampler, load_corpus, validation_share
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import layerzero
from layerzero import checkpoint

SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 1},  # 0.1 million parameters, for a quick test
    "small": {"layers": 4, "width": 128, "heads": 2},  # 0.8 million
    "medium": {"layers": 12, "width": 768, "heads": 12},  # 85 million, for a GPU
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DTYPE_HELP = "to compute in; masters stay fp32. auto: fp32 on CPUs, because bf16 is slow on many of them"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--zero3-size", type=int, default=2, help="ranks that shard the compute weights, usually those of a node")
    add("--accumulation", choices=["sharded", "full", "local"], default="sharded", help="where gradients add up")
    add("--micro-batches", type=int, default=2, metavar="A", help="per optimizer step")
    add("--model", choices=list(SIZES), default="small", help="size of the GPT")
    add("--untied", action="store_true", help="give the head a matrix of its own")
    add("--steps", type=int, default=240, help="optimizer steps of the whole run, over which the learning rate decays")
    add("--batch-size", type=int, default=8, help="sequences per rank and micro-batch")
    add("--seq-len", type=int, default=64, help="bytes per sequence")
    add(
        "--optimizer",
        choices=["adamw", "muon"],
        default="adamw",
        help="muon: Muon for the matrices in the blocks, AdamW for all other parameters",
    )
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.1, help="for matrices; vectors have none")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help=DTYPE_HELP)
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if there are any")
    add("--checkpoints", metavar="FOLDER", help="save checkpoints in this folder, and resume from the newest one in it")
    add("--save-every", type=int, default=60, metavar="STEPS", help="and after the last step")
    add(
        "--stop-on",
        nargs="+",
        default=[],
        choices=[each.name for each in signal.Signals],
        metavar="SIGNAL",
        help="save and end when a rank receives SIGTERM, SIGUSR1, ...",
    )
    add("--logdir", metavar="FOLDER", help="write losses, gradient norms and traffic for TensorBoard to this folder")
    add("--validation-windows", type=int, default=128, help="held-out sequences to evaluate")
    add("--seed", type=int, default=0, help="of weights, batches and the sample")
    add("--picture", metavar="FILE", help="draw losses, memory and traffic to this PNG or SVG file (needs matplotlib)")
    add("--no-sample", action="store_true", help="do not generate text at the end")
    args = parser.parse_args(argv)
    if args.stop_on and not args.checkpoints:
        parser.error("--stop-on saves a checkpoint, so it needs a folder: pass --checkpoints FOLDER")
    return args


@dataclass(frozen=True)
class Ranks:
    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class Trainer(NamedTuple):
    model: nn.Module
    optimizers: list[layerzero.ShardedOptimizer]
    schedulers: list[LambdaLR]
    numel: int  # number of parameters of the full model


class Result(NamedTuple):
    first_loss: float  # validation, nats per byte
    last_loss: float


def main(argv: list[str] | None = None) -> Result:
    args = parse_args(argv)
    if args.logdir:
        summary_writer()  # fail early if TensorBoard is missing
    started_here = not dist.is_initialized()
    ranks = start_ranks(args.device)
    if args.dtype == "auto":
        args.dtype = "fp32" if ranks.device.type == "cpu" else "bf16"
    try:
        return run(args, ranks)
    finally:
        if started_here:
            dist.destroy_process_group()


def run(args: argparse.Namespace, ranks: Ranks) -> Result:
    if args.picture and ranks.is_first:
        from run_picture import draw  # noqa: PLC0415 - needs matplotlib

    corpus = load_corpus()
    sampler = WindowSampler(
        corpus.train,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        micro_batches=args.micro_batches,
        ranks=ranks.size,
        seed=args.seed,
    )
    held_out = validation_share(
        corpus.validation,
        windows=args.validation_windows,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        rank=ranks.rank,
        ranks=ranks.size,
    )
    trainer = build(args, ranks)

    first_loss = validate(trainer.model, held_out, ranks)
    layerzero.traffic(trainer.model, reset=True)  # count only the training
    losses = train(args, trainer, sampler, ranks)
    costs = schemes(args, trainer, ranks)
    text = costs_text(trainer, ranks, len(losses), costs)
    if args.picture and losses and ranks.is_first:
        draw(args.picture, losses, layerzero.memory(trainer.model), layerzero.traffic(trainer.model), costs)
    last_loss = validate(trainer.model, held_out, ranks)
    if ranks.is_first:
        print(text)
        print(f"validation loss {first_loss:.2f} -> {last_loss:.2f} (nats per byte)")
    if not args.no_sample:
        text = sample_text(trainer.model, args, ranks)
        if ranks.is_first:
            print(f"\nsample:\n{text}")
    if args.picture and losses and ranks.is_first:
        print(f"\npicture of losses, memory and traffic: {os.path.abspath(args.picture)}")
    return Result(first_loss, last_loss)


def summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - only --logdir needs it
    except ImportError as error:
        raise SystemExit("--logdir needs TensorBoard: pip install tensorboard") from error
    return SummaryWriter


def build(args: argparse.Namespace, ranks: Ranks) -> Trainer:
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(context=args.seq_len, tied_head=not args.untied, **SIZES[args.model]))
    numel = sum(p.numel() for p in model.parameters())
    model = layerzero.shard_model(
        model.to(ranks.device),
        zero3_size=args.zero3_size,
        units=[Block],
        mp_policy=MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=torch.float32),
        accumulation=args.accumulation,
    )
    optimizers = [layerzero.shard_optimizer(optimizer, model) for optimizer in make_optimizers(args, model)]
    schedulers = [LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps)) for optimizer in optimizers]
    return Trainer(model, optimizers, schedulers, numel)


def make_optimizers(args: argparse.Namespace, model: nn.Module) -> list[torch.optim.Optimizer]:
    # Sharded parameters keep their global shape, so the usual split by ndim needs no change.
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizers: list[torch.optim.Optimizer] = []
    if args.optimizer == "muon":
        in_blocks = [p for m in model.modules() if isinstance(m, Block) for p in m.parameters() if p.ndim == 2]
        # Updates are scaled to the size of AdamW's updates, so that both optimizers can use the same learning rate.
        how = {"lr": args.lr, "weight_decay": args.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(in_blocks, **how))
        matrices = [p for p in matrices if all(p is not other for other in in_blocks)]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [*optimizers, torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))]


def resume(args: argparse.Namespace, trainer: Trainer) -> int:
    """Load the latest checkpoint and return the next step; the number of ranks and `zero3_size` may have changed."""
    first, *others = trainer.optimizers
    found = checkpoint.load_latest(args.checkpoints, trainer.model, first) if args.checkpoints else None
    if found is None:
        return 0
    extra = found.extra
    for optimizer, state in zip(others, extra["other optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for scheduler, state in zip(trainer.schedulers, extra["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    step, steps = int(extra["step"]), int(extra.get("steps", args.steps))
    if dist.get_rank() == 0:
        print(f"resumed from step {step}" + (", nothing to do" if step >= args.steps else ""))
        if steps != args.steps:
            print(f"the cosine of the saved run ended at step {steps}; learning rates now follow a run of {args.steps}")
    return step


def save(args: argparse.Namespace, trainer: Trainer, step: int) -> checkpoint.PendingSave:
    first, *others = trainer.optimizers
    extra = {
        "step": step,
        "steps": args.steps,
        "schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "other optimizers": [optimizer.state_dict() for optimizer in others],
    }
    path = f"{args.checkpoints}/step-{step:06d}"
    return checkpoint.save_async(path, trainer.model, first, extra, keep_last=2)


def train(args: argparse.Namespace, trainer: Trainer, sampler: WindowSampler, ranks: Ranks) -> list[float]:
    """Train for the remaining steps; return their losses."""
    trainer.model.train()
    losses = []
    first = resume(args, trainer)
    pending = None  # asynchronous save in flight
    requests = [checkpoint.on_signal(getattr(signal, name), trainer.model) for name in args.stop_on]
    tokens = sampler.windows_per_step * args.seq_len  # tokens per step, over all ranks
    writer = summary_writer()(args.logdir) if args.logdir and ranks.is_first else None
    with tqdm(total=args.steps, initial=first, unit="step", disable=not ranks.is_first) as bar:
        start = time.perf_counter()
        for step in range(first, args.steps):
            loss, grad_norm = train_step(args, trainer, sampler, ranks, step)
            losses.append(loss)
            bar.set_postfix(
                loss=f"{loss:.3f}",
                grad_norm=f"{grad_norm:.2f}",
                lr=f"{trainer.schedulers[0].get_last_lr()[0]:.1e}",
                tokens_per_s=f"{tokens * (step + 1 - first) / (time.perf_counter() - start):,.0f}",
                refresh=False,
            )
            bar.update()
            if writer is not None:
                sent = layerzero.traffic(trainer.model).bytes_by_axis
                numbers = {f"bytes sent/{axis}": nbytes for axis, nbytes in sent.items()}
                for name, value in {"loss": loss, "grad_norm": grad_norm, **numbers}.items():
                    writer.add_scalar(name, value, step)
            due = step + 1 == args.steps or (step + 1) % args.save_every == 0
            stopping = [request for request in requests if request.asked()]  # the same on all ranks
            if args.checkpoints and (due or stopping):
                pending = save(args, trainer, step + 1)
            if stopping:
                stopping[0].leave()  # when the save is complete
    for request in requests:
        request.close()
    if pending is not None:
        pending.wait()
    if writer is not None:
        writer.close()
    return losses


def train_step(
    args: argparse.Namespace, trainer: Trainer, sampler: WindowSampler, ranks: Ranks, step: int
) -> tuple[float, float]:
    """Take one optimizer step; return the mean training loss over ranks and the gradient norm."""
    model, optimizers, schedulers, _ = trainer
    total = torch.zeros((), device=ranks.device)
    for micro_batch in range(args.micro_batches):
        batch = sampler.batch(step=step, micro_batch=micro_batch, rank=ranks.rank)
        inputs, targets = batch.inputs.to(ranks.device), batch.targets.to(ranks.device)
        last = micro_batch == args.micro_batches - 1
        # Accumulate gradients until the last micro-batch, so that they are reduced between nodes once per step.
        with contextlib.nullcontext() if last else layerzero.no_sync(model):
            # layerzero averages over ranks, like DDP. The loop must average over micro-batches.
            loss = next_token_loss(model(inputs), targets) / args.micro_batches
            loss.backward()
        total += loss.detach()
    grad_norm = layerzero.clip_grad_norm_(model, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total) / ranks.size, float(grad_norm)


@torch.no_grad()
def validate(model: nn.Module, batches: list[Batch], ranks: Ranks) -> float:
    """Return the mean loss over the held-out windows of all ranks, in nats per byte."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # loss, bytes
    for batch in batches:
        targets = batch.targets.to(ranks.device)
        sums[0] += next_token_loss(model(batch.inputs.to(ranks.device)), targets, reduction="sum")
        sums[1] += (targets != IGNORED).sum()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def sample_text(model: nn.Module, args: argparse.Namespace, ranks: Ranks) -> str:
    """Continue a line of Python. All ranks must call this function and draw the same bytes, because forwards gather."""
    model.eval()
    prompt = b"def read(self, size"
    ids = torch.tensor([list(prompt)], device=ranks.device)
    generator = torch.Generator().manual_seed(args.seed)
    ids = generate(
        model,
        ids,
        new_tokens=200,
        context=args.seq_len,
        temperature=0.7,
        top_k=20,
        generator=generator,
    )
    return bytes(ids[0].tolist()).decode(errors="replace")


def warmup_cosine(step: int, steps: int) -> float:
    """Return the factor on the peak learning rate: linear warmup over 10 % of the run, then cosine decay to 0.1."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0))


def schemes(args: argparse.Namespace, trainer: Trainer, ranks: Ranks) -> list[Cost]:
    """Return the costs of layerzero and of other sharding schemes by formula."""
    return scheme_costs(
        trainer.numel,
        ranks=ranks.size,
        zero3_size=args.zero3_size,
        micro_batches=args.micro_batches,
        compute_bytes=DTYPES[args.dtype].itemsize,
        accumulation=args.accumulation,
    )


def costs_text(trainer: Trainer, ranks: Ranks, steps: int, costs: list[Cost]) -> str:
    """Return tables of this rank's memory and traffic, and of the costs of sharding schemes."""
    titles = ("by formula, per rank", "weights, gradients and optimizer state", f"sent between nodes in {steps} steps")
    by_formula = ["  ".join(titles)]
    for cost in costs:
        sizes = zip((cost.state_bytes, cost.slow_bytes * steps), titles[1:], strict=True)
        cells = [f"{size / 1e6:.2f} MB".rjust(len(title)) for size, title in sizes]
        by_formula.append("  ".join([cost.scheme.ljust(len(titles[0])), *cells]))
    tables = [str(layerzero.memory(trainer.model)), str(layerzero.traffic(trainer.model)), "\n".join(by_formula)]
    return "\n\n".join([f"\nrank {ranks.rank} after {steps} steps:", *tables]) + "\n"


def start_ranks(device: str) -> Ranks:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.device_count() >= local_size)
    if use_cuda:
        torch.cuda.set_device(local_rank)
    else:
        # Ranks share the cores: do not use more threads than cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    if not dist.is_initialized():
        backend = "nccl" if use_cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:  # started without torchrun
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    return Ranks(dist.get_rank(), dist.get_world_size(), place)


if __name__ == "__main__":
    main()
