"""Mistakes in training scripts: each one that is reported fails when it runs, and correct programs have none."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from layerzero import cli_doctor
from layerzero.__main__ import main
from layerzero.doctor.script_checks import check_script, find_mistakes
from tests.support.pages import PAGES, ROOT, read_page
from tests.support.ranks import run_ranks

START = """
import copy, io
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
import layerzero
from layerzero import checkpoint
from tests.support.snippets import MyTransformer, batch

rank = dist.get_rank()
model = MyTransformer()
"""
SHARD = "model = layerzero.shard_model(model, zero3_size=2)\n"
SHARDED = START + SHARD
OTHER = "model = MyTransformer()\n"
SAVE = "torch.save(model.state_dict(), 'x')\n"
STEP = "model(batch(0)).backward()\noptimizer.step()\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters())\n"
WRAP = "sharded = layerzero.shard_optimizer(optimizer, model)\n"

# The last line of each program up to the mark is the mistake; the text is of the error that it raises.
MISTAKES = {
    "DDP, then shard_model": (START + "model = DDP(model)\n" + SHARD[:-1], "", "is wrapped in Distributed"),
    "DDP inside shard_model": (
        START + "model = layerzero.shard_model(DDP(model), zero3_size=2)",
        "",
        "is wrapped in Distributed",
    ),
    "fully_shard, then shard_model": (
        START + "fully_shard(model)\n" + SHARD[:-1],
        "",
        "is sharded by torch's fully_shard",
    ),
    "shard_model, then DDP": (SHARDED + "ddp = DDP(model)", "", "layerzero has sharded is not supported"),
    "shard_model, then fully_shard": (SHARDED + "fully_shard(model)", "", "layerzero has sharded is not supported"),
    "state_dict on one rank": (
        SHARDED + "if rank == 0:\n    torch.save(model.state_dict(), io.BytesIO())",
        "",
        "has only some of its rows",
    ),
    "state_dict in a dict": (
        SHARDED + "torch.save({'step': 1, 'model': model.state_dict()}, io.BytesIO())",
        "",
        "has only some of its rows",
    ),
    "collective on one rank": (
        SHARDED + "if dist.get_rank() == 0:\n    state = layerzero.full_state_dict(model)",
        "",
        "rank 1 has died or has exited",
    ),
    "collective on one rank of several": (
        SHARDED + "rank, world = dist.get_rank(), dist.get_world_size()\n"
        "if rank == 0:\n    state = layerzero.full_state_dict(model)",
        "",
        "rank 1 has died or has exited",
    ),
    "collective where the rank is zero": (
        SHARDED + "if not rank:\n    state = layerzero.full_state_dict(model)",
        "",
        "rank 1 has died or has exited",
    ),
    "collective on the main rank": (
        SHARDED + "is_main = rank == 0\nif is_main:\n    state = layerzero.full_state_dict(model)",
        "",
        "rank 1 has died or has exited",
    ),
    "save on one rank": (
        SHARDED + "if rank == 0:\n    checkpoint.save('somewhere', model)",
        "",
        "did not take part",
    ),
    "optimizer without shard_optimizer": (
        SHARDED + SGD[:-1],
        "\n" + STEP,
        r"SGD\.step\(\) would update parameter 'blocks",
    ),
    "optimizer without shard_optimizer, saved": (
        SHARDED + SGD[:-1],
        "\n" + STEP + "checkpoint.save('somewhere', model, optimizer)\n",
        r"SGD\.step\(\) would update parameter 'blocks",
    ),
    "discarded result": (
        SHARDED + SGD + "layerzero.shard_optimizer(optimizer, model)",
        "\n" + STEP,
        r"SGD\.step\(\) would update parameter 'blocks",
    ),
    "step of the wrapped optimizer": (
        SHARDED + ADAMW + WRAP + STEP[:-1],
        "",
        r"AdamW\.step\(\) would update parameter 'blocks",
    ),
    "step of the wrapped optimizer in a loop": (
        SHARDED + SGD + "sharded = layerzero.shard_optimizer(optimizer=optimizer, model=model)\n"
        "for number in range(2):\n    model(batch(number)).backward()\n    optimizer.step()",
        "\n    sharded.zero_grad()\n",
        r"SGD\.step\(\) would update parameter 'blocks",
    ),
    "deepcopy": (SHARDED + "other = copy.deepcopy(model)", "", "deepcopy of a model sharded by layerzero"),
    "assign": (
        SHARDED + "model.load_state_dict(MyTransformer().state_dict(), assign=True)",
        "",
        "would replace the sharded",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_reported_with_its_line(case: str) -> None:
    before, after, _ = MISTAKES[case]
    (found,) = find_mistakes(ast.parse(before + after))
    assert found.line == len(before.splitlines()), found


def _run(rank: int, program: str, folder: str) -> None:
    exec(compile(program.replace("somewhere", folder), "program", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES)
def test_what_is_reported_fails(case: str, tmp_path: Path) -> None:
    before, after, error = MISTAKES[case]
    with pytest.raises(AssertionError, match=error):
        run_ranks(_run, before + after, str(tmp_path / "saved"), world_size=2, pg_timeout=2)


RIGHT = {
    "one wrapper or the other": "if rank:\n    model = DDP(model)\nelse:\n    model = layerzero.shard_model(model)",
    "two models": "ddp = DDP(model)\n" + OTHER + SHARD,
    "a wrapped part that is ignored": "model = DDP(model)\nlayerzero.shard_model(model, ignored_modules=[model])",
    "a save before sharding": SAVE + SHARD,
    "a save of another model": SHARD + OTHER + SAVE,
    "a save of full tensors": SHARD + "torch.save({n: p.full_tensor() for n, p in model.state_dict().items()}, 'x')",
    "a save of unsharded parameters": SHARD + "with layerzero.unsharded(model):\n    " + SAVE,
    "a save in a branch without sharding": "if rank:\n    " + SHARD + SAVE,
    "a call on every rank": "if rank == 0:\n    a = layerzero.full_state_dict(model)\nelse:\n"
    "    layerzero.full_state_dict(model)",
    "a rank that is no rank": "rank = 8\nif rank == 0:\n    layerzero.full_state_dict(model)",
    "a flag with another value": "main = rank == 0\nmain = True\nif main:\n    layerzero.full_state_dict(model)",
    "a flag of no rank": "main, rank = True, 8\nif main:\n    layerzero.full_state_dict(model)",
    "a condition with more": "if rank == 0 or True:\n    layerzero.full_state_dict(model)",
    "a local function": "if rank == 0:\n    print(layerzero.memory(model))",
    "a sharded optimizer": SHARD + SGD + "optimizer = layerzero.shard_optimizer(optimizer, model)\n" + STEP,
    "a sharded optimizer in a loop": SHARD + ADAMW + "optimizer = layerzero.shard_optimizer(optimizer, model)\n"
    "for _ in range(2):\n    optimizer.step()",
    "a sharded optimizer of another name": SHARD + ADAMW + WRAP + "for _ in range(2):\n    sharded.step()",
    "a sharded optimizer of two names": SHARD + ADAMW + "sharded = optimizer" + WRAP.removeprefix("sharded") + STEP,
    "a name for the sharded optimizer": SHARD + ADAMW + WRAP + "optimizer = sharded\n" + STEP,
    "a name that a loop assigns": SHARD + ADAMW + WRAP + "for optimizer in [sharded]:\n    optimizer.step()",
    "a step before sharding": ADAMW + STEP + SHARD + ADAMW + WRAP,
    "a step of another function's optimizer": SHARD + ADAMW + WRAP + "def step(optimizer):\n    optimizer.step()",
    "a wrapped optimizer whose class is unknown": SHARD + "optimizer = make(model)\n" + WRAP + STEP,
    "an optimizer that somebody else shards": SHARD + SGD + "prepare(model, optimizer)\n" + STEP,
    "a scheduler": SHARD + SGD + "torch.optim.lr_scheduler.StepLR(optimizer, 1)",
    "a function that runs at another time": SHARD + "def later():\n    " + SAVE,
    "a global name": SHARD + "def change():\n    global model\n    " + OTHER + "change()\n" + SAVE,
    "a function of the same name": "def shard_model(model):\n    return model\n\nshard_model(model)\nDDP(model)",
    "a copy before sharding": "other = copy.deepcopy(model)\n" + SHARD,
}


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_guessed(case: str) -> None:
    assert find_mistakes(ast.parse(START + RIGHT[case])) == []


def test_programs_of_this_repository_have_no_mistakes() -> None:
    programs = {str(path): path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")}
    for page in map(read_page, PAGES):
        pieces = page.snippets("python", "file train.py")
        programs[page.name] = "\n".join(f"if True:\n{_indented(piece.text)}" for piece in pieces)
        programs |= {f"{page.name} line {piece.line}": piece.text for piece in pieces}
    assert len(programs) > 50
    assert {name: found for name, text in programs.items() if (found := find_mistakes(ast.parse(text)))} == {}


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def test_a_finding_names_file_and_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MISTAKES["deepcopy"][0])
    (found,) = check_script(script)
    assert found.level == "problem" and f"train.py:{len(script.read_text().splitlines())}: copy.deepcopy" in found.text
    script.write_text(SHARDED)
    assert [each.level for each in check_script(script)] == ["ok"]


def test_a_script_is_never_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    check_script(script)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [None, "def f(:", "\0"])
def test_what_cannot_be_read_is_a_problem(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "train.py").write_text(content)
    (found,) = check_script(tmp_path / "train.py")
    assert found.level == "problem" and "train.py cannot be read" in found.text


def test_the_exit_status_for_a_script_that_does_not_exist_is_that_of_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for check in ("check_host", "check_packages"):
        monkeypatch.setattr(cli_doctor, check, lambda *_: [])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["layerzero", "doctor", str(tmp_path / "nofile.py")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "nofile.py cannot be read" in capsys.readouterr().out
