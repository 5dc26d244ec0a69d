"""Run every part in its own process, and write the results to one file.

    python -m benchmarks.gpu                          # on the GPU, ten minutes
    python -m benchmarks.gpu --device cpu --tiny      # the same code at the size of a test

The checks come first, several at a time. Then each measurement runs alone. If a part fails or takes too long, the end
of its output is reported, and the next part runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.tables import RESULTS

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "result: "  # before the JSON that a part prints
_CONTESTANTS = ("layerzero", "layerzero-full", "fsdp2-full", "fsdp2-hsdp")


def checks(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command lines of the parts that check results, by part."""
    flags = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    python, part = [sys.executable], [sys.executable, "-m", "benchmarks.gpu.parts"]
    found = {}
    for mode in ("sharded", "full", "local") if args.device == "cuda" else ("sharded",):
        found[f'loopback, late collectives, "{mode}"'] = [*part, "loopback", "--modes", mode, *flags]
    observer = ["compute-sanitizer", "--tool=memcheck", "--track-stream-ordered-races=all", "--error-exitcode=9"]
    found["compute-sanitizer"] = [*(observer if args.device == "cuda" else []), *part, "steps", "--tiny", *flags]
    for ranks in (4, 2):
        found[f"verify, gloo, {ranks} ranks on one device"] = [*part, "verify", "--ranks", str(ranks), *flags]
    found["verify, NCCL, 4 ranks on one device"] = [*part, "verify", "--ranks", "4", "--backend", "default", *flags]
    found["verify, one rank"] = [*part, "verify", "--ranks", "1", "--backend", "default", *flags]
    for offload in ("nothing", "grads", "optimizer"):
        for where, stream in (("", []), (", on a stream of one's own", ["--side-stream"])):
            found[f"sanitizer, offload {offload}{where}"] = [*part, "sanitizer", "--offload", offload, *stream, *flags]
    # Loopback cannot notice the first: requests for scratch memory wait for the same work.
    for what in ("gradients", "earlier reduction streams", "gathers", "copies to the host"):
        if what != "gradients":
            found[f"loopback, without a wait for {what}"] = [*part, "loopback", "--without-wait", what, *flags]
        offload = "grads" if what == "copies to the host" else "nothing"
        command = [*part, "sanitizer", "--without-wait", what, "--offload", offload, *flags]
        found[f"sanitizer, without a wait for {what}"] = command
    found["capture of a graph inside a unit"] = [*part, "capture", *flags]
    found["pytest"] = [*python, "-m", "pytest", "-q", "-m", "gpu", "tests/optimizers"]
    return found


def measurements(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command lines of the parts that measure time and memory, by part."""
    flags = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    part = [sys.executable, "-m", "benchmarks.gpu.parts"]
    found = {}
    for scheme in ("plain", *_CONTESTANTS):
        name = f"overhead, 4 layers of Llama-3 8B, {scheme}"
        found[name] = [*part, "overhead", "--model", "llama", "--scheme", scheme, *flags]
    for scheme in ("plain", "layerzero", "layerzero-offload-grads", "layerzero-offload-optimizer", "fsdp2-full"):
        found[f"step time, 1.3b, {scheme}"] = [*part, "step-time", "--model", "1.3b", "--scheme", scheme, *flags]
    for scheme in (*_CONTESTANTS, "layerzero-local"):
        found[f"modeled network, 1.3b, {scheme}"] = [*part, "network", "--model", "1.3b", "--scheme", scheme, *flags]
    for scheme in (*_CONTESTANTS, "layerzero-local"):
        found[f"memory, 7b, {scheme}"] = [*part, "memory", "--model", "7b", "--scheme", scheme, *flags]
    found["codecs"] = [*part, "codecs", *flags]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of the size of a test")
    parser.add_argument("--only", default="", help="parts with this in their name")
    parser.add_argument("--parts", choices=["all", "checks", "measurements"], default="all")
    parser.add_argument("--jobs", type=int, default=4, help="number of checks at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a part")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.relative_to(_ROOT)}, for all parts on a GPU")
    args = parser.parse_args()
    if args.results is None:
        if args.only or args.tiny or args.parts != "all" or args.device != "cuda":
            parser.error("pass --results, since the published results have all parts on a GPU")
        args.results = RESULTS
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    args.results.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"torch": torch.__version__, "device": device, "tiny": args.tiny, "parts": {}}

    def result_of(name: str, command: list[str]) -> dict[str, Any]:
        missing = why_skipped(name, args.device)
        return {"ok": True, "skipped": missing} if missing else run(command, args.timeout, name)

    for group, jobs in ((checks, args.jobs), (measurements, 1)):
        chosen = {name: command for name, command in group(args).items() if args.only in name}
        if args.parts not in ("all", group.__name__):
            continue
        with ThreadPoolExecutor(jobs) as pool:
            for name, found in zip(chosen, pool.map(result_of, chosen, chosen.values()), strict=True):
                results["parts"][name] = found
                print(f"{name}: {json.dumps(found)}", flush=True)
                args.results.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(not part["ok"] for part in results["parts"].values()))


def why_skipped(name: str, device: str) -> str | None:
    """Return why a part cannot run on this machine, or None."""
    if device == "cuda" and name == "compute-sanitizer" and shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer, a part of the CUDA toolkit, is not installed"
    if device == "cuda" and name.startswith("verify, NCCL, 4 ranks") and torch.cuda.nccl.version() < (2, 30):
        return f"NCCL {torch.cuda.nccl.version()} does not run several ranks on one device; 2.30 does"
    return None


def environment(name: str) -> dict[str, str]:
    """Return the environment variables of a part, in addition to those of this process."""
    if name == "compute-sanitizer":
        return {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if name.startswith("verify, NCCL, 4 ranks") else {}


def run(command: list[str], timeout: float, name: str) -> dict[str, Any]:
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env=os.environ | environment(name),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"not finished after {timeout:.0f} s"}
    seconds = round(time.monotonic() - start, 1)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if "pytest" in command:
        ok = done.returncode in (0, 5)  # 5: no test was selected
        summary = done.stdout.strip().splitlines()[-1:]
        if ok and " passed" not in "".join(summary):
            return {"ok": True, "skipped": "no test ran: " + "".join(summary)}
        return {"ok": ok, "seconds": seconds, "says": summary}
    if done.returncode or not lines:
        return {"ok": False, "seconds": seconds, "error": excerpt(done.stdout + done.stderr)}
    return {"seconds": seconds, "ok": True, **json.loads(lines[-1].removeprefix(_MARK))}


def excerpt(output: str) -> str:
    """Return the first and the last 3,000 characters of a long output."""
    return output if len(output) < 6000 else f"{output[:3000]}\n...\n{output[-3000:]}"


if __name__ == "__main__":
    main()
