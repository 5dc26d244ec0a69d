"""layerzero.checkpoint: a saved state loads into any number of ranks and any units."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import safetensors_files
from tests.support.checkpointing import WithBuffers, everything, sharded_net, train
from tests.support.models import IntegerNet, different, full_parameters, integer_net
from tests.support.ranks import mesh_of, on_ranks, run_ranks

TOPOLOGIES = ((4, 4), (4, 2), (4, 1), (2, 2), (2, 1), (1, 1))


def _save(rank: int, path: str, zero3_size: int, adam: bool) -> dict[str, Tensor]:
    model, optimizer = sharded_net(zero3_size, adam=adam, steps=2)
    checkpoint.save(path, model, optimizer, {"step": 2})
    saved = everything(model, optimizer)
    train(model, optimizer, range(2, 4))
    return {"saved": saved, "continued": everything(model, optimizer)}


def _resume(rank: int, path: str, zero3_size: int, adam: bool, expected: dict[str, dict[str, Tensor]]) -> None:
    for units in (IntegerNet.UNITS, None):
        model, optimizer = sharded_net(zero3_size, adam=adam, units=units, seed=1)
        extra = checkpoint.load(path, model, optimizer)
        assert extra == {"step": 2}
        wrong = different(everything(model, optimizer), expected["saved"])
        assert not wrong, f"loaded on {dist.get_world_size(), zero3_size} units={units}: {wrong}"
        train(model, optimizer, range(extra["step"], 4))
        if not adam or dist.get_world_size() == 4:  # Adam rounds differently on other ranks
            wrong = different(everything(model, optimizer), expected["continued"])
            assert not wrong, f"continued on {dist.get_world_size(), zero3_size} units={units}: {wrong}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "saved_on", [(4, 2), pytest.param((2, 1), marks=pytest.mark.slow), pytest.param((1, 1), marks=pytest.mark.slow)]
)
def test_a_run_resumed_on_any_topology_equals_one_that_never_stopped(tmp_path: Path, saved_on: tuple[int, int]) -> None:
    path = str(tmp_path / "step-2")
    expected = run_ranks(_save, path, saved_on[1], False, world_size=saved_on[0])[0]
    assert any(name.endswith("momentum_buffer") for name in expected["saved"])
    for world_size, zero3_size in TOPOLOGIES:
        run_ranks(_resume, path, zero3_size, False, expected, world_size=world_size)


def test_adamw_resumes_with_the_bits_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "step-2")
    expected = run_ranks(_save, path, 2, True)[0]
    for world_size in (4, 2):
        run_ranks(_resume, path, 2, True, expected, world_size=world_size)


def _slow_on_rank_1(owner: Any, name: str) -> Any:
    """Patch a function to take longer on rank 1 than the timeout of the default group."""
    function = getattr(owner, name)

    def slow(*args: Any) -> Any:
        time.sleep(8 * dist.get_rank())
        return function(*args)

    return mock.patch.object(owner, name, slow)


@pytest.mark.slow
@on_ranks(world_size=2, pg_timeout=6)
def test_one_rank_may_write_and_read_longer_than_the_timeout_of_the_default_group(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, steps=1)
    expected = everything(model, optimizer)
    with _slow_on_rank_1(safetensors_files, "write_file"):
        checkpoint.save(tmp_path / "one", model, optimizer)
    train(model, optimizer, range(1, 2))
    with _slow_on_rank_1(safetensors_files.CheckpointFiles, "read"):
        checkpoint.load(tmp_path / "one", model, optimizer)
    assert not different(everything(model, optimizer), expected)


def _sizes(rank: int, path: str, zero3_size: int) -> int:
    model, optimizer = sharded_net(zero3_size, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), steps=1)
    checkpoint.save(path, model, optimizer)
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_rank_writes_what_it_alone_owns(tmp_path: Path) -> None:
    path = tmp_path / "one"
    numel = run_ranks(_sizes, str(path), 2)[0]
    contents = json.loads((path / "contents.json").read_text())["tensors"]
    sizes = [
        torch.Size(sizes).numel()
        for name, (_, _, chunks) in contents.items()
        for _, _, sizes in chunks
        if name.startswith("model.") or name.endswith("momentum_buffer")
    ]
    assert sum(sizes) == 2 * numel, "parameters and momenta, once each"
    files = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    names = sorted(file.name for file in path.iterdir())
    assert names == ["contents.json", "manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(4))]
    assert all(load_file(path / name) for name in files) and json.loads((path / "manifest.json").read_text()), (
        "no pickle"
    )
    headers = {name: int.from_bytes((path / name).read_bytes()[:8], "little") + 8 for name in files}
    assert sum(files.values()) - sum(headers.values()) == 4 * 2 * numel, "in fp32"


class Changed(IntegerNet):
    """An IntegerNet with another head and an additional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(2))


