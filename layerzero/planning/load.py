"""What a model computes in a micro-batch: :class:`Load`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from layerzero.planning.models import Sizes
from layerzero.setup.partition import UnitPlan

__all__ = ["Load"]


@dataclass(frozen=True)
class Load:
    """The work of a rank in one micro-batch.

    Attributes:
        tokens: of a micro-batch: of all its sequences.
        sequence: tokens of one of them.
        recompute: blocks keep their inputs alone, and compute again in the backward.
        forward: FLOP of a token in a forward, by unit.
        activation_bytes: of a micro-batch; 0: not known.
    """

    tokens: int
    sequence: int
    recompute: bool
    forward: dict[str, float] = field(default_factory=dict)
    activation_bytes: float = 0.0

    @classmethod
    def of_sizes(cls, sizes: Sizes, tokens: int, sequence: int, *, recompute: bool, element: int = 2) -> Load:
        forward = {f"blocks.{index}": sizes.block_flops(sequence) for index in range(sizes.layers)}
        forward[""] = sizes.root_flops()
        kept, head = sizes.block_activations() * element, sizes.vocab * (element + 8)  # logits, and in fp32, and theirs
        blocks = sizes.layers * sizes.hidden * element + kept if recompute else sizes.layers * kept
        return cls(tokens, sequence, recompute, forward, float(tokens) * (blocks + head))

    @classmethod
    def of_units(cls, plans: list[UnitPlan], tokens: int, *, recompute: bool, activation_bytes: float) -> Load:
        """Two FLOP for each weight and token, but for embeddings; a tied one is a head."""
        forward = {}
        for plan in plans:
            looked_up = {id(module.weight) for module in plan.modules if isinstance(module, nn.Embedding)}
            numel = sum(
                found.parameter.numel()
                for found in plan.parameters
                if found.parameter.ndim > 1 and (id(found.parameter) not in looked_up or len(found.owners) > 1)
            )
            forward[plan.name] = 2.0 * numel
        return cls(tokens, tokens, recompute, forward, activation_bytes)

    def flops(self, unit: str) -> float:
        """Of a unit's forward."""
        return self.tokens * self.forward.get(unit, 0.0)

    def activations(self) -> float:
        """Bytes at the end of a forward."""
        return self.activation_bytes
