# ruff: noqa: PLC0415 (Megatron is imported where the stand-ins are in place)
"""Saves and loads with megatron.core.dist_checkpointing, composed as in Megatron-LM's training script."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

import layerzero.megatron
from tests.support.megatron_ranks import Case, Make, Run, make_scheduler, megatron, train, whole_weights


def sharded_state(chunks: list[nn.Module], optimizer: Any, metadata: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return the sharded state dict, composed as in Megatron-LM's training script."""
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks).items()
    }
    if not optimizer.is_stub_optimizer:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _named(chunks: list[nn.Module]) -> dict[str, Any]:
    """Return the chunks by name, without Megatron's wrapper, as Megatron-LM does."""
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {
        name: chunk if isinstance(chunk, layerzero.megatron.ShardedChunk) else chunk.module
        for name, chunk in zip(names, chunks, strict=True)
    }


def save(path: str, chunks: list[nn.Module], optimizer: Any, scheduler: Any, metadata: Any, parallel: bool) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(path).mkdir()
    dist.barrier()
    state = {"scheduler": scheduler.state_dict(), **sharded_state(chunks, optimizer, metadata, is_loading=False)}
    with may_start_writers():
        dist_checkpointing.save(state, path, _in_parallel() if parallel else None)


def _in_parallel(load_from: str | None = None) -> Any:
    """Return Megatron-LM's default strategy: one data-parallel rank writes and reads each replicated tensor."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if load_from is None:
        strategy = serialization.get_default_save_sharded_strategy("torch_dist")
        return fully_parallel.FullyParallelSaveStrategyWrapper(strategy, group)
    strategy = serialization.get_default_load_sharded_strategy(load_from)
    return fully_parallel.FullyParallelLoadStrategyWrapper(strategy, group)


@contextlib.contextmanager
def may_start_writers() -> Iterator[None]:
    """Allow Megatron to start its writer processes: the ranks of these tests are daemons, which must not."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    daemon = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    # Megatron starts a process for this queue, which would outlive a killed rank.
    with daemon, mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        yield


def load(path: str, chunks: list[nn.Module], optimizer: Any, scheduler: Any, metadata: Any, parallel: bool) -> None:
    from megatron.core import dist_checkpointing

    wanted = sharded_state(chunks, optimizer, metadata, is_loading=True)
    state = dist_checkpointing.load(wanted, path, _in_parallel(path) if parallel else None)
    for name, chunk in _named(chunks).items():
        chunk.load_state_dict(state[name])
    if not optimizer.is_stub_optimizer:
        optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


# Training runs that save and continue

GATED = (("gated_linear_unit", True),)  # its first linear layer is stored in two pieces
DATA = Case(zero3_size=2, micro_batches=2, settings=GATED)
BEFORE, AFTER = [0, 1], [2, 3]  # steps


def go_on(case: Case, chunks: list[nn.Module], optimizer: Any, scheduler: Any) -> Run:
    losses, results, scales = train(case, chunks, optimizer, scheduler, AFTER)
    return Run(losses, results, [whole_weights(chunk) for chunk in chunks], scales)


def save_and_go_on(rank: int, path: str, case: Case, metadata: Any, make: Make, parallel: bool = False) -> Run:
    """Train, save, and train on."""
    with megatron(case):
        chunks, optimizer = make(case)
        scheduler = make_scheduler(optimizer)
        for group in optimizer.param_groups:
            changed = {"eps": 1e-6, "dampening": 0.2}  # values that only the checkpoint has
            group.update({name: value for name, value in changed.items() if name in group})
        train(case, chunks, optimizer, scheduler, BEFORE)
        save(path, chunks, optimizer, scheduler, metadata, parallel)
        return go_on(case, chunks, optimizer, scheduler)
