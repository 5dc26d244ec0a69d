"""Train the example's GPT with a codec of hop 2, and print the validation loss.

    torchrun --standalone --nproc-per-node 4 benchmarks/codec_losses.py --codec int4 [--seed 0] [--spike 100]

Each rank is a replica, so all gradients are encoded. With `--spike 100`, the gradients of every twentieth step are
multiplied by 100 before they are clipped to a norm of 1.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_gpt

import layerzero

CODECS = {
    "none": None,
    "int8": layerzero.Int8Blocks(),
    "int4": layerzero.Int4Blocks(),
    "int4-without-feedback": layerzero.Int4Blocks(feedback=False),
}
SPIKE_EVERY = 20  # steps


def validation_loss(args: argparse.Namespace, *further: str) -> float:
    """Return the validation loss after training with the settings of `args` and `further` arguments of the example."""
    factor = 1.0
    step_of, loss_of = train_gpt.train_step, train_gpt.next_token_loss

    def loss(*given: Any, **further: Any) -> torch.Tensor:
        return factor * loss_of(*given, **further)

    def step(*given: Any) -> tuple[float, float]:
        nonlocal factor
        factor = args.spike if given[-1] % SPIKE_EVERY == SPIKE_EVERY - 1 else 1.0
        try:
            return step_of(*given)
        finally:
            factor = 1.0  # for the validation

    sharded = functools.partial(layerzero.shard_model, codecs=layerzero.Codecs(hop2=CODECS[args.codec]))
    given = ["--steps", str(args.steps), "--seed", str(args.seed), "--lr", "1e-3", "--zero3-size", "1", "--no-sample"]
    with (
        mock.patch.object(layerzero, "shard_model", sharded),
        mock.patch.object(train_gpt, "train_step", step),
        mock.patch.object(train_gpt, "next_token_loss", loss),
    ):
        return train_gpt.main([*given, *further]).last_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", choices=CODECS, default="none", help="hop2_codec of shard_model")
    parser.add_argument("--spike", type=float, default=1.0, help="factor of the gradients of every twentieth step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    loss = validation_loss(args, "--validation-windows", "512")
    if dist.get_rank() == 0:
        print(f"codec {args.codec}, seed {args.seed}, spike {args.spike:g}: validation loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
