"""Functions for `layerzero verify` with the example GPT. Run this command in the root of the repository:

layerzero verify examples.verify_gpt:make_model --loss examples.verify_gpt:loss --unit Block
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.gpt import GPT, Block, GPTConfig, next_token_loss

__all__ = ["Block", "loss", "make_batch", "make_model"]


def make_model() -> nn.Module:
    """Return a small GPT. Errors in sharding do not depend on its size."""
    return GPT(GPTConfig(layers=2, width=48, context=32))


def make_batch(index: int, rank: int) -> Tensor:
    """Return random bytes, int64 [4, 33]. verify has seeded torch for this index and rank."""
    return torch.randint(0, 256, (4, 33))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next byte."""
    return next_token_loss(model(ids[:, :-1]), ids[:, 1:])