@on_ranks()
def test_what_does_not_fit_is_listed_and_nothing_is_changed(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, steps=1)
    checkpoint.save(f"{tmp_path}/one", model, optimizer, {"step": 1})
    torch.manual_seed(5)
    other = layerzero.shard_model(Changed(), mesh=mesh_of(2), units=Changed.UNITS)
    other.shift.requires_grad_(True)
    groups = [{"params": [p for n, p in other.named_parameters() if n != "shift"]}]
    its_optimizer = layerzero.shard_optimizer(torch.optim.SGD(groups, lr=1.0, momentum=0.9), other)
    before = everything(other, its_optimizer)
    with pytest.raises(ValueError) as caught:
        checkpoint.load(f"{tmp_path}/one", other, its_optimizer)
    for said in (
        "head.weight: expected shape [4, 6], but the checkpoint has [3, 6]",
        "head.bias: expected shape [4], but the checkpoint has [3]",
        "missing: scale",
        "missing: count",
        "unexpected in the optimizer: shift",
        "momentum_buffer of head.weight in the optimizer: expected shape [4, 6]",
        "no saved parameter group contains scale",
    ):
        assert said in str(caught.value), f"{said!r} is not in {caught.value}"
    assert not different(everything(other, its_optimizer), before), "nothing was changed"
    assert its_optimizer.param_groups[0]["lr"] == 1.0
    if rank == 0:
        with pytest.warns(UserWarning, match=r"skipped the entries that do not match: .*missing: scale"):
            assert checkpoint.load(f"{tmp_path}/one", other, its_optimizer, strict=False) == {"step": 1}
    else:
        assert checkpoint.load(f"{tmp_path}/one", other, its_optimizer, strict=False) == {"step": 1}
    after, saved = everything(other, its_optimizer), everything(model, optimizer)
    for name, value in after.items():
        fits = name in saved and saved[name].shape == value.shape
        assert torch.equal(value, saved[name] if fits else before[name]), name
    assert not any("shift" in name for name in after if name.startswith("optimizer"))
    smaller = integer_net()
    smaller.first = nn.Identity()
    smaller.shift = None
    with pytest.raises(
        ValueError, match=r"first\.bias; unexpected: first\.weight; unexpected: shift\. Use a separate folder"
    ):
        checkpoint.load(f"{tmp_path}/one", layerzero.shard_model(smaller, mesh=mesh_of(2)))
    with pytest.raises(
        ValueError, match=r"does not match the optimizer: missing: the optimizer state\. Load the model without"
    ):
        checkpoint.save(f"{tmp_path}/bare", model)
        checkpoint.load(f"{tmp_path}/bare", model, optimizer)


