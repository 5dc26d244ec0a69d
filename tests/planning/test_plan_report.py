"""The text, the data and the picture of a plan, and the command ``layerzero plan``."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import Result
from matplotlib.figure import Figure
from typer.testing import CliRunner

import layerzero
from layerzero.cli import app
from layerzero.planning import Cluster, Plan, TransformerShape, plan
from layerzero.planning.plan_report import seconds_text
from layerzero.planning.step_cost import ASSUMPTIONS
from layerzero.utils.text_tables import size_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "planning.md"
SIZES = TransformerShape(layers=4, hidden=512, ffn=1408, vocab=4096, heads=8)
SMALL = "layers=1,hidden=64,vocab=64,heads=2"
MODULE = """
from torch import nn

class Layer(nn.Linear):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(64, 64), nn.Tanh(), Layer(64, 64))

    def forward(self, x):
        return self.layers(x)
"""


def run(folder: Path, *arguments: str) -> Result:
    """Run the command in `folder`, in this process, because a process of its own takes seconds to start."""
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)


@pytest.fixture(scope="module")
def found() -> Plan:
    cluster = Cluster(nodes=8, accelerators=4, memory=8, reserve=1, between=100)
    return plan(SIZES, cluster, zero3_sizes=[2, 4], micro_batches=4)


def test_the_text_answers_three_questions_in_one_screen(found: Plan) -> None:
    lines = str(found).splitlines()
    assert len(lines) <= 55 and max(map(len, lines)) <= 78
    text = " ".join(" ".join(lines).split())
    for part in ("Does it fit into 7.00 GB (8 GB minus a reserve of 1 GB)?", "what crosses nodes?", ASSUMPTIONS):
        assert part in text
    assert "8 nodes x 4 accelerators, 100 Gbit/s per node, 300 GB/s inside a node" in text
    for row in (*found.rows, *found.other_schemes):
        cells = (row.scheme, str(row.zero3_size), size_text(row.peak), size_text(row.cost.between))
        pattern = (
            " +".join(map(re.escape, cells[:2])) + f" .*{cells[2]} .* {cells[3]} +{seconds_text(row.cost.seconds())}"
        )
        assert any(re.match(pattern, line) for line in lines), cells
    best = found.best
    assert best is not None and f"Recommended: {best.label}, peak {size_text(best.peak)}." in text
    stays = found.estimator.layerzero(best.zero3_size, best.accumulation, reshards="step")
    assert text.endswith(
        f"reshard_after_forward='step' fits as well: peak {size_text(stays.peak)}, and a rank sends "
        f"{size_text(stays.cost.zero3)} instead of {size_text(best.cost.zero3)} inside its ZeRO-3 group."
    )
    kinds = best.kinds
    assert sum(kinds.values()) == best.peak and "optimizer" in kinds
    assert ", ".join(f"{kind} {size_text(nbytes)}" for kind, nbytes in kinds.items()) in text
    assert found.links == (100.0, 200.0, 800.0, 1600.0)
    for row in found.compared:
        times = " +".join(seconds_text(row.cost.seconds(link)) for link in found.links)
        label = row.label.replace(", zero3_size=", " S=").split(",")[0]
        pattern = f"{re.escape(label)} +{times} +{row.cost.hidden_from:,.4g}"
        assert any(re.match(pattern, line) for line in lines)


def test_what_a_reader_must_know_about_the_input_is_said() -> None:
    whole = " ".join(str(plan(lambda: torch.nn.Linear(64, 64), Cluster(nodes=1, accelerators=1))).split())
    assert " in 1 unit; 1 micro-batch of 4,096 tokens per rank and step; activations are unknown and not coun" in whole
    assert "The whole model is one unit" in whole and "1 node x 1 accelerator, 400 Gbit/s per node (assumed)" in whole
    assert "At which link" not in whole, "one node has no link to others"
    on_cpu = plan(SIZES, Cluster(nodes=2, accelerators=2, device="cpu"), activation_bytes=5e6)
    assert "2 nodes x 2 CPU ranks, 800 Gbit/s per node (assumed)" in str(on_cpu) and "unknown" not in str(on_cpu)
    assert on_cpu.rows[0].memory["activations"] == 5_000_000
    assert on_cpu.config is not None and on_cpu.config.shared_memory == "off"


def test_the_data_have_the_documented_keys_and_the_numbers_of_the_rows(found: Plan) -> None:
    data = json.loads(json.dumps(found.as_dict()))
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## JSON") : text.index("## Accuracy")]
    documented = {
        name: re.findall(r"`(\w+)`", keys) for name, keys in re.findall(r"^\| (.*?) \| (`.*) \|$", section, re.M)
    }
    assert documented == {"plan": list(data), "row": list(data["rows"][0])}
    for row, each in zip((*found.rows, *found.other_schemes), (*data["rows"], *data["other_schemes"]), strict=True):
        numbers = (row.scheme, row.zero3_size, row.peak, row.memory, row.cost.between, row.cost.seconds(), row.fits)
        names = ("scheme", "zero3_size", "peak_bytes", "memory_bytes", "between_bytes", "step_seconds", "fits")
        assert tuple(each[name] for name in names) == numbers
        assert each["room_bytes"] == 7e9 - row.peak and each["link_seconds"]["100"] == each["step_seconds"]
    assert data["recommended"] in data["rows"] and data["why"] in " ".join(str(found).split())
    assert data["cluster"]["between"] == 100 and data["cluster"]["between_assumed"] is False
    nothing = plan(SIZES, Cluster(nodes=1, accelerators=2, memory=1.0001, reserve=1)).as_dict()
    assert nothing["recommended"] is None and not any(row["fits"] for row in nothing["rows"])


def test_the_picture_shows_the_memory_and_the_step_times_of_all_schemes(
    found: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []
    savefig = Figure.savefig

    def save(figure: Figure, *arguments: object, **options: object) -> None:
        savefig(figure, *arguments, **options)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    found.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    memory, times = saved[0].axes
    lengths: dict[float, float] = {}
    for bar in (bar for container in memory.containers for bar in container):
        lengths[bar.get_y()] = lengths.get(bar.get_y(), 0.0) + bar.get_width()
    assert list(lengths.values()) == pytest.approx([row.peak / 1e9 for row in found.compared])
    drawn = {line.get_label().replace("\n", " "): line for line in times.lines}
    for row in found.compared:
        speeds, seconds = drawn[row.label].get_data()
        assert list(seconds) == [row.cost.seconds(speed) for speed in speeds] and min(speeds) < 100 < max(speeds)


def test_without_matplotlib_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(tmp_path, SMALL, "nodes=1", "--plot", "plan.png")
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "Run: pip install matplotlib" in done.stderr


def test_the_command_plans_sizes_configs_and_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = run(tmp_path, SMALL, "nodes=2,accelerators=2,memory=8.5,device=cpu", "--plot", "plan.svg")
    assert (
        done.exit_code == 0 and "2 nodes x 2 CPU ranks" in done.stdout and "<svg" in (tmp_path / "plan.svg").read_text()
    )
    done = run(tmp_path, SMALL, "nodes=1,accelerators=1,memory=4.0001", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["why"].startswith("No settings fit")
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "settings.yaml").write_text("mp_policy: {param_dtype: bf16}\noffload: {grads: true}\nzero3_size: 2\n")
    options = [
        "--unit",
        "Layer",
        "--settings",
        "settings.yaml",
        "--micro-batches",
        "2",
        "--json",
        "--activations",
        "0.5",
    ]
    data = json.loads(run(tmp_path, "mine:Net", "nodes=2,accelerators=2", *options).stdout)
    assert (data["parameters"], data["units"], data["micro_batches"]) == (8320, 3, 2)
    assert all(row["offload"] == ["grads"] and row["zero3_size"] == 2 for row in data["rows"])
    assert data["rows"][0]["memory_bytes"]["activations"] == 500_000_000
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "vocab_size": 128, "n_head": 4, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(tmp_path, ".", "nodes=2", "--zero3-size", "4", "--zero3-size", "8", "--tokens", "64", "--no-recompute")
    assert done.exit_code == 0 and "1 micro-batch of 64 tokens" in done.stdout, done.stderr
    sizes = {int(line.split()[1]) for line in done.stdout.splitlines() if re.match(r"layerzero +\d", line)}
    assert sizes == {4, 8}


def test_a_wrong_command_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for arguments, said in (
        (
            ["missing:Net", "nodes=2"],
            "the model 'missing:Net' cannot be imported: ModuleNotFoundError: No module named 'missing'",
        ),
        (["config.json", "nodes=2"], "there is no file or folder 'config.json'. As the model, pass a config.json"),
        (
            [SMALL, "nodes"],
            "the cluster has 'nodes', but must be a list such as name=1,name=2 of nodes, accelerators, ",
        ),
        ([SMALL, "nodes=2,bandwith=3"], "the cluster has 'bandwith=3', but must be a list"),
        ([SMALL, "memory=3"], "the cluster has no nodes"),
        (["layers=1,hidden=64", "nodes=2"], "the model has no vocab, heads"),
        ([SMALL, "nodes=many"], "nodes must be an int, got 'many'"),
        (["layers=1,hidden=30,vocab=64,heads=4", "nodes=2"], "heads=4 does not divide hidden=30"),
        (["layers=one,hidden=30,vocab=64,heads=3", "nodes=2"], "layers must be an int of at least 1, got 'one'"),
        ([SMALL, "nodes=2", "--zero3-size", "7"], "zero3_size=7 does not divide the 16 ranks of the cluster"),
        ([SMALL, "nodes=2", "--settings", "nowhere.yaml"], "No such file or directory: 'nowhere.yaml'"),
    ):
        done = run(tmp_path, *arguments)
        assert done.exit_code == 2 and said in done.stderr, (arguments, done)
        assert done.stderr.count("\n") == 1 and done.stdout == ""


# --- the page of the docs ---


def _output(command: str) -> str:
    return CliRunner().invoke(app, shlex.split(command.replace("\\\n", ""))).stdout


def test_the_example_of_the_page_is_what_the_command_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (command, told) = re.findall(r"```\n\$ layerzero (plan .*?[^\\])\n(.*?)```", text, flags=re.DOTALL)[0]
    assert told.strip() == _output(command).strip()


def test_the_fields_of_a_cluster_are_documented() -> None:
    rows = [line.split("|")[1:4] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    told = {}
    for names, _, values in rows:
        told |= zip(re.findall(r"`(\w+)`", names), [value.strip() for value in values.split(", ")], strict=False)
    fields = {name: field.default for name, field in Cluster.__dataclass_fields__.items()}
    assert told.keys() >= fields.keys() and told["between"] == "400 for each accelerator"
    for name in fields.keys() - {"nodes", "between"}:
        assert str(fields[name]).removesuffix(".0") == told[name], name


@pytest.mark.exhaustive
def test_the_numbers_of_the_decision_table_are_those_of_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    (settings,) = re.findall(r"The file `bf16.yaml` contains:\n\n```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "bf16.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    section = text[text.index("## When another scheme is better") : text.index("## Compare schemes on your own model")]
    commands = dict(re.findall(r"^# (.*)\nlayerzero (plan .*)$", section, re.MULTILINE))
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [A-Zl]", line)]
    assert {command for *_, command in rows} == commands.keys() and len(rows) >= 5
    said = {name: _output(command) for name, command in commands.items()}
    for _, _, because, command in rows:
        numbers = re.findall(r"[\d.]+ (?:s|ms|GB)\b", because)
        assert len(numbers) >= 2
        assert not [number for number in numbers if f" {number}" not in said[command]], (because, said[command])


def test_the_package_exports_the_plan() -> None:
    assert layerzero.plan is plan and layerzero.Plan is Plan and layerzero.planning.Cluster is Cluster
