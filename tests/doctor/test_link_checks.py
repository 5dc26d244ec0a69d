"""``layerzero doctor`` on real ranks, which torchrun starts or which run under several host names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.doctor.link_checks import check_speeds
from layerzero.planning import Cluster, ProbeResult
from tests.support.ranks import serve

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
needs_root = pytest.mark.skipif(
    os.getuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(["unshare", "-u", "true"], check=False).returncode != 0,
    reason="needs root, unshare, and namespaces of host names",
)


def _environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "TORCH_", "GLOO_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def run_two(folder: Path, on_rank_1: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command on two ranks of torchrun, after the shell command `on_rank_1` on the second one."""
    script = f'if [ "$RANK" = 1 ]; then {on_rank_1}; fi; exec "$@"'
    command = [*TORCHRUN, "sh", "-c", script, "-", sys.executable, "-m", "layerzero", "doctor", *options]
    return subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=240, check=False
    )


def problems(printed: str) -> list[str]:
    return [each["text"] for each in json.loads(printed)["findings"] if each["level"] == "problem"]


@pytest.mark.exhaustive
def test_two_equal_ranks_measure_their_link(tmp_path: Path) -> None:
    ran = run_two(tmp_path, "true", "--json")
    assert problems(ran.stdout) == [], ran.stderr
    assert ran.returncode == 0
    texts = [each["text"] for each in json.loads(ran.stdout)["findings"]]
    assert any(text.startswith("1 node: ranks 0-1 on ") for text in texts), texts
    assert any(text.startswith("inside a node: ") for text in texts)
    assert not any(text.startswith("between nodes: ") for text in texts)
    assert "the ranks of a node share memory for weights and gradients" in texts


@pytest.mark.slow
def test_a_differing_variable_is_an_error_that_names_the_rank(tmp_path: Path) -> None:
    ran = run_two(tmp_path, "export NCCL_ALGO=Ring LOCAL_WORLD_SIZE=1")
    assert ran.returncode == 1, ran.stderr
    assert "  problem  NCCL_ALGO differs: not set on rank 0 and Ring on rank 1. Use the same NCCL_ALGO" in ran.stdout
    assert "  problem  LOCAL_WORLD_SIZE differs: 2 on rank 0 and 1 on rank 1. Start" in ran.stdout
    assert "  note     rank 1: NCCL_ALGO=Ring: NCCL's own choice is overridden" in ran.stdout, "a finding of one rank"
    _, heading, links = ran.stdout.partition("\nlinks\n")
    assert heading and "inside a node: " in links, "links are measured all the same"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_and_no_hang(tmp_path: Path) -> None:
    ran = run_two(tmp_path, "exit 0", "--timeout", "2")
    assert ran.returncode == 1, ran.stderr
    assert "  problem  rank 1 did not take part within 4 s." in ran.stdout


@pytest.mark.exhaustive
def test_a_rank_that_cannot_connect_is_named(tmp_path: Path) -> None:
    ran = run_two(tmp_path, "export GLOO_SOCKET_IFNAME=nowhere", "--json", "--timeout", "5")
    assert ran.returncode == 1, ran.stderr
    interface, first, second = problems(ran.stdout)
    assert interface.startswith("rank 1: GLOO_SOCKET_IFNAME=nowhere: there is no interface 'nowhere'")
    assert first.startswith("rank 0 could not communicate: ") and "imeout" in first
    assert second.startswith("rank 1 could not communicate: ") and "nowhere" in second


@pytest.mark.exhaustive
def test_without_the_other_ranks_a_rendezvous_ends(tmp_path: Path) -> None:
    """Without torchrun, the first rank serves the store and waits for all ranks to connect."""
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ran = subprocess.run(
        [sys.executable, "-m", "layerzero", "doctor", "--json", "--timeout", "2"],
        cwd=tmp_path,
        env=_environment(**launched),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert problems(ran.stdout)[-1].startswith("the rendezvous failed: ")


@pytest.mark.exhaustive
@needs_root
def test_ranks_are_grouped_by_host(tmp_path: Path) -> None:
    """Four ranks with the host names left, left, right, right."""
    store = serve()
    launched = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [
                "unshare",
                "-u",
                "sh",
                "-c",
                f'hostname {host}; exec "$@"',
                "-",
                sys.executable,
                "-m",
                "layerzero",
                "doctor",
                "--json",
            ],
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
    assert any(text.startswith("between nodes: ") for text in texts)
    assert "the ranks of a node share memory for weights and gradients" in texts


def test_only_measured_links_are_shown() -> None:
    cluster = Cluster(nodes=2, accelerators=8, inside=300.0, between=400.0)
    assert check_speeds(ProbeResult(cluster, ("inside", "between")))[0].text.startswith(
        "inside a node: 300 GB/s per rank"
    )
    assert [each.text[:14] for each in check_speeds(ProbeResult(cluster, ("between",)))] == ["between nodes:"]
    assert check_speeds(ProbeResult(cluster, ())) == []


def test_links_between_nodes_that_are_not_slower_are_noted() -> None:
    slow, fast = (Cluster(nodes=2, accelerators=8, inside=50.0, between=between) for between in (3000.0, 3400.0))
    measured = ("inside", "between")
    assert [each.level for each in check_speeds(ProbeResult(slow, measured))] == ["ok", "ok"]
    assert [each.level for each in check_speeds(ProbeResult(fast, measured))] == ["ok", "ok", "note"]
