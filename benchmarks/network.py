"""Two nodes emulated on one machine: network namespaces joined by a cable of limited speed.

Each end of a virtual Ethernet pair lies in a namespace of its own, and a token bucket filter limits what it sends.
Processes in one namespace reach each other at memory speed through its loopback; whatever goes to the other namespace
passes the cable, whose interface counts it. This needs Linux, root, and the commands ``ip`` and ``tc`` (iproute2).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Carried", "Node", "bits_per_second", "carried", "one_machine", "two_nodes", "why_unavailable"]

# The process id in the name tells a namespace in use from one that a killed run has left behind.
_NAME = re.compile(r"^layerzero-(\d+)-n[01]\b")


@dataclass(frozen=True)
class Node:
    """Where some of the ranks run."""

    prefix: tuple[str, ...]  # put before a command to run it here
    interface: str  # what leads to the other node, or the loopback
    address: str


class Carried(NamedTuple):
    """Bytes that an interface has carried since it exists, Ethernet headers included."""

    sent: int
    received: int


def carried(interface: str) -> Carried:
    """Counters of an interface of the namespace in which this process runs."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            fields = numbers.split()
            return Carried(sent=int(fields[8]), received=int(fields[0]))
    raise ValueError(f"this namespace has no interface {interface!r}")


def why_unavailable() -> str | None:
    """The reason why :func:`two_nodes` cannot work here, or None. It tries: a container's root may lack the rights."""
    if not sys.platform.startswith("linux"):
        return f"two emulated nodes need Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "two emulated nodes need root, for network namespaces"
    if missing := [command for command in ("ip", "tc") if shutil.which(command) is None]:
        return f"two emulated nodes need the command {' and '.join(missing)} (iproute2)"
    try:
        with two_nodes():
            return None
    except RuntimeError as error:
        return str(error)


@contextmanager
def one_machine() -> Iterator[tuple[Node, ...]]:
    """No emulation: all ranks on the loopback of this machine."""
    yield (Node(prefix=(), interface="lo", address="127.0.0.1"),)


@contextmanager
def two_nodes(rate: str = "1gbit") -> Iterator[tuple[Node, ...]]:
    """Two namespaces and a cable; gone again afterwards, whatever happens inside.

    Args:
        rate: of the cable in each direction, as ``tc`` writes it.
    """
    _remove_stale()
    names = [f"layerzero-{os.getpid()}-n{index}" for index in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(*f"ip link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}".split())
        nodes = []
        for index, name in enumerate(names):
            interface, address = f"v{index}", f"10.77.0.{index + 1}"
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", interface)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", interface, "up")
            shape = f"tc qdisc add dev {interface} root tbf rate {rate} burst 256kb latency 50ms"
            _run(*inside, *shape.split())
            nodes.append(Node(prefix=inside, interface=interface, address=address))
        yield tuple(nodes)
    finally:
        for name in names:
            with suppress(RuntimeError):  # it was never made
                _run("ip", "netns", "delete", name)


def bits_per_second(rate: str) -> float:
    """``"1gbit"`` as a number."""
    match = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate)
    if match is None:
        raise ValueError(f"rate {rate!r} is not like 1gbit or 100mbit")
    return float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _remove_stale() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        match = _NAME.match(line)
        if match and (int(match[1]) == os.getpid() or not Path(f"/proc/{match[1]}").exists()):
            _run("ip", "netns", "delete", line.split()[0])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"two emulated nodes: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
