"""The benchmarks run, count correctly and compute their verdicts correctly. No time is asserted."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import mmap
import os
import re
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from benchmarks import checkpoint, contest, measure, network
from benchmarks.contestants import ENTRIES, why_missing
from benchmarks.launch import RanksFailed, run_job
from benchmarks.results import FOLDER, Results, published, summarize
from benchmarks.tables import LOSS_TOLERANCE, PAGE, file_of, losses_agree, render
from benchmarks.task import Task, make_batches, make_model
from benchmarks.worker import Job, take_step
from tests.support.ranks import on_ranks, run_ranks

TINY = {"layers": 2, "width": 64, "seq_len": 16}
TRAINED = [name for name, entry in ENTRIES.items() if entry.needs is None and entry.family not in ("compute", "sites")]


def three_steps(rank: int, name: str, reduce: str) -> tuple[list[float], dict[str, int]]:
    """Return the losses and the traffic of the last step."""
    task = Task(micro_batches=2, reduce=reduce, **TINY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the peers
        contestant = ENTRIES[name].load()(task)
        losses = []
        for step in range(3):
            contestant.ledger()
            losses.append(take_step(contestant, make_batches(task, rank=rank, step=step)))
    return losses, contestant.ledger()


def all_contestants(rank: int, reduce: str) -> dict[str, tuple[list[float], dict[str, int]]]:
    return {name: three_steps(rank, name, reduce) for name in TRAINED}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_contestants_train_alike_and_hybrids_send_what_the_formula_says(reduce: str) -> None:
    ranks = run_ranks(all_contestants, reduce)
    final = {name: sum(rank[name][0][-1] for rank in ranks) / 4 for name in TRAINED}
    middle = sorted(final.values())[len(final) // 2]
    assert all(abs(loss / middle - 1) < LOSS_TOLERANCE for loss in final.values()), final

    task = Task(micro_batches=2, reduce=reduce, **TINY)
    numel = sum(parameter.numel() for parameter in make_model(task).parameters())
    results = Results("two-nodes", {"ranks": 4, "node_size": 2, "parameters": numel})
    for name in ("layerzero", "layerzero-full", "layerzero-exchanges", "layerzero-full-exchanges"):
        sent = sum(rank[name][1]["replica"] for rank in ranks[:2])
        assert sent == pytest.approx(results.formula_bytes(reduce), rel=0.03)


def _sites(rank: int) -> list[int]:
    """Return the bytes that a rank of two sites sends to the other site, by step."""
    task = Task(micro_batches=2, reduce="fp32", **{**TINY, "layers": 4})
    contestant = ENTRIES["layerzero-sites"].load()(task)
    sent = []
    for step in range(9):
        contestant.ledger()
        take_step(contestant, make_batches(task, rank=rank, step=step))
        ledger = contestant.ledger()
        assert not ledger.get("replica"), ledger
        sent.append(ledger.get("site", 0))
    return sent


def test_sites_exchange_a_fragment_every_four_steps() -> None:
    for sent in run_ranks(_sites):
        assert [step for step, each in enumerate(sent) if each] == [3, 7]


LINK_ROWS = {  # row of docs/slow-links.md: key of the records
    "fp32 gradients": "layerzero/A4/fp32",
    "bf16 gradients": "layerzero/A4/bf16",
    "`Int8Blocks()`": "layerzero-int8/A4/fp32",
    "`Int4Blocks()`": "layerzero-int4/A4/fp32",
    'fp32 gradients, `Codecs(refresh="lossless")`': "layerzero-lossless/A4/fp32",
    '`Int4Blocks()`, `"lossless"`': "layerzero-int4-lossless/A4/fp32",
    "`Int4Blocks()`, `Int4Difference()`": "layerzero-int4-int4/A4/fp32",
    "a [site](#several-sites) per node, H = 16, 4 fragments, int4": "layerzero-sites/A4/fp32",
    "the same without exchanges": "layerzero-sites-apart/A4/fp32",
    "FSDP2 HSDP, fp32 gradients": "fsdp2-hsdp-no-sync/A4/fp32",
    "FSDP2 HSDP, bf16 gradients": "fsdp2-hsdp-no-sync/A4/bf16",
    "FSDP1 `_HYBRID_SHARD_ZERO2`, bf16 gradients": "fsdp1-hybrid-zero2/A4/bf16",
}


def _measured(rate: str, key: str) -> list[float]:
    """Return the shortest and the longest median of a record, or nothing if it was not measured."""
    runs = Results.load(FOLDER / "links" / f"{rate}.json").records.get(key, {"runs": []})["runs"]
    medians = sorted(statistics.median(run["seconds"]) for run in runs)
    return [medians[0], medians[-1]] if medians else []


def test_the_page_on_slow_links_has_the_measured_times() -> None:
    lines = (PAGE.parent / "slow-links.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("| settings | 1 Gbit/s | 100 Mbit/s | 20 Mbit/s |") + 2 :]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[: table.index("")]]
    assert [name for name, *_ in cells] == list(LINK_ROWS)
    for name, *times in cells:
        for rate, text in zip(("1gbit", "100mbit", "20mbit"), times, strict=True):
            stated = [float(number) for number in text.replace(" to ", " ").split()]
            measured = _measured(rate, LINK_ROWS[name])
            assert bool(stated) == bool(measured), (name, rate)
            for value, seconds in zip([stated[0], stated[-1]] if stated else [], measured, strict=True):
                assert abs(value - seconds) < 0.006 * max(1.0, seconds), (name, rate, seconds)


def test_the_page_on_benchmarks_has_the_times_with_kept_weights() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Weights kept during the step")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in re.findall(r"^\| \w.*$", section, re.M)]
    columns = {
        '`"full"`': "layerzero-full-exchanges-keep",
        "with bf16 accumulators": "layerzero-full-exchanges-keep-bf16",
        "`_HYBRID_SHARD_ZERO2`": "fsdp1-hybrid-zero2",
    }
    (header,) = re.findall(r"^\| \| A \| gradients \| (.*) \|$", section, re.M)
    names = [columns[cell] for cell in header.split(" | ")]
    assert names[-2:] == list(columns.values())[-2:] and len(lines) >= 6
    ratios: dict[str, list[float]] = {"two nodes": [], "one machine": []}
    savings = []
    for where, micro_batches, reduce, *cells in lines:
        path = FOLDER / "kept-weights" / f"{where.replace(' ', '-')}.json"
        found = []
        for name, cell in zip(names, cells, strict=True):
            runs = Results.load(path).record(name, int(micro_batches), reduce)["runs"]
            times = sorted(statistics.median(run["seconds"]) for run in runs)
            peak = max(max(run["peak_bytes"]) for run in runs) / 1e6
            text = f"{times[0]:.2f}" if len(times) == 1 else f"{times[0]:.2f} to {times[-1]:.2f}"
            assert cell == f"{text} s, {peak:.0f} MB", (where, micro_batches, reduce, name)
            found.append((times, round(peak)))
        (ours, own_peak), (others, other_peak) = found[-2:]
        ratios[where] += [others[0] / ours[-1], others[-1] / ours[0]]
        savings.append(other_peak - own_peak)
    stated = " ".join(section.split())
    for where, expected in ratios.items():
        assert f"{min(expected):.1f} to {max(expected):.1f} times" in stated, (where, expected)
    assert f"{min(savings)} to {max(savings)} MB less memory" in stated


@pytest.mark.exhaustive
def test_a_contest_keeps_its_results_and_goes_on_where_it_stopped(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "one-machine.json"
    sizes = [f"--{key.replace('_', '-')}={value}" for key, value in {**TINY, "ranks": 2, "node_size": 1}.items()]
    command = ["--where=one-machine", "--micro-batches=2", "--reduce=fp32", "--steps=2", "--rounds=1", *sizes]
    command += [f"--results={path}", "--only", "layerzero"]
    assert contest.main(command) == 0
    (run,) = Results.load(path).record("layerzero", 2, "fp32")["runs"]
    assert len(run["seconds"]) == 2 and len(run["losses"]) == 5 and run["losses"][-1] < run["losses"][0]
    assert len(run["peak_bytes"]) == 2 and run["ledger"]["replica"] > 0

    capsys.readouterr()
    assert contest.main(command) == 0
    assert capsys.readouterr().out == ""  # nothing was left to do
    assert contest.main([*command, "--again", "--minutes=-1"]) == 0
    assert "goes on" in capsys.readouterr().out
    assert len(Results.load(path).record("layerzero", 2, "fp32")["runs"]) == 1, "what was there is kept until then"
    with pytest.raises(SystemExit, match="another --results"):
        contest.main([*command, "--layers=3"])


def test_a_rank_that_fails_is_told_with_its_own_words() -> None:
    task = Task(micro_batches=1, reduce="fp32", ranks=1, node_size=1, layers=2, width=129, seq_len=16)
    with network.one_machine() as nodes, pytest.raises(RanksFailed, match="not a multiple of heads"):
        run_job(Job(contestant="compute", task=task, steps=1, limit=1), nodes, timeout=60)


def test_two_emulated_nodes_carry_the_bytes_of_the_formula() -> None:
    if reason := network.why_unavailable():
        pytest.skip(reason)
    task = Task(micro_batches=2, reduce="fp32", ranks=2, node_size=1, layers=2, width=128, seq_len=16)
    with network.two_nodes("200mbit") as nodes:
        ranks = run_job(Job(contestant="layerzero", task=task, steps=2, limit=5), nodes, timeout=90)
    numel = sum(parameter.numel() for parameter in make_model(task).parameters())
    results = Results("two-nodes", {"ranks": 2, "node_size": 1, "parameters": numel})
    for sent in summarize(ranks, nodes=2)["wire_bytes"]:
        assert sent == pytest.approx(results.formula_bytes("fp32"), rel=0.05)  # barriers and headers count more here


def _reaches(switch: network.Switch, a: int, b: int) -> bool:
    """Check that one node can connect to another within the time limit."""
    there, here = switch.nodes[b], switch.nodes[a]
    listening = "import socket; s = socket.create_server(('', 7777)); print(flush=True); s.accept()"
    connects = f"import socket; socket.create_connection(('{there.address}', 7777), 3)"
    with subprocess.Popen([*there.prefix, sys.executable, "-c", listening], stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        done = subprocess.run([*here.prefix, sys.executable, "-c", connects], capture_output=True, check=False)
        server.kill()
    return done.returncode == 0


def test_the_cable_of_a_node_is_cut_and_mended_and_the_network_is_gone_after_an_exception() -> None:
    if reason := network.why_unavailable():
        pytest.skip(reason)
    with pytest.raises(KeyError), network.switched(3, "100mbit") as switch:
        names = [node.prefix[-1] for node in switch.nodes]
        assert _reaches(switch, 0, 1) and _reaches(switch, 2, 0)
        switch.cut(1)
        assert not _reaches(switch, 0, 1) and _reaches(switch, 2, 0)
        switch.mend(1)
        assert _reaches(switch, 0, 1)
        raise KeyError
    assert not any(Path("/var/run/netns", name).exists() for name in names)


def test_rates_are_read_as_tc_writes_them() -> None:
    assert network.bits_per_second("1gbit") == 1e9 and network.bits_per_second("2.5mbit") == 2.5e6
    with pytest.raises(ValueError, match="fast"):
        network.bits_per_second("fast")


def test_model_state_counts_each_storage_once_and_leaves_batches_out() -> None:
    before = measure.model_state_bytes()
    whole, batch = torch.zeros(1000), torch.zeros(500)
    half = whole[:500]
    weight = torch.nn.Parameter(whole)
    weight.sum().backward()  # a gradient that Python has not accessed
    cached = torch.UntypedStorage(300)  # no tensor has it
    assert measure.model_state_bytes(apart_from=[batch]) - before == 2 * 4000 + cached.nbytes()
    assert half.numel() == 500


def test_shared_memory_counts_once_for_those_who_share_it() -> None:
    file = os.memfd_create("shared")
    try:
        os.ftruncate(file, 1 << 20)
        os.posix_fallocate(file, 0, 1 << 19)
        before, peak = measure.model_state_bytes(sharers=2), measure.peak_bytes(sharers=2)
        mapping = mmap.mmap(file, 1 << 20)
        weights = torch.frombuffer(mapping, dtype=torch.float32, count=1 << 16, offset=0).fill_(1)
        neighbors = torch.frombuffer(mapping, dtype=torch.float32, count=1 << 15, offset=1 << 17)  # a part of them
        private = torch.zeros(1000)
        assert measure.model_state_bytes(sharers=2) - before == (1 << 18) + private.nbytes
        shared = measure.shared_memory()
        assert (shared.held, shared.resident) == (1 << 19, weights.nbytes) and neighbors[0] == 1
        for _ in range(100):  # until accessing it no longer raises
            two, four, again = (measure.peak_bytes(sharers=sharers) for sharers in (2, 4, 2))
            if two == again:
                break
        assert two == again and two - four == 1 << 17
        assert measure.peak_bytes() >= peak
    finally:
        os.close(file)


def _moment(model: torch.nn.Module, batch: torch.Tensor) -> tuple[int, int]:
    return measure.model_state_bytes(apart_from=[batch], sharers=2), layerzero.memory(model).total


@on_ranks(shared_memory=None)
def test_the_memory_report_leaves_nothing_out(rank: int) -> None:
    """Compare layerzero.memory with the tensors that the garbage collector finds, at three points of a step."""
    before = measure.model_state_bytes(sharers=2)
    for settings in ({}, {"accumulation": "full"}, {"prefetch": 3}, {"shared_memory": "off"}):
        torch.manual_seed(0)
        block = [torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.Linear(2048, 64)) for _ in range(4)]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = layerzero.shard_model(
            torch.nn.Sequential(*block), zero3_size=2, units=[str(n) for n in range(4)], mp_policy=policy, **settings
        )
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        batch = torch.randn(2, 64)
        for _ in range(3):
            moments = []
            for number in range(2):
                with layerzero.no_sync(model) if number == 0 else contextlib.nullcontext():
                    model(batch).sum().backward()
                moments.append(_moment(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            moments.append(_moment(model, batch))
        for found, told in moments:
            assert abs((found - before) / told - 1) < 0.03, (settings, moments, before)
        del model, optimizer
        dist.barrier()  # another rank may still map the shared memory


@pytest.mark.parametrize(("name", "count"), [("layerzero", 1), ("layerzero-exchanges", 0)])
def test_hybrids_share_the_memory_of_a_node_unless_told_otherwise(name: str, count: int) -> None:
    assert run_ranks(shared_mappings, name) == [count] * 4


def shared_mappings(rank: int, name: str) -> int:
    task = Task(micro_batches=2, reduce="fp32", **TINY)
    contestant = ENTRIES[name].load()(task)
    take_step(contestant, make_batches(task, rank=rank, step=0))
    return len(measure.shared_memory().addresses)


def test_figures_show_the_published_results_without_marks_of_code(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots, page = importlib.import_module("benchmarks.plots"), PAGE.read_text(encoding="utf-8")
    for results in published():
        text = plots.draw(results, tmp_path).read_text(encoding="utf-8")
        assert "<svg" in text and ">FSDP2 HSDP</text>" in text and "`" not in text
        assert f"images/{results.where}.svg" in page
    assert ">FSDP2's full sharding</text>" in plots.draw_scale(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 100.0])
def test_losses_that_differ_or_are_not_finite_are_told(wrong: float) -> None:
    _, results = published()
    assert losses_agree(results.rows(4, "fp32"))[1] <= LOSS_TOLERANCE
    run = results.record("fsdp2-full", 4, "fp32")["runs"][0]
    run["losses"] = [wrong] * len(run["losses"])
    apart = losses_agree(results.rows(4, "fp32"))[1]
    assert apart > LOSS_TOLERANCE and (wrong == 100.0 or apart == math.inf)
    assert "**DO NOT AGREE**" in render(results)


def test_the_published_tables_are_made_of_the_published_results() -> None:
    page = PAGE.read_text()
    for results in published():
        assert file_of(results) == (FOLDER / f"{results.where}.md").read_text(), "run python -m benchmarks.tables"
        assert f"](../benchmarks/results/{results.where}.md)" in page
    assert [results.where for results in published()] == ["one-machine", "two-nodes"]


def test_a_missing_peer_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_missing("deepspeed-zero1") == "deepspeed is not installed"
    assert why_missing("layerzero") is None


def test_the_table_of_checkpoints_is_what_was_measured() -> None:
    results = json.loads((FOLDER / "checkpoint" / "checkpoint.json").read_text())
    assert checkpoint.table(results) in (PAGE.parent / "checkpoints.md").read_text()
