"""Export merges the tensor and pipeline parts of layerzero.megatron.save into one model, weight averages included."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner, Result

import layerzero
import layerzero.megatron
from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.safetensors_files import TensorFiles
from layerzero.cli import app
from layerzero.megatron import export_parts
from layerzero.megatron.export import _FullTensorPlan, _StoredRows
from tests.support.megatron_checkpoints import load, save
from tests.support.megatron_ranks import Case, make_config, make_ours, make_scheduler, megatron, run_step, whole_weights
from tests.support.ranks import run_ranks

GATED = (("gated_linear_unit", True), ("num_query_groups", 2))
CASES = {
    "tensor": Case(tp=2, zero3_size=2),
    "gated, queries in groups": Case(tp=2, zero3_size=1, settings=GATED),
    "pipeline": Case(tp=1, pp=2, zero3_size=2, tied=False),
    "tied over stages": Case(tp=2, pp=2, zero3_size=1),
    "interleaved": Case(tp=2, pp=2, chunks=2, zero3_size=1, dtype="bfloat16"),
    "experts": Case(
        pp=2,
        zero3_size=2,
        settings=(
            ("num_moe_experts", 2),
            ("moe_router_load_balancing_type", "none"),
            ("add_bias_linear", False),
        ),
    ),
}


def _train_and_save(rank: int, folder: str, case: Case) -> None:
    with megatron(case):
        chunks, optimizer = make_ours(case, ema_decay=0.5)
        scheduler = make_scheduler(optimizer)
        for step in range(3):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            run_step(case, chunks, step)
            assert optimizer.step()[0]
            scheduler.step(1)
            layerzero.megatron.save(f"{folder}/{step}", chunks, optimizer, {"step": step})
        save(f"{folder}/megatron", chunks, optimizer, scheduler, None, parallel=False)
        # The loaded average equals the saved one and continues from it.
        again, other = make_ours(case, ema_decay=0.5)
        assert layerzero.megatron.load(f"{folder}/0", again, other) == {"step": 0}
        layerzero.megatron.load(f"{folder}/2", again, other)
        for mine, theirs in zip(other.emas, optimizer.emas, strict=True):
            assert int(mine.n_averaged) == int(theirs.n_averaged) == 3
            for name, average in mine.state_dict()["averages"].items():
                assert torch.equal(average.to_local(), theirs.state_dict()["averages"][name].to_local()), name


def _merged_by_megatron(rank: int, folder: str, case: Case) -> dict[str, Tensor]:
    with megatron(case):
        chunks, optimizer = make_ours(case)
        load(f"{folder}/megatron", chunks, optimizer, make_scheduler(optimizer), None, parallel=False)
        return whole_weights(chunks[0])


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("which", CASES)
def test_the_parts_are_the_model_that_megatron_makes_of_them_on_one_rank(which: str, tmp_path: Path) -> None:
    case = CASES[which]
    run_ranks(_train_and_save, str(tmp_path), case, world_size=4)
    alone = case.but(tp=1, pp=1, chunks=1, zero3_size=1)
    expected = run_ranks(_merged_by_megatron, str(tmp_path), alone, world_size=1)[0]
    for step in range(3):
        result = export(tmp_path / str(step), tmp_path / f"{step}.safetensors")
        assert result.exit_code == 0, result.stderr
    weights = [load_file(tmp_path / f"{step}.safetensors") for step in range(3)]
    assert weights[2].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[2][name], value), name
    assert export("--ema", tmp_path / "2", tmp_path / "ema.safetensors").exit_code == 0
    averages = load_file(tmp_path / "ema.safetensors")
    assert averages.keys() == expected.keys()
    for name, average in averages.items():
        one, two, three = (state[name] for state in weights)
        torch.testing.assert_close(average, one / 4 + two / 4 + three / 2)
    assert any(not torch.equal(averages[name], weights[2][name]) for name in averages)
    if case.chunks > 1:
        for chunk in range(case.chunks):
            lost = sorted((tmp_path / str(chunk)).glob(f"layout-*-stage-001-chunk-{chunk:03d}"))[-1]
            shutil.rmtree(lost)
            without = export(tmp_path / str(chunk), tmp_path / "without.safetensors")
            assert without.exit_code == 1 and f"lacks {lost.name}" in without.stderr, without.output


def test_what_is_missing_or_damaged_is_told(tmp_path: Path) -> None:
    run_ranks(_save_plain, str(tmp_path / "run"), world_size=2)
    out = tmp_path / "out.safetensors"
    without = export("--ema", tmp_path / "run", out)
    assert without.exit_code == 1 and "has no averages" in without.stderr
    assert export("--dtype", "bfloat16", tmp_path / "run", out).exit_code == 0
    assert {value.dtype for value in load_file(out).values()} == {torch.bfloat16}
    again = export(tmp_path / "run", out)
    assert again.exit_code == 1 and "already exists" in again.stderr
    _, other = sorted((tmp_path / "run").glob("layout-*"))
    shutil.move(other, tmp_path / "elsewhere")
    lacks = export(tmp_path / "run", tmp_path / "two.safetensors")
    assert lacks.exit_code == 1 and "lacks tensor-001-stage-000" in lacks.stderr
    shutil.move(tmp_path / "elsewhere", other)
    file = next(file for file in sorted(other.glob("*.safetensors")))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    damaged = export(tmp_path / "run", tmp_path / "two.safetensors")
    assert damaged.exit_code == 1 and file.name in damaged.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "run"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="contains no parts of a checkpoint"):
        export_parts(tmp_path / "empty", tmp_path / "two.safetensors")
    one = next((tmp_path / "run").glob("layout-*"))
    run_ranks(_save_other_extra, str(tmp_path / "other"), world_size=1)
    shutil.rmtree(one)
    shutil.move(tmp_path / "other", one)
    with pytest.raises(ValueError, match=r"was not saved by layerzero\.megatron\.save"):
        export_parts(tmp_path / "run", tmp_path / "two.safetensors")


def test_a_piece_outside_of_its_tensor_is_told() -> None:
    class Stored(TensorFiles):
        contents = SimpleNamespace(tensors={"w": SimpleNamespace(shape=(2, 3), dtype=torch.float32, chunks=[])})

    plan = _FullTensorPlan((2, 3), torch.float32, {(4, 0): _StoredRows(Stored(), "w", 0, 2)})
    with pytest.raises(CheckpointError, match="contain only 0 of 6 elements"):
        plan.build()


def _save_other_extra(rank: int, path: str) -> None:
    model = layerzero.shard_model(torch.nn.Linear(2, 2), mesh=layerzero.init_mesh(1))
    layerzero.checkpoint.save(path, model, extra=[1])


def _save_plain(rank: int, folder: str) -> None:
    case = Case(tp=2, zero3_size=1)
    with megatron(case):
        chunks, optimizer = make_ours(case)
        layerzero.megatron.save(folder, chunks, optimizer)


def _save_a_stranger(rank: int, folder: str) -> None:
    case = Case(zero3_size=2)
    with megatron(case):
        (chunk,) = layerzero.megatron.wrap(torch.nn.Linear(4, 4), make_config(case), zero3_size=2)
        layerzero.megatron.save(folder, [chunk])
        layerzero.megatron.load(folder, [chunk])


def test_modules_that_do_not_say_where_they_belong_are_saved_and_not_exported(tmp_path: Path) -> None:
    run_ranks(_save_a_stranger, str(tmp_path / "run"), world_size=2)
    result = export(tmp_path / "run", tmp_path / "out.safetensors")
    assert result.exit_code == 1
    assert "Linear has no sharded_state_dict, which returns the positions" in result.stderr
