"""A cluster as a plan sees it: :class:`Cluster`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from layerzero.config.yaml_file import read_yaml
from layerzero.planning.simulator import SimMachine

__all__ = ["Cluster"]

_STEPS = ("direct", "log", "ring")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of accelerators, and what they reach; not what is printed on their boxes.

    Attributes:
        nodes, accelerators: accelerators are of one node.
        memory: GB (1e9 bytes) of one accelerator.
        reserve: GB of it that is not for the model: the driver, the allocator, NCCL.
        between: Gbit/s that a node sends to the others, all of its ports together.
        inside: GB/s that an accelerator sends inside its node.
        between_latency, inside_latency: microseconds of one step of an exchange.
        tflops: TFLOP/s that an accelerator reaches in a block, in the compute dtype; about half of its peak.
        memory_speed: GB/s of an accelerator's memory.
        host: GB/s that an accelerator copies to or from its host.
        host_memory: GB of a node.
        host_memory_speed: GB/s of a node, for optimizers that run there.
        launch: microseconds of the host for an exchange.
        steps: an exchange among n ranks takes ``"direct"`` 1, ``"log"`` log2 n or ``"ring"`` n - 1 latencies.
        price: of an accelerator for an hour, in whatever currency; 0: not known.
        device: ``"cuda"`` or ``"cpu"``: whether exchanges are added up by the backend, or here, as on gloo.
        processor_per_byte: nanoseconds for which a rank's processor works on each byte it sends, on a CPU.

    Example::

        cluster = layerzero.planning.Cluster(nodes=16, accelerators=8, memory=80, between=400)
    """

    nodes: int
    accelerators: int = 8
    memory: float = 80.0
    reserve: float = 4.0
    between: float = 400.0
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
            if field.type == "str":
                if not isinstance(value, str):
                    raise TypeError(f"{field.name} must be a name, got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, (int, float) if field.type == "float" else int):
                raise TypeError(f"{field.name} must be {'a number' if field.type == 'float' else 'an int'}: {value!r}")
        may_be_zero = {"reserve", "between_latency", "inside_latency", "launch", "price", "processor_per_byte"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type != "str" and not (value > 0 or (value == 0 and field.name in may_be_zero)):
                raise ValueError(f"{field.name}={value}; it must be {'0 or ' * (field.name in may_be_zero)}more than 0")
        if self.steps not in _STEPS:
            raise ValueError(f"steps={self.steps!r}; use one of {_STEPS}")
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device={self.device!r}; use 'cuda' or 'cpu'")

    @property
    def ranks(self) -> int:
        return self.nodes * self.accelerators

    @property
    def room(self) -> float:
        """Bytes of an accelerator that a model may take."""
        return (self.memory - self.reserve) * 1e9

    def machine(self, zero3_size: int) -> SimMachine:
        """It, for the simulation of ranks of which so many share the weights."""
        return SimMachine(
            node_size=self.accelerators,
            inside=self.inside * 1e9,
            between=self.between * 1e9 / 8,
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
        """The fields in a YAML file (needs ``pip install PyYAML``); `others` are put in place of them.

        Raises:
            TypeError, ValueError: a name or a value that is unknown or wrong; names it and the file.
        """
        content = read_yaml(Path(path))
        known = [field.name for field in fields(cls)]
        if unknown := sorted(str(name) for name in content if name not in known):
            raise ValueError(f"{path}: unknown fields {', '.join(unknown)}; known are {', '.join(known)}")
        given = {**content, **others}
        if "nodes" not in given:
            raise ValueError(f"{path}: nodes is not given")
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None
