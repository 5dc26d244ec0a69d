"""layerzero.megatron refuses settings that it does not support, and names the setting and a way out."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import layerzero.megatron
from layerzero import Offload, PrecisionPolicy
from tests.support.megatron_ranks import Case, make_chunks, make_config, make_ours, megatron
from tests.support.ranks import on_ranks

CASE = Case(pp=2, zero3_size=2)
FUSED = {"gradient_accumulation_fusion": True}
FULL = 'Use accumulation="full", or "sharded" with zero3_size=1'
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # settings of the model, arguments of wrap, message
    ({"mtp_num_layers": 1}, {}, r"config\.mtp_num_layers=1, which adds copies of the embeddings; leave it out"),
    ({"defer_embedding_wgrad_compute": True}, {}, "after the last backward"),
    ({"gtp_weight_remat_size": 2}, {}, r"config\.gtp_weight_remat_size=2, which shards the weights a second time"),
    ({"expert_gtp_weight_remat_size": 2}, {}, "shards the weights a second time"),
    ({"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}, {}, "updates a bias of the routers"),
    ({"overlap_dispatch_backward_with_experts_wgrad": True}, {}, "after the backward of their layer"),
    ({"moe_expert_rank_capacity_factor": 1.5}, {}, "repeats a step"),
    ({"fp4": "e2m1"}, {}, "quantize gathered weights in each forward"),
    ({"cuda_graph_impl": "local"}, {}, "records the addresses of weights"),
    (FUSED, {}, FULL),
    (FUSED, {"zero3_size": 1, "accumulation": "local"}, FULL),
    (
        FUSED,
        {"accumulation": "full", "mp_policy": PrecisionPolicy(accumulation_dtype=torch.bfloat16)},
        "and accumulation_dtype exclude each other",
    ),
    (FUSED, {"accumulation": "full", "offload": Offload(grads=True)}, r"and Offload\(grads=True\) exclude each other"),
    ({}, {"zero3_size": 3}, r"zero3_size=3 does not divide the 2 data-parallel.*Use one of \[1, 2\]"),
    ({}, {"expert_zero3_size": 1}, r"expert_zero3_size=1, but the model has no experts"),
    ({}, {"zero3_size": None, "groups": mock.Mock(), "expert_zero3_size": 1}, "groups already determine"),
    ({}, {"units": lambda name, module: False}, "must be the only parameter of its unit on both"),
]


@on_ranks(world_size=4)
def test_what_is_not_supported_is_refused_with_a_way_out(rank: int) -> None:
    with megatron(CASE):
        for changes, arguments, match in REFUSED:
            config = make_config(CASE)
            chunks = make_chunks(CASE, config)
            for name, value in changes.items():
                setattr(config, name, value)
            with pytest.raises(ValueError, match=match):
                layerzero.megatron.wrap(chunks, config, **{"zero3_size": 2, **arguments})
        chunks, optimizer = make_ours(CASE)
        key = mock.Mock(matches=lambda parameter, name: name.endswith("linear_fc1.weight"))
        with pytest.raises(ValueError, match=r"to 'muon', but config\.optimizer is 'adam'"):
            layerzero.megatron.ShardedMegatronOptimizer(
                chunks, optimizer.config, config_overrides={key: {"optimizer": "muon"}}
            )
