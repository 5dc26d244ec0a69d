"""``python -m layerzero inspect``, ``export`` and ``import``: full models in one process, without a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner, Result

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import whole_model_files
from layerzero.cli import app
from layerzero.dtensor.local_shard import plain
from tests.support.checkpointing import WithBuffers, everything, sharded_net
from tests.support.damaging import flip_bit
from tests.support.models import TiedTransformer, different
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow


def command(*arguments: str | Path) -> Result:
    """Run ``python -m layerzero`` in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _save_tied(rank: int, path: str) -> dict[str, Tensor]:
    model = layerzero.shard_model(
        WithBuffers(seed=1), mesh=mesh_of(2), units=WithBuffers.UNITS, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
    )
    checkpoint.save(path, model)
    state = layerzero.full_state_dict(model, rank0_only=False)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def test_an_exported_model_is_the_full_state_dict(tmp_path: Path) -> None:
    expected = run_ranks(_save_tied, str(tmp_path / "one"))[0]
    assert command("export", tmp_path / "one", tmp_path / "out.safetensors").exit_code == 0
    found = load_file(tmp_path / "out.safetensors")
    assert not different(found, expected)
    plain = WithBuffers(seed=2)
    missing, unexpected = plain.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["counting._extra_state"], [])
    assert command("export", "--dtype", "bfloat16", tmp_path / "one", tmp_path / "b.safetensors").exit_code == 0
    narrow = load_file(tmp_path / "b.safetensors")
    assert not different(narrow, {n: v.bfloat16() if v.is_floating_point() else v for n, v in expected.items()})
    again = command("export", tmp_path / "one", tmp_path / "out.safetensors")
    assert again.exit_code == 1 and "already exists" in again.stderr
    assert command("export", "--dtype", "int4", tmp_path / "one", tmp_path / "x").exit_code == 2


def _load_tied(rank: int, path: str, wanted: dict[str, Tensor]) -> None:
    for zero3_size in (1, 2):
        model = layerzero.shard_model(TiedTransformer(seed=3), mesh=mesh_of(zero3_size), units=TiedTransformer.UNITS)
        assert checkpoint.load(path, model) is None
        assert not different(layerzero.full_state_dict(model, rank0_only=False), wanted)


def _refuse_twins(rank: int, path: str) -> None:
    model = layerzero.shard_model(TiedTransformer(seed=3), mesh=mesh_of(2), units=TiedTransformer.UNITS)
    before = layerzero.full_state_dict(model, rank0_only=False)
    with pytest.raises((ValueError, RuntimeError), match=r"embedding\.weight and head\.weight are one parameter here"):
        checkpoint.load(path, model)
    assert not different(layerzero.full_state_dict(model, rank0_only=False), before)


def test_imported_safetensors_load_into_a_sharded_model(tmp_path: Path) -> None:
    net = TiedTransformer(seed=1)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    first = {name: value for name, value in state.items() if name.startswith("blocks")}
    rest = {name: value for name, value in state.items() if name not in first}
    save_file(first, tmp_path / "1.safetensors")
    save_file(rest, tmp_path / "2.safetensors")
    made = command("import", tmp_path / "1.safetensors", tmp_path / "2.safetensors", tmp_path / "whole")
    assert made.exit_code == 0, made.stderr
    run_ranks(_load_tied, str(tmp_path / "whole"), state, world_size=2)

    save_file({name: value for name, value in rest.items() if name != "head.weight"}, tmp_path / "3.safetensors")
    whole_model_files.import_model([tmp_path / "1.safetensors", tmp_path / "3.safetensors"], tmp_path / "once")
    run_ranks(_load_tied, str(tmp_path / "once"), state, world_size=2)

    save_file({**rest, "head.weight": rest["head.weight"] + 1}, tmp_path / "4.safetensors")
    whole_model_files.import_model([tmp_path / "1.safetensors", tmp_path / "4.safetensors"], tmp_path / "apart")
    run_ranks(_refuse_twins, str(tmp_path / "apart"), world_size=2)

    narrow = {name: value.bfloat16() for name, value in state.items()}
    save_file(narrow, tmp_path / "5.safetensors")
    whole_model_files.import_model([tmp_path / "5.safetensors"], tmp_path / "narrow")
    wide = {name: value.float() for name, value in narrow.items()}
    run_ranks(_load_tied, str(tmp_path / "narrow"), wide, world_size=2)

    twice = command("import", tmp_path / "1.safetensors", tmp_path / "1.safetensors", tmp_path / "twice")
    assert twice.exit_code == 1 and "that an earlier file has as well" in twice.stderr
    (tmp_path / "no.safetensors").write_bytes(b"nothing of the kind")
    wrong = command("import", tmp_path / "no.safetensors", tmp_path / "no")
    assert wrong.exit_code == 1 and "is not a safetensors file" in wrong.stderr
    assert not list(tmp_path.glob(".*")), "nothing is left over"


