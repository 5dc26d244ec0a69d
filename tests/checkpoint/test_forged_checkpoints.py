"""A forged checkpoint with correct digests is loaded or refused; it cannot do anything else."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import CheckpointError, whole_model_files
from layerzero.checkpoint.errors import escape_unprintable
from layerzero.cli import app
from tests.support.checkpointing import everything, sharded_net
from tests.support.damaging import DATA, sign
from tests.support.models import different
from tests.support.ranks import mesh_of, run_ranks

Change = Callable[[dict[str, Any]], Any]
WEIGHT = "model.head.weight"  # [3, 6], in the files of both ranks


def _chunks(*chunks: list[Any]) -> Change:
    return lambda content: content["tensors"][WEIGHT].__setitem__(2, list(chunks))


def _document(part: str, value: Any) -> Change:
    return lambda content: content["document"].__setitem__(part, value)


def _extra(value: Any) -> Change:
    return _document("extra", value)


def _optimizer(part: str, value: Any) -> Change:
    return lambda content: content["document"]["optimizer"].__setitem__(part, value)


def _state(value: Any) -> Change:
    return lambda content: content["document"]["optimizer"]["state"].__setitem__("head.weight", value)


def _topology(value: Any) -> Change:
    return lambda content: content.__setitem__("topology", value)


HOSTILE: dict[str, Change] = {
    "a hole at the end": _chunks([DATA, [0, 0], [2, 6]]),
    "no rows": _chunks(),
    "overflow": _chunks([DATA, [2**63, 0], [3, 6]]),
    "fractions": _chunks([DATA, [0.0, 0], [3.0, 6]]),
    "truth": _chunks([DATA, [False, 0], [3, 6]]),
    "elsewhere": _chunks(["../" + DATA, [0, 0], [3, 6]]),
    "absolute": _chunks(["/etc/passwd", [0, 0], [3, 6]]),
    "unlisted": _chunks(["unlisted", [0, 0], [3, 6]]),
    "manifest": _chunks(["manifest.json", [0, 0], [3, 6]]),
    "no tensors": _chunks(["contents.json", [0, 0], [3, 6]]),
    "other file": _chunks(["rank-00001.safetensors", [0, 0], [3, 6]]),
    "other dtype": lambda content: content["tensors"][WEIGHT].__setitem__(0, "bfloat16"),
    "no dtype": lambda content: content["tensors"][WEIGHT].__setitem__(0, "nn"),
    "quantized": lambda content: content["tensors"][WEIGHT].__setitem__(0, "quint8"),
    "no tensor": _extra({"$tensor": "nothing"}),
    "not a key": _extra({"$tensor": ["x"]}),
    "rows of nothing": _extra({"$sharded": WEIGHT}),
    "tag": _extra({"$import": "os"}),
    "array": _extra({"$ndarray": "nothing"}),
    "float": _extra({"$float": "x"}),
    "bytes": _extra({"$bytes": "€"}),
    "bytes with a space": _extra({"$bytes": "YWI= "}),
    "dtype": _extra({"$dtype": "load"}),
    "unhashable": _extra({"$dict": [[[], 1]]}),
    "unpaired": _extra({"$dict": [[1]]}),
    "counter": _extra({"$counter": 3}),
    "state": _optimizer("state", []),
    "state of one": _state(1),
    "state of nothing": _state(None),
    "groups": _optimizer("param_groups", [3]),
    "no groups": _optimizer("param_groups", None),
    "optimizer": _document("optimizer", [1]),
    "named optimizer": _document("optimizer", "adam"),
    "model": _document("model", [1]),
    "model of each rank": _document("model", {"$per_rank": [1]}),
    "ranks": _topology({"data_parallel": "2", "zero3_size": 2}),
    "no ranks": _topology({}),
    "list of ranks": _topology([]),
    "null ranks": _topology(None),
    "nothing": lambda content: content.clear(),
}


def _rewrite(path: Path, change: Change) -> None:
    content = json.loads((path / "contents.json").read_text())
    change(content)
    (path / "contents.json").write_text(json.dumps(content))
    sign(path)


def _all_refuse(rank: int, folder: Path, named: str) -> list[str]:
    """Load every checkpoint in `folder`; return those that do not raise an error naming the file."""
    model, optimizer = sharded_net(2, adam=True, seed=1, steps=1)
    before, loaded = everything(model, optimizer), []
    for path in sorted(folder.iterdir()):
        try:
            checkpoint.load(path, model, optimizer)
            loaded.append(path.name)
        except CheckpointError as error:
            if named not in str(error):
                loaded.append(f"{path.name}: {error}")
        if wrong := different(everything(model, optimizer), before):
            loaded.append(f"{path.name} changed {wrong}")
            break
    return loaded


@pytest.mark.slow
def test_a_hostile_table_of_contents_is_refused(intact: Path, tmp_path: Path) -> None:
    for name, change in HOSTILE.items():
        _rewrite(Path(shutil.copytree(intact, tmp_path / name)), change)
    started = time.monotonic()
    for found in run_ranks(_all_refuse, tmp_path, "contents.json", world_size=2):
        assert not found
    assert time.monotonic() - started < 30


def _safetensors(header: bytes, size: int | None = None, data: bytes = bytes(64)) -> bytes:
    return (len(header) if size is None else size).to_bytes(8, "little") + header + data


class _Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PLANTED"],)


def test_a_hostile_data_file_is_refused(intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    whole = (intact / DATA).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    table = json.loads(whole[8 : 8 + length])

    def entry(**changed: Any) -> bytes:
        header = {**table, WEIGHT: {**table[WEIGHT], **changed}}
        return _safetensors(json.dumps(header).encode(), data=whole[8 + length :])

    begin, end = table[WEIGHT]["data_offsets"]
    rows, columns = table[WEIGHT]["shape"]
    assert rows > 1
    contents = {
        "pickle": pickle.dumps(_Planted()),
        "no header": b"",
        "huge header": _safetensors(b"{}", 2**63),
        "long header": _safetensors(b"{}", 1000),
        "nothing": _safetensors(b"{}", data=b""),
        "deep": _safetensors(b"[" * 100_000),
        "backwards": entry(data_offsets=[end, begin]),
        "beyond": entry(data_offsets=[begin + 10**9, end + 10**9]),
        "other shape": entry(shape=[columns, rows]),
        "one row": entry(shape=[1, rows * columns]),
        "other dtype": entry(dtype="I32"),
        "overflow": entry(shape=[2**62, 2**62]),
        "other name": _safetensors(json.dumps(table).encode().replace(WEIGHT.encode(), b"other")),
    }
    for name, content in contents.items():
        path = Path(shutil.copytree(intact, tmp_path / "all" / name))
        (path / DATA).write_bytes(content.ljust(len(whole), b"\0"))
        sign(path)
    for found in run_ranks(_all_refuse, tmp_path / "all", DATA, world_size=2):
        assert not found
    for name in contents:
        with pytest.raises(CheckpointError):
            whole_model_files.export_model(tmp_path / "all" / name, tmp_path / "exported")
    assert {path.name for path in tmp_path.iterdir()} == {"all"}, "nothing ran, and nothing was left"


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
