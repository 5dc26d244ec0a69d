"""The benchmarks run, count what they say they count, and judge by right arithmetic. No time is asserted."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoint, contest, measure, network
from benchmarks.contestants import ENTRIES, why_missing
from benchmarks.launch import RanksFailed, run_job
from benchmarks.results import FOLDER, Results, summarise
from benchmarks.tables import PAGE, page_with, render
from benchmarks.task import Task, make_batches, make_model
from benchmarks.verdicts import LOSS_TOLERANCE, losses_agree, verdicts
from benchmarks.worker import Job, take_step
from tests.support.ranks import run_ranks

TINY = {"layers": 2, "width": 64, "seq_len": 16}
TRAINED = [name for name, entry in ENTRIES.items() if entry.needs is None and entry.family != "compute"]


def three_steps(rank: int, name: str, reduce: str) -> tuple[list[float], dict[str, int]]:
    """Losses, and the ledger of the last step."""
    task = Task(micro_batches=2, reduce=reduce, **TINY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers
        contestant = ENTRIES[name].load()(task)
        losses = []
        for step in range(3):
            contestant.ledger()
            losses.append(take_step(contestant, make_batches(task, rank=rank, step=step)))
    return losses, contestant.ledger()


def all_contestants(rank: int, reduce: str) -> dict[str, tuple[list[float], dict[str, int]]]:
    return {name: three_steps(rank, name, reduce) for name in TRAINED}


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_contestants_train_alike_and_hybrids_send_what_the_formula_says(reduce: str) -> None:
    ranks = run_ranks(all_contestants, reduce)
    final = {name: sum(rank[name][0][-1] for rank in ranks) / 4 for name in TRAINED}
    middle = sorted(final.values())[len(final) // 2]
    assert all(abs(loss / middle - 1) < LOSS_TOLERANCE for loss in final.values()), final

    task = Task(micro_batches=2, reduce=reduce, **TINY)
    numel = sum(parameter.numel() for parameter in make_model(task).parameters())
    results = Results("two-nodes", {"ranks": 4, "node_size": 2, "parameters": numel})
    for name in ("layerzero", "layerzero-full"):
        sent = sum(rank[name][1]["replica"] for rank in ranks[:2])
        assert sent == pytest.approx(results.formula_bytes(reduce), rel=0.03)


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
    for sent in summarise(ranks, nodes=2)["wire_bytes"]:
        assert sent == pytest.approx(results.formula_bytes("fp32"), rel=0.05)  # barriers and headers weigh more here


def test_the_network_is_gone_after_an_exception() -> None:
    if reason := network.why_unavailable():
        pytest.skip(reason)
    with pytest.raises(KeyError), network.two_nodes() as nodes:
        names = [node.prefix[-1] for node in nodes]
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
    weight.sum().backward()  # a gradient that Python has not seen
    assert measure.model_state_bytes(apart_from=[batch]) - before == 2 * 4000
    assert half.numel() == 500


def example(**seconds: float) -> Results:
    """Results of runs that took `seconds` a step; names with `_` for `-`."""
    settings = {"ranks": 4, "node_size": 2, "parameters": 1_000_000, "rate": "1gbit", "batch_size": 1, "seq_len": 8}
    machine = {"processor": "P", "cores": "2", "memory": "1 GiB", "kernel": "6", "python": "3", "torch": "2"}
    results = Results("two-nodes", settings, machine, ["python -m benchmarks.contest"])
    for name, each in seconds.items():
        results.record(name.replace("_", "-"), 4, "fp32")["runs"].append(
            {
                "seconds": [each, 2 * each, each / 2],
                "losses": [5.0, 4.0],
                "wire_bytes": [3_000_000.0, 2_900_000.0],
                "ledger": {"replica": 3_000_000.0} if name == "layerzero" else {},
                "peak_bytes": [2_000_000, 1_000_000],
                "state_bytes": {"between steps": [500_000 if name == "layerzero" else 700_000, 400_000]},
                "kinds": {},
                "date": "2020-02-20T00:00:00+00:00",
            }
        )
    return results


def test_verdicts_compare_with_the_fastest_configuration_of_a_peer() -> None:
    results = example(layerzero=1.0, fsdp2_hsdp=3.0, fsdp2_hsdp_keep=1.4, fsdp2_full=7.0, compute=0.5)
    found = {verdict.bar: verdict for verdict in verdicts(results, 4, "fp32")}
    assert len(found) == 6
    hsdp = found["times faster than FSDP2 HSDP"]
    assert hsdp.measured == pytest.approx(1.4) and not hsdp.met and "kept" in hsdp.peer
    assert found["times faster than FSDP2 full sharding"].met
    assert found["model state below every hybrid peer's, ratio"].measured == pytest.approx(5 / 7)
    results.record("layerzero", 4, "fp32")["runs"][0]["kinds"] = {"reduce_buffer": 100_000, "accumulator": 7}
    found = {verdict.bar: verdict for verdict in verdicts(results, 4, "fp32")}
    assert found["model state below every hybrid peer's, ratio, without our scratch"].measured == pytest.approx(4 / 7)
    # N (1 - 1/R) (4 + 2) = 3 MB: exactly what was sent
    assert found["bytes on the link off the formula by"].measured == pytest.approx(0.0)
    bound = found["step over max(compute alone, bytes / speed)"]
    assert bound.measured == pytest.approx(2.0) and not bound.met and "compute" in bound.peer


def test_losses_are_compared_after_the_last_step_that_all_took() -> None:
    results = example(layerzero=1.0, fsdp2_hsdp=1.0)
    results.record("fsdp2-hsdp", 4, "fp32")["runs"][0]["losses"] = [5.05]
    steps, apart = losses_agree(results.rows(4, "fp32"))
    assert steps == 1 and apart == pytest.approx(0.01)


def test_tables_say_what_is_missing_and_replace_only_their_part_of_the_page() -> None:
    results = example(layerzero=1.0, fsdp2_hsdp=3.0)
    results.record("deepspeed-hpz", 4, "fp32")["problem"] = "deepspeed is not installed"
    text = render(results)
    assert "not measured: deepspeed is not installed" in text
    assert (
        "| FSDP2 HSDP, all-reduce in the last | 3.000 | 1.50 - 6.00, 3 | 3.00 | 3.0 |  | 0.7 |  | 2 | 4.0000 |" in text
    )
    page = page_with("before\n<!-- two-nodes -->\nold\n<!-- end of two-nodes -->\nafter\n", [results])
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page and text in page
    assert page_with(page, [results]) == page
    with pytest.raises(ValueError, match="no <!-- two-nodes -->"):
        page_with("", [results])


def test_the_published_page_is_made_of_the_published_results() -> None:
    results = [Results.load(path) for path in sorted(FOLDER.glob("*.json"))]
    page = PAGE.read_text()
    assert page_with(page, results) == page, "run python -m benchmarks.tables"


def test_a_missing_peer_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_missing("deepspeed-zero1") == "deepspeed is not installed"
    assert why_missing("layerzero") is None


def test_the_table_of_checkpoints_is_what_was_measured() -> None:
    results = json.loads((FOLDER / "checkpoint" / "checkpoint.json").read_text())
    assert checkpoint.table(results) in (PAGE.parent / "checkpoints.md").read_text()
