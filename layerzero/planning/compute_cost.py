"""What a model computes in a micro-batch: :class:`ComputeCost`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from layerzero.planning.transformer_shapes import TransformerBlock, TransformerShape
from layerzero.sharding.unit_selection import UnitDefinition

__all__ = ["ComputeCost"]


@dataclass(frozen=True)
class ComputeCost:
    """The work of a rank in one micro-batch.

    Attributes:
        tokens: of a micro-batch: of all its sequences.
        sequence: tokens of one of them.
        recompute: blocks keep their inputs alone, and compute again in the backward.
        forward: FLOP of a token in a forward, by unit.
        again: of them, those of blocks, which are computed again.
        activation_bytes: of a micro-batch; 0: not known.
    """

    tokens: int
    sequence: int
    recompute: bool
    forward: dict[str, float] = field(default_factory=dict)
    again: dict[str, float] = field(default_factory=dict)
    activation_bytes: float = 0.0

    @classmethod
    def of_sizes(
        cls,
        sizes: TransformerShape,
        plans: list[UnitDefinition],
        tokens: int,
        sequence: int,
        *,
        recompute: bool,
        element: int = 2,
    ) -> ComputeCost:
        """A block counts in the unit that it is in, the head in the root."""
        each = sizes.block_flops(sequence)
        again = {plan.name: each * sum(isinstance(m, TransformerBlock) for m in plan.modules) for plan in plans}
        forward = {name: flops + sizes.root_flops() * (name == "") for name, flops in again.items()}
        kept, head = sizes.block_activations() * element, sizes.vocab * (element + 8)  # logits, and in fp32, and theirs
        blocks = sizes.layers * sizes.hidden * element + kept if recompute else sizes.layers * kept
        return cls(tokens, sequence, recompute, forward, again, float(tokens) * (blocks + head))

    @classmethod
    def of_units(
        cls, plans: list[UnitDefinition], tokens: int, *, recompute: bool, activation_bytes: float
    ) -> ComputeCost:
        """Two FLOP for each weight and token, but for embeddings; a tied one is a head.

        Units but the root are blocks.
        """
        forward = {}
        for plan in plans:
            looked_up = {id(module.weight) for module in plan.modules if isinstance(module, nn.Embedding)}
            numel = sum(
                found.parameter.numel()
                for found in plan.parameters
                if found.parameter.ndim > 1 and (id(found.parameter) not in looked_up or len(found.owners) > 1)
            )
            forward[plan.name] = 2.0 * numel
        again = {name: flops * (name != "") for name, flops in forward.items()}
        return cls(tokens, tokens, recompute, forward, again, activation_bytes)

    def flops(self, unit: str) -> float:
        """Of a unit's forward."""
        return self.tokens * self.forward.get(unit, 0.0)

    def backward_flops(self, unit: str) -> float:
        """Of a unit's backward: twice those of its forward, and what it computes again."""
        return 2 * self.flops(unit) + (self.tokens * self.again.get(unit, 0.0) if self.recompute else 0.0)
