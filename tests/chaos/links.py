"""Faults of network links and of machines, on two or three emulated nodes, which need root."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.network import Switch, switched
from layerzero.checkpoint.manifest import MANIFEST
from tests.chaos.ranks import LIMIT, STEPS
from tests.chaos.tries import RANKS, Lost, Try, ended, kill, undisturbed

RATE, SLOW = "100mbit", "1mbit"


def _network(switch: Switch) -> dict[str, Any]:
    """Return the network part of a plan, with two ranks on each node."""
    nodes = [switch.nodes[rank // 2] for rank in range(RANKS)]
    names = {"namespaces": [node.prefix[-1] for node in nodes], "interfaces": [node.interface for node in nodes]}
    return names | {"address": switch.nodes[0].address}


@functools.cache
def _calm() -> str:
    """Return the digest of a run on two emulated nodes without faults."""
    with switched(2, RATE) as switch:
        return undisturbed({"network": _network(switch)}, 90)


def _until(run: Try, ranks: list[Any], step: int) -> None:
    while all(process.is_alive() for process in ranks) and f"{step}" not in run.texts("step"):
        time.sleep(0.01)


def cut_cable(run: Try, draw: random.Random) -> str:
    """Cut the cable of one node. The watchdog names it on all ranks, all end by the timeout and are started again."""
    run.calm, node = _calm(), draw.randrange(2)
    with switched(2, RATE) as switch:
        plan = {"watch": True, "network": _network(switch), "timeout": 20}
        ranks = run.start(plan)
        try:
            _until(run, ranks, draw.randrange(1, STEPS - 1))
            time.sleep(draw.uniform(0, 0.05))
            switch.cut(node)
            # The store is on node 0. Its ranks name those that do not answer; the others report that they are cut off.
            run.logged(r"late by .*rank [23] has not joined and does not answer", LIMIT + 5, 2, {0, 1})
            run.logged(r"late by .*the store has not answered .* this machine cannot reach it", LIMIT + 5, 2, {2, 3})
            ended(ranks, 90, (1,))
        finally:
            kill(ranks)
        switch.mend(node)
        run.restarted(plan)
    return "survived, ranks named"


def slow_cable(run: Try, draw: random.Random) -> str:
    """Reduce the rate of one link to 1%. All ranks report the slow link, and the run continues."""
    run.calm = _calm()
    with switched(2, RATE) as switch:
        ranks = run.start({"watch": True, "network": _network(switch)})
        try:
            _until(run, ranks, draw.randrange(1, STEPS - 2))
            node = draw.randrange(2)
            switch.limit(node, SLOW)
            run.logged(said := r"late by ([\d.]+) s: .*all of its ranks have joined: the link is slow", 60, RANKS)
            switch.limit(node, RATE)
            ended(ranks, 90)
        finally:
            kill(ranks)
    if run.texts("end") != [run.calm] * RANKS:
        raise Lost(f"went on with other bits: {run.texts('end')}")
    first = [float(re.findall(said, text)[0]) for text in run.texts("log")]
    if max(first) > LIMIT + 5:
        raise Lost(f"told only when it was late by {first} s")
    return "survived, link named"


# --- a node dies, and torchrun replaces it by the spare ---

_EXAMPLE = Path(__file__).parents[2] / "examples" / "train_restarts.py"
_PORT = 29400
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_SERVES = "import sys, time, torch.distributed as d; s = d.TCPStore(sys.argv[1], int(sys.argv[2]), None, True, "
_SERVES += "wait_for_workers=False); print('serving', flush=True); time.sleep(600)"


class _Nodes:
    """torchrun agents on three nodes, two of which take part. Their rendezvous store runs on the switch."""

    def __init__(self, switch: Switch, folder: Path, *, memory: bool) -> None:
        self._folder, self._switch = folder, switch
        command = [*switch.prefix, sys.executable, "-c", _SERVES, switch.address, str(_PORT)]
        self._store = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._store.stdout is not None
        self._store.stdout.readline()
        self.agents = [self._agent(index, memory) for index in range(2)]

    def spare(self, *, memory: bool) -> None:
        """Start the agent of the spare node after the other two have begun to train."""
        self.until(r"attempt 0: from step 0")
        self.agents.append(self._agent(2, memory))

    def first_save(self, seconds: float = 120) -> None:
        """Wait for the first complete checkpoint."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):  # a folder may be removed meanwhile
                if list(self._folder.glob(f"*/**/{MANIFEST}")):
                    return
            time.sleep(0.01)
        raise Lost(f"nothing was saved: {self.said()[-3000:]}")

    def _agent(self, index: int, memory: bool) -> subprocess.Popen[bytes]:
        node = self._switch.nodes[index]
        command = [*node.prefix, *_TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2"]
        command += ["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "chaos", "--local-addr", node.address]
        command += ["--rdzv-endpoint", f"{self._switch.address}:{_PORT}", "--monitor-interval", "0.1"]
        command += ["--rdzv-conf", "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"]
        place = self._folder / (f"node{index}" if memory else "saved")
        place.mkdir(exist_ok=True)
        command += [str(_EXAMPLE), "--snapshots" if memory else "--checkpoints", str(place), "--pause", "0.1"]
        known = os.environ | {"GLOO_SOCKET_IFNAME": node.interface, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        known |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"out.{index}").open("wb") as out:
            return subprocess.Popen(command, env=known, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("out.*")))

    def until(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.said())) is None:
            if time.monotonic() > deadline:
                raise Lost(f"nobody said {pattern!r}: {self.said()[-3000:]}")
            time.sleep(0.02)
        return found

    def kill(self, index: int) -> None:
        """Kill all processes of a node."""
        for process in _said_by("ip", "netns", "pids", self._switch.nodes[index].prefix[-1]).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        self.agents[index].wait()

    def close(self) -> None:
        for index in range(len(self.agents)):
            self.kill(index)
        self._store.kill()
        self._store.wait()


def _said_by(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@functools.cache
def _digest() -> str:
    """Return the digest of a run of the example without faults."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        ranks = ("--standalone", "--nproc-per-node", "4")
        said = _said_by(*_TORCHRUN, *ranks, str(_EXAMPLE), "--checkpoints", str(folder))
        return re.findall(r"digest of the run: (\w{64})", said)[-1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replaced(run: Try, draw: random.Random, memory: bool) -> str:
    """Kill a node. The spare replaces it and resumes from host memory, or from a disk that all nodes share."""
    digest, node = _digest(), draw.randrange(2)
    with switched(3, "1gbit") as switch:
        nodes = _Nodes(switch, run.folder, memory=memory)
        try:
            nodes.spare(memory=memory)
            nodes.first_save()
            time.sleep(draw.uniform(0, 1.5))  # 40 steps take four seconds
            killed = time.monotonic()
            nodes.kill(node)
            if memory:
                shutil.rmtree(run.folder / f"node{node}")
            first = int(nodes.until(r"attempt \d: from step ([1-9]\d*)")[1])
            nodes.until(f"first step of the attempt, number {first}, done")
            run.seconds = time.monotonic() - killed
            found = nodes.until(r"digest of the run: (\w{64})")[1]
        finally:
            nodes.close()
    if found != digest:
        raise Lost(f"ended with {found}, not {digest}")
    return "survived, the spare came in"


def replaced_from_memory(run: Try, draw: random.Random) -> str:
    return _replaced(run, draw, memory=True)


def replaced_from_disk(run: Try, draw: random.Random) -> str:
    return _replaced(run, draw, memory=False)
