"""A run that is started again where it died, and ends with the bits of one that never stopped.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        examples/train_restarts.py --checkpoints /tmp/run --kill 1

`--kill SEED` lets a rank be killed at a random moment of the first attempt. torchrun ends the others and starts all
again; without the variable, torch's own process groups fail at that (docs/reliability.md). The digest that is printed
at the end holds weights, optimizer state, data and random numbers of the whole run: the same with and without kills.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading

import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import checkpoint

SEED, STEPS, SAMPLES = 0, 40, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoints", required=True, metavar="FOLDER")
    parser.add_argument("--kill", type=int, metavar="SEED", help="a rank at a random moment of the first attempt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    model = layerzero.shard_model(nn.Sequential(*layers), zero3_size=1, units=[nn.Sequential])
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    chain = checkpoint.Chain(model, optimizer)
    checkpoint.seed_random_states(SEED)  # for the dropout, other numbers on each rank
    data = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(SEED))

    first = 0
    if found := checkpoint.load_latest(args.checkpoints, model, optimizer):
        first = found.extra["step"]
        checkpoint.set_random_states(found.extra["random"])
        chain.resume(found.extra["chain"])
    if dist.get_rank() == 0:
        print(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}: from step {first}", flush=True)
    pending = None
    for step in range(first, STEPS):
        if args.kill is not None and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            maybe_die(args.kill, step)
        indices = torch.randint(SAMPLES, (8,), generator=torch.Generator().manual_seed(step * 1000 + dist.get_rank()))
        chain.saw(indices)
        (model(data[indices]) - data[indices]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            extra = {"step": step + 1, "chain": chain.link(step + 1)}
            extra["random"] = checkpoint.random_states(SEED, step + 1)
            pending = checkpoint.save_async(f"{args.checkpoints}/{step + 1:06d}", model, optimizer, extra, keep_last=2)
    if pending is not None:
        pending.wait()
    digest = chain.link(STEPS)["head"]
    if dist.get_rank() == 0:
        print(f"digest of the run: {digest}", flush=True)
    dist.destroy_process_group()


def maybe_die(seed: int, step: int) -> None:
    """In one of the steps, on one of the ranks, a little later."""
    draw = random.Random(seed)
    when, rank, seconds = draw.randrange(1, STEPS), draw.randrange(dist.get_world_size()), draw.uniform(0.0, 0.03)
    if (step, dist.get_rank()) == (when, rank):
        print(f"rank {rank} is killed {1000 * seconds:.0f} ms into step {step}", flush=True)
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    main()
