"""Emulation of nodes on one machine: two network namespaces with a rate-limited link, or several with a switch.

Each end of a virtual Ethernet pair is in its own namespace, and a token bucket filter limits its send rate. Processes
in one namespace communicate at memory speed over its loopback. Traffic to another namespace passes the link, whose
interface counts it. This needs Linux, root, and the commands ``ip`` and ``tc`` (iproute2).
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

__all__ = [
    "Carried",
    "Node",
    "Switch",
    "bits_per_second",
    "carried",
    "one_machine",
    "switched",
    "two_nodes",
    "why_unavailable",
]

# The process id in the name distinguishes a namespace in use from one that a killed run has left.
_NAME = re.compile(r"^layerzero-(\d+)-(n\d+|switch)\b")


@dataclass(frozen=True)
class Node:
    """Emulated node, or this machine."""

    prefix: tuple[str, ...]  # command prefix that runs a command on this node
    interface: str  # interface to the other nodes, or the loopback
    address: str


class Carried(NamedTuple):
    """Bytes that an interface has sent and received since its creation, including Ethernet headers."""

    sent: int
    received: int


def carried(interface: str) -> Carried:
    """Return the counters of an interface in this process's namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            fields = numbers.split()
            return Carried(sent=int(fields[8]), received=int(fields[0]))
    raise ValueError(f"this namespace has no interface {interface!r}")


def why_unavailable() -> str | None:
    """Return the reason why :func:`two_nodes` cannot work here, or None.

    The function creates two emulated nodes as a test, because root in a container may lack the rights.
    """
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
    """Yield one node for all ranks, on the loopback of this machine, without emulation."""
    yield (Node(prefix=(), interface="lo", address="127.0.0.1"),)


@contextmanager
def two_nodes(rate: str = "1gbit") -> Iterator[tuple[Node, ...]]:
    """Create two namespaces and a link; remove them at the end, even after an error.

    Args:
        rate: rate of the link in each direction, in the syntax of ``tc``.
    """
    with _namespaces("n0", "n1") as names:
        _run(*f"ip link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}".split())
        nodes = [_node(name, index) for index, name in enumerate(names)]
        for node in nodes:
            _limit(node.prefix, node.interface, rate)
        yield tuple(nodes)


class Switch:
    """Switch between the nodes of :func:`switched`. It can cut and slow down their links during a run."""

    def __init__(self, nodes: tuple[Node, ...], prefix: tuple[str, ...], rate: str) -> None:
        self.nodes = nodes
        self.prefix = prefix  # command prefix that runs a command in the namespace of the switch
        self.address = "10.77.0.254"
        self._rate = rate

    def cut(self, node: int) -> None:
        """Cut the link of a node. The link loses its carrier, and other nodes get no notification."""
        _run(*self.prefix, "ip", "link", "set", f"p{node}", "down")

    def mend(self, node: int) -> None:
        """Restore the link of a node with its initial rate."""
        _run(*self.prefix, "ip", "link", "set", f"p{node}", "up")
        self.limit(node, self._rate)

    def limit(self, node: int, rate: str) -> None:
        """Limit the rate of a node's link in both directions."""
        _limit(self.nodes[node].prefix, self.nodes[node].interface, rate)
        _limit(self.prefix, f"p{node}", rate)


@contextmanager
def switched(count: int, rate: str = "1gbit") -> Iterator[Switch]:
    """Create `count` namespaces, each with a link to a switch; remove them at the end.

    Args:
        rate: rate of each link in each direction, in the syntax of ``tc``.
    """
    with _namespaces("switch", *(f"n{index}" for index in range(count))) as (hub, *names):
        at = _inside(hub)
        _run(*at, "ip", "link", "add", "br0", "type", "bridge")
        nodes = []
        for index, name in enumerate(names):
            _run(*f"ip link add v{index} netns {name} type veth peer name p{index} netns {hub}".split())
            _run(*at, *f"ip link set p{index} master br0 up".split())
            nodes.append(_node(name, index))
        switch = Switch(tuple(nodes), at, rate)
        for command in (f"ip addr add {switch.address}/24 dev br0", "ip link set br0 up", "ip link set lo up"):
            _run(*at, *command.split())
        for index in range(count):
            switch.limit(index, rate)
        yield switch


@contextmanager
def _namespaces(*kinds: str) -> Iterator[list[str]]:
    _remove_stale()
    names = [f"layerzero-{os.getpid()}-{kind}" for kind in kinds]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        yield names
    finally:
        for name in names:
            with suppress(RuntimeError):  # it does not exist
                _run("ip", "netns", "delete", name)


def _inside(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


def _node(name: str, index: int) -> Node:
    """Return the node of a namespace, after setting up the end of the link in it: address and link state."""
    node = Node(prefix=_inside(name), interface=f"v{index}", address=f"10.77.0.{index + 1}")
    for command in (
        f"ip addr add {node.address}/24 dev {node.interface}",
        "ip link set lo up",
        f"ip link set {node.interface} up",
    ):
        _run(*node.prefix, *command.split())
    return node


def _limit(prefix: tuple[str, ...], interface: str, rate: str) -> None:
    shape = f"tc qdisc replace dev {interface} root tbf rate {rate} burst 256kb latency 50ms"
    _run(*prefix, *shape.split())


def bits_per_second(rate: str) -> float:
    """Return a rate such as ``"1gbit"`` as a number."""
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
