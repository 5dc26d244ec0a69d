"""The parts for one GPU run on a CPU at the size of a test, and a part that fails or hangs stops no other."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import ranks, tables
from benchmarks.gpu.report import last_report
from benchmarks.gpu.waits import observed_waits
from layerzero.comm.collectives import _wait_for_last
from layerzero.device.accelerator import HostDeviceCopies
from layerzero.device.streams import _DeviceEvents

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def test_the_tables_of_gpus_are_what_was_measured() -> None:
    results = json.loads(tables.RESULTS.read_text())
    page = PAGE.read_text()
    assert all(part["ok"] for part in results["parts"].values()) and results["device"] in page and not results["tiny"]
    missing = {name for part in program.parts().values() for name in part.runs} - results["parts"].keys()
    for run in missing:  # the page names what was not run to its end
        assert f"- {run}\n" in page
    found = tables.tables(results["parts"])
    assert {"overhead", "memory", "network", "codecs"} <= found.keys()
    for table in found.values():
        assert table in page


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "run",
    [
        "machine",
        "NCCL, 2 ranks on one device",
        'loopback, late collectives, "sharded"',
        "sanitizer, offload grads",
        "waits, each left out once",
        "waits of the host",
        "host time and kernels",
        "graph, captured in step 3",
        "memory, llama, layerzero-full",
        "memory, 7b, fsdp2-full",
        "step times with offloads",
        "compute-sanitizer",
        "modeled network, 1.3b, layerzero-local",
        "codecs",
    ],
)
def test_the_parts_run_on_a_cpu_at_the_size_of_a_test(run: str, tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"torch": "another", "parts": {"of another torch": {}}}))
    given = ["--device", "cpu", "--tiny", "--call", "1", "2", "more", "--only", run, "--results", str(results)]
    assert program.main(given) == 0, results.read_text()
    found = json.loads(results.read_text())
    assert found["parts"][run]["ok"] and "skipped" not in found["parts"][run]
    assert "of another torch" not in found["parts"]
    tables.main([str(results)])


def test_a_run_is_killed_at_its_deadline_with_what_it_has_started_and_keeps_its_results(tmp_path: Path) -> None:
    child = tmp_path / "child"
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "print('result: {\"first\": 1}', flush=True)\n"
        "print('result: {\"first\": 1, \"sec', end='', flush=True)\n"
        "child.wait()\n"
    )
    ended, output = program._output_of([sys.executable, "-c", text], dict(os.environ), time.monotonic() + 3)
    assert ended is None and last_report(output) == {"first": 1}
    for _ in range(100):
        if not Path("/proc", child.read_text(), "cmdline").exists() or not _command_of(child.read_text()):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the run is alive")
    assert program._output_of(["true"], dict(os.environ), time.monotonic() - 1) == (None, "")


def _command_of(process: str) -> bytes:
    """Return the command line of a process, which is empty if the process has ended."""
    try:
        return Path("/proc", process, "cmdline").read_bytes()
    except ProcessLookupError:
        return b""


def _works(args: Namespace, folder: str) -> dict[str, Any]:
    dist.barrier()
    return {"ok": True}


def _fails(args: Namespace, folder: str) -> dict[str, Any]:
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    dist.barrier()
    return {"ok": True}


def _hangs(args: Namespace, folder: str) -> dict[str, Any]:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()
    return {"ok": True}


@pytest.mark.slow
def test_a_case_that_fails_or_hangs_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    args = Namespace(device="cpu", ranks=2, only="", case_seconds=3.0)
    cases = {"first": _works, "hangs": _hangs, "fails": _fails, "last": _works}
    found = ranks.supervise(args, cases)
    assert found["first"]["ok"] and found["last"]["ok"] and not found["ok"]
    assert "not finished after 3 s" in found["hangs"]["error"] and "out of luck" in found["fails"]["error"]
    told = last_report(capsys.readouterr().out)
    assert told is not None and told["last"]["ok"], "each result is told before the end"


class _Stream:
    """Stream that records the events it waits for."""

    def __init__(self) -> None:
        self.awaited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.awaited.append(event)


def test_waits_are_found_by_place_and_those_of_one_place_are_left_out() -> None:
    stream = _Stream()
    copies = HostDeviceCopies(torch.device("cpu"))
    copies.module = SimpleNamespace(current_stream=lambda: stream)
    group = SimpleNamespace(last_on_stream=None, last_encoded_reduction=None, last_launch=None)

    def wait() -> None:
        stream.wait_event("not asked for by layerzero")
        copies.wait("copy")
        group.last_on_stream = _DeviceEvents(copies.module, [SimpleNamespace(record_event=lambda: "gather")])
        _wait_for_last(group)  # type: ignore[arg-type]

    with observed_waits([(_Stream, "wait_event")]) as found:
        wait()
    of_copies, of_gathers = sorted(found)
    assert re.fullmatch(r"device/accelerator.py:\d+ HostDeviceCopies.wait", of_copies)
    assert re.fullmatch(
        r"device/streams.py:\d+ _DeviceEvents.wait from comm/collectives.py:\d+ _wait_for_last", of_gathers
    )
    for without, awaited in ((of_copies, "gather"), (of_gathers, "copy")):
        stream.awaited.clear()
        with observed_waits([(_Stream, "wait_event")], without=without) as again:
            wait()
        assert stream.awaited[0] == "not asked for by layerzero" and stream.awaited[1:] == [awaited] and again == found
