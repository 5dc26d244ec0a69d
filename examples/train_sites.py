"""Train a small GPT at two sites that synchronize every few steps (DiLoCo), or synchronously for comparison.

    torchrun --nproc-per-node 4 examples/train_sites.py --sites 2 --every 16 --warmup 40
    torchrun --nproc-per-node 4 examples/train_sites.py --sites 1

The program treats the ranks of this machine as `--sites` clusters with a slow link between them. It prints the
validation loss of the first site, and the bytes that a rank sends between the sites per step after the warm-up. With
one site, all steps are synchronous, and the settings of the outer steps have no effect. The model, the
batches and the optimizer are those of train_gpt.py.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig, next_token_loss
from stdlib_text import WindowSampler, load_corpus, validation_share
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from train_gpt import DTYPES, SIZES, make_optimizers, start_ranks, validate, warmup_cosine

import layerzero

CODECS = {"none": None, "int8": layerzero.Int8Blocks(), "int4": layerzero.Int4Blocks()}


class Result(NamedTuple):
    loss: float  # validation loss of the first site, nats per byte
    sent: float  # bytes that this rank sent between sites per step, after the warm-up


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--sites", type=int, default=2, help="sets of ranks with a slow link between them")
    add("--zero3-size", type=int, default=1, help="ranks of a site over which the compute weights are sharded")
    add("--every", type=int, default=16, metavar="H", help="steps between two exchanges of the same weights")
    add("--warmup", type=int, default=40, help="synchronous steps at the start")
    add("--fragments", type=int, default=1, help="parts of the model that are exchanged at different steps")
    add("--delay", type=int, default=0, help="steps between the start of an exchange and its outer step")
    add("--outer-lr", type=float, default=0.7, help="learning rate of the outer steps")
    add("--outer-momentum", type=float, default=0.5, help="Nesterov momentum of the outer steps")
    add("--codec", choices=list(CODECS), default="int4", help="codec of the deltas")
    add("--model", choices=list(SIZES), default="small", help="size of the GPT")
    add("--steps", type=int, default=232, help="optimizer steps; the last one of the default is an outer step")
    add("--micro-batches", type=int, default=2, metavar="A", help="micro-batches per optimizer step")
    add("--batch-size", type=int, default=8, help="sequences per rank and micro-batch")
    add("--seq-len", type=int, default=64, help="bytes per sequence")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--dtype", choices=list(DTYPES), default="fp32", help="compute dtype")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: one GPU per rank if there are enough, otherwise the CPU",
    )
    add("--seed", type=int, default=0, help="seed of the initial weights and the batches")
    args = parser.parse_args(argv)
    args.optimizer, args.weight_decay = "adamw", 0.1
    return args


def main(argv: list[str] | None = None) -> Result:
    args = parse_args(argv)
    ranks = start_ranks(args.device)
    corpus = load_corpus()
    windows = {"seq_len": args.seq_len, "batch_size": args.batch_size, "ranks": ranks.size}
    sampler = WindowSampler(corpus.train, micro_batches=args.micro_batches, seed=args.seed, **windows)
    held_out = validation_share(corpus.validation, windows=128, rank=ranks.rank, **windows)

    # Rank = site * (replicas * S) + replica * S + s: the ranks of a site are consecutive.
    shape = (args.sites, ranks.size // args.sites // args.zero3_size, args.zero3_size)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("site", "replica", "zero3"))
    torch.manual_seed(args.seed)
    model = layerzero.shard_model(
        GPT(GPTConfig(context=args.seq_len, **SIZES[args.model])).to(ranks.device),
        mesh=mesh["replica", "zero3"],
        units=[Block],
        mp_policy=MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=torch.float32),
    )
    (optimizer,) = (layerzero.shard_optimizer(each, model) for each in make_optimizers(args, model))
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    outer = None
    if args.sites > 1:
        outer = layerzero.outer(
            model,
            optimizer,
            sites=mesh["site"],
            every=args.every,
            warmup=args.warmup,
            fragments=args.fragments,
            delay=args.delay,
            lr=args.outer_lr,
            momentum=args.outer_momentum,
            codec=CODECS[args.codec],
        )

    for step in range(args.steps):
        if step == args.warmup:
            layerzero.traffic(model, reset=True)
        for micro_batch in range(args.micro_batches):
            batch = sampler.batch(step=step, micro_batch=micro_batch, rank=ranks.rank)
            last = micro_batch == args.micro_batches - 1
            with nullcontext() if last else layerzero.no_sync(model):
                loss = next_token_loss(model(batch.inputs.to(ranks.device)), batch.targets.to(ranks.device))
                (loss / args.micro_batches).backward()
        if outer is not None:
            outer.average_gradients()  # in synchronous steps, so that all sites clip the same gradients
        layerzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step()
    sent = layerzero.traffic(model).bytes_by_axis.get("site", 0) / max(1, args.steps - args.warmup)
    if args.sites > 1:  # all ranks take part in the evaluation of the first site
        weights = layerzero.full_state_dict(model, rank0_only=False)
        for name in sorted(weights):
            dist.broadcast(weights[name], group=mesh.get_group("site"), group_src=0)
        layerzero.load_full_state_dict(model, weights)
    loss = validate(model, held_out, ranks)
    if ranks.is_first:
        print(f"validation loss {loss:.4f}, {sent / 1e6:.3f} MB per step and rank between sites")
    return Result(loss, sent)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
