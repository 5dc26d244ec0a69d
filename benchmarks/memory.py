"""Compare the peak memory that `layerzero.memory` predicts for a step with the resident memory of the process.

    python -m benchmarks.memory

Four ranks on this machine train a model with very small activations. "Process" is the peak resident memory of two
steps minus that of the same process after its imports, with this rank's share of shared memory. It also includes
activations, temporaries of torch, buffers of gloo and Python objects, which the prediction does not. Buffers that are
allocated but never accessed are not resident, so a process may use less memory than predicted.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from benchmarks import measure

RANKS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Case(NamedTuple):
    zero3_size: int
    accumulation: str
    shared_memory: str
    dtype: str

    def settings(self) -> dict[str, object]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if self.dtype == "bf16" else None)
        return {
            "zero3_size": self.zero3_size,
            "accumulation": self.accumulation,
            "shared_memory": self.shared_memory,
            "mp_policy": policy,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--units", type=int, default=12)
    args = parser.parse_args()
    print(f"MB, rank 0 of {RANKS}; {args.units} units, {8 * args.width**2 * args.units / 1e6:.1f} M parameters, AdamW")
    heads = ("predicted", "counted", "process")
    print(f"{'S':>2} {'accumulates':>12} {'shared memory':>12} {'dtype':>6}", *(f"{head:>10}" for head in heads))
    for values in itertools.product((1, 2, 4), ("sharded", "full"), ("auto", "off"), ("fp32", "bf16")):
        case = Case(*values)
        if case.zero3_size == 1 and (case.shared_memory == "auto" or case.accumulation == "full"):
            continue  # without a ZeRO-3 group, ranks share no memory, and accumulators are always full
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_measure, args=(case, args.width, args.units, folder), nprocs=RANKS)
            predicted, counted, process = map(int, Path(folder, "result").read_text().split())
        print(
            f"{case.zero3_size:>2} {case.accumulation:>12} {case.shared_memory:>12} {case.dtype:>6} "
            f"{predicted / 1e6:>10.1f} {counted / 1e6:>10.1f} {process / 1e6:>10.1f}",
            flush=True,
        )


def _measure(rank: int, case: Case, width: int, units: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    measure.return_freed_memory()
    before = measure.resident_bytes()
    model = layerzero.shard_model(nn.Sequential(*(Block(width) for _ in range(units))), units=Block, **case.settings())
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    x = torch.randn(1, width, dtype=torch.bfloat16 if case.dtype == "bf16" else torch.float32)
    for step in range(4):
        if step == 2:
            measure.reset_peak()
        for micro_batch in range(2):
            with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    process = measure.peak_bytes(sharers=case.zero3_size if case.shared_memory == "auto" else 1) - before
    report = layerzero.memory(model)
    if rank == 0:
        Path(folder, "result").write_text(f"{report.predicted_peak} {report.measured_peak} {process}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
