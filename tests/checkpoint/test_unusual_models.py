"""Checkpoints of unusual models and loops: wrappers, odd states, states that fit in part."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import publish, run_folder
from layerzero.checkpoint.manifest import MANIFEST
from tests.support.checkpointing import everything, sharded_net
from tests.support.models import different, exact_model, full_parameters, integer_net
from tests.support.ranks import mesh_of, on_ranks


class Scale(nn.Module):
    """Module with a parameter, a buffer and a tensor as extra state, as low-precision layers have."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), value))
        self.amax = torch.full((3,), value)

    def get_extra_state(self) -> Any:
        return {"amax": self.amax, "steps": [1, self.amax]} if self.amax[0] > 1 else self.amax.clone()

    def set_extra_state(self, state: Any) -> None:
        self.amax = state["steps"][1] if isinstance(state, dict) else state

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.sum()


def _wrapped(value: float, wrap: Any, ignored: bool, zero3_size: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), wrap(Scale(value)))
    nn.init.constant_(net[0].weight, value)
    nn.init.constant_(net[0].bias, value)
    scale = next(module for module in net.modules() if isinstance(module, Scale)).scale
    return layerzero.shard_model(net, mesh=mesh_of(zero3_size), ignored_params=[scale] if ignored else None)


@on_ranks(world_size=2)
def test_wrappers_and_extra_states_do_not_change_what_is_saved(rank: int, tmp_path: Path) -> None:
    wraps = {
        "bare": lambda module: module,
        "compiled": partial(torch.compile, backend="eager"),
        "recomputed": checkpoint_wrapper,
    }
    for ignored in (False, True):
        for kind, wrap in wraps.items():
            model = _wrapped(1.0 if ignored else 2.0, wrap, ignored, 2)
            optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            checkpoint.save(f"{tmp_path}/{ignored}-{kind}", model, optimizer)
    for ignored in (False, True):
        for kind, other in (("bare", "compiled"), ("compiled", "recomputed"), ("recomputed", "bare")):
            model = _wrapped(5.0, wraps[other], ignored, 1)
            optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model)
            checkpoint.load(f"{tmp_path}/{ignored}-{kind}", model, optimizer)
            case = f"{kind} -> {other}, ignored={ignored}"
            amax = next(module for module in model.modules() if isinstance(module, Scale)).amax
            assert amax.tolist() == [1.0 if ignored else 2.0] * 3, case
            for name, parameter in model.named_parameters():
                for loaded, expected in (
                    (parameter.detach(), 0.5 if ignored else 1.5),
                    (optimizer.state[parameter]["momentum_buffer"], 1.0),
                ):
                    whole = loaded.full_tensor() if hasattr(loaded, "full_tensor") else loaded
                    assert whole.unique().tolist() == [expected], f"{case}: {name}"


@on_ranks(world_size=2)
def test_what_a_state_dict_hook_makes_is_refused_instead_of_lost(rank: int, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = layerzero.shard_model(net, mesh=mesh_of(2))
    checkpoint.save(f"{tmp_path}/one", model)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({f"{prefix}1.running_mean": torch.ones(2)})
    )
    with pytest.raises((TypeError, RuntimeError), match=r"state_dict\(\) has 1\.running_mean, which is no parameter"):
        checkpoint.save(f"{tmp_path}/two", model)
    with pytest.raises(ValueError, match=r"1\.running_mean is added by a state_dict\(\) hook"):
        checkpoint.load(f"{tmp_path}/one", model)


