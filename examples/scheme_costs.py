"""Costs of three sharding schemes by formula: memory of model states, and bytes between nodes.

The model has N parameters, D data-parallel ranks, nodes of S ranks, R = D/S nodes, and A micro-batches per step.
Compute weights have c bytes per element (bf16: 2), and reduced gradients g bytes (fp32: 4). The optimizer is Adam with
fp32 masters.

Model states in bytes per rank (without activations and gathered weights, which are equal in all schemes):

    layerzero   12 N/D  +  c N/S  +  4 N/S     masters 4 and Adam 8 over all ranks; compute weights
                                               and the accumulator inside the node; reduced
                                               gradients are in the accumulator
                                               (accumulation="full", and S = 1: 4 N for the
                                               accumulator and 4 N/D for gradients;
                                               accumulation="local" and a single node: 4 N/D
                                               for gradients and no accumulator; fp32 compute
                                               weights (c = 4) contain the masters)
    FSDP2       16 N/D                         all states over all ranks
    HSDP        16 N/S                         all states over one node, a copy in each node

Bytes that a rank sends to other nodes in a step:

    layerzero   (1 - 1/R) N/S (g + c)          sends gradients once and updated weights once
                                               (accumulation="local": (A g + c))
    FSDP2       (1 - 1/R) N/S A (2 c + g)      gathers for forward and for backward and reduces gradients,
                                               each for every micro-batch
    HSDP        (1 - 1/R) N/S 2 g              all-reduces gradients once, in the last micro-batch

These formulas are the minimum number of bytes that leave a node, divided evenly among its ranks. Ring collectives
reach this minimum for layerzero and HSDP. For FSDP2, only a collective that is aware of the nodes reaches it. A plain
ring sends (1 - 1/D) instead of (1 - 1/R). Padding is not included.
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
    masters = 0 if compute_bytes == 4 else 4 * per_rank  # fp32 compute weights contain the masters
    whole = accumulation == "full" or (zero3_size == 1 and accumulation == "sharded")
    is_final = accumulation == "local" or (accumulation == "sharded" and single_node)
    accumulator = 4 * numel if whole else 0 if is_final else 4 * per_node_rank
    # A sharded accumulator also contains the reduced gradients.
    gradients = 0 if accumulation == "sharded" and 1 < zero3_size < ranks else 4 * per_rank
    sends = micro_batches if accumulation == "local" else 1
    states = masters + 8 * per_rank + compute_bytes * per_node_rank + gradients + accumulator
    return [
        Cost("layerzero", states, crossing * (sends * reduce_bytes + compute_bytes)),
        Cost("FSDP2", 16 * per_rank, crossing * micro_batches * (2 * compute_bytes + reduce_bytes)),
        Cost("HSDP", 16 * per_node_rank, crossing * 2 * reduce_bytes),
    ]