def _save_trained(rank: int, path: str) -> int:
    model, optimizer = sharded_net(2, adam=True, steps=1)
    checkpoint.save(path, model, optimizer, {"tokens": torch.arange(5)})
    return len(everything(model, optimizer))


def test_inspect_lists_the_tensors_and_notices_damage(tmp_path: Path) -> None:
    path = tmp_path / "one"
    count = run_ranks(_save_trained, str(path))[0]
    shown = command("inspect", path)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == count + 3, "a title, all tensors, those of extra, and the topology"
    table = {line.split()[0]: line for line in lines}
    assert "[3, 6]" in table["model.head.weight"] and "float32" in table["model.head.weight"]
    assert table["optimizer.state.head.weight.exp_avg"].split()[-2] == "72"
    assert "int64" in table["extra.tokens"]
    assert "saved by 4 ranks with zero3_size=2; save number 1 in its folder" in lines[-1]
    assert "all files are intact" in lines[-1]
    flip_bit(path / "rank-00002.safetensors")
    damaged = command("inspect", path)
    assert damaged.exit_code == 1 and "rank-00002.safetensors is damaged" in damaged.stderr


def test_conversion_needs_less_memory_than_two_layers(tmp_path: Path) -> None:
    layers = {f"layers.{i}.weight": torch.full((256, 4096), float(i)) for i in range(12)}
    save_file(layers, tmp_path / "big.safetensors")
    with AllocationPeak(nn.Module()) as used:
        whole_model_files.import_model([tmp_path / "big.safetensors"], tmp_path / "big")
        whole_model_files.export_model(tmp_path / "big", tmp_path / "out.safetensors")
    layer = layers["layers.0.weight"].nbytes
    assert layer <= used.peak < 2 * layer + (1 << 20), "two layers and some buffers; the model has 12"
    assert not different(load_file(tmp_path / "out.safetensors"), layers)


class Wide(nn.Module):
    """Eight units of four layers; 1 MiB each in fp32."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))) for _ in range(8)]
        self.layers = nn.ModuleList(layers)


def _stream(rank: int) -> tuple[int, int]:
    model = layerzero.shard_model(Wide(), mesh=mesh_of(2), units=nn.Sequential)
    with AllocationPeak(model) as of_others:
        state = layerzero.full_state_dict(model)
    assert bool(state) == (rank == 0)
    with AllocationPeak(model) as of_load:
        layerzero.load_full_state_dict(model, state)
    return of_others.peak, of_load.peak


class AllocationPeak(TorchDispatchMode):
    """Peak bytes of new storages that are alive at the same time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._old = {plain(parameter).untyped_storage()._cdata for parameter in model.parameters()}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.is_meta:  # meta tensors have no memory
                continue
            if (storage := tensor.untyped_storage())._cdata not in self._old:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


def test_full_state_streams_unit_by_unit() -> None:
    unit = 4 * 4 * 256 * 256
    for rank, (saving, loading) in enumerate(run_ranks(_stream)):
        kept = 8 * unit if rank == 0 else 0
        assert kept <= saving <= kept + unit, (rank, saving)
        assert 0 < loading <= unit, (rank, loading)