@on_ranks(world_size=2)
def test_another_models_checkpoint_is_told_in_a_few_lines(rank: int, tmp_path: Path) -> None:
    """Load 28 parameters into other names or shapes; a single message covers all of them."""
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(14)))
    model = layerzero.shard_model(net, mesh=mesh_of(2))
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9), model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(f"{tmp_path}/one", model, optimizer)
    other = nn.Sequential(*(nn.Linear(3, 3 if place < 7 else 4) for place in range(7)), nn.Linear(3, 5))
    for place in range(20):
        other.add_module(f"further{place}", nn.Linear(5, 5))
    other = layerzero.shard_model(other, mesh=mesh_of(2))
    its_optimizer = layerzero.shard_optimizer(torch.optim.SGD(other.parameters(), momentum=0.9), other)
    before = everything(other, its_optimizer)
    with pytest.raises(ValueError) as caught:
        checkpoint.load(f"{tmp_path}/one", other, its_optimizer)
    message = str(caught.value)
    for said in (
        "one does not match the model or the optimizer: 42 of 56 tensors of the model do not match",
        "missing: further0.weight, further0.bias, further1.weight and 37 more",
        "unexpected: 10.bias, 10.weight, 11.bias and 9 more",
        "7.weight: expected shape [5, 3], but the checkpoint has [3, 3]",
        "Use a separate folder for each model",
    ):
        assert said in message, f"{said!r} is not in {message}"
    assert len(message) < 1500, message
    assert not different(everything(other, its_optimizer), before), "nothing was changed"
    shallow = layerzero.shard_model(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), mesh=mesh_of(2))
    with pytest.raises(
        ValueError, match=r"one does not match the model: unexpected: 10\.bias, 10\.weight, 11\.bias and 19 more"
    ):
        checkpoint.load(f"{tmp_path}/one", shallow)


@on_ranks(world_size=2)
def test_a_dtype_that_would_lose_digits_is_refused(rank: int, tmp_path: Path) -> None:
    for trained in (False, True):
        net = integer_net().to(torch.bfloat16).requires_grad_(trained)
        model = layerzero.shard_model(net, mesh=mesh_of(2))
        checkpoint.save(f"{tmp_path}/{trained}", model)
    wide = layerzero.shard_model(integer_net(1), mesh=mesh_of(2))
    checkpoint.load(f"{tmp_path}/False", wide)
    assert not different(full_parameters(wide), dict(integer_net().named_parameters())), "bf16 fits into fp32"
    with pytest.raises(ValueError, match=r"shift: expected torch.bfloat16, but the checkpoint has torch.float32"):
        frozen = integer_net().to(torch.bfloat16).requires_grad_(False)
        checkpoint.load(f"{tmp_path}/True", layerzero.shard_model(frozen, mesh=mesh_of(2)))


def _grouped(*groups: dict[str, Any], **settings: Any) -> tuple[nn.Module, Optimizer]:
    """Return a model and an optimizer whose groups name their parameters."""
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    named = dict(model.named_parameters())
    filled = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
    return model, layerzero.shard_optimizer(torch.optim.SGD(filled, lr=1.0, **settings), model)


