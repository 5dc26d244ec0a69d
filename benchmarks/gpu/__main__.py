"""Run the parts for one GPU, each run in its own process, and write the results to one file after each.

    python -m benchmarks.gpu --call 1                      # parts 1 to 5, nine minutes
    python -m benchmarks.gpu --call 2                      # parts 6 and 7, three minutes
    python -m benchmarks.gpu --call more                   # what the two calls leave out
    python -m benchmarks.gpu --device cpu --tiny --results FILE     # the same code at the size of a test

A run that fails or takes too long is reported with the end of its output, and the next run starts. The results of
earlier calls stay in the file. ``python -m benchmarks.gpu.tables FILE`` prints the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import last_report
from benchmarks.gpu.tables import RESULTS

_ROOT = Path(__file__).resolve().parents[2]
_NETWORK = ("layerzero", "layerzero-full", "fsdp2-full", "fsdp2-hsdp", "layerzero-local")


@dataclass(frozen=True)
class Part:
    """Runs that share a time limit.

    Args:
        call: call that includes this part.
        seconds: limit on the part.
        jobs: number of runs at a time. Parts that measure time have one.
        runs: arguments of ``python -m benchmarks.gpu.parts``, by the name of the run.
    """

    call: str
    seconds: float
    jobs: int
    runs: dict[str, list[str]]


def parts() -> dict[str, Part]:
    """Return the parts by name, in the order in which they run."""
    late = {
        f'loopback, late collectives, "{mode}"': ["loopback", "--modes", mode] for mode in ("sharded", "full", "local")
    }
    races = {
        f"sanitizer, offload {offload}{', on a stream of its own' * side}": [
            *("sanitizer", "--offload", offload),
            *(["--side-stream"] * side),
        ]
        for offload in ("nothing", "grads", "optimizer")
        for side in (False, True)
    }
    memory = {
        f"memory, {model}, {scheme}": ["memory", "--model", model, "--scheme", scheme, "--micro-batches", count]
        for model, count in (("llama", "4"), ("7b", "2"))
        for scheme in (*_NETWORK, *(["layerzero-apart"] * (model == "llama")))
    }
    return {
        "1 machine": Part("1", 40, 1, {"machine": ["machine"]}),
        "2 ranks, two": Part("1", 60, 1, {"NCCL, 2 ranks on one device": ["ranks", "--ranks", "2"]}),
        "2 ranks, four": Part("1", 90, 1, {"NCCL, 4 ranks on one device": ["ranks", "--ranks", "4"]}),
        "3 streams": Part("1", 200, 8, {"waits, each left out once": ["waits"], **late, **races}),
        "4 host": Part("1", 60, 1, {"waits of the host": ["blocking", "--model", "small"]}),
        "5 time": Part("1", 90, 1, {"host time and kernels": ["overhead", "--model", "llama"]}),
        "6 graph": Part("2", 30, 1, {"graph, captured in step 3": ["graph"]}),
        "7 memory": Part("2", 90, 2, memory),
        "7 offloads": Part("2", 60, 1, {"step times with offloads": ["offloads"]}),
        "more checks": Part(
            "more",
            240,
            4,
            {
                "compute-sanitizer": ["steps", "--tiny"],
                **{f"verify, gloo, {n} ranks on one device": ["verify", "--ranks", str(n)] for n in (4, 2)},
            },
        ),
        "more times": Part(
            "more",
            240,
            1,
            {**{f"modeled network, 1.3b, {s}": ["network", "--scheme", s] for s in _NETWORK}, "codecs": ["codecs"]},
        ),
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of the size of a test")
    parser.add_argument("--call", choices=["1", "2", "more"], nargs="*", default=["1", "2"])
    parser.add_argument("--only", default="", help="runs with this in their name")
    parser.add_argument("--nccl", type=Path, help="libnccl.so.2 of NCCL 2.30 or newer, for several ranks on one device")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(_ROOT)}, on a GPU")
    args = parser.parse_args(given)
    if args.results is None:
        if args.tiny or args.device != "cuda":
            parser.error("pass --results, since the published results come from a GPU")
        args.results = RESULTS
    if args.nccl is not None and not args.nccl.is_file():
        parser.error(f"--nccl: {args.nccl} is not a file")
    results = _earlier(args)
    ok = True
    for part in parts().values():
        chosen = {name: run for name, run in part.runs.items() if args.only in name}
        if part.call not in args.call or not chosen:
            continue
        deadline = time.monotonic() + part.seconds
        with ThreadPoolExecutor(part.jobs) as pool:
            started = {pool.submit(run, name, given, args, deadline): name for name, given in chosen.items()}
            for done in as_completed(started):
                name, found = started[done], done.result()
                ok &= found["ok"]
                results["parts"][name] = found
                print(f"{name}: {json.dumps(found)[:2000]}", flush=True)
                args.results.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if ok else 1


def _earlier(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of earlier calls with the same torch on the same device, or new results without parts."""
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    results: dict[str, Any] = {"torch": torch.__version__, "device": device, "tiny": args.tiny}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.results.exists():
        earlier: dict[str, Any] = json.loads(args.results.read_text())
        if {**earlier, **results} == earlier:
            return earlier
    return {**results, "parts": {}}


def run(name: str, given: Sequence[str], args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Run one process of a part, and return its results."""
    command = [sys.executable, "-m", "benchmarks.gpu.parts", *given, "--device", args.device]
    command += ["--tiny"] * (args.tiny and "--tiny" not in given)
    environment = dict(os.environ)
    if name == "compute-sanitizer" and args.device == "cuda":
        if shutil.which(name) is None:
            return {"ok": True, "skipped": "compute-sanitizer, a part of the CUDA toolkit, is not installed"}
        command[:0] = [name, "--tool=memcheck", "--track-stream-ordered-races=all", "--error-exitcode=9"]
        environment["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    if given[0] == "ranks":
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if args.nccl is not None:
            environment["LD_PRELOAD"] = str(args.nccl.resolve())
    began = time.monotonic()
    ended, output = _output_of(command, environment, deadline)
    seconds = round(time.monotonic() - began, 1)
    found = last_report(output)
    if ended == 0 and found is not None:
        return {"ok": True, "seconds": seconds, **found}
    error = f"not finished in {seconds:.0f} s" if ended is None else excerpt(output)
    return {**(found or {}), "ok": False, "seconds": seconds, "error": error}


def _output_of(command: Sequence[str], environment: dict[str, str], deadline: float) -> tuple[int | None, str]:
    """Return the exit status of a process, or None if it has not finished, and its output.

    At the deadline, the process is killed with all processes that it has started.
    """
    if time.monotonic() > deadline:
        return None, ""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        ended = None
        try:
            ended = process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            pass
        finally:  # also after an interrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return ended, output.read()


def excerpt(output: str) -> str:
    """Return the first and the last 3,000 characters of a long output."""
    return output if len(output) < 6000 else f"{output[:3000]}\n...\n{output[-3000:]}"


if __name__ == "__main__":
    sys.exit(main())
