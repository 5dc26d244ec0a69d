"""Compute a model's floating-point operations and activation memory per micro-batch: :class:`ComputeCost`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from layerzero.extend import UnitDefinition
from layerzero.planning.transformer_shapes import TransformerShape


class ComputeCost(NamedTuple):
    """FLOPs in the forward and the backward passes of a micro-batch on one rank, and the bytes of its activations."""

    forward: float
    backward: float
    activation_bytes: float = 0.0  # 0 if unknown

    @classmethod
    def of_shape(cls, shape: TransformerShape, tokens: int, *, recompute: bool, element: int) -> ComputeCost:
        """Compute the cost of a transformer.

        Args:
            tokens: number of tokens in a micro-batch, which are one sequence.
            recompute: True if blocks save only their inputs and repeat their forward pass in the backward pass.
            element: size of an activation element, in bytes.
        """
        blocks = float(tokens) * shape.layers * shape.block_forward_flops_per_token(tokens)
        forward = blocks + tokens * shape.head_forward_flops_per_token()
        # The head saves logits in compute dtype and in fp32, and their fp32 gradients.
        block_bytes, logits = shape.block_activations() * element, shape.vocab * (element + 8)
        saved = shape.layers * shape.hidden * element + block_bytes if recompute else shape.layers * block_bytes
        return cls(forward, 2 * forward + blocks * recompute, float(tokens) * (saved + logits))

    @classmethod
    def of_units(cls, units: Sequence[UnitDefinition], tokens: int, *, recompute: bool) -> ComputeCost:
        """Estimate the cost from the parameters of the units: two FLOPs per matrix element and token.

        Embeddings are counted only if they are tied to a head. Units that contain other modules are treated as blocks.
        Frozen matrices have no gradients.
        """
        forward = frozen = blocks = 0.0
        for unit in units:
            embeddings = {id(module.weight) for module in unit.modules if isinstance(module, nn.Embedding)}
            matrices = [
                planned.parameter
                for planned in unit.parameters
                if planned.parameter.ndim > 1 and (id(planned.parameter) not in embeddings or len(planned.owners) > 1)
            ]
            flops = 2.0 * tokens * sum(matrix.numel() for matrix in matrices)
            forward += flops
            frozen += 2.0 * tokens * sum(matrix.numel() for matrix in matrices if not matrix.requires_grad)
            blocks += flops * bool(unit.name and any(True for _ in unit.called[0].children()))
        return cls(forward, 2 * forward - frozen + blocks * recompute)
