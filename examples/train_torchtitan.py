"""Train a sharded llama with torchtitan's own trainer. Comments mark the differences from plain torchtitan.

torchrun --nproc-per-node 8 -m torchtitan.train --module train_torchtitan --config small_llama
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from layerzero.integrations.torchtitan import with_layerzero


@dataclass(kw_only=True, slots=True)
class NoTokenizer(BaseTokenizer.Config):
    def build(self, **_: Any) -> None: ...


@dataclass(kw_only=True, slots=True)
class Bytes(ParallelAwareDataloader.Config):
    def build(self, *, seq_len: int, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> Any:
        text = torch.tensor(list(b"to be or not to be, that is the question: " * 400)).unfold(0, seq_len + 1, 7)
        where, mine = torch.arange(seq_len), text[dp_rank::dp_world_size]
        batches = [({"input": ids[:-1], "positions": where}, ids[1:]) for ids in mine]
        return ParallelAwareDataloader(batches, dp_rank, dp_world_size, batch_size=local_batch_size)


def small_llama() -> Any:
    config = llama3_debugmodel()
    config.dataloader, config.tokenizer = Bytes(), NoTokenizer()
    config.training.seq_len, config.training.steps = 64, 20
    config.parallelism.data_parallel_replicate_degree = 2  # number of nodes; the ranks of a node share weights
    config.checkpoint.enable, config.checkpoint.interval = True, 10
    return with_layerzero(config, accumulation="full")
