"""layerzero.EMA averages as torch's swa_utils does, and restores the weights."""

from __future__ import annotations

import itertools
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import layerzero
from layerzero.dtensor.local_shard import plain
from tests.support.models import (
    BF16,
    assert_close,
    different,
    exact_model,
    exact_sgd,
    full_parameters,
    in_lockstep,
    integer_batch,
    integer_net,
    train,
)
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow


def shard(mesh: DeviceMesh, net: nn.Module | None = None, **settings: object) -> tuple[nn.Module, Optimizer]:
    return exact_model(net or integer_net(), mesh=mesh, **settings)


def whole(ema: layerzero.EMA) -> dict[str, Tensor]:
    return {name: average.full_tensor() for name, average in ema.state_dict()["averages"].items()}


@on_ranks()
def test_the_average_is_that_of_torch_in_one_process(rank: int) -> None:
    for zero3_size, decay in ((1, 0.5), (2, 0.5), (2, 0.9), (4, 0.5)):
        ours, net = shard(layerzero.init_mesh(zero3_size)), integer_net()
        theirs = exact_sgd(net.parameters())
        ema = layerzero.EMA(ours[0], decay=decay)
        averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))
        for step in range(3):
            in_lockstep(rank, ours, (net, theirs), [step])
            ema.update()
            averaged.update_parameters(net)
            expected, case = dict(averaged.module.named_parameters()), f"S={zero3_size} decay={decay} step {step}"
            assert torch.equal(ema.n_averaged, averaged.n_averaged), case
            if decay == 0.5:
                assert not (wrong := different(whole(ema), expected)), f"{case}: {wrong}"
            else:
                assert_close(whole(ema), {name: p.detach() for name, p in expected.items()}, case)
        assert different(whole(ema), full_parameters(ours[0])), "the average is not the model itself"


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
@on_ranks()
def test_swapped_computes_with_the_average_on_all_ranks_and_gives_the_masters_back(rank: int, zero3_size: int) -> None:
    inputs, _ = integer_batch(samples=5)  # equal on all ranks, so the outputs must be, too
    for policy in (MixedPrecisionPolicy(), BF16):
        mesh = layerzero.init_mesh(zero3_size)
        (model, optimizer), undisturbed = shard(mesh, mp_policy=policy), shard(mesh, mp_policy=policy)
        ema = layerzero.EMA(model, decay=0.5)
        for step in range(3):
            train(model, optimizer, rank, [step])
            ema.update()
            train(*undisturbed, rank, [step])
            averages = whole(ema)
            before, kept = [plain(p).clone() for p in model.parameters()], full_parameters(model)
            dtype = policy.param_dtype or torch.float32
            expected, usual = (
                functional_call(integer_net(), {n: p.to(dtype) for n, p in weights.items()}, inputs.to(dtype))
                for weights in (averages, kept)
            )
            with ema.swapped(), torch.no_grad():  # the refresh of this step is still in flight
                assert torch.equal(model(inputs), expected), f"S={zero3_size} {dtype} step {step}"
                assert not different(full_parameters(model), averages)
                assert not different(whole(ema), averages), "the average can be saved inside"
            assert all(map(torch.equal, map(plain, model.parameters()), before)), "not the old masters"
            with torch.no_grad():
                assert torch.equal(model(inputs), usual), f"S={zero3_size} {dtype} step {step}, afterwards"
            if step:
                assert not torch.equal(expected, usual)
        train(model, optimizer, rank, [3])
        train(*undisturbed, rank, [3])
        assert not different(full_parameters(model), full_parameters(undisturbed[0])), "training went another way"


@on_ranks()
def test_swapped_restores_after_an_exception_and_an_edit(rank: int) -> None:
    model, optimizer = shard(layerzero.init_mesh(2))
    train(model, optimizer, rank, [0])
    ema = layerzero.EMA(model, decay=0.5)
    ema.update()
    train(model, optimizer, rank, [1])
    ema.update()
    before, averages = full_parameters(model), whole(ema)
    with pytest.raises(ZeroDivisionError), ema.swapped():
        with torch.no_grad():
            model.shift.add_(1.0)  # a write inside is undone
        raise ZeroDivisionError
    assert not different(full_parameters(model), before)
    assert not different(whole(ema), averages)
    ema.update()