@on_ranks(world_size=2)
def test_what_fits_is_loaded_and_everything_else_stays(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, steps=1)
    ema = layerzero.EMA(model)
    ema.update()
    checkpoint.save(f"{tmp_path}/model", model)
    checkpoint.save(f"{tmp_path}/all", model, optimizer, {"ema": ema.state_dict(), "step": 1})

    other, its_optimizer = sharded_net(2, seed=1, steps=1)
    before = everything(other, its_optimizer)
    with _warned(rank, "missing: the optimizer"):
        checkpoint.load(f"{tmp_path}/model", other, its_optimizer, strict=False)
    after = everything(other, its_optimizer)
    assert not different(full_parameters(other), full_parameters(model))
    kept = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert {name for name in before if name.startswith("optimizer")} <= kept

    net = integer_net(2)
    net.head = nn.Linear(6, 5)
    model, optimizer = exact_model(net, mesh=mesh_of(2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = everything(model, optimizer)
    with _warned(rank, r"extra\.ema\.averages\.head\.weight has the sharding of head\.weight"):
        extra = checkpoint.load(f"{tmp_path}/all", model, optimizer, strict=False)
    assert extra["step"] == 1
    assert extra["ema"]["averages"]["head.weight"] is None
    assert extra["ema"]["averages"]["first.weight"].shape == (6, 5)
    after = everything(model, optimizer)
    assert all(torch.equal(after[name], before[name]) for name in after if "head" in name), "state included"


def _warned(rank: int, match: str) -> Any:
    return pytest.warns(UserWarning, match=match) if rank == 0 else pytest.MonkeyPatch.context()


@on_ranks()
def test_parameters_without_elements_can_be_saved(rank: int, tmp_path: Path) -> None:
    for shape in ((4, 0), (0, 4), (0,), (1, 1)):
        net = nn.ParameterDict({"e": nn.Parameter(torch.zeros(shape)), "w": nn.Parameter(torch.ones(3))})
        model = layerzero.shard_model(net, mesh=mesh_of(2))
        name = "x".join(map(str, shape))
        checkpoint.save(f"{tmp_path}/{name}", model)
        checkpoint.load(f"{tmp_path}/{name}", model)
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{tmp_path}/dcp-{name}")
        checkpoint.load_dcp(f"{tmp_path}/dcp-{name}", model)


@on_ranks(world_size=2)
def test_values_are_stored_as_they_look_and_compared_whole(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2)
    z = torch.tensor([1 + 2j])
    extra = {"conjugate": z.conj(), "negative": z.conj().imag, "reversed": np.arange(3)[::-1]}
    checkpoint.save(f"{tmp_path}/one", model, optimizer, extra)
    checkpoint.save_async(f"{tmp_path}/two", model, optimizer, extra).wait()
    for name in ("one", "two"):
        loaded = checkpoint.load(f"{tmp_path}/{name}", model, optimizer)
        assert loaded["conjugate"].tolist() == [1 - 2j]
        assert loaded["negative"].tolist() == [-2]
        assert loaded["reversed"].tolist() == [2, 1, 0]
    for value in (torch.zeros(1, dtype=torch.complex128), torch.zeros(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises((TypeError, RuntimeError), match=r"extra\.odd: a .* cannot be stored in a safetensors file"):
            checkpoint.save(f"{tmp_path}/three", model, optimizer, {"odd": value})
    for one, other in (([1, 2], (1, 2)), ([1], [1, 2]), ([checkpoint.per_rank(0)], [0])):
        with pytest.raises(ValueError, match=r"extra\.it"):
            checkpoint.save(f"{tmp_path}/three", model, optimizer, {"it": other if rank else one})


@on_ranks(world_size=2)
def test_hyperparameters_that_are_tensors_and_other_optimizers(rank: int, tmp_path: Path) -> None:
    def built(*groups: slice, lr: Any) -> tuple[nn.Module, Optimizer]:
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(2))
        named = list(model.named_parameters())
        inner = torch.optim.AdamW([{"params": named[group]} for group in groups], lr=lr)
        return model, layerzero.shard_optimizer(inner, model)

    model, optimizer = built(slice(0, 3), slice(3, None), lr=torch.tensor(0.5))
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    checkpoint.save(f"{tmp_path}/one", model, optimizer)
    model, optimizer = built(slice(None), lr=torch.tensor(0.125))
    rate = optimizer.param_groups[0]["lr"]
    checkpoint.load(f"{tmp_path}/one", model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5, "compiled steps hold the tensor"
    names = optimizer.param_groups[0]["param_names"]
    assert names == [name for name, _ in model.named_parameters()]
    plain_sgd = layerzero.shard_optimizer(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(
        ValueError,
        match=r"one does not match the optimizer: the checkpoint has the state of AdamW, but the optimizer is SGD\. "
        r"Create the optimizer with the same class, parameter groups and options",
    ):
        checkpoint.load(f"{tmp_path}/one", model, plain_sgd)
    two_groups_model, two_groups = built(slice(0, 3), slice(3, None), lr=torch.tensor(0.5))
    two_groups.param_groups[0]["weight_decay"] = 0.5
    checkpoint.save(f"{tmp_path}/two", two_groups_model, two_groups)
    with pytest.raises(ValueError, match=r"two does not match the optimizer: .* different weight_decay.*\. Create the"):
        checkpoint.load(f"{tmp_path}/two", model, optimizer)
    ema = layerzero.EMA(model)
    ema.update()
    with ema.swapped(), pytest.raises(RuntimeError, match=r"inside EMA\.swapped"):
        checkpoint.load(f"{tmp_path}/one", model, optimizer)


@on_ranks(world_size=2)
def test_what_comes_after_the_rename_does_not_fail_the_save(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2)
    flush = publish.flush_folder

    def refuse(path: Path) -> None:
        if path == tmp_path:
            raise PermissionError(path)
        flush(path)

    with mock.patch.object(publish, "flush_folder", refuse), _warned(rank, "could not be flushed"):
        checkpoint.save(f"{tmp_path}/one", model, optimizer)
    checkpoint.load(f"{tmp_path}/one", model, optimizer)


def test_leftovers_are_removed_when_nobody_can_be_writing_them(tmp_path: Path) -> None:
    day, token = 24 * 3600, "0123456789abcdef"
    new = tmp_path / "new"
    new.mkdir()
    (new / MANIFEST).touch()
    now = (new / MANIFEST).stat().st_mtime
    names = {f".old.{token}.partial": 2 * day, f".young.{token}.partial": day // 2, ".theirs.partial": 2 * day}
    for name, age in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        for path in (tmp_path / name / "file", tmp_path / name):
            os.utime(path, (now - age, now - age))
    exported = tmp_path / f".file.{token}.partial"
    exported.touch()
    os.utime(exported, (0, 0))
    busy = tmp_path / f".busy.{token}.partial"
    busy.mkdir()
    (busy / "file").touch()
    os.utime(busy, (0, 0))  # a file in it is being written
    run_folder.clear_leftovers(new / MANIFEST)
    assert {path.name for path in tmp_path.iterdir()} == {"new", busy.name, *list(names)[1:]}
