"""Checkpoints of FSDP2 load into sharded models, and layerzero's into FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from tests.support.checkpointing import everything, sharded_net, train
from tests.support.models import IntegerNet, different, integer_net
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=2**-4, weight_decay=0.5),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=2**-4, momentum=0.5),
}


def grouped(net: nn.Module) -> list[dict[str, Any]]:
    named = dict(net.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.25},
        {"params": [p for name, p in named.items() if not name.endswith("weight")]},
    ]


def fsdp2(name: str, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    net = integer_net(seed)
    for unit in (net.first, net.second, net.head, net):
        fully_shard(unit)
    return net, OPTIMIZERS[name](grouped(net))


def ddp(name: str) -> tuple[nn.Module, Optimizer]:
    net = nn.parallel.DistributedDataParallel(integer_net())
    return net, OPTIMIZERS[name](grouped(net))


def ours(name: str, zero3_size: int, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = layerzero.shard_model(integer_net(seed), mesh=mesh_of(zero3_size), units=IntegerNet.UNITS)
    return model, layerzero.shard_optimizer(OPTIMIZERS[name](grouped(model)), model)


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the full state of an FSDP2 or DDP model, as `everything` does for sharded models."""

    def gathered(value: Tensor) -> Tensor:
        return (value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()).clone()

    names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
    found = {f"model.{name}": gathered(parameter) for parameter, name in names.items()}
    for parameter, values in optimizer.state.items():
        found |= {f"optimizer.{names[parameter]}.{key}": gathered(value) for key, value in values.items()}
    return found


def _they_save(rank: int, path: str, name: str, kind: str) -> dict[str, Tensor]:
    model, optimizer = ddp(name) if kind == "DDP" else fsdp2(name)
    train(model, optimizer, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "flattened")
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    return whole(model, optimizer)


def _ours_loads(rank: int, path: str, name: str, zero3_size: int) -> dict[str, Tensor]:
    model, optimizer = ours(name, zero3_size, seed=1)
    optimizer.param_groups[0]["lr"] = 1.0
    checkpoint.load_dcp(path, model, optimizer, optimizer_key="optim")
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (2**-4, 0.25),
        (2**-4, 0.5 if name == "AdamW" else 0),
    ]
    return everything(model, optimizer)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["nested", "flattened", "DDP"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_checkpoint_of_fsdp2_or_ddp_loads_into_a_sharded_model(tmp_path: Path, name: str, kind: str) -> None:
    path = str(tmp_path / "dcp")
    saved = run_ranks(_they_save, path, name, kind)[0]
    for world_size, zero3_size in ((4, 2), (2, 2), (1, 1)):
        found = run_ranks(_ours_loads, path, name, zero3_size, world_size=world_size)[0]
        assert not (wrong := different(found, saved)), f"{world_size, zero3_size}: {wrong}"


def _torch_loads(rank: int, path: str, name: str) -> dict[str, Tensor]:
    model, optimizer = ours(name, 2, seed=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: .*param_names"):
        dcp.load(state, checkpoint_id=path)
    for group in optimizer_state["param_groups"]:
        del group["param_names"]  # FSDP2's optimizer was built without names
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return everything(model, optimizer)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_torchs_own_load_reads_a_checkpoint_of_fsdp2_without_names_in_its_groups(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "dcp")
    saved = run_ranks(_they_save, path, name, "nested", world_size=2)[0]
    found = run_ranks(_torch_loads, path, name, world_size=2)[0]
    assert not (wrong := different(found, saved)), wrong


def _ours_saves(rank: int, path: str, name: str, plainly: bool) -> dict[str, Tensor]:
    model, optimizer = ours(name, 2)
    train(model, optimizer, range(2))
    if plainly:
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict_by_name()}, checkpoint_id=path)
    else:
        checkpoint.save(path, model, optimizer)
    return everything(model, optimizer)


def _fsdp2_loads(rank: int, path: str, name: str, plainly: bool) -> dict[str, Tensor]:
    model, optimizer = fsdp2(name, seed=1)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, **({"checkpoint_id": path} if plainly else {"storage_reader": checkpoint.reader(path)}))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [2**-4, 2**-4]
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    return whole(model, optimizer)


def _plain_round_trip(rank: int, path: str, name: str) -> dict[str, dict[str, Tensor]]:
    model, optimizer = ours(name, 1, seed=1)
    train(model, optimizer, range(3, 4))  # so that there is a state to load into
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict_by_name()}
    dcp.load(state, checkpoint_id=path)
    optimizer.load_state_dict(state["optimizer"])
    fresh, its_optimizer = ours(name, 1, seed=1)
    checkpoint.load_dcp(path, fresh, its_optimizer)
    return {"dcp.load": everything(model, optimizer), "load_dcp": everything(fresh, its_optimizer)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("plainly", [False, True], ids=["checkpoint.save", "dcp.save"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_checkpoint_of_ours_loads_into_fsdp2_and_plain_ones_into_ours(
    tmp_path: Path, name: str, plainly: bool
) -> None:
    path = str(tmp_path / "ours")
    saved = run_ranks(_ours_saves, path, name, plainly)[0]
    loaded = {"FSDP2": run_ranks(_fsdp2_loads, path, name, plainly, world_size=2)[0]}
    loaded |= run_ranks(_plain_round_trip, path, name, world_size=2)[0] if plainly else {}
    for how, found in loaded.items():
        assert not (wrong := different(found, saved)), f"{how}: {wrong}"


def _misfits(rank: int, path: str) -> None:
    model, optimizer = ours("SGD", 2)
    dcp.save({"model": {"shift": torch.zeros(6)}, "optimizer": {"state": {}, "param_groups": []}}, checkpoint_id=path)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=r"missing: first.weight.*no saved parameter group contains"):
        checkpoint.load_dcp(path, model, optimizer)
    with pytest.raises(ValueError, match="missing: the optimizer"):
        checkpoint.load_dcp(path, model, optimizer, optimizer_key="optim")
    assert not different(everything(model, optimizer), before)
    dist.barrier()


def test_what_does_not_fit_is_an_error_here_too(tmp_path: Path) -> None:
    run_ranks(_misfits, str(tmp_path / "dcp"), world_size=2)


@on_ranks(world_size=1)
def test_values_are_read_into_conjugate_and_negative_views(rank: int, tmp_path: Path) -> None:
    model, _ = sharded_net(1)
    checkpoint.save(tmp_path / "one", model, extra={"z": torch.tensor([1 + 2j]), "i": torch.tensor([3.0])})
    z = torch.zeros(1, dtype=torch.complex64).conj()
    views = {"z": z, "i": torch.zeros(1, dtype=torch.complex64).conj().imag}
    dcp.load({"extra": views}, storage_reader=checkpoint.reader(tmp_path / "one"))
    assert views["z"].tolist() == [1 + 2j] and views["i"].tolist() == [3.0]


@on_ranks(world_size=1)
def test_values_are_read_into_single_elements_of_any_stride(rank: int, tmp_path: Path) -> None:
    model, _ = sharded_net(1)
    checkpoint.save(tmp_path / "one", model, extra={"column": torch.tensor([3.0]), "expanded": torch.tensor([[4.0]])})
    views = {"column": torch.zeros(4, 5)[:1, 2], "expanded": torch.zeros(()).expand(1, 1)}
    assert [view.stride(-1) for view in views.values()] == [5, 0]
    dcp.load({"extra": views}, storage_reader=checkpoint.reader(tmp_path / "one"))
    assert views["column"].tolist() == [3.0] and views["expanded"].tolist() == [[4.0]]