@on_ranks()
def test_misuse_is_refused_and_torchs_averaged_model_points_here(rank: int) -> None:
    net = integer_net()
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            layerzero.EMA(net, decay=bad)
    with pytest.raises(ValueError, match="shard_model"):
        layerzero.EMA(net)
    with pytest.raises(ValueError, match="trainable"):
        layerzero.EMA(shard_frozen())
    model, optimizer = shard(layerzero.init_mesh(2))
    ema, other = layerzero.EMA(model), layerzero.EMA(model)
    train(model, optimizer, rank, [0])
    ema.update()
    before = full_parameters(model)
    with ema.swapped():
        for misuse in (optimizer.step, ema.update, other.update):
            with pytest.raises(RuntimeError, match="swapped"):
                misuse()
        for again in (ema, other):
            with pytest.raises(RuntimeError, match=r"called inside EMA\.swapped"), again.swapped():
                pass
    with layerzero.unsharded(model), pytest.raises(RuntimeError, match="unsharded"), ema.swapped():
        pass
    assert not different(full_parameters(model), before)
    train(model, optimizer, rank, [1])
    other.update()
    with pytest.raises(TypeError, match=r"layerzero\.EMA"):
        AveragedModel(model)


def shard_frozen() -> nn.Module:
    return layerzero.shard_model(integer_net().requires_grad_(False), zero3_size=2)


@on_ranks()
def test_an_average_holds_own_rows_in_fp32_and_sends_nothing(rank: int) -> None:
    net = integer_net()
    net.head.bias.requires_grad_(False)
    model, optimizer = shard(layerzero.init_mesh(2), net, mp_policy=BF16)
    train(model, optimizer, rank, [0])
    ema = layerzero.EMA(model)
    layerzero.traffic(model)
    calls = dict(layerzero.traffic(model).calls)
    ema.update()
    ema.update()
    assert dict(layerzero.traffic(model).calls) == calls, "an update sends nothing"
    averages = ema.state_dict()["averages"]
    assert averages.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, average in averages.items():
        parameter = model.get_parameter(name)
        assert average.shape == parameter.shape and average.dtype == torch.float32, name
        assert average.to_local().shape == parameter.to_local().shape, "only this rank's rows"


def trained(rank: int, mesh: DeviceMesh) -> tuple[nn.Module, layerzero.EMA]:
    model, optimizer = shard(mesh)
    ema = layerzero.EMA(model, decay=0.5)
    for step in range(2):
        train(model, optimizer, rank, [step])
        ema.update()
    return model, ema


def _load(rank: int, folder: str) -> None:
    mesh, other_mesh = layerzero.init_mesh(2), layerzero.init_mesh(4)
    model, ema = trained(rank, mesh)
    saved, averages = ema.state_dict(), whole(ema)
    dcp.save({"ema": saved}, checkpoint_id=folder)
    dist.barrier()
    for target_mesh, source in itertools.product((mesh, other_mesh), ("sharded", "whole", "checkpoint")):
        if source == "sharded" and target_mesh is other_mesh:
            continue
        fresh = layerzero.EMA(shard(target_mesh, integer_net(seed=7))[0], decay=0.5)
        if source == "checkpoint":
            state = {"ema": fresh.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            fresh.load_state_dict(state["ema"])
        else:
            fresh.load_state_dict(saved if source == "sharded" else saved | {"averages": averages})
        assert not (wrong := different(whole(fresh), averages)), f"{source}: {wrong}"
        assert fresh.n_averaged == 2
    # After two updates both are still equal: the number of updates decides what the first one does.
    again = layerzero.EMA(model, decay=0.5)
    again.load_state_dict(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for each in (ema, again):
        each.update()
    assert not different(whole(ema), whole(again)) and different(whole(ema), averages)


def test_an_average_is_saved_and_loaded_into_any_sharding() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_load, os.path.join(folder, "checkpoint"))


@on_ranks()
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(rank: int) -> None:
    _, ema = trained(rank, layerzero.init_mesh(2))
    _, other = trained(rank, layerzero.init_mesh(4))
    saved, before = ema.state_dict(), whole(ema)
    averages = saved["averages"]
    for bad, culprit in (
        ({name: average for name, average in averages.items() if name != "shift"}, r"the model: missing: shift\. Load"),
        (averages | {"stranger": torch.zeros(1)}, r"the model: unexpected: stranger\. Load"),
        (averages | {f"other{i}": torch.zeros(1) for i in range(71)}, r"unexpected: other0, .* and 67 more\. Load"),
        (averages | {"head.weight": torch.zeros(6, 3)}, "head.weight"),
        (other.state_dict()["averages"], "not sharded like the parameter"),
    ):
        with pytest.raises(ValueError, match=culprit):
            ema.load_state_dict(saved | {"averages": bad, "n_averaged": 9})
        assert not different(whole(ema), before) and ema.n_averaged == 2, culprit
