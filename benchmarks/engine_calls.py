"""Count Python calls, stack depth and changes of file in the engine during one backward. Nothing is timed.

    python -m benchmarks.engine_calls

One process is rank 0 of 4 on torch's fake process group. It profiles the interpreter (``sys.setprofile``) in a backward
with reductions, for a model of a few units in steady state:

- the depth from a parameter's hook to the function of torch.distributed that sends its unit's gradients, counted in
  frames of layerzero on the stack, including the hook;
- frames of layerzero, and changes between its files, per unit.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg

import layerzero

_PACKAGE = str(Path(layerzero.__file__).parent)
_HOOK = "_gradient_hook"  # name of the function that makes the hooks of parameters
_COLLECTIVES = {"all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single"}


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Watcher:
    """Profile function that counts frames, file changes and depths inside layerzero."""

    def __init__(self) -> None:
        self.frames = 0
        self.changes = 0
        self.depths: Counter[int] = Counter()  # depths of hop 1 below the hook of a parameter
        self._last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_name in _COLLECTIVES and "distributed" in code.co_filename:
            self._reach(frame)
        if not code.co_filename.startswith(_PACKAGE):
            return
        self.frames += 1
        self.changes += code.co_filename != self._last
        self._last = code.co_filename

    def _reach(self, frame: FrameType) -> None:
        depth, above = 0, frame.f_back
        while above is not None:
            code = above.f_code
            if code.co_filename.startswith(_PACKAGE):
                depth += 1
                if _HOOK in code.co_qualname if sys.version_info >= (3, 11) else code.co_name == "hook":
                    self.depths[depth] += 1
                    return
            above = above.f_back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=4)
    for accumulation in ("sharded", "full"):
        model = nn.Sequential(*(Block(16) for _ in range(args.units)))
        layerzero.shard_model(model, zero3_size=2, units=Block, accumulation=accumulation, shared_memory="off")
        watcher = Watcher()
        for step in range(4):
            loss = model(torch.ones(2, 16)).sum()
            if step == 3:
                # For a model on the CPU, autograd runs hooks in this thread.
                sys.setprofile(watcher)
            loss.backward()
            sys.setprofile(None)
            model.zero_grad()
        depths = ", ".join(f"{depth} ({count} times)" for depth, count in sorted(watcher.depths.items()))
        print(
            f"{accumulation}: calls from a parameter's hook to torch.distributed: {depths}; for each unit "
            f"{watcher.frames / args.units:.1f} frames, {watcher.changes / args.units:.1f} changes of file"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
