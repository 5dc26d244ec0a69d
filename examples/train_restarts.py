"""Train with restarts after failures. The result is bitwise equal to that of an uninterrupted run.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        examples/train_restarts.py --checkpoints /tmp/run --kill 1

`--kill SEED` kills a rank at a random time in the first attempt. torchrun then stops the other ranks and restarts all
of them. Without the environment variable, torch's own process groups fail after a restart (docs/reliability.md). The
digest of the weights, which is printed at the end, is the same with and without kills. `--snapshots` stores snapshots
in the memory of two nodes instead of checkpoints. A run then survives the loss of a node, with `torchrun --nnodes 2` on
two nodes and a spare node.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import checkpoint

SEED, STEPS, SAMPLES = 0, 40, 1000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kept = parser.add_mutually_exclusive_group(required=True)
    kept.add_argument("--checkpoints", metavar="FOLDER")
    kept.add_argument("--snapshots", metavar="FOLDER", help="where shared memory is mounted, such as /dev/shm")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each step")
    parser.add_argument("--kill", type=int, metavar="SEED", help="a rank at a random moment of the first attempt")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    model = layerzero.shard_model(nn.Sequential(*layers), zero3_size=1, units=[nn.Sequential])
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    checkpoint.seed_random_states(SEED)  # dropout draws different numbers on each rank
    data = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(SEED))

    first, buddies = 0, None
    if args.snapshots:
        buddies = checkpoint.Buddies(model, optimizer, name="restarts", memory=args.snapshots)
    if found := buddies.load() if buddies else checkpoint.load_latest(args.checkpoints, model, optimizer):
        first = found.extra["step"]
        checkpoint.set_random_states(found.extra["random"])
    if dist.get_rank() == 0:
        print(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}: from step {first}", flush=True)
    pending = None
    for step in range(first, STEPS):
        if args.kill is not None and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            maybe_die(args.kill, step)
        indices = torch.randint(SAMPLES, (8,), generator=torch.Generator().manual_seed(step * 1000 + dist.get_rank()))
        (model(data[indices]) - data[indices]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            extra = {"step": step + 1, "random": checkpoint.random_states(SEED, step + 1)}
            if buddies:
                buddies.snapshot(extra)
            else:
                folder = f"{args.checkpoints}/{step + 1:06d}"
                pending = checkpoint.save_async(folder, model, optimizer, extra, keep_last=2)
        if step == first and dist.get_rank() == 0:
            print(f"first step of the attempt, number {step}, done", flush=True)
        time.sleep(args.pause)
    if pending is not None:
        pending.wait()
    if buddies:
        buddies.close()
    weights = layerzero.full_state_dict(model)
    if dist.get_rank() == 0:
        values = b"".join(weight.numpy().tobytes() for weight in weights.values())
        print(f"digest of the run: {hashlib.sha256(values).hexdigest()}", flush=True)
    dist.destroy_process_group()


def maybe_die(seed: int, step: int) -> None:
    """Kill this process shortly after a random step begins, on a random rank."""
    draw = random.Random(seed)
    when, rank, seconds = draw.randrange(1, STEPS), draw.randrange(dist.get_world_size()), draw.uniform(0.0, 0.03)
    if (step, dist.get_rank()) == (when, rank):
        print(f"rank {rank} is killed {1000 * seconds:.0f} ms into step {step}", flush=True)
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    main()
