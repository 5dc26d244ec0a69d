"""Description of a cluster for :func:`layerzero.plan`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from layerzero.integrations.yaml_file import read_yaml
from layerzero.planning.simulator import SimMachine

__all__ = ["Cluster"]

_STEPS = ("direct", "log", "ring")
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
        between_latency, inside_latency: time that one step of a collective takes between nodes and inside a node, in
            microseconds.
        tflops: TFLOP/s that an accelerator achieves in a block, in the compute dtype. This is about half of its peak.
        memory_speed: bandwidth of an accelerator's memory, in GB/s.
        host: speed of copies between an accelerator and its host, in GB/s.
        host_memory: host memory per node, in GB.
        host_memory_speed: bandwidth of a node's host memory, in GB/s. It is used for optimizers that run on the host.
        launch: time that the host needs to launch a collective, in microseconds.
        steps: number of steps in a collective over n ranks. The value ``"direct"`` means 1 step, ``"log"`` means
            log2(n) steps, and ``"ring"`` means n - 1 steps.
        price: price per accelerator-hour, in any currency, or 0 if the price is unknown.
        device: ``"cuda"`` or ``"cpu"``. On ``"cuda"``, the backend computes the sums of a reduction. On
            ``"cpu"``, layerzero computes them, as with gloo.
        processor_per_byte: processor time that a rank on a CPU needs per byte that it sends, in nanoseconds.

    Example::

        cluster = layerzero.planning.Cluster(nodes=16, accelerators=8, memory=80, between=400)
    """

    nodes: int
    accelerators: int = 8
    memory: float = 80.0
    reserve: float = 4.0
    between: float | None = None
    inside: float = 300.0
    between_latency: float = 10.0
    inside_latency: float = 5.0
    tflops: float = 400.0
    memory_speed: float = 2500.0
    host: float = 25.0
    host_memory: float = 1000.0
    host_memory_speed: float = 300.0
    launch: float = 10.0
    steps: str = "log"
    price: float = 0.0
    device: str = "cuda"
    processor_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.type == "float | None":
                continue
            if field.type == "str":
                if not isinstance(value, str):
                    raise TypeError(f"{field.name} must be a string, got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int if field.type == "int" else (int, float)):
                raise TypeError(
                    f"{field.name} must be {'an int' if field.type == 'int' else 'a number'}, got {value!r}"
                )
        may_be_zero = {"reserve", "between_latency", "inside_latency", "launch", "price", "processor_per_byte"}
        for field in fields(self):
            value = getattr(self, field.name)
            if (
                field.type != "str"
                and value is not None
                and not (value > 0 or (value == 0 and field.name in may_be_zero))
            ):
                raise ValueError(f"{field.name} must be {'0 or ' * (field.name in may_be_zero)}positive, got {value}")
        if self.steps not in _STEPS:
            raise ValueError(f"steps={self.steps!r} is not supported. Use one of {_STEPS}")
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device={self.device!r} is not supported. Use 'cuda' or 'cpu'")

    @property
    def ranks(self) -> int:
        return self.nodes * self.accelerators

    @property
    def rank_text(self) -> str:
        """Noun for one rank in reports."""
        return "CPU rank" if self.device == "cpu" else "accelerator"

    @property
    def node_link(self) -> float:
        """Bandwidth from a node to other nodes, in Gbit/s: `between`, or the assumed value."""
        return _PORT * self.accelerators if self.between is None else self.between

    @property
    def node_link_text(self) -> str:
        """Text that describes `node_link` in reports."""
        return f"{self.node_link:,.4g} Gbit/s per node" + (" (assumed)" if self.between is None else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, with the assumed value of `between` if it is None.

        The value of ``between_assumed`` is True if `between` is None.
        """
        return asdict(self) | {"between": self.node_link, "between_assumed": self.between is None}

    @property
    def room(self) -> float:
        """Memory of an accelerator that is available to a model, in bytes."""
        return (self.memory - self.reserve) * 1e9

    def machine(self, zero3_size: int) -> SimMachine:
        """Return the simulated machine for ranks in ZeRO-3 groups of `zero3_size` ranks."""
        return SimMachine(
            node_size=self.accelerators,
            inside=self.inside * 1e9,
            between=self.node_link * 1e9 / 8,
            inside_latency=self.inside_latency * 1e-6,
            between_latency=self.between_latency * 1e-6,
            steps=self.steps,
            launch=self.launch * 1e-6,
            processor_per_byte=self.processor_per_byte * 1e-9,
            zero3_size=zero3_size,
            host=self.host * 1e9,
        )

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **others: Any) -> Cluster:
        """Read a cluster from a YAML file (requires PyYAML).

        Args:
            path: file that contains the names and values of fields.
            others: fields that override those in the file.

        Raises:
            TypeError, ValueError: a name is unknown, a value is invalid, or `nodes` is missing. The message names the
                file and the field.
        """
        content = read_yaml(Path(path))
        names = [field.name for field in fields(cls)]
        if unknown := sorted(str(name) for name in content if name not in names):
            raise ValueError(f"{path} has unknown fields {', '.join(unknown)}. Use {', '.join(names)}")
        values = {**content, **others}
        if "nodes" not in values:
            raise ValueError(f"{path} has no field nodes. Add the number of nodes")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None
