"""Safetensors files of full models in the layout of Hugging Face, loaded into sharded models."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint.pretrained_weights import find_safetensors
from tests.checkpoint.test_whole_model_files import AllocationPeak, command
from tests.dtensor.test_tensor_parallel import net, shard
from tests.support.models import TiedTransformer, different, full_parameters
from tests.support.ranks import mesh_of, run_ranks


def _state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the state of a tied model with one name for the tied weight, as transformers saves it."""
    state = {name: value.to(dtype) for name, value in TiedTransformer(seed=1).state_dict().items()}
    del state["head.weight"]
    return state


def _folder(path: Path, state: dict[str, Tensor]) -> Path:
    """Write two files with an index, beside files of other programs."""
    path.mkdir()
    weight_map = {}
    for number, names in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] for name in names}, path / file)
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "consolidated.safetensors").write_bytes(b"of somebody else")
    (path / "config.json").write_text("{}")
    return path


def _sharded(size: int, *, meta: bool = False) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        model = TiedTransformer(seed=3)
    return layerzero.shard_model(
        model, mesh=mesh_of(size), units=TiedTransformer.UNITS, param_init_fn=(lambda _: None) if meta else None
    )


def _load(rank: int, path: str, wanted: dict[str, Tensor]) -> None:
    whole = TiedTransformer(seed=3)
    whole.load_state_dict({**wanted, "head.weight": wanted["embedding.weight"]})
    batch = TiedTransformer.batch(step=0)
    for size in (1, 2, 4):
        for meta in (False, True):
            model = _sharded(size, meta=meta)
            checkpoint.load_safetensors(path, model)
            assert not different(layerzero.full_state_dict(model, rank0_only=False), dict(whole.state_dict()))
            with torch.no_grad():
                assert torch.equal(TiedTransformer.loss(model, batch), TiedTransformer.loss(whole, batch)), (size, meta)


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_into_a_model_that_was_built_on_meta(tmp_path: Path, dtype: torch.dtype) -> None:
    state = _state(dtype)
    folder = _folder(tmp_path / "model", state)
    run_ranks(_load, str(folder), {name: value.float() for name, value in state.items()}, timeout=300)


def _stream(rank: int, path: str) -> int:
    model = layerzero.shard_model(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))), mesh=mesh_of(2))
    with AllocationPeak(model) as peak:
        checkpoint.load_safetensors(path, model, rename=lambda name: name.removeprefix("model."))
    for i, layer in enumerate(model):
        assert (layer.weight.to_local() == i).all()
    return peak.peak


def test_a_rank_reads_its_own_rows(tmp_path: Path) -> None:
    whole = 8 * 4 * 256 * 256
    for dtype in (torch.float32, torch.bfloat16):
        state = {f"model.{i}.weight": torch.full((256, 256), float(i), dtype=dtype) for i in range(8)}
        save_file(state, tmp_path / "model.safetensors")
        for peak in run_ranks(_stream, str(tmp_path)):
            assert 0 < peak <= whole / 4 + whole / 32 + 4096, dtype  # its rows, and the rows of the tensor being read


def _load_parts(rank: int, path: str, wanted: dict[str, Tensor]) -> None:
    for tp in (2, 4):
        mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
        model, _ = shard(mesh, 4 // tp, seed=3)
        checkpoint.load_safetensors(path, model)
        assert not (wrong := different(full_parameters(model), wanted)), (tp, wrong)


def test_tensor_parallel_parts_get_their_own_rows_and_columns(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(value.shape, generator=generator) for name, value in net().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    run_ranks(_load_parts, str(tmp_path), state)


def _refused(path: str, model: nn.Module) -> str:
    before = layerzero.full_state_dict(model, rank0_only=False)
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as caught:
        checkpoint.load_safetensors(path, model)
    assert not different(layerzero.full_state_dict(model, rank0_only=False), before)
    return str(caught.value)


def _misfits(rank: int, folder: str) -> None:
    model = _sharded(2)
    message = _refused(f"{folder}/wrong.safetensors", model)
    for said in (
        "missing: norm.bias",
        "unexpected: stranger",
        "norm.weight: expected shape [12], but the checkpoint has [3]",
    ):
        assert said in message, message
    message = _refused(f"{folder}/{'a' if rank == 0 else 'b'}.safetensors", model)
    assert re.search(r"ranks disagree.*files", message), message
    message = _refused(f"{folder}/{'a' if rank == 0 else 'c'}.safetensors", model)
    assert re.search(r"ranks disagree.*files", message), "two trainings of one model"
    assert "no model.safetensors" in _refused(f"{folder}/nothing", model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load_safetensors(f"{folder}/wrong.safetensors", model, strict=False)
    assert any("stranger" in str(each.message) for each in caught) == (rank == 0)
    assert torch.equal(model.embedding.weight.full_tensor(), TiedTransformer(seed=1).embedding.weight)


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    save_file(_state(), tmp_path / "a.safetensors")
    save_file(_state(torch.bfloat16), tmp_path / "b.safetensors")
    tuned = _state()
    tuned["norm.weight"] = tuned["norm.weight"] + 2**-10
    save_file(tuned, tmp_path / "c.safetensors")
    state = {**_state(), "stranger": torch.ones(3)}
    del state["norm.bias"]
    state["norm.weight"] = torch.ones(3)
    save_file(state, tmp_path / "wrong.safetensors")
    run_ranks(_misfits, str(tmp_path), world_size=2)


def test_folders_and_indexes_that_are_not_right_are_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _state())
    assert [path.name for path in find_safetensors(folder)] == ["model-0.safetensors", "model-1.safetensors"]
    assert find_safetensors([folder, folder / "model-0.safetensors"]) == [
        *find_safetensors(folder),
        folder / "model-0.safetensors",
    ]
    index = folder / "model.safetensors.index.json"
    for text, said in (
        ('{"weight_map": {"a": "model-0.safetensors"}}', "model-0.safetensors lacks the tensor a"),
        ('{"weight_map": {"a": "../model-0.safetensors"}}', "is not a file name in the same folder"),
        ('{"weight_map": {"a": ".."}}', "is not a file name in the same folder"),
        ('{"weight_map": {"a": ""}}', "is not a file name in the same folder"),
        ('{"weight_map": {"a": 3}}', "is not an index"),
        ("[]", "is not an index"),
    ):
        index.write_text(text)
        with pytest.raises(checkpoint.CheckpointError, match=said):
            find_safetensors(folder)
    index.unlink()
    with pytest.raises(ValueError, match=r"files: consolidated.safetensors, model-0.safetensors, .*Pass the paths"):
        find_safetensors(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="Its pickled weights are not read"):
        find_safetensors(folder)


def _load_imported(rank: int, path: str, wanted: dict[str, Tensor]) -> None:
    model = _sharded(2)
    checkpoint.load(path, model)
    found = layerzero.full_state_dict(model, rank0_only=False)
    assert not different({name: found[name] for name in wanted}, wanted)


def test_import_takes_a_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _state())
    made = command("import", folder, tmp_path / "whole")
    assert made.exit_code == 0, made.stderr
    run_ranks(_load_imported, str(tmp_path / "whole"), _state())
    wrong = command("import", tmp_path / "none", tmp_path / "other")
    assert wrong.exit_code == 1 and "none" in wrong.stderr
