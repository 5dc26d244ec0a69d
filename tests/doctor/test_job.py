"""Comparison of ranks: their reports without processes, and ``layerzero doctor`` on real ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerzero.doctor.findings import Finding
from layerzero.doctor.job import (
    RankReport,
    check_facts,
    check_nodes,
    check_speeds,
    format_ranks,
    merge_findings,
    node_size,
    relevant_variables,
)
from tests.support.ranks import serve

NOTE = Finding("one", "note", "a note")
PROBLEM = Finding("two", "problem", "a problem", "Change it")


def reports(hosts: str, **changes: dict[str, Any]) -> dict[int, RankReport]:
    """Return the reports of ranks on hosts named by letters; `changes` replace fields by ``rank_1={...}``."""
    facts = {"torch": "2.13.0", "LOCAL_WORLD_SIZE": str(hosts.count(hosts[0]))}
    return {
        rank: replace(RankReport(f"{host} boot", facts, ()), **changes.get(f"rank_{rank}", {}))
        for rank, host in enumerate(hosts)
    }


def problems(found: list[Finding]) -> list[str]:
    return [each.text for each in found if each.level == "problem"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([7, 0, 1, 2, 5], "ranks 0-2, 5, 7"), ([1, 3], "ranks 1, 3")],
)
def test_neighboring_ranks_are_written_as_a_range(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_equal_ranks_are_fine() -> None:
    assert [each.level for each in check_facts(reports("aabb"))] == ["ok"]
    (found,) = check_nodes(reports("aabb"))
    assert found.level == "ok" and found.text == "2 nodes: ranks 0-1 on a; ranks 2-3 on b"
    assert check_nodes(reports("abcdefghij"))[0].text.endswith("rank 7 on h; and 2 more nodes")


def test_a_difference_names_values_and_ranks() -> None:
    other = {"facts": {"torch": "2.12.0", "LOCAL_WORLD_SIZE": "2", "NCCL_ALGO": "Ring"}}
    assert problems(check_facts(reports("aabb", rank_1=other, rank_3=other))) == [
        "torch differs: 2.13.0 on ranks 0, 2 and 2.12.0 on ranks 1, 3",
        "NCCL_ALGO differs: not set on ranks 0, 2 and Ring on ranks 1, 3",
    ]
    (found,) = check_facts(
        reports("ab", rank_1={"facts": {"torch": "2.13.0", "LOCAL_WORLD_SIZE": "1", "accelerators": "B"}})
    )
    assert found.level == "note"


@pytest.mark.parametrize(("hosts", "size"), [("aabb", 2), ("aaaa", 4), ("ab", 1), ("aab", 0), ("abab", 0), ("abba", 0)])
def test_nodes_are_measured_only_if_they_are_blocks_of_equal_size(hosts: str, size: int) -> None:
    assert node_size(reports(hosts)) == size


def test_ranks_that_alternate_between_nodes_are_a_problem() -> None:
    assert problems(check_nodes(reports("abab"))) == [
        "a has ranks 0, 2, but weights are sharded over consecutive ranks, so gathers cross nodes",
        "b has ranks 1, 3, but weights are sharded over consecutive ranks, so gathers cross nodes",
    ]


def test_a_wrong_number_of_local_ranks_is_a_problem() -> None:
    one: dict[str, Any] = {"facts": {"LOCAL_WORLD_SIZE": "1"}}
    none: dict[str, Any] = {"facts": {}}
    found = problems(check_nodes(reports("aa", rank_0=one, rank_1=one)))
    assert found == ["LOCAL_WORLD_SIZE is 1 on ranks 0-1, but a has ranks 0-1"]
    assert problems(check_nodes(reports("aa", rank_0=none, rank_1=none))) == [], "zero3_size is then required"


def test_findings_of_some_ranks_carry_their_names() -> None:
    mine, fine = Finding("one", "ok", "12 GB"), Finding("one", "ok", "13 GB")
    merged = merge_findings(
        reports(
            "aab",
            rank_0={"findings": (mine, NOTE)},
            rank_1={"findings": (fine, NOTE, PROBLEM)},
            rank_2={"findings": (fine, NOTE, PROBLEM)},
        )
    )
    assert merged == [mine, NOTE, replace(PROBLEM, text="ranks 1-2: a problem")]


def test_a_report_survives_json() -> None:
    report = RankReport.of_this_rank({"NCCL_ALGO": "Ring", "LOCAL_WORLD_SIZE": "2"}, [NOTE, PROBLEM])
    assert report.facts["NCCL_ALGO"] == "Ring" and report.facts["LOCAL_WORLD_SIZE"] == "2"
    assert RankReport.from_json(report.to_json()) == report


def test_variables_that_name_devices_of_a_machine_may_differ_between_ranks() -> None:
    environment = {"NCCL_ALGO": "Ring", "NCCL_IB_HCA": "mlx5_0", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"CUDA_VISIBLE_DEVICES": "1", "RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "4", "HOME": "/"}
    assert list(relevant_variables(environment)) == ["NCCL_ALGO", "OMP_NUM_THREADS", "WORLD_SIZE"]


def test_only_measured_links_are_shown_and_fast_ones_between_nodes_noted() -> None:
    (found,) = check_speeds({"inside": 300e9})
    assert found.text == "inside a node: 300 GB/s per rank"
    assert check_speeds({}) == []
    assert [each.level for each in check_speeds({"inside": 50e9, "between": 50e9})] == ["ok", "ok"]
    assert [each.level for each in check_speeds({"inside": 50e9, "between": 51e9})] == ["ok", "ok", "note"]


# Real ranks, which torchrun starts or which run under several host names.

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
DOCTOR = (sys.executable, "-m", "layerzero", "doctor")
needs_root = pytest.mark.skipif(
    os.getuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(["unshare", "-u", "true"], check=False).returncode != 0,
    reason="needs root, unshare, and namespaces of host names",
)


def _environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "TORCH_", "GLOO_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def _run(folder: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = _environment(**variables)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def run_two(folder: Path, on_rank_1: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command on two ranks of torchrun, after the shell command `on_rank_1` on the second one."""
    script = f'if [ "$RANK" = 1 ]; then {on_rank_1}; fi; exec "$@"'
    return _run(folder, [*TORCHRUN, "sh", "-c", script, "-", *DOCTOR, *options])


