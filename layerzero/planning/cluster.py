"""Description of a cluster for :func:`layerzero.plan`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

_PORT = 400.0  # in Gbit/s; nodes with eight accelerators usually have one port of this speed per accelerator


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Description of a cluster of nodes with accelerators. Speeds are achieved speeds, not nominal peak speeds.

    Attributes:
        nodes: number of nodes.
        accelerators: number of accelerators per node.
        memory: memory of one accelerator, in GB (1e9 bytes).
        reserve: memory that the driver, the allocator and NCCL use on an accelerator, in GB.
        between: bandwidth from a node to other nodes over all of its ports, in Gbit/s. If None, 400 Gbit/s per
            accelerator are assumed.
        inside: bandwidth from an accelerator to others in its node, in GB/s.
        host_memory: host memory per node, in GB.
        tflops: TFLOP/s that an accelerator achieves in a block, in the compute dtype. This is about half of its peak.
        device: ``"cuda"`` or ``"cpu"``. On ``"cuda"``, the backend computes the sums of a reduction. On
            ``"cpu"``, layerzero computes them, as with gloo.

    Example::

        cluster = layerzero.planning.Cluster(nodes=16, accelerators=8, memory=80, between=400)
    """

    nodes: int
    accelerators: int = 8
    memory: float = 80.0
    reserve: float = 4.0
    between: float | None = None
    inside: float = 300.0
    host_memory: float = 1000.0
    tflops: float = 400.0
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device={self.device!r} is not supported. Use 'cuda' or 'cpu'")
        for name in (field.name for field in fields(self) if field.name != "device"):
            value, is_count = getattr(self, name), name in ("nodes", "accelerators")
            if name == "between" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int if is_count else (int, float)):
                raise TypeError(f"{name} must be {'an int' if is_count else 'a number'}, got {value!r}")
            if not (value > 0 or (value == 0 and name == "reserve")):
                raise ValueError(f"{name} must be {'0 or ' * (name == 'reserve')}positive, got {value}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.accelerators

    @property
    def room(self) -> float:
        """Memory of an accelerator that is available to a model, in bytes."""
        return (self.memory - self.reserve) * 1e9

    @property
    def node_link(self) -> float:
        """Bandwidth from a node to other nodes, in Gbit/s: `between`, or the assumed value."""
        return _PORT * self.accelerators if self.between is None else self.between

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, with the assumed value of `between` if it is None.

        The value of ``between_assumed`` is True if `between` is None.
        """
        return asdict(self) | {"between": self.node_link, "between_assumed": self.between is None}

    def __str__(self) -> str:
        assumed = " (assumed)" if self.between is None else ""
        rank = "CPU rank" if self.device == "cpu" else "accelerator"
        return (
            f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.accelerators} {rank}{'s' * (self.accelerators > 1)}, "
            f"{self.node_link:,.4g} Gbit/s per node{assumed}, {self.inside:.4g} GB/s inside a node, "
            f"{self.tflops:.4g} TFLOP/s per {rank}"
        )
