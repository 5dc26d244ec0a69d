"""Costs of three sharding schemes by formula: memory of model states, and bytes between nodes.

N parameters, D data-parallel ranks, nodes of S ranks, R = D/S nodes, A micro-batches per step; c bytes per
element of compute weights (bf16: 2), g bytes per element of a reduced gradient (fp32: 4). Adam, fp32 masters.

Model states in bytes per rank (without activations and gathered weights, which are the same for all three):

    layerzero   12 N/D  +  c N/S  +  4 N/S     masters 4 and Adam 8 over all ranks; compute weights
                                               and the accumulator inside the node; reduced
                                               gradients lie in the accumulator
                                               (accumulation="full", and S = 1: 4 N for the
                                               accumulator and 4 N/D for gradients; a single
                                               node needs the 4 N/D instead of a sharded
                                               accumulator, and no copy of fp32 weights)
    FSDP        16 N/D                         everything over all ranks
    HSDP        16 N/S                         everything over one node, a copy in each node

Bytes that a rank sends to other nodes in a step:

    layerzero   (1 - 1/R) N/S (g + c)          gradients out once, fresh weights back once
    FSDP        (1 - 1/R) N/S A (2 c + g)      gathers for forward and for backward and reduces gradients,
                                               each for every micro-batch
    HSDP        (1 - 1/R) N/S 2 g              all-reduces gradients once, in the last micro-batch

These formulas give the minimum that leaves a node, divided evenly among its ranks. Ring collectives reach it
for layerzero and HSDP. For FSDP a collective must know which ranks share a node; a plain ring sends (1 - 1/D)
where the formula has (1 - 1/R). Padding is not included.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    scheme: str
    state_bytes: float  # per rank
    slow_bytes: float  # per rank and step


def scheme_costs(
    numel: int,
    *,
    ranks: int,
    zero3_size: int,
    micro_batches: int,
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
    accumulation: str = "sharded",
) -> list[Cost]:
    per_rank, per_node_rank = numel / ranks, numel / zero3_size
    crossing = per_node_rank * (1 - zero3_size / ranks)  # elements that a rank sends to other nodes in one collective
    single_node = zero3_size == ranks
    weights = 0 if single_node and compute_bytes == 4 else compute_bytes * per_node_rank
    accumulator = 4 * numel if accumulation == "full" else 0 if single_node else 4 * per_node_rank
    # If there is a sharded accumulator, it also holds the reduced gradients.
    gradients = 0 if accumulation == "sharded" and 1 < zero3_size < ranks else 4 * per_rank
    states = 12 * per_rank + gradients + weights + accumulator
    return [
        Cost("layerzero", states, crossing * (reduce_bytes + compute_bytes)),
        Cost("FSDP", 16 * per_rank, crossing * micro_batches * (2 * compute_bytes + reduce_bytes)),
        Cost("HSDP", 16 * per_node_rank, crossing * 2 * reduce_bytes),
    ]
