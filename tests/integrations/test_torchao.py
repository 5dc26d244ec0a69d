"""torchao's tensor subclasses: float8 training compared with FSDP2, and NF4 base weights."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

if find_spec("torchao") is None:
    pytest.skip("needs torchao 0.18, installed with --no-deps", allow_module_level=True)

import layerzero
from tests.support.ranks import mesh_of, on_ranks, run_ranks, run_sharing

WORLD, WIDTH, STEPS = 4, 32, 4
POLICIES = (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make(*, emulate: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415 - in ranks alone

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 16))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    return convert_to_float8_training(model, config=config)


def train(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(16, WIDTH, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _beside_fsdp2(rank: int) -> None:
    for policy in POLICIES:
        emulate = policy.param_dtype is None  # otherwise torch._scaled_mm runs on the CPU
        theirs = make(emulate=emulate)
        mesh = init_device_mesh("cpu", (WORLD,))
        for part in (theirs[0], theirs[1], theirs):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), rank)
        assert expected[-1] < 0.5 * expected[0]
        weights = {name: p.full_tensor() for name, p in theirs.named_parameters()}
        for settings in ({"zero3_size": 1}, {"zero3_size": 2}, {"zero3_size": 4, "accumulation": "full"}):
            model = layerzero.shard_model(make(emulate=emulate), units={Block}, mp_policy=policy, **settings)
            optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
            # The casts are the same, but another order of a sum may move a weight to the next float8 value.
            torch.testing.assert_close(train(model, optimizer, rank), expected, rtol=1e-3, atol=0)
            state = layerzero.full_state_dict(model, rank0_only=False)
            assert {type(value) for value in state.values()} == {Tensor}
            off = [(state[name] - weights[name].detach()).abs().max().item() for name in state]
            assert max(off) < 1e-3, off


@pytest.mark.parametrize("run", [run_ranks, run_sharing])
def test_float8_weights_are_trained_as_under_fsdp2(run: Any) -> None:
    run(_beside_fsdp2, world_size=WORLD)


@on_ranks(world_size=WORLD)
def test_float8_data_travel_and_scales_need_no_step_of_their_own(rank: int) -> None:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor  # noqa: PLC0415 - in ranks alone
    from torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp  # noqa: PLC0415

    model = layerzero.shard_model(make(emulate=True), mesh=mesh_of(2), units={Block})
    seen: list[type] = []
    model[0].up.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    layerzero.traffic(model, reset=True)
    with torch.no_grad():
        before = model(torch.ones(4, WIDTH))
    assert seen == [Float8TrainingTensor]
    # One byte per weight in this rank's half of the weights, and four per bias.
    matrices, biases = 4 * 2 * WIDTH * WIDTH + 16 * WIDTH, 2 * 3 * WIDTH + 16
    assert matrices // 2 <= layerzero.traffic(model).bytes["gather"] <= matrices // 2 + 4 * biases // 2 + 64
    precompute_float8_dynamic_scale_for_fsdp(model)  # finds no weight of its class and changes nothing
    assert torch.equal(model(torch.ones(4, WIDTH)), before)


@on_ranks(world_size=2)
def test_a_base_in_nf4_is_whole_on_every_rank_and_sharding_it_is_refused(rank: int) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, to_nf4  # noqa: PLC0415

    def base() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 8))
        model[0].weight = nn.Parameter(to_nf4(model[0].weight.detach()), requires_grad=False)
        return model

    with pytest.raises(
        ValueError,
        match=r"'0.weight' is a NF4Tensor, whose values are in quantized_data \[16384\] torch.uint8, .*of one inner "
        r"tensor that has the parameter's own shape and dtype: convert it.*ignored_params='unsupported' leaves",
    ):
        layerzero.shard_model(base(), zero3_size=2)
    alone = base()
    model = layerzero.shard_model(base(), zero3_size=2, ignored_params="unsupported")
    assert isinstance(model[0].weight, NF4Tensor)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(rank))
    assert torch.equal(model(x), alone(x))
    model(x).sum().backward()
    alone(x).sum().backward()
    total = alone[1].weight.grad.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(model[1].weight.grad.full_tensor(), total / dist.get_world_size())
