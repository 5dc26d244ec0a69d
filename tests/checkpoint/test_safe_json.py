"""Checkpoints that are too large to read, write to terminals, or have unusable optimizer states."""

from __future__ import annotations

import copy
import json
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from typer.testing import CliRunner

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import CheckpointError, atomic_files, safe_json, whole_model_files
from layerzero.checkpoint.checksums import ChecksumScheme
from layerzero.checkpoint.manifest import FORMAT, VERSION, manifest_text
from layerzero.checkpoint.safe_json import CONTENTS_BYTES, escape_unprintable
from layerzero.cli import app
from tests.support.checkpointing import everything, train
from tests.support.damaging import save_intact, sign
from tests.support.models import IntegerNet, different, integer_net
from tests.support.ranks import mesh_of, run_ranks


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "intact"
    run_ranks(save_intact, str(path), world_size=2)
    return path


def _cheaply(read: Callable[[], Any], match: str) -> None:
    """Require a refusal within one second of CPU time and 200 MB."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError, match=match):
        read()
    assert time.process_time() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_huge_manifest_is_refused_and_passed_over(intact: Path, tmp_path: Path) -> None:
    shutil.copytree(intact, tmp_path / "good")
    shutil.copytree(intact, tmp_path / "sparse")
    with (tmp_path / "sparse" / atomic_files.MANIFEST).open("r+b") as file:
        file.truncate(30 << 30)
    said = r"manifest.json has 32,212,254,720 bytes, but layerzero reads at most 67,108,864 bytes"
    _cheaply(lambda: atomic_files.Manifest.read(tmp_path / "sparse"), said)
    shutil.copytree(intact, tmp_path / "lists")
    (tmp_path / "lists" / atomic_files.MANIFEST).write_bytes(b"[" + b",".join([b"[]"] * 5_000_000) + b"]")
    _cheaply(lambda: atomic_files.Manifest.read(tmp_path / "lists"), "manifest.json has 10,000,000 values in")
    assert checkpoint.latest(tmp_path) == tmp_path / "good"


def _save_long(rank: int, path: Path) -> None:
    model = layerzero.shard_model(nn.Linear(2, 2), mesh=mesh_of(1))
    checkpoint.save(path / "short", model, None, [0] * 100_000)
    assert checkpoint.load(path / "short", model) == [0] * 100_000
    free, safe_json._FREE_VALUES = safe_json._FREE_VALUES, 1000  # so that 8 million entries are not needed
    try:
        with pytest.raises(CheckpointError, match=r"contents.json has [\d,]+ values .*as tensors"):
            checkpoint.save(path / "long", model, None, [0] * 100_000)
        with pytest.raises(CheckpointError, match=r"contents.json has [\d,]+ values"):
            checkpoint.load(path / "short", model)
        checkpoint.save(path / "tensor", model, None, torch.zeros(100_000))
        assert checkpoint.load(path / "tensor", model).shape == (100_000,)
    finally:
        safe_json._FREE_VALUES = free
    assert {saved.name for saved in path.iterdir()} == {"short", "tensor"}


def test_what_is_too_long_to_be_read_is_not_saved(tmp_path: Path) -> None:
    run_ranks(_save_long, tmp_path, world_size=1)


def test_a_huge_table_of_contents_is_refused_before_it_is_parsed(intact: Path, tmp_path: Path) -> None:
    path = tmp_path / "one"
    shutil.copytree(intact, path)
    text = (path / "contents.json").read_bytes()
    (path / "contents.json").write_bytes(text[:-1] + b', "x": [' + b"[]," * 20_000_000 + b"[]]}")
    sign(path)
    _cheaply(
        lambda: whole_model_files.inspect(path),
        r"contents.json has 40,\d+,\d+ values in 60,\d+,\d+ bytes, .* at most 17,",
    )
    with (path / "contents.json").open("r+b") as file:
        file.truncate(30 << 30)
    table = {
        file.name: [file.stat().st_size, "0" * 64] for file in path.iterdir() if file.name != atomic_files.MANIFEST
    }
    known = {"format": FORMAT, "version": VERSION, "sequence": 0, "files": table}
    known["checksums"] = asdict(ChecksumScheme("sha256", 2**63))
    (path / atomic_files.MANIFEST).write_bytes(manifest_text(known))
    _cheaply(lambda: checkpoint.reader(path, verify=False), "contents.json has .* at most 536,870,912 bytes")


def test_a_large_model_on_many_ranks_is_far_from_the_caps() -> None:
    for rest in ([], [1], [128], [64, 3, 3], [64, 3, 3, 3]):
        ranks = range(18_000, 20_000)
        chunks = [[f"rank-{rank:05d}.safetensors", [rank, *(0 for _ in rest)], [1, *rest]] for rank in ranks]
        text = json.dumps({"model.layers.100.weight": ["float32", [20_000, *rest], chunks]}).encode()
        values = text.count(b",") + text.count(b"[") + text.count(b"{")
        assert values < len(text) / 4.4, "the share of the text that counts; two million more are free"
        assert len(text) * 10 * 300 < CONTENTS_BYTES, "100 units with AdamW"


RED = "\x1b[31mred\x1b]0;title\x07\u202e"
SEEN = r"\x1b[31mred\x1b]0;title\x07\u202e"


def _red(rank: int, path: Path) -> None:
    net = nn.ParameterDict({RED: nn.Parameter(torch.ones(2))})
    checkpoint.save(path / "one", layerzero.shard_model(net, mesh=mesh_of(1)))
    model = layerzero.shard_model(nn.ParameterDict({"plain": nn.Parameter(torch.ones(2))}), mesh=mesh_of(1))
    with pytest.raises(ValueError, match="does not match the model") as caught:
        checkpoint.load(path / "one", model)
    assert f"unexpected: {SEEN}" in str(caught.value) and "\x1b" not in str(caught.value)
    with pytest.warns(UserWarning, match=r"unexpected: \\x1b\[31mred"):
        checkpoint.load(path / "one", model, strict=False)


def test_names_are_shown_and_not_sent_to_the_terminal(tmp_path: Path) -> None:
    run_ranks(_red, tmp_path, world_size=1)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "one")], color=True)
    assert f"model.{SEEN}" in shown.output and "\x1b" not in shown.output and "\x07" not in shown.output
    content = json.loads((tmp_path / "one" / "contents.json").read_text())
    content["tensors"][f"model.{RED}"][1] = [-1]
    (tmp_path / "one" / "contents.json").write_text(json.dumps(content))
    sign(tmp_path / "one")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "one")], color=True)
    assert shown.exit_code == 1 and SEEN in shown.stderr and "\x1b" not in shown.stderr
    assert escape_unprintable("a\nb\té\ud800") == "a\nb\\té\\ud800"


# Optimizers

ADAM = "optimizer.state.head.weight"
State = dict[str, Any]


def _state(entry: str, value: Any, name: str = "head.weight") -> Callable[[State], None]:
    return lambda optimizer: optimizer["state"][name].__setitem__(entry, value)


def _without(entry: str) -> Callable[[State], None]:
    return lambda optimizer: optimizer["state"]["head.weight"].__delitem__(entry)


def _group(**changes: Any) -> Callable[[State], None]:
    return lambda optimizer: optimizer["param_groups"][0].update(changes)


REFUSED: dict[str, tuple[Callable[[State], None], str]] = {
    "lr": (_group(lr="boom"), "lr of parameter group 0 in the optimizer: expected a number, .* a str: 'boom'"),
    "lr list": (
        _group(lr=[0.1]),
        "lr of parameter group 0 .* expected a number, but the checkpoint has a list of values",
    ),
    "lr None": (_group(lr=None), "parameter group 0 .*: with lr from the checkpoint, a step fails with TypeError"),
    "betas": (_group(betas=0.9), "betas of parameter group 0 .* expected a list of values, .* a number: 0.9"),
    "beta": (_group(betas={"$tuple": [0.9, "x"]}), "betas of parameter group 0 .* expected a number, .* a str"),
    "one beta": (_group(betas=[0.9]), "with betas from the checkpoint, a step fails with ValueError"),
    "maximize": (_group(maximize="no"), "maximize of parameter group 0 .* expected a number, .* a str: 'no'"),
    "rows": (_group(eps={"$tensor": "model.head.weight"}), "eps of parameter group 0 .* the checkpoint has a tensor"),
    "missing": (_without("exp_avg_sq"), "exp_avg_sq of head.weight .*: the checkpoint does not have it"),
    "step": (_without("step"), "step of head.weight in the optimizer: the checkpoint does not have it"),
    "number": (_state("exp_avg", 0.5), "exp_avg of head.weight .*: expected a tensor of the .*, .* has a number"),
    "none": (_state("exp_avg", None), "exp_avg of head.weight in the optimizer: it is None"),
    "text": (_state("exp_avg", "x"), "exp_avg of head.weight .* the checkpoint has a str"),
    "of a bias": (_state("exp_avg", 1, "head.bias"), "exp_avg of head.bias .*: expected a tensor"),
    "a rows' step": (_state("step", {"$sharded": f"{ADAM}.exp_avg", "like": "head.weight"}), "step of .* a number"),
    "amsgrad": (_group(amsgrad=True), "max_exp_avg_sq of head.weight .*: the checkpoint does not have it"),
}
ACCEPTED: dict[str, Callable[[State], None]] = {
    "as it was": lambda optimizer: None,
    "whole lr": _group(lr=1),
    "true": _group(maximize=0, eps=1e-8, amsgrad=False),
    "more": _group(initial_lr=0.5, schedule="cosine"),
    "list of betas": _group(betas=[0.5, 0.75]),
    "number of steps": _state("step", 3),
    "more states": _state("seen", 7),
    "never stepped": lambda optimizer: optimizer["state"].__delitem__("head.weight"),
    "no state": lambda optimizer: optimizer["state"].__setitem__("head.weight", {}),
}


def _adam(seed: int = 1, **settings: Any) -> tuple[nn.Module, Optimizer]:
    model = layerzero.shard_model(integer_net(seed), mesh=mesh_of(1), units=IntegerNet.UNITS)
    return model, layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2**-4, **settings), model)


def _judged(rank: int, folder: Path) -> None:
    content = json.loads((folder / "contents.json").read_text())
    model, optimizer = _adam()
    train(model, optimizer, range(1))
    before, group = everything(model, optimizer), copy.deepcopy({**optimizer.param_groups[0], "params": None})

    def rewrite(change: Callable[[State], None]) -> None:
        changed = copy.deepcopy(content)
        change(changed["document"]["optimizer"])
        (folder / "contents.json").write_text(json.dumps(changed))
        sign(folder)

    for case, (change, said) in REFUSED.items():
        rewrite(change)
        with pytest.raises(ValueError, match=said):
            checkpoint.load(folder, model, optimizer)
        assert not different(everything(model, optimizer), before), case
        assert {**optimizer.param_groups[0], "params": None} == group, case
        with pytest.warns(UserWarning, match="skipped the entries that do not match"):
            checkpoint.load(folder, model, optimizer, strict=False)
        train(model, optimizer, range(1))  # the loaded state can be stepped
        model, optimizer = _adam()
        train(model, optimizer, range(1))
    for case, change in ACCEPTED.items():
        rewrite(change)
        other, its_optimizer = _adam()
        checkpoint.load(folder, other, its_optimizer)
        assert its_optimizer.param_groups[0]["lr"] == (1 if case == "whole lr" else 2**-4), case
        train(other, its_optimizer, range(1))


def test_a_state_that_the_optimizer_could_not_step_is_refused_by_name(intact: Path, tmp_path: Path) -> None:
    run_ranks(_judged, Path(shutil.copytree(intact, tmp_path / "one")), world_size=1)


class Odd(Optimizer):
    """Optimizer with different states for matrices and the rest, and a string; it draws random numbers."""

    def __init__(self, params: Any, *, limit: float | None = None) -> None:
        super().__init__(params, {"lr": 0.5, "limit": limit})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state and p.ndim > 1:
                    state |= {"kind": "matrix", "mean": torch.zeros_like(p)}
                elif not state:
                    state |= {"kind": "vector", "count": 0}
                if p.ndim > 1:
                    state["mean"] = (state["mean"] + p.grad) / 2
                else:
                    state["count"] += 1
                p.sub_(p.grad + torch.rand(()) * 0, alpha=group["lr"])


def _words(optimizer: Optimizer) -> list[str]:
    """Remove the strings from the state and return them, so that the rest can be compared as tensors."""
    return [values.pop("kind", "") for values in optimizer.state.values()]


def _round_trips(rank: int, folder: Path) -> None:
    """Load valid but unusual states, each into an optimizer that has stepped and one that has not."""
    cases: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], dict[str, Any]]] = {
        "amsgrad on": (torch.optim.AdamW, {"amsgrad": True}, {"amsgrad": False}),
        "amsgrad off": (torch.optim.AdamW, {"amsgrad": False}, {"amsgrad": True}),
        "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5}, {"lr": 0.5}),
        "no momentum": (torch.optim.SGD, {"lr": 0.5}, {"lr": 0.5, "momentum": 0.5}),
        "fused": (torch.optim.AdamW, {"fused": True}, {"foreach": True}),
        "single": (torch.optim.AdamW, {"foreach": True}, {"foreach": False, "fused": False}),
        "tensor lr": (torch.optim.AdamW, {"lr": 0.5}, {"lr": torch.tensor(0.25)}),
        "Adagrad": (torch.optim.Adagrad, {}, {"lr": 0.5}),
        "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, {}),
        "Rprop": (torch.optim.Rprop, {}, {}),
        "ASGD": (torch.optim.ASGD, {}, {}),
        "NAdam": (torch.optim.NAdam, {}, {}),
        "Odd": (Odd, {"limit": 0.5}, {"limit": None}),
        "odder": (Odd, {"limit": None}, {"limit": 0.5}),
    }
    for number, (case, (kind, saved, here)) in enumerate(cases.items()):
        late = bool(number % 2)  # a parameter has had no gradient
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
        model.shift.requires_grad_(not late)
        optimizer = layerzero.shard_optimizer(kind(model.parameters(), **saved), model)
        train(model, optimizer, range(1))
        path = folder / f"{case}-{late}"
        checkpoint.save(path, model, optimizer)
        words = _words(optimizer)
        for stepped in (False, True):
            other = layerzero.shard_model(integer_net(1), mesh=mesh_of(1), units=IntegerNet.UNITS)
            its_optimizer = layerzero.shard_optimizer(kind(other.parameters(), **here), other)
            if stepped:
                train(other, its_optimizer, range(1))
            random = torch.get_rng_state()
            checkpoint.load(path, other, its_optimizer)
            assert torch.equal(torch.get_rng_state(), random), case
            assert _words(its_optimizer) == words, case
            wrong = different(everything(other, its_optimizer), everything(model, optimizer))
            assert not wrong, f"{case} late={late} stepped={stepped}: {wrong}"
            train(other, its_optimizer, range(1))


@pytest.mark.slow
def test_whatever_an_optimizer_keeps_comes_back(tmp_path: Path) -> None:
    run_ranks(_round_trips, tmp_path, world_size=2)


def _no_buffer_yet(rank: int, folder: Path) -> None:
    """Load a state of older versions of SGD, which keep None before the first step."""
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(1), units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model)
    train(model, optimizer, range(1))
    for values in optimizer.state.values():
        values["momentum_buffer"] = None
    checkpoint.save(folder / "one", model, optimizer)
    checkpoint.load(folder / "one", model, optimizer)
    assert all(values["momentum_buffer"] is None for values in optimizer.state.values())
    train(model, optimizer, range(1))


def test_a_buffer_that_is_none_stays_none(tmp_path: Path) -> None:
    run_ranks(_no_buffer_yet, tmp_path, world_size=1)