@on_ranks(world_size=2)
def test_groups_are_matched_by_the_names_of_their_parameters(rank: int, tmp_path: Path) -> None:
    names = [name for name, _ in integer_net().named_parameters()]
    weights = [name for name in names if name.endswith("weight")]
    others = [name for name in names if not name.endswith("weight")]
    model, optimizer = _grouped(
        {"params": weights, "lr": 0.5, "weight_decay": 0.1}, {"params": others, "lr": torch.tensor(0.25)}
    )
    checkpoint.save(tmp_path / "one", model, optimizer)
    model, optimizer = _grouped({"params": others[:1]}, {"params": weights, "momentum": 0.5}, {"params": others[1:]})
    checkpoint.load(tmp_path / "one", model, optimizer)
    found = [(float(g["lr"]), g["weight_decay"], g["momentum"]) for g in optimizer.param_groups]
    assert found == [(0.25, 0, 0), (0.5, 0.1, 0), (0.25, 0, 0)], "by name, not by place"
    model, optimizer = _grouped({"params": names})
    with pytest.raises(ValueError, match="saved in groups with different lr, weight_decay"):
        checkpoint.load(tmp_path / "one", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1.0
    # Groups without parameters keep their settings, too, in every kind of load.
    empty = {"params": []}
    model, optimizer = _grouped(
        {**empty, "lr": 0.5}, {"params": names, "lr": 0.25}, {**empty, "lr": 0.125}, momentum=0.5
    )
    train(model, optimizer, range(1))
    checkpoint.save(tmp_path / "two", model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp")
    loads: dict[str, Any] = {
        "checkpoint.load": lambda model, other: checkpoint.load(tmp_path / "two", model, other),
        "load_dcp": lambda model, other: checkpoint.load_dcp(tmp_path / "dcp", model, other),
        "state_dict": lambda model, other: other.load_state_dict(optimizer.state_dict()),
        "by name": lambda model, other: other.load_state_dict(optimizer.state_dict_by_name()),
        "full": lambda model, other: other.load_state_dict(optimizer.full_state_dict(rank0_only=False)),
    }
    for name, load in loads.items():
        fresh, other = _grouped(empty, {"params": names}, empty, momentum=0.5)
        load(fresh, other)
        assert [group["lr"] for group in other.param_groups] == [0.5, 0.25, 0.125], name


def _numbered(rank: int, folder: str, saves: bool) -> dict[str, dict[str, Tensor]]:
    """Save numbered state with torch, with and without names in the groups, or load both."""
    found = {}
    for name in ("names", "numbers"):
        model, optimizer = sharded_net(2, adam=True, seed=0 if saves else 1)
        if saves:
            train(model, optimizer, range(2))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            for group in state["optimizer"]["param_groups"] if name == "numbers" else ():
                del group["param_names"]
            dcp.save(state, checkpoint_id=f"{folder}/{name}")
        else:
            checkpoint.load_dcp(f"{folder}/{name}", model, optimizer)
        found[name] = everything(model, optimizer)
    return found


def test_numbered_state_that_torch_saved_loads_on_other_ranks(tmp_path: Path) -> None:
    saved = run_ranks(_numbered, str(tmp_path), True)[0]
    loaded = run_ranks(_numbered, str(tmp_path), False, world_size=2)[0]
    for name, expected in saved.items():
        assert any(key.endswith("exp_avg") for key in expected)
        assert not (wrong := different(loaded[name], expected)), f"{name}: {wrong}"


@on_ranks(world_size=2)
def test_buffers_tied_weights_and_extra_states_come_back(rank: int, tmp_path: Path) -> None:
    net = WithBuffers(seed=1)
    expected = {name: value.clone() for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    net.counting.calls = 17
    model = layerzero.shard_model(net, mesh=mesh_of(2), units=WithBuffers.UNITS)
    checkpoint.save(f"{tmp_path}/one", model)
    stored = json.loads(Path(tmp_path, "one", "contents.json").read_text())
    names = [name for name in stored["tensors"] if "embedding" in name or "head" in name]
    assert names == ["model.embedding.weight"], "tied weights are stored once"
    for zero3_size in (1, 2):
        other = layerzero.shard_model(WithBuffers(seed=2), mesh=mesh_of(zero3_size), units=None)
        checkpoint.load(f"{tmp_path}/one", other)
        whole = layerzero.full_state_dict(other, rank0_only=False)
        assert not different({n: v for n, v in whole.items() if isinstance(v, Tensor)}, expected)
        assert other.counting.calls == 17
        assert other.scratch.tolist() == [2, 2]


def _rotation(rank: int, folder: str) -> list[str]:
    model, optimizer = sharded_net(2)
    for step in (8, 9, 10, 11):
        checkpoint.save(f"{folder}/step-{step}", model, optimizer, keep_last=2)
    with pytest.raises((FileExistsError, RuntimeError), match="already exists"):
        checkpoint.save(f"{folder}/step-11", model, optimizer)
    with pytest.raises((FileNotFoundError, RuntimeError), match="there is no checkpoint at"):
        checkpoint.load(f"{folder}/none", model, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match=r"it has no manifest\.json"):
        checkpoint.load(folder, model, optimizer)
    with pytest.raises((ValueError, RuntimeError), match="keep_last"):
        checkpoint.save(f"{folder}/step-12", model, optimizer, keep_last=0)
    return sorted(path.name for path in Path(folder).iterdir())


def test_only_the_last_checkpoints_are_kept_and_latest_finds_the_last(tmp_path: Path) -> None:
    (tmp_path / "step-99").mkdir()
    (tmp_path / ".step-98.partial").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    left = run_ranks(_rotation, str(tmp_path), world_size=2)[0]
    theirs = [".step-98.partial", "notes.txt", "step-99"]  # another process may be writing the first
    assert left == sorted([*theirs, "step-10", "step-11"]), "only what is a checkpoint is counted, and removed"
    assert checkpoint.latest(tmp_path) == tmp_path / "step-11"
    (tmp_path / "step-11" / "contents.json").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
