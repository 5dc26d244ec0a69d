"""Bad settings change nothing, policies check themselves, and old names and torch's policies are understood."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

import layerzero
from layerzero import Codecs, LayerZeroConfig, Offload, PrecisionPolicy
from tests.support.models import integer_net
from tests.support.ranks import on_ranks

WORLD = 4


@on_ranks(world_size=WORLD)
def test_refused_model_is_unchanged_and_can_be_sharded(rank: int) -> None:
    model = integer_net()
    before = dict(model.named_parameters())
    for settings in ({"units": ["third"]}, {"prefetch": -1}, {"accumulation": "half"}, {"zero3_size": 3}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            layerzero.shard_model(model, **({"zero3_size": 2} | settings))
        after = dict(model.named_parameters())
        assert after.keys() == before.keys(), settings
        assert all(after[name] is p and not isinstance(p, DTensor) for name, p in before.items()), settings
    layerzero.shard_model(model, zero3_size=2)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_sharding_without_torch_distributed_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        layerzero.shard_model(integer_net(), zero3_size=1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        layerzero.init_mesh(1)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (LayerZeroConfig, {"zero3_size": "8"}),
        (LayerZeroConfig, {"zero3_size": 0}),
        (LayerZeroConfig, {"accumulation": "none"}),
        (LayerZeroConfig, {"prefetch": -3}),
        (LayerZeroConfig, {"mp_policy": torch.bfloat16}),
        (LayerZeroConfig, {"offload": True}),
        (LayerZeroConfig, {"codecs": "lossless"}),
        (LayerZeroConfig, {"sync_module_states": 1}),
        (LayerZeroConfig, {"reshard_after_forward": None}),
        (PrecisionPolicy, {"replica_reduce_dtype": torch.uint8}),
        (PrecisionPolicy, {"accumulation_dtype": torch.float16}),
        (PrecisionPolicy, {"buffer_dtype": "bf16"}),
        (PrecisionPolicy, {"fp32_accumulation": 1}),
        (Offload, {"grads": "pinned"}),
        (Offload, {"pin_memory": False}),
        (Codecs, {"refresh": "zip"}),
    ],
    ids=str,
)
def test_policies_refuse_a_bad_setting_by_name(policy: type, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises((TypeError, ValueError), match=name):
        policy(**settings)


OLD_NAMES = {
    **dict.fromkeys(("replica_reduce_dtype", "buffer_dtype", "accumulation_dtype"), PrecisionPolicy),
    "reduce_scatter_with_fp32_accumulation": PrecisionPolicy,
    **dict.fromkeys(("offload_grads", "offload_optimizer", "offload_params", "pin_memory"), Offload),
    **dict.fromkeys(("gather_codec", "hop2_codec", "refresh_codec"), Codecs),
}


def test_an_old_name_is_refused_with_its_new_place() -> None:
    for name, policy in OLD_NAMES.items():
        with pytest.raises(TypeError, match=name) as raised:
            layerzero.shard_model(nn.Linear(2, 2), **{name: None})
        place = re.search(rf"=layerzero\.{policy.__name__}\((\w+)=\.\.\.\)$", str(raised.value))
        assert place is not None and hasattr(policy(), place[1]), raised.value
    with pytest.raises(TypeError, match=r"Use model\.set_gradient_divide_factor"):
        layerzero.shard_model(nn.Linear(2, 2), gradient_divide_factor=1.0)


def test_torchs_policies_are_accepted() -> None:
    config = LayerZeroConfig(offload=CPUOffloadPolicy(pin_memory=False), mp_policy=None, codecs=None)
    assert config.offload == Offload(grads=True, optimizer=True, params=True, pin_memory=False)
    assert LayerZeroConfig(offload=OffloadPolicy()) == LayerZeroConfig(offload=None) == LayerZeroConfig()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float16, cast_forward_inputs=False)
    ours = PrecisionPolicy.of(policy, fp32_accumulation=True)
    assert ours.torch_policy == policy and ours.fp32_accumulation


def test_fields_of_the_full_model_are_read_from_the_policy_of_the_root() -> None:
    root = PrecisionPolicy(torch.bfloat16, replica_reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    unit = PrecisionPolicy(accumulation_dtype=torch.bfloat16)
    model = integer_net()
    config = LayerZeroConfig(mp_policy=lambda name, module: unit if name else root)
    found = config.unit_settings("first", model.first, 2, config.root_policy(model)).policy
    assert (found.param_dtype, found.accumulation_dtype) == (None, torch.bfloat16)
    assert found.replica_reduce_dtype == found.buffer_dtype == torch.bfloat16
    other = LayerZeroConfig(mp_policy=lambda name, module: root if name else unit)
    with pytest.raises(ValueError, match=r"replica_reduce_dtype of mp_policy\('first', module\) is torch.bfloat16"):
        other.unit_settings("first", model.first, 2, unit)