def printed_problems(printed: str) -> list[str]:
    return [each["text"] for each in json.loads(printed)["findings"] if each["level"] == "problem"]


@pytest.mark.slow
def test_a_differing_variable_is_an_error_that_names_the_rank(tmp_path: Path) -> None:
    ran = run_two(tmp_path, "export NCCL_ALGO=Ring LOCAL_WORLD_SIZE=1")
    assert ran.returncode == 1, ran.stderr
    assert "  problem  NCCL_ALGO differs: not set on rank 0 and Ring on rank 1. Use" in ran.stdout
    assert "  problem  LOCAL_WORLD_SIZE differs: 2 on rank 0 and 1 on rank 1. Use" in ran.stdout
    assert "  problem  LOCAL_WORLD_SIZE is 1 on rank 1, but " in ran.stdout
    assert "  note     rank 1: NCCL_ALGO=Ring: NCCL's own choice is overridden" in ran.stdout, "a finding of one rank"
    _, heading, links = ran.stdout.partition("\nlinks\n")
    assert heading and "inside a node: " in links and "between nodes" not in links, "links are measured all the same"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_and_no_hang(tmp_path: Path) -> None:
    ran = run_two(tmp_path, "exit 0", "--timeout", "2")
    assert ran.returncode == 1, ran.stderr
    assert "  problem  rank 1 did not take part within 4 s." in ran.stdout


@pytest.mark.exhaustive
def test_a_rank_that_cannot_connect_is_named(tmp_path: Path) -> None:
    ran = run_two(tmp_path, "export GLOO_SOCKET_IFNAME=nowhere", "--json", "--timeout", "5")
    assert ran.returncode == 1, ran.stderr
    first, second = printed_problems(ran.stdout)
    assert first.startswith("rank 0 could not communicate: ") and "imeout" in first
    assert second.startswith("rank 1 could not communicate: ") and "nowhere" in second


@pytest.mark.exhaustive
def test_without_the_other_ranks_a_rendezvous_ends(tmp_path: Path) -> None:
    """Without torchrun, the first rank serves the store and waits for all ranks to connect."""
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ran = _run(tmp_path, [*DOCTOR, "--json", "--timeout", "2"], **launched)
    assert ran.returncode == 1, ran.stderr
    assert printed_problems(ran.stdout)[-1].startswith("the rendezvous failed: ")


@pytest.mark.exhaustive
@needs_root
def test_ranks_are_grouped_by_host(tmp_path: Path) -> None:
    """Four ranks with the host names left, left, right, right."""
    store = serve()
    launched = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            ["unshare", "-u", "sh", "-c", f'hostname {host}; exec "$@"', "-", *DOCTOR, "--json"],
            cwd=tmp_path,
            env=_environment(**launched, RANK=str(rank), LOCAL_RANK=str(rank % 2)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(("left", "left", "right", "right"))
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert [printed for printed, _ in outputs[1:]] == [""] * 3, "the first rank prints for all"
    texts = [each["text"] for each in json.loads(outputs[0][0])["findings"]]
    assert "2 nodes: ranks 0-1 on left; ranks 2-3 on right" in texts
    assert any(text.startswith("inside a node: ") for text in texts)
    assert any(text.startswith("between nodes, ") for text in texts)
