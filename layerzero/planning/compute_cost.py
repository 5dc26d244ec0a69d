"""Compute a model's floating-point operations and activation memory per micro-batch: :class:`ComputeCost`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from layerzero.planning.transformer_shapes import TransformerBlock, TransformerShape
from layerzero.sharding.unit_selection import UnitDefinition

__all__ = ["ComputeCost"]


@dataclass(frozen=True)
class ComputeCost:
    """FLOPs and activation memory that one rank needs for one micro-batch.

    Attributes:
        tokens: number of tokens in a micro-batch, over all sequences.
        sequence: number of tokens in one sequence.
        recompute: True if blocks save only their inputs and repeat their forward pass in the backward pass.
        forward: FLOPs per token in the forward pass of each unit.
        frozen: FLOPs per token in the forward pass of each unit's frozen matrices, which have no gradients.
        again: FLOPs per token in the forward pass of each unit's blocks, which `recompute` repeats.
        activation_bytes: size of the activations of a micro-batch in bytes, or 0 if unknown.
    """

    tokens: int
    sequence: int
    recompute: bool
    forward: dict[str, float] = field(default_factory=dict)
    frozen: dict[str, float] = field(default_factory=dict)
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
        """Compute the cost of a transformer from its shape.

        The cost of a block is added to the block's unit. The cost of the head is added to the unit that
        contains the head. `element` is the size of an activation element, in bytes.
        """
        block_flops = sizes.block_forward_flops_per_token(sequence)
        recomputed = {
            plan.name: block_flops * sum(isinstance(m, TransformerBlock) for m in plan.modules) for plan in plans
        }
        head = next((plan.name for plan in plans if any(name == "head" for name in plan.modules.values())), "")
        forward = {
            name: flops + sizes.head_forward_flops_per_token() * (name == head) for name, flops in recomputed.items()
        }
        # The head saves logits in compute dtype and in fp32, and their fp32 gradients.
        block_bytes, logits = sizes.block_activations() * element, sizes.vocab * (element + 8)
        blocks = sizes.layers * sizes.hidden * element + block_bytes if recompute else sizes.layers * block_bytes
        return cls(
            tokens, sequence, recompute, forward, again=recomputed, activation_bytes=float(tokens) * (blocks + logits)
        )

    @classmethod
    def of_units(
        cls, plans: list[UnitDefinition], tokens: int, *, recompute: bool, activation_bytes: float
    ) -> ComputeCost:
        """Estimate the cost from the parameters of the units: two FLOPs per matrix element and token.

        Embeddings are counted only if they are tied to a head. Units that contain other modules are treated as blocks.
        """
        forward, frozen = {}, {}
        for plan in plans:
            embeddings = {id(module.weight) for module in plan.modules if isinstance(module, nn.Embedding)}
            matrices = [
                planned.parameter
                for planned in plan.parameters
                if planned.parameter.ndim > 1 and (id(planned.parameter) not in embeddings or len(planned.owners) > 1)
            ]
            forward[plan.name] = 2.0 * sum(matrix.numel() for matrix in matrices)
            frozen[plan.name] = 2.0 * sum(matrix.numel() for matrix in matrices if not matrix.requires_grad)
        blocks = {plan.name for plan in plans if plan.name and any(True for _ in plan.called[0].children())}
        recomputed = {name: flops * (name in blocks) for name, flops in forward.items()}
        return cls(tokens, tokens, recompute, forward, frozen, recomputed, activation_bytes)

    def flops(self, unit: str) -> float:
        """Return the number of FLOPs in a unit's forward pass."""
        return self.tokens * self.forward.get(unit, 0.0)

    def backward_flops(self, unit: str) -> float:
        """Return the number of FLOPs in a unit's backward pass.

        The gradients of inputs take as many FLOPs as the forward pass, and the gradients of trained matrices as many as
        the forward pass of these matrices. With recomputation, the forward pass of blocks is added.
        """
        recomputed = self.again.get(unit, 0.0) if self.recompute else 0.0
        return 2 * self.flops(unit) + self.tokens * (recomputed - self.frozen.get(unit, 0.0))
