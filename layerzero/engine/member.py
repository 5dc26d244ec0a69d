"""One parameter of a handle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from layerzero.tensors.rows import RowSpan

__all__ = ["Member"]


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter of a handle: where the model holds it, and its stand-ins."""

    name: str  # fully qualified, the first of its names
    places: tuple[tuple[dict[str, Any], str], ...]  # every (parameters of a module, attribute); several when tied
    leaf: nn.Parameter  # the whole parameter, compute dtype; a view of the full buffer
    parameter: nn.Parameter  # the sharded parameter that the user sees, a RowShardedTensor
    master: Tensor  # this rank's rows, plain, master dtype: what the optimizer updates
    span: RowSpan
    local: slice  # this rank's elements inside the ZeRO-1 shard
    accumulates: Node  # autograd's node that delivers the gradient of the leaf

    def is_coming(self) -> bool:
        """The backward that runs now delivers a gradient of the whole parameter."""
        try:
            return bool(torch._C._will_engine_execute_node(self.accumulates))  # type: ignore[attr-defined]
        except RuntimeError:  # autograd.grad for the leaf itself
            return True
