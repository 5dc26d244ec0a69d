"""Count Python calls and files between a hook of the engine and the collective that it launches. Nothing is timed.

    python -m benchmarks.engine_calls

One process is rank 0 of 4 on torch's fake process group. It profiles the interpreter (``sys.setprofile``) during one
step of a model of a few units in steady state, and prints

- for a weight, the longest chain of layerzero's functions from a module's forward hook to the all-gather of its unit;
- for a gradient, the longest chain from a hook of the backward to the collective that sends its unit's gradients;
- calls to functions of layerzero, and changes between its files, per unit of the backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg

import layerzero

_PACKAGE = str(Path(layerzero.__file__).parent)
_WAYS = {  # by name: the hooks, and the functions of torch.distributed that they reach
    "weight": ({"_PreForwardHook.__call__"}, {"all_gather_into_tensor", "all_gather_single"}),
    "gradient": (
        {"_GradientHook.__call__", "Scheduler.pre_backward", "Scheduler.post_backward", "Scheduler.finalize_backward"},
        {"all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single"},
    ),
}


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Watcher:
    """Profile function that counts calls and file changes inside layerzero, and records chains from hooks."""

    def __init__(self) -> None:
        self.calls = 0
        self.changes = 0
        self.chains: dict[str, list[CodeType]] = {}  # by name of the path: the longest chain, starting with the hook
        self._last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if "distributed" in code.co_filename:
            self._reach(frame)
        if not code.co_filename.startswith(_PACKAGE):
            return
        self.calls += 1
        self.changes += code.co_filename != self._last
        self._last = code.co_filename

    def _reach(self, frame: FrameType) -> None:
        for name, (hooks, collectives) in _WAYS.items():
            if frame.f_code.co_name not in collectives:
                continue
            chain: list[CodeType] = []
            above = frame.f_back
            while above is not None and not (chain and chain[-1].co_qualname in hooks):
                if above.f_code.co_filename.startswith(_PACKAGE):
                    chain.append(above.f_code)
                above = above.f_back
            if chain and chain[-1].co_qualname in hooks and len(chain) > len(self.chains.get(name, ())):
                self.chains[name] = chain[::-1]


def _described(chain: Sequence[CodeType]) -> str:
    files = list(dict.fromkeys(code.co_filename for code in chain))
    names = " -> ".join(code.co_qualname for code in chain)
    return f"{len(chain)} calls in {len(files)} files: {names}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=4)
    for accumulation in ("sharded", "full"):
        model = nn.Sequential(*(Block(16) for _ in range(args.units)))
        layerzero.shard_model(model, zero3_size=2, units=Block, accumulation=accumulation, shared_memory="off")
        forward, backward = Watcher(), Watcher()
        for step in range(4):
            # For a model on the CPU, autograd runs hooks in this thread.
            sys.setprofile(forward if step == 3 else None)
            loss = model(torch.ones(2, 16)).sum()
            sys.setprofile(backward if step == 3 else None)
            loss.backward()
            sys.setprofile(None)
            model.zero_grad()
        print(
            f"{accumulation}: for each unit of the backward {backward.calls / args.units:.1f} calls, "
            f"{backward.changes / args.units:.1f} changes of file"
        )
        for watcher in (forward, backward):
            for name, chain in watcher.chains.items():
                print(f"  {name}: {_described(chain)}")
        layerzero.close(model)


if __name__ == "__main__":
    main()
