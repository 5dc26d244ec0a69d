"""Presentation of plans, traces and reports: commands, the page with charts, and tables."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import layerzero
from layerzero.cli import app
from layerzero.planning import Cluster, Plan, TransformerShape, plan
from layerzero.planning.plan_html import report_html
from layerzero.utils.text_tables import size
from tests.support.models import TiedTransformer
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIZES = TransformerShape(layers=4, hidden=512, ffn=1408, vocab=4096, heads=8)
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
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


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "layerzero", *arguments]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(SIZES, Cluster(nodes=8, accelerators=4, memory=8, reserve=1), zero3_sizes=[2, 4], micro_batches=[1, 4])


# --- the page ---


def test_the_page_is_one_file_that_asks_for_nothing(found: Plan) -> None:
    page = report_html(found, nodes=(2, 8))
    assert "<script" not in page and "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r'(src|href)="(?!data:,|#)|url\((?!#)|@import|<!ENTITY', page)
    assert page.count("<svg") == page.count("</svg>") == 3
    assert found.why.split(":")[0] in page
    for said in ("gather", "hop 1", "hop 2", "refresh", "compute", "FSDP2", "HSDP", "ZeRO-1", "accumulator"):
        assert said in page, said
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    for scheme in ("FSDP2", "HSDP", "ZeRO-1"):
        assert scheme in charts[0] and scheme in charts[2], "beside layerzero's memory and times"
    assert found.best is not None
    drawn = [*(kind for kind, nbytes in found.best.memory.items() if nbytes), size(found.best.peak), "7.00 GB of 8 GB"]
    assert not [text for text in drawn if f"{text}</text>" not in charts[0]]
    for text in ("compute", "forward", "backward", "update", "gather", "hop 1", "hop 2", "refresh", "ms"):
        assert f">{text}</text>" in charts[1], text
    assert all(f">{text}</text>" in charts[2] for text in ("2", "8", "nodes", "layerzero"))
    assert page.count("<table") == 1 and page.count("<tr") == 1 + 8 + len(found.peers)
    assert page == report_html(found, nodes=(2, 8)), "the same plan gives the same page"


def test_names_are_escaped() -> None:
    named = type("Layer<b>&$x$", (torch.nn.Linear,), {})
    with torch.device("meta"):
        model = torch.nn.Sequential(named(8, 8), named(8, 8))
    page = report_html(plan(model, Cluster(nodes=2, accelerators=2), units={named}, micro_batches=[1]), nodes=(2,))
    assert "Layer&lt;b&gt;&amp;$x$" in page and "<b>" not in page


def test_without_matplotlib_the_command_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "layerzero.planning.plan_html")
    sizes = ["--layers", "1", "--hidden", "64", "--vocab", "64", "--heads", "2"]
    done = CliRunner().invoke(app, ["plan", *sizes, "--nodes", "1", "--html", str(tmp_path / "report.html")])
    assert done.exit_code == 2 and "Recommended" in done.stdout
    assert 'pip install "torch-layerzero[plots]"' in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_plan_of_which_nothing_fits_has_a_page_too() -> None:
    tight = plan(SIZES, Cluster(nodes=1, accelerators=2, memory=1.2, reserve=1), micro_batches=[1])
    assert tight.best is None
    page = report_html(tight, nodes=(1, 2))
    assert "No settings fit" in page and "To paste" not in page and page.count("<svg") == 3


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, to render the page")
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desktop"])
def test_the_page_is_rendered_without_a_complaint_and_is_no_wider_than_the_screen(
    found: Plan, tmp_path: Path, width: int
) -> None:
    assert CHROMIUM is not None
    # Content wider than the page would need scrolling; the page reports its width.
    told = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></body>"
    (tmp_path / "report.html").write_text(report_html(found, nodes=(2, 8)).replace("</body>", told))
    picture = tmp_path / "picture.png"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1400", f"--screenshot={picture}"]
    page = f"file://{tmp_path / 'report.html'}"
    run_once = subprocess.run([*command, page], capture_output=True, text=True, timeout=120, check=False)
    assert run_once.returncode == 0 and picture.stat().st_size > 10_000, run_once.stderr
    assert "CONSOLE" not in run_once.stderr, run_once.stderr
    dumped = subprocess.run(
        [*command[:-1], "--dump-dom", page], capture_output=True, text=True, timeout=120, check=False
    )
    title = re.search(r"<title>(\d+) of (\d+)</title>", dumped.stdout)
    assert title is not None, dumped.stdout[:500]
    assert int(title[1]) <= int(title[2]), title[0]


# --- the page of the docs ---


def test_the_docs_say_what_is_there() -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    told = {}
    for names, _, values in rows:
        told |= zip(re.findall(r"`(\w+)`", names), [value.strip() for value in values.split(", ")], strict=False)
    assert told["between"] == "400 for each accelerator" and Cluster(nodes=2, accelerators=4).node_link == 1600
    for field in dataclasses.fields(Cluster):
        if field.name in told and field.name not in ("nodes", "price", "between"):
            assert str(field.default).removesuffix(".0") == told[field.name], field.name
    missing = {field.name for field in dataclasses.fields(Cluster)} - told.keys()
    assert missing == {"processor_per_byte"}, "which is measured"


def test_the_walk_is_what_the_command_says() -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (walk,) = re.findall(r"```\n\$ layerzero (plan .*?)```", text, flags=re.DOTALL)
    command, _, told = walk.replace("\\\n", "").partition("\n")
    said = CliRunner().invoke(app, shlex.split(command)).stdout
    assert told.strip() == said[: said.index("\n\npeak: maximum in a step")].strip()


# --- commands ---


def test_plan_of_sizes_writes_a_table_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes: 4\naccelerators: 4\nmemory: 8\nreserve: 1\n")
    sizes = ["--layers", "2", "--hidden", "256", "--vocab", "512", "--heads", "4"]
    done = run(tmp_path, "plan", *sizes, "--cluster", "cluster.yaml", "--nodes", "2", "--html", "report.html")
    assert done.returncode == 0, done.stderr
    assert "2 nodes x 4 accelerators of 8 GB" in done.stdout and "Recommended: zero3_size=" in done.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    done = run(tmp_path, "plan", *sizes, "--nodes", "1", "--accelerators", "1", "--memory", "4.001")
    assert done.returncode == 1 and "No settings fit" in done.stdout


def test_plan_of_a_factory_and_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    done = run(tmp_path, "plan", "mine:Net", "--unit", "Layer", "--nodes", "2", "--micro-batches", "2")
    assert done.returncode == 0, done.stderr
    assert "8.32 k parameters in 3 units" in done.stdout and "units: [Layer]" in done.stdout
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "vocab_size": 128, "n_head": 4, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(tmp_path, "plan", "config.json", "--nodes", "2", "--batch-tokens", "300000")
    assert done.returncode == 0 and "5 micro-batches" in done.stdout, done.stderr
    assert "units: auto" in done.stdout and 'units="auto"' in done.stdout, "as models of transformers say themselves"


def test_a_wrong_command_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "old.json").write_text('{"layerzero": {"format": 1, "schedule": []}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for arguments, said in (
        (["plan", "--nodes", "2"], "--layers is missing"),
        (["plan", "missing:Net", "--nodes", "2"], "module 'missing' is not on the import path"),
        (["plan", "config.json", "--nodes", "2"], "No such file"),
        (["plan", "mine:Net"], "the number of nodes is unknown"),
        (["plan", "x:y", "--layers", "2", "--nodes", "2"], "either a model or its sizes"),
        (["trace", "trace.json"], "is not a trace file written by layerzero.trace"),
        (["trace", "old.json"], "has trace format 1, but this version reads format 2. Record the trace again"),
        (["simulate", "nowhere.json"], "No such file"),
        (["simulate", "trace.json", "--gbit", "0"], "is not a trace file written by layerzero.trace"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2 and said in done.stderr, (arguments, done)
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


# --- log of a run ---


def _printed(rank: int, folder: str) -> tuple[str, str, str]:
    model = layerzero.shard_model(TiedTransformer(), mesh=mesh_of(2), units=TiedTransformer.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    with layerzero.trace(model, f"{folder}/rank{{rank}}.json"):
        for step in range(2):
            layerzero.traffic(model, reset=True)
            TiedTransformer.loss(model, TiedTransformer.batch(step=step, rank=rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report, traffic = layerzero.memory(model), layerzero.traffic(model)
    for collective in ("hop1", "hop2", "refresh"):
        assert traffic.predicted[collective] == traffic.bytes[collective], collective
    assert "metadata" not in traffic.predicted
    rows = {line.split("  ")[0]: line.split()[-4:] for line in str(report).splitlines()}
    for kind in ("zero3_shard", "accumulator", "reduce_buffer"):
        predicted, measured = " ".join(rows[kind][:2]), " ".join(rows[kind][2:])
        assert predicted == measured != "0 B", report
    return str(report), str(traffic), str(layerzero.metrics(model))


def test_reports_are_tables_with_units_and_traces_are_read_by_commands(tmp_path: Path) -> None:
    memory, traffic, numbers = run_ranks(_printed, str(tmp_path))[0]
    assert re.search(r"^memory of this rank +predicted +measured$", memory, re.MULTILINE)
    assert re.search(r"^peak of a step +[\d.]+ .B +[\d.]+ .B$", memory, re.MULTILINE)
    assert re.search(r"^gather +\d+ ", traffic, re.MULTILINE)
    assert re.search(r"^axis replica +[\d.]+ .B$", traffic, re.MULTILINE)
    assert re.search(r"^memory/zero3_shard +[\d.]+ .B$", numbers, re.MULTILINE)
    assert re.search(r"^steps/taken +1$", numbers, re.MULTILINE)

    done = run(tmp_path, "trace", "rank0.json")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^gather +zero3 +\d+ +[\d.]+ .?B", done.stdout, re.MULTILINE)
    assert re.search(r"^backward +the root +2 ", done.stdout, re.MULTILINE)
    slow, fast = (run(tmp_path, "simulate", "rank0.json", "--gbit", gbit).stdout for gbit in ("0.001", "25"))
    times = [re.search(r"simulated: 2 steps in ([\d.]+) (\w+)", each) for each in (slow, fast)]
    seconds = [float(each[1]) * {"s": 1, "ms": 1e-3, "us": 1e-6}[each[2]] for each in times if each is not None]
    assert len(seconds) == 2 and seconds[0] > seconds[1]
    assert re.search(r"^hop2 +\d+ +[\d.]+ .?B", fast, re.MULTILINE)
