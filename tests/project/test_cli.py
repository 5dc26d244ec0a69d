"""The command line, run as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import layerzero
from layerzero.__main__ import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# A module in the current directory; the command line gets only its name.
MODULE = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

class Layer(nn.Linear):
    pass

class Right(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(4, 8), nn.Tanh(), Layer(8, 2))

    def forward(self, x):
        return self.layers(x)

class Wrong(Right):
    def forward(self, x):
        self.layers[2].weight.data.mul_(0.5)
        return super().forward(x)

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def list_before(model):
    optimizer = sgd(model.parameters())
    fully_shard(model)
    return model, optimizer

def squares(model, batch):
    return model(batch).square().mean()

def make_batch(index, rank):
    return torch.randn(3, 4)

three = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "bare.py").write_text("def make_model(): pass")
    (tmp_path / "broken.py").write_text("import a_module_that_nobody_has")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m layerzero`` in `folder`."""
    command = [sys.executable, "-W", "error", "-m", "layerzero", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_right_model_ends_with_0_and_a_table(folder: Path) -> None:
    options = ["--world-size", "2", "--loss", "mine:squares", "--unit", "Layer", "--param-dtype", "bfloat16"]
    ran = run(folder, "verify", "mine:Right", *options, "--zero3-size", "2", "--steps", "2")
    assert ran.returncode == 0, ran.stderr
    assert "layers.0.weight" in ran.stdout
    assert "bfloat16" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "OK: all 4 parameters match within the tolerance"
    assert ran.stderr == ""


def test_a_wrong_model_ends_with_1_and_names_the_weight(folder: Path) -> None:
    ran = run(folder, "verify", "mine:Wrong", "--loss", "mine:squares", "--world-size", "2", "--zero3-size", "2")
    assert ran.returncode == 1, ran.stderr
    assert "DIFFERENT" in ran.stdout
    assert "changes layers.2.weight in place" in ran.stdout
    assert ran.stderr == ""


def test_wrong_code_of_a_user_ends_with_1_and_names_the_step(folder: Path) -> None:
    options = ["--loss", "mine:squares", "--world-size", "2", "--scheme", "mine:list_before", "--optimizer", "mine:sgd"]
    ran = run(folder, "verify", "mine:Right", *options)
    assert ran.returncode == 1, ran.stderr
    assert "first difference: weights after step 0: 'layers.0.bias', 'layers.0.weight', 'layers.2.bias'" in ran.stdout
    assert ran.stderr == ""


def test_a_bad_target_ends_with_2_and_one_sentence(folder: Path) -> None:
    ran = run(folder, "verify", "nowhere.to_be:found")
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        "layerzero: the model 'nowhere.to_be:found' cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    ]


USAGE = {
    "no colon": (["mine"], "the model must have the form package.module:name, got 'mine'"),
    "no attribute": (
        ["mine:Nothing"],
        "the model 'mine:Nothing' cannot be imported: AttributeError: module 'mine' has no attribute 'Nothing'",
    ),
    "not callable": (["mine:three"], "the model 'mine:three' is not callable: its type is int"),
    "import": (
        ["broken:x"],
        "'broken:x' cannot be imported: ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    ),
    "no batches": (["bare:make_model"], "bare has no make_batch(index, rank). Define it there, or pass"),
    "batches": (
        ["mine:Right", "--batches", "mine:x"],
        "--batches 'mine:x' cannot be imported: AttributeError: module 'mine' has no attribute 'x'",
    ),
    "loss": (
        ["mine:Right", "--loss", "mine:x"],
        "--loss 'mine:x' cannot be imported: AttributeError: module 'mine' has no attribute 'x'",
    ),
    "size": (["mine:Right", "--zero3-size", "3"], "zero3_sizes=[3] is not possible with layerzero: sizes must divide"),
    "accumulation": (
        ["mine:Right", "--accumulation", "some"],
        "accumulation='some'",
    ),
    "scheme": (["mine:Right", "--scheme", "zero"], "('layerzero', 'fsdp2', 'hsdp', 'ddp'), got 'zero'"),
    "set-up": (
        ["mine:Right", "--scheme", "mine:list_before"],
        "Pass optimizer_fn, a function (parameters) -> optimizer",
    ),
    "dtype": (
        ["mine:Right", "--param-dtype", "int8"],
        "--param-dtype is 'int8', which is not a supported dtype. Use one of fp32, ",
    ),
    "unit": (["mine:Right", "--unit", "mine:squares"], "--unit mine:squares is not a torch.nn.Module class"),
    "steps": (["mine:Right", "--steps", "0"], "steps must be an int >= 1, got 0"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_ends_with_2_and_one_sentence(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = USAGE[case]
    monkeypatch.syspath_prepend(str(folder))
    for name in ("mine", "bare", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", ["layerzero", "verify", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""
    assert not dist.is_initialized()


def test_without_typer_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "layerzero.cli", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "the command line of layerzero needs typer. Run: pip install typer\n"


def test_the_version_needs_no_typer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "layerzero.cli", raising=False)
    monkeypatch.setattr(sys, "argv", ["layerzero", "--version"])
    main()
    assert capsys.readouterr().out == f"layerzero {layerzero.__version__}\n"


def test_importing_layerzero_needs_torch_alone() -> None:
    program = "import sys; sys.modules['typer'] = None; import layerzero; assert 'layerzero.cli' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
