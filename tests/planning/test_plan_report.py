"""Presentation of plans, traces and reports: commands, the page with charts, and tables."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from click.testing import Result
from matplotlib.figure import Figure
from typer.testing import CliRunner

import layerzero
from layerzero import cli_planning
from layerzero.cli import app
from layerzero.integrations.yaml_file import HOP2_CODECS, NAMED_REFRESH_CODECS
from layerzero.planning import Cluster, Estimate, Plan, TransformerShape, plan
from layerzero.planning.estimator import _CODING, _CRITERIA, _REFRESH_CODING, ALIKE_TEXT, StepCost
from layerzero.planning.plan_html import _MEMORY_KINDS, _MEMORY_TEXTS, report_html
from layerzero.planning.plan_report import parts_text, reduce_text, scheme_comparison_text, shown_rows
from layerzero.utils.text_tables import seconds_text, si_text, size_text
from tests.support.browser import Browser, open_browser
from tests.support.models import TiedTransformer
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIZES = TransformerShape(layers=4, hidden=512, ffn=1408, vocab=4096, heads=8)
PATIENT = """
import sys
from layerzero import cli, cli_planning
cli_planning._PATIENCE, cli_planning._INTERVAL = 0.0, 0.02
cli.app(sys.argv[1:])
"""
IMPATIENT = PATIENT.replace("0.02", "0.0")
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
    """Run a command in `folder`, in this process, because a process of its own takes seconds to start."""
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(SIZES, Cluster(nodes=8, accelerators=4, memory=8, reserve=1), zero3_sizes=[2, 4], micro_batches=[1, 4])


# --- the page ---


def test_the_page_is_one_file_that_asks_for_nothing(found: Plan) -> None:
    page = report_html(found, nodes=(2, 8))
    assert "<script" not in page and "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r'(src|href)="(?!data:,|#)|url\((?!#)|@import|<!ENTITY', page)
    assert page.count("<svg") == page.count("</svg>") == 3
    assert found.best is not None and found.why.startswith("Recommended: ") and html.escape(found.why) in page
    for said in ("gather", "hop 1", "hop 2", "refresh", "compute", "FSDP2", "HSDP", "ZeRO-1", "accumulator"):
        assert said in page, said
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    for scheme in ("FSDP2", "HSDP", "ZeRO-1"):
        assert scheme in charts[0] and scheme in charts[2], "beside layerzero's memory and times"
    drawn = [
        *(_MEMORY_KINDS[kind] for kind, nbytes in found.best.memory.items() if nbytes),
        size_text(found.best.peak),
        "7.00 GB of 8 GB",
    ]
    assert not [text for text in drawn if f"{text}</text>" not in charts[0]]
    for text in ("compute", "forward", "backward", "update", "gather", "hop 1", "hop 2", "refresh", "ms"):
        assert f">{text}</text>" in charts[1], text
    assert all(f">{text}</text>" in charts[2] for text in ("2", "8", "nodes"))
    assert f">layerzero, {reduce_text(found.best.choice)}</text>" in charts[2]
    rivals = [row for row in found.other_schemes if row.choice.micro_batches == found.best.choice.micro_batches]
    for scheme in ("FSDP2", "ZeRO-1"):  # in the dtype in which it is the fastest, as in the first sentence
        fastest = min((row for row in rivals if row.choice.scheme == scheme), key=lambda row: (not row.fits, row.step))
        assert f">{scheme}, {reduce_text(fastest.choice)}</text>" in charts[0] and f">{scheme}, " in charts[2]
    assert page.count("<table") == 1 and page.count("<tr") == 1 + 8 + len(found.other_schemes)
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
    assert done.exit_code == 2 and done.stdout == "", "it does not plan first"
    assert "Run: pip install matplotlib" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_plan_of_which_nothing_fits_has_a_page_too() -> None:
    tight = plan(SIZES, Cluster(nodes=1, accelerators=2, memory=1.2, reserve=1), micro_batches=[1])
    assert tight.best is None
    page = report_html(tight, nodes=(1, 2))
    assert "No settings fit" in page and "Recommended settings to copy" not in page and page.count("<svg") == 3


def test_a_scheme_with_several_shard_sizes_has_a_bar_and_a_line_for_each() -> None:
    sizes = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)
    cluster = Cluster(nodes=8, accelerators=2, memory=7, reserve=1)
    found = plan(sizes, cluster, zero3_sizes=[8], micro_batches=[1], reduce_dtypes=["fp32"])
    groups = [row.choice.zero3_size for row in found.other_schemes if row.choice.scheme == "HSDP"]
    assert groups == [2, 4, 8]
    memory, _, times = re.findall(r"<svg.*?</svg>", report_html(found, nodes=(8, 16)), flags=re.DOTALL)
    for chart in (memory, times):
        assert [chart.count(f">HSDP S={group}, fp32</text>") for group in groups] == [1, 1, 1]
        assert chart.count(">FSDP2, fp32</text>") == chart.count(">ZeRO-1, fp32</text>") == 1


def test_a_page_and_a_text_name_the_same_closest_settings() -> None:
    tight = plan(SIZES, Cluster(nodes=1, accelerators=2, memory=1.2, reserve=1), micro_batches=[1])
    page = report_html(tight, nodes=(1,))
    shown = re.findall(r"<tr.*?</tr>", page)[1:9]
    assert (
        f"Of the {len(tight.rows)} combinations of layerzero settings that were tried, the table shows the 8 closest. "
        in page
    )
    closest = tight.rows[:8]
    without_host = plan(SIZES, dataclasses.replace(tight.cluster, host_memory=0.01), micro_batches=[1], offload=True)
    assert len(without_host.rows) > len({max(row.excess, row.host_excess) for row in without_host.rows}), "ties"
    for rows in (tight.rows, without_host.rows):
        shortfalls = [(row.excess, row.host_excess) for row in rows]
        assert shortfalls == sorted(shortfalls) and len(rows) > 8
    assert all(f">{size_text(row.peak)}</td>" in line for row, line in zip(closest, shown, strict=True))
    assert f" need {size_text(closest[0].excess)} more per accelerator" in tight.why


def test_the_recommended_row_is_shown_even_if_it_is_not_among_the_fastest(found: Plan) -> None:
    fitting = [row for row in found.rows if row.fits]
    assert found.best in fitting[:12] and "; the 12 fastest:" in str(found) and fitting[-1].tokens < fitting[0].tokens
    slow = dataclasses.replace(found, best=fitting[-1])
    assert shown_rows(slow) == [fitting[-1], *fitting[:11]]
    assert "; the recommended one and the 11 fastest:" in str(slow)
    page = report_html(slow, nodes=(2,))
    assert (
        f"Of the {len(found.rows)} combinations of layerzero settings that were tried, the table shows the recommended "
        in page
    )
    assert re.findall(r"<tr.*?</tr>", page)[1].startswith('<tr class="best">')
    (own,) = (link for link in slow.links if link.between == found.cluster.node_link)
    assert own.rows["layerzero"] == fitting[-1]


@pytest.mark.exhaustive
def test_the_figure_of_a_step_names_its_micro_batches(found: Plan) -> None:
    for count, text in (
        (1, "the only micro-batch"),
        (2, "both micro-batches"),
        (4, "the first and the last of 4 micro"),
    ):
        few = plan(SIZES, found.cluster, zero3_sizes=[4], micro_batches=[count], reduce_dtypes=["fp32"])
        assert f"The figure shows {text}" in report_html(few, nodes=(2,))


def test_the_page_explains_the_collectives_of_the_figure() -> None:
    texts = {"Gather:": (2, 8), "Hop 1:": (2, 8), "Hop 2:": (1, 2), "Refresh:": (1, 2)}
    for size in (1, 2, 8):
        settings = {"zero3_sizes": [size], "micro_batches": [1], "reduce_dtypes": ["fp32"]}
        page = report_html(plan(SIZES, Cluster(nodes=4, accelerators=2), **settings), nodes=(2,))
        assert {text for text in texts if text in page} == {text for text, sizes in texts.items() if size in sizes}


def test_a_model_in_one_unit_is_noted(found: Plan) -> None:
    whole = plan(lambda: torch.nn.Linear(64, 64), Cluster(nodes=2, accelerators=2), micro_batches=[1])
    assert whole.units == 1 and "in 1 unit, the root; " in str(whole)
    assert "the whole model is one unit" in str(whole) and "the whole model is one unit" not in str(found)
    assert " fit into 76.0 GB (80 GB minus a reserve of 4 GB); the " in str(whole)


def test_the_page_opens_with_the_answer_in_one_sentence(found: Plan) -> None:
    best = found.best
    assert best is not None
    counts = best.choice.micro_batches
    fits = [each for each in found.other_schemes if each.choice.micro_batches == counts and each.fits]
    other = min(fits, key=lambda each: each.step)
    answer = _answer(report_html(found, nodes=(2,)))
    start = f"Use zero3_size={best.choice.zero3_size}, accumulation='{best.choice.accumulation}', "
    assert answer.startswith(start) and answer.count(". ") == 0 and answer.endswith(".")
    change = f"{100 * abs(other.step - best.step) / best.step:.1f}% {'less' if other.step < best.step else 'more'}"
    assert answer.endswith(
        f"a simulated step takes {seconds_text(best.step)}, and peak memory is {size_text(best.peak)} of "
        f"{size_text(found.cluster.room)}; the fastest other scheme that fits, {other.choice.scheme} with "
        f"{reduce_text(other.choice)} gradients, takes {seconds_text(other.step)} ({change}) and needs "
        f"{size_text(other.peak)}."
    )


def test_the_answer_about_encoded_gradients_names_the_fastest_other_scheme_whatever_its_dtype() -> None:
    codecs = ("int8_blocks",)
    settings = {"zero3_sizes": [4], "micro_batches": [1], "reduce_dtypes": ["fp32", "bf16"], "hop2_codecs": codecs}
    found = plan(SIZES, Cluster(nodes=8, accelerators=4, memory=8, reserve=1, between=10), **settings)
    best = next(row for row in found.rows if row.choice.reduce_dtype is torch.float32)
    other = min((row for row in found.other_schemes if row.fits), key=lambda row: row.step)
    assert other.choice.reduce_dtype is torch.bfloat16
    answer = _answer(report_html(dataclasses.replace(found, best=best), nodes=(2,)))
    assert "fp32/int8_blocks gradients" in answer
    assert re.search(
        f"the fastest other scheme that fits, {other.choice.scheme}( S=4)? with bf16 gradients, takes ", answer
    )


@pytest.mark.exhaustive
def test_the_answer_names_no_scheme_that_does_not_fit(found: Plan) -> None:
    best = found.best
    assert best is not None
    full = [dataclasses.replace(each, peak=int(each.room) + 1) for each in found.other_schemes]
    answer = _answer(report_html(dataclasses.replace(found, other_schemes=full), nodes=(2,)))
    counts = f"{best.choice.micro_batches} micro-batch"
    memory = f"{size_text(best.peak)} of {size_text(found.cluster.room)}"
    assert f", and peak memory is {memory}; no other scheme fits with {counts}" in answer
    slow = [_with_step(each, 10 * best.step) for each in found.other_schemes]
    assert "(900.0% longer)" in _answer(report_html(dataclasses.replace(found, other_schemes=slow), nodes=(2,)))
    fast = [_with_step(each, best.step / 2) for each in found.other_schemes]
    assert "(50.0% less)" in _answer(report_html(dataclasses.replace(found, other_schemes=fast), nodes=(2,)))


def _with_step(row: Estimate, step: float) -> Estimate:
    cost = dataclasses.replace(row.simulated(), step=step)
    return dataclasses.replace(row, simulated=lambda: cost)


def _answer(page: str) -> str:
    (answer,) = re.findall(r'<h1>Training plan</h1>\n<p class="answer">(.*?)</p>', page)
    return html.unescape(answer)


def test_axes_have_round_ticks_from_zero(found: Plan) -> None:
    memory, step, times = re.findall(r"<svg.*?</svg>", report_html(found, nodes=(2, 8)), flags=re.DOTALL)
    for axis, chart in (("x", memory), ("x", step), ("y", times)):
        ticks = [float(tick) for tick in re.findall(rf'<g id="{axis}tick_.*?>([\d.]+)</text>', chart, flags=re.DOTALL)]
        assert 3 <= len(ticks) <= 8 and ticks[0] == 0, ticks
        digits = {f"{tick - last:.0e}"[0] for last, tick in itertools.pairwise(ticks)}
        assert digits <= {"1", "2", "5"} and len(digits) == 1, ticks


def test_the_page_explains_the_kinds_of_memory_and_shows_a_limit_that_is_near() -> None:
    cluster = Cluster(nodes=2, accelerators=4, memory=8, device="cpu")
    codecs = {"hop2_codecs": ["int4_blocks"], "refresh_codecs": ["lossless"]}
    page = report_html(found := plan(SIZES, cluster, zero3_sizes=[2], **codecs), nodes=(2,))
    assert "2 nodes x 4 CPU ranks of 8 GB" in str(found) and "2 nodes &times; 4 CPU ranks of 8 GB" in page
    names = set(re.findall(r">([a-z ]+)</text>", page.partition("</svg>")[0]))
    explained = dict(re.findall(r"<strong>([a-z ]+)</strong>(.*?): ", page))
    assert names == explained.keys() == set(_MEMORY_TEXTS), "each name of the legend is explained, and no other"
    kinds = {name: re.findall(r"<code>(\w+)</code>", text) for name, text in explained.items()}
    assert kinds["masters"] == ["zero1_shard"] and kinds["weights"] == ["zero3_shard"]
    assert kinds["gradients"] == ["accumulator", "gradient_shard"] and kinds["residuals"] == ["residual"]
    assert kinds["reduction buffers"] == ["reduce_buffer"] and kinds["gathered units"] == ["cached_buffer"]
    assert "of 8 GB</text>" in page
    page = report_html(plan(SIZES, dataclasses.replace(cluster, memory=8000), zero3_sizes=[2]), nodes=(2,))
    assert "of 8000 GB</text>" not in page, "bars a thousandth of the axis wide cannot be read"


def test_memory_of_all_schemes_has_the_same_names(found: Plan) -> None:
    names = {
        row.choice.scheme: {_MEMORY_KINDS[kind] for kind, nbytes in row.memory.items() if nbytes}
        for row in found.other_schemes
    }
    sharded = {"masters", "gradients", "optimizer", "gathered units", "reduction buffers", "activations"}
    assert names["FSDP2"] == names["HSDP"] == sharded and names["HFSDP"] == sharded | {"weights"}
    assert names["ZeRO-1"] == {"masters", "weights", "gradients", "optimizer", "activations"}
    for row in found.other_schemes:
        assert sum(row.memory.values()) == row.peak


def test_the_axis_of_memory_has_the_unit_of_the_bars(found: Plan) -> None:
    tiny = plan(TransformerShape(layers=2, hidden=64, vocab=64, heads=2), Cluster(nodes=2), tokens=16)
    sizes = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)
    large = plan(sizes, Cluster(nodes=2), zero3_sizes=[8], micro_batches=[1])
    for each, unit in ((tiny, "MB"), (found, "MB"), (large, "GB")):
        chart = report_html(each, nodes=(2,)).partition("</svg>")[0]
        largest = max((*shown_rows(each, 8), *each.other_schemes), key=lambda row: row.peak)
        assert f">{unit}</text>" in chart and size_text(largest.peak).endswith(unit)
        ticks = [float(tick) for tick in re.findall(r'<g id="xtick_.*?>([\d.]+)</text>', chart, flags=re.DOTALL)]
        assert ticks[-1] >= 1, ticks


def test_legends_are_no_wider_than_their_figures(found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    savefig = Figure.savefig

    def save(figure: Figure, *arguments: object, **options: object) -> None:
        savefig(figure, *arguments, **options)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    sizes = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)
    several = plan(sizes, Cluster(nodes=8, accelerators=2, memory=7, reserve=1), zero3_sizes=[8], micro_batches=[1])
    cluster = Cluster(nodes=2, accelerators=2, memory=8, device="cpu")
    codecs = {"hop2_codecs": ["int4_blocks"], "refresh_codecs": ["int4_difference"]}
    coded = plan(SIZES, cluster, zero3_sizes=[2], micro_batches=[1], **codecs)
    for each in (found, several, coded):
        report_html(each, nodes=(2, 8))
    assert len(saved) == 9
    for figure in saved:
        (legend,) = figure.legends
        extent, whole = legend.get_window_extent(), figure.bbox
        assert whole.x0 <= extent.x0 < extent.x1 <= whole.x1 and whole.y0 <= extent.y0 < extent.y1 <= whole.y1
        (axes,) = figure.axes
        assert extent.y1 <= axes.get_window_extent().y0 and axes.get_window_extent().height > 0.4 * whole.height


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("width", [420, 1000, 1300, 1400])
def test_the_page_is_rendered_without_a_complaint_and_is_no_wider_than_the_window(
    found: Plan, tmp_path: Path, browser: Browser, width: int
) -> None:
    (tmp_path / "report.html").write_text(report_html(found, nodes=(2, 8)))
    browser.show(f"file://{tmp_path}/report.html", width=width)
    assert browser.overflow() == [] and browser.errors() == []
    outside = browser.run(
        "return [...document.querySelectorAll('svg')].filter(svg => {"
        "  const legend = svg.querySelector('[id^=legend]').getBoundingClientRect();"
        "  const whole = svg.getBoundingClientRect();"
        "  return legend.left < whole.left || legend.right > whole.right }).length"
    )
    assert outside == 0, "legends are cut off"
    shown, scrolled = browser.run(
        "const box = document.querySelector('.wide'); return [box.clientWidth, box.scrollWidth]"
    )
    assert shown > 0.9 * width - 32, "the table uses the width of the window"
    assert scrolled == shown or width < 1300, "all columns are visible"
    columns = browser.run("return [...document.querySelectorAll('section')].map(each => each.offsetLeft)")
    assert len(set(columns)) == (1 if width == 420 else 2)


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
    assert told.strip() == said.strip()


@pytest.mark.exhaustive
def test_the_numbers_of_the_decision_table_are_those_of_its_commands() -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    section = text[text.index("## When another scheme is better") : text.index("## Compare schemes on your own model")]
    commands = dict(re.findall(r"^# (.*)\nlayerzero (plan .*)$", section, re.MULTILINE))
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [A-Zl]", line)]
    assert {command for *_, command in rows} == commands.keys() and len(rows) == 7
    said = {name: CliRunner().invoke(app, shlex.split(command)).stdout for name, command in commands.items()}
    for _, _, because, command in rows:
        numbers = re.findall(r"[\d.]+ (?:s|ms|GB)\b", because)
        assert len(numbers) >= 2
        assert not [number for number in numbers if f" {number}" not in said[command]], (because, said[command])
        link = re.search(r"at ([\d,]+) Gbit/s", because, re.IGNORECASE)
        assert link is not None and f"\n{link[1]} " in said[command]


def test_the_docs_have_the_rule_of_the_recommendation() -> None:
    text = " ".join((ROOT / "docs" / "planning.md").read_text(encoding="utf-8").split())
    *criteria, last = (text.removeprefix("the ") for text, _ in _CRITERIA)
    rule = f"the planner chooses by these criteria, in this order: {', '.join(criteria)}, and {last}."
    assert f"within {ALIKE_TEXT} of the highest throughput, {rule}" in text


def test_the_assumed_times_of_codecs_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/gpu/gpu.json").read_text(encoding="utf-8"))["parts"]["codecs"]
    page = (ROOT / "docs" / "slow-links.md").read_text(encoding="utf-8")
    section = page[page.index("## Time of the codecs") : page.index("## Lossless refresh")]
    lowest = r"([\d.]+)(?: to [\d.]+)?"
    on_cpu = re.findall(rf"^\| int\d.*? \| {lowest} \| {lowest} \|$", section, re.MULTILINE)
    for codec, encode, told in zip(("int8", "int4"), ("encode", "encode with feedback"), on_cpu, strict=True):
        of_gpu = [round(measured[f"{codec}, {each}"] / 1e9) for each in (encode, "decode")]
        assert [rate / 1e9 for rate in _CODING[f"{codec}_blocks", "cuda"]] == of_gpu
        assert [rate / 1e9 for rate in _CODING[f"{codec}_blocks", "cpu"]] == pytest.approx([float(n) for n in told])
    assert _CODING.keys() == set(itertools.product(HOP2_CODECS, ("cuda", "cpu")))
    refreshes = re.findall(rf"^\| .* of weights.*? \| {lowest} \| {lowest} \|$", section, re.MULTILINE)
    for codec, stated in zip(("int4_difference", "lossless"), refreshes, strict=True):
        assert [rate / 1e9 for rate in _REFRESH_CODING[codec]] == pytest.approx([float(n) for n in stated])
    assert _REFRESH_CODING.keys() == NAMED_REFRESH_CODECS.keys()


def test_waits_for_copies_in_one_direction_are_one_part_of_a_step(found: Plan) -> None:
    assert found.best is not None
    parts = {"forward": 1.0, "fetch": 0.5, "up": 0.25, "store": 0.125, "down": 0.125, "hop2": 0.1, "gather": 0.05}
    row = dataclasses.replace(found.best, simulated=lambda: StepCost(2.15, parts, {}, 0.0))
    assert parts_text(row) == (
        "a step of 2.15 s: forward 1.00 s, waiting for copies from host memory 750.0 ms, waiting for copies to host "
        "memory 250.0 ms, waiting for hop 2 100.0 ms, waiting for gather 50.0 ms"
    )


def test_a_plan_for_one_node_has_no_comparison_of_links() -> None:
    single = plan(SIZES, Cluster(nodes=1, accelerators=1, memory=8, reserve=1), micro_batches=[1])
    assert single.links == () and scheme_comparison_text(single) == "" and single.as_dict()["links"] == []
    text, page = str(single), report_html(single, nodes=(1,))
    assert "; 1 node x 1 accelerator of 8 GB" in text and "; 1 node &times; 1 accelerator of 8 GB" in page
    assert "at which link" not in text + page and "\n\n\n" not in text


@pytest.mark.exhaustive
def test_the_times_of_encoded_gradients_are_those_of_the_command() -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    section = text[text.index("### Settings for slow links") : text.index("### Progress and reports")]
    (command,) = re.findall(r"```bash\nlayerzero (plan .*?)```", section, flags=re.DOTALL)
    said = CliRunner().invoke(app, [*shlex.split(command.replace("\\\n", "")), "--all"]).stdout
    told = re.search(
        r"takes ([\d.]+ s)\s+with\s+`int4_blocks`,\s+([\d.]+ s)\s+with\s+`int8_blocks`\s+and\s+([\d.]+ s)\s+without",
        section,
    )
    assert told is not None
    for codec, step in zip(("/int4_blocks", "/int8_blocks", ""), told.groups(), strict=True):
        assert re.search(rf"^layerzero +8 +sharded +- +fp32{codec} .* {re.escape(step)} ", said, re.MULTILINE), said


# --- commands ---


def test_plan_of_sizes_writes_a_table_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes: 4\naccelerators: 4\nmemory: 8\nreserve: 1\n")
    sizes = ["--layers", "2", "--hidden", "256", "--vocab", "512", "--heads", "4"]
    done = run(tmp_path, "plan", *sizes, "--cluster", "cluster.yaml", "--nodes", "2", "--html", "report.html")
    assert done.exit_code == 0, done.stderr
    assert "2 nodes x 4 accelerators of 8 GB" in done.stdout and "Recommended: zero3_size=" in done.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    done = run(tmp_path, "plan", *sizes, "--nodes", "1", "--accelerators", "1", "--memory", "4.001")
    assert done.exit_code == 1 and "No settings fit" in done.stdout


def test_sites_are_planned_by_the_command(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "64", "--vocab", "64", "--heads", "2", "--nodes", "2", "--accelerators", "2"]
    sites = ["--sites", "3", "--between-sites", "0.001", "--every", "8", "--fragments", "2"]
    text = run(tmp_path, "plan", *sizes, *sites).stdout
    found = json.loads(run(tmp_path, "plan", *sizes, *sites, "--json").stdout)
    assert [each["codec"] for each in found["sites"]] == [None, "int8_blocks", "int4_blocks"]
    lines = text[text.index("3 sites, each with 2 x 2 accelerators") :].splitlines()
    assert lines[1].startswith("layerzero.outer(every=8, fragments=2).")
    for each, line in zip(found["sites"], lines[3:6], strict=True):
        cells = line.split()
        assert cells[:2] == [each["codec"] or "none", str(each["delay"]) if each["hides_exchanges"] else "-"]
        assert (
            seconds_text(each["step_seconds"]).split()[0] in cells
            and size_text(each["outer_bytes"]).split()[0] in cells
        )
    assert run(tmp_path, "plan", *sizes, *sites, "--html", "sites.html").exit_code == 0
    page = html.unescape((tmp_path / "sites.html").read_text())
    assert all(line in page for line in lines), "the report has the table, too"
    assert "Sites are not estimated" in run(tmp_path, "plan", *sizes, *sites, "--memory", "4.0001").stdout
    for wrong, message in (
        (["--sites", "2"], "--between-sites is missing"),
        (["--between-sites", "1"], "--sites is missing"),
        (["--every", "4"], "--sites is missing"),
        (["--sites", "0", "--between-sites", "1"], "sites=0 is not supported"),
    ):
        done = run(tmp_path, "plan", *sizes, *wrong)
        assert done.exit_code == 2 and message in done.stderr and not done.stdout


def test_settings_for_slow_links_are_options_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes: 2\naccelerators: 2\ndevice: cpu\n")
    sizes = ["--layers", "2", "--hidden", "64", "--vocab", "64", "--heads", "2", "--cluster", "cluster.yaml"]
    tried = ["--replica-reduce-dtype", "bf16", "--accumulation-dtype", "bf16", "--refresh-codec", "lossless"]
    tried += ["--refresh-codec", "none", "--zero3-size", "2", "--micro-batches", "1", "--json"]
    rows = json.loads(run(tmp_path, "plan", *sizes, *tried).stdout)["rows"]
    assert {row["refresh_codec"] for row in rows} == {None, "lossless"}
    assert {row["replica_reduce_dtype"] for row in rows if row["reduce_dtype"] == "fp32"} == {"bf16"}
    assert {row["accumulation_dtype"] for row in rows if row["accumulation"] == "full"} == {"bf16"}


def test_json_has_the_data_of_the_text_under_the_documented_keys(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "256", "--vocab", "512", "--heads", "4", "--price", "2", "--reserve", "1"]
    command = ["plan", *sizes, "--nodes", "4", "--accelerators", "4", "--memory", "1.1", "--micro-batches", "2"]
    text, found = run(tmp_path, *command).stdout, json.loads(run(tmp_path, *command, "--json").stdout)
    tables = text.split("\n\n")
    for rows, shown in ((found["rows"][:12], tables[1]), (found["other_schemes"], tables[2])):
        lines = shown.splitlines()[-len(rows) :]
        for row, line in zip(rows, lines, strict=True):
            assert line.startswith(f"{row['scheme']} ") and row["reduce_dtype"] in line
            for cell in (
                size_text(row["peak_bytes"]),
                size_text(row["between_bytes"]),
                seconds_text(row["step_seconds"]),
            ):
                assert cell in line, (cell, line)
            assert line.endswith(si_text(row["tokens_per_second"])) and line.removeprefix(row["scheme"]).count("-") == (
                not row["fits"]
            ) + (row["scheme"] == "layerzero" and not row["offload"])
    assert found["settings"]["fit"] == len(found["rows"]) < found["settings"]["tried"]
    assert found["cluster"]["between"] == 1600 and found["cluster"]["between_assumed"] is True
    assert found["why"] in text and found["call"] in text and found["yaml"].strip() in text
    assert found["recommended"] in found["rows"] and found["price_per_day"] == 24 * 2 * 16
    table = next(each for each in tables if each.startswith("Step time and tokens/s by link speed"))
    links = table[table.index("\nGbit/s ") :].splitlines()[2:]
    assert [each["between"] for each in found["links"]] == [200, 800, 1600]
    for each, line in zip(found["links"], links, strict=True):
        assert line.startswith(f"{each['between']:,.0f} ") and line.endswith(f"{each['advantage']:+.1%}")
        for row in filter(None, each["schemes"].values()):
            assert f"{seconds_text(row['step_seconds'])}, {si_text(row['tokens_per_second'])}" in line
    every = json.loads(run(tmp_path, *command, "--json", "--all").stdout)
    assert len(every["rows"]) == every["settings"]["tried"]

    documented = _documented_keys()
    assert (
        documented["plan"] == found.keys()
        and documented["an element of `rows` or `other_schemes`"] == found["rows"][0].keys()
    )
    assert documented["an element of `links`"] == found["links"][0].keys()


def _documented_keys() -> dict[str, set[str]]:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (`.*`) \|$", page[page.index("## JSON") :], re.MULTILINE)
    return {title: set(re.findall(r"`(\w+)`", cell)) for title, cell in rows}


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_planning, "_PATIENCE", 0.0)
    monkeypatch.setattr(cli_planning, "_INTERVAL", 0.0)
    sizes = ["--layers", "1", "--hidden", "64", "--vocab", "64", "--heads", "2", "--nodes", "1"]
    done = CliRunner().invoke(app, ["plan", *sizes])
    assert done.exit_code == 0 and not done.stderr
    own, other = pty.openpty()
    command = [sys.executable, "-c", PATIENT, "plan", *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other, cwd=ROOT) as process:
        assert process.stdout is not None
        text = process.stdout.read().decode()
    os.close(other)
    said = os.read(own, 1 << 16).decode()
    os.close(own)
    assert re.search(r"\rlayerzero: \d+ estimates in \d+ s", said) and said.endswith("\r\x1b[K")
    assert text.replace("\r\n", "\n") == done.stdout


@pytest.mark.exhaustive
def test_the_progress_of_a_report_does_not_mix_with_other_output(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--hidden", "64", "--vocab", "64", "--heads", "2", "--nodes", "2"]
    own, other = pty.openpty()
    command = [sys.executable, "-c", IMPATIENT, "plan", *sizes, "--html", str(tmp_path / "report.html")]
    with subprocess.Popen(command, stdout=other, stderr=other, cwd=ROOT) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        os.close(other)
        said = b"".join(iter(lambda: _read(own), b"")).decode().replace("\r\n", "\n")  # while it writes
        timer.cancel()
    os.close(own)
    assert process.returncode == 0
    shown = re.sub(r"(\rlayerzero: \d+ estimates in \d+ s)+\r\x1b\[K", "<progress>", said)
    plan_text, report, rest = shown.removeprefix("<progress>").partition("<progress>\nwritten: ")
    assert shown.startswith("<progress>") and report
    assert " ".join(plan_text.split()).endswith("times are simulated; neither is measured.")
    assert "estimates in" not in plan_text + rest and "\x1b" not in plan_text + rest


def _read(terminal: int) -> bytes:
    """Return output from a terminal; nothing at its end, which Linux reports as an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def test_plan_of_a_factory_and_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    command = [sys.executable, "-W", "error", "-m", "layerzero", "plan", "mine:Net", "--unit", "Layer"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    command += ["--nodes", "2", "--micro-batches", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "8.32 k parameters in 3 units" in done.stdout and "units: [Layer]" in done.stdout
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "vocab_size": 128, "n_head": 4, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(tmp_path, "plan", "config.json", "--nodes", "2", "--batch-tokens", "300000")
    assert done.exit_code == 0 and "5 micro-batches" in done.stdout, done.stderr
    assert "units: auto" in done.stdout and 'units="auto"' in done.stdout, "as models of transformers say themselves"


def test_a_wrong_command_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "text.json").write_text("no")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "part.json").write_text('{"layerzero": {"format": 2, "schedule": [{}]}}')
    (tmp_path / "old.json").write_text('{"layerzero": {"format": 1, "schedule": []}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    small = ["--layers", "1", "--hidden", "64", "--vocab", "64", "--heads", "2", "--nodes", "2"]
    for arguments, said in (
        (["plan", "--nodes", "2"], "--layers is missing"),
        (["plan", "missing:Net", "--nodes", "2"], "module 'missing' is not on the import path"),
        (
            ["plan", "config.json", "--nodes", "2"],
            "there is no file or folder 'config.json'. As the model, pass a config.json",
        ),
        (["plan", "mine:Net"], "the number of nodes is unknown"),
        (["plan", "x:y", "--layers", "2", "--nodes", "2"], "either a model or its sizes"),
        (["plan", "x:y", "--probe"], "module 'x' is not on the import path"),
        (["plan", "--probe", "--batch-tokens", "8", "--micro-batches", "2"], "exclude each other. Pass one of them"),
        (
            ["plan", *small, "--hop2-codec", "int2"],
            "--hop2-codec must be a non-empty list of 'int8_blocks', 'int4_blocks' or None (`none` on the command "
            "line), got ['int2']",
        ),
        (["plan", *small, "--zero3-size", "7"], "--zero3-size=7 does not divide the 16 ranks of the cluster"),
        (["plan", "--probe", "--cluster", "c.yaml"], "--probe and --cluster exclude each other"),
        (["trace", "trace.json"], "is not a trace file written by layerzero.trace"),
        (["trace", "old.json"], "has trace format 1, but this version reads format 2. Record the trace again"),
        (
            ["simulate", "nowhere.json"],
            "layerzero: cannot open 'nowhere.json': No such file or directory. Check the path and its permissions\n",
        ),
        (["trace", "text.json"], "it does not contain JSON. Pass a file that layerzero.trace wrote\n"),
        (["trace", "list.json"], "by layerzero.trace: it has no recorded schedule. Pass a file that layerzero.trace"),
        (["trace", "part.json"], "by layerzero.trace: its recorded schedule is incomplete or damaged. Pass a file"),
        (
            ["plan", "--layers", "1", "--hidden", "30", "--vocab", "64", "--heads", "4", "--nodes", "2"],
            "layerzero: --heads=4 does not divide --hidden=30. Change one of them\n",
        ),
        (["simulate", "trace.json", "--between", "0"], "is not a trace file written by layerzero.trace"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2 and said in done.stderr, (arguments, done)
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
        assert "Error" not in done.stderr and "Errno" not in done.stderr, "exceptions are not named"


def test_options_that_may_be_repeated_say_so() -> None:
    (command,) = (each for each in app.registered_commands if each.name == "plan")
    assert command.callback is not None
    hints = get_type_hints(command.callback, include_extras=True)
    texts = {name: hint.__metadata__[0].help for name, hint in hints.items() if "list[" in str(hint)}
    assert texts.keys() >= {"micro_batches", "zero3_size", "unit", "hop2_codec", "accumulation_dtype"}
    assert all("may be repeated" in text for text in texts.values()), texts


# --- log of a run ---


def _printed(rank: int, folder: str) -> tuple[str, str]:
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
    return str(report), str(traffic)


def test_reports_are_tables_with_units_and_traces_are_read_by_commands(tmp_path: Path) -> None:
    memory, traffic = run_ranks(_printed, str(tmp_path))[0]
    assert re.search(r"^memory of this rank +predicted +measured$", memory, re.MULTILINE)
    assert re.search(r"^peak of a step +[\d.]+ .B +[\d.]+ .B$", memory, re.MULTILINE)
    assert re.search(r"^gather +\d+ ", traffic, re.MULTILINE)
    assert re.search(r"^axis replica +[\d.]+ .B$", traffic, re.MULTILINE)

    done = run(tmp_path, "trace", "rank0.json")
    assert done.exit_code == 0, done.stderr
    assert re.search(r"^gather +zero3 +\d+ +[\d.]+ .?B", done.stdout, re.MULTILINE)
    assert re.search(r"^backward +the root +2 ", done.stdout, re.MULTILINE)
    slow, fast = (run(tmp_path, "simulate", "rank0.json", "--between", gbit).stdout for gbit in ("0.001", "25"))
    times = [re.search(r"simulated: 2 steps in ([\d.]+) (\w+)", each) for each in (slow, fast)]
    seconds = [float(each[1]) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[each[2]] for each in times if each is not None]
    assert len(seconds) == 2 and seconds[0] > seconds[1]
    assert re.search(r"^hop2 +\d+ +[\d.]+ .?B", fast, re.MULTILINE)
    assert "nodes of 2 accelerators, 25 Gbit/s per node\n" in fast
    _simulate_with_the_defaults_of_a_plan(tmp_path)


def _simulate_with_the_defaults_of_a_plan(folder: Path) -> None:
    done = run(folder, "simulate", "rank0.json")
    assert "nodes of 2 accelerators, 800 Gbit/s per node (assumed)" in done.stdout
    found = json.loads(run(folder, "simulate", "rank0.json", "--json").stdout)
    assert _documented_keys()["simulate"] == found.keys()
    assert found["cluster"] == Cluster(nodes=2, accelerators=2).as_dict()
    assert found["steps"] == 2 and f"in {seconds_text(found['seconds'])}, " in done.stdout
    for kind, each in found["collectives"].items():
        row = f"{kind} +{each['calls']} +{size_text(each['sent_bytes'])} +{seconds_text(each['waited_seconds'])}$"
        assert re.search(row, done.stdout, re.MULTILINE), row
    (folder / "cluster.yaml").write_text("nodes: 2\naccelerators: 2\nbetween: 3\ninside: 7\n")
    found = json.loads(run(folder, "simulate", "rank0.json", "--cluster", "cluster.yaml", "--json").stdout)
    assert found["cluster"] == Cluster(nodes=2, accelerators=2, between=3, inside=7).as_dict()
    done = run(folder, "simulate", "rank0.json", "--between", "0")
    assert done.exit_code == 2 and "between must be positive, got 0" in done.stderr
