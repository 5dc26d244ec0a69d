"""Estimate memory and traffic of layerzero and of other schemes: :class:`Estimator`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from layerzero import LayerZeroConfig, PrecisionPolicy
from layerzero.extend import (
    COMPARE_EVERY,
    Accumulation,
    Extent,
    HandleSpec,
    Reshards,
    UnitDefinition,
    UnitSpec,
    device_bytes,
    estimate_memory,
    optimizer_bytes,
    plan_unit_specs,
    predicted_traffic,
)
from layerzero.planning.cluster import Cluster
from layerzero.planning.compute_cost import ComputeCost
from layerzero.planning.step_cost import Pass, StepCost
from layerzero.slow_links import Int4Difference

LAYERZERO = "layerzero"
OTHER_SCHEMES = ("FSDP2", "HSDP", "HFSDP", "ZeRO-1")
_STATE = 2  # number of AdamW state elements per parameter element, in the dtype of the master
_LOSSLESS_BITS = 4.3  # per weight; measured in the middle of a training (docs/slow-links.md, "Lossless refresh")


@dataclass(frozen=True)
class Row:
    """Estimated cost of a scheme with one combination of settings. Bytes are per rank.

    Attributes:
        scheme: ``"layerzero"``, or the name of another scheme.
        zero3_size: number of ranks over which weights are sharded.
        accumulation: value of layerzero's setting; empty for other schemes.
        offload: what layerzero keeps in host memory: ``"grads"``, ``"optimizer"``, ``"params"``.
        reshards: value of layerzero's setting `reshard_after_forward`; None for other schemes.
        memory: bytes by kind, as :func:`layerzero.memory` predicts them. The dict also contains ``optimizer`` (AdamW)
            and, if known, the estimated ``activations``.
        peak: largest number of bytes on the device during a step, over all kinds.
        cost: traffic and duration of a step.
    """

    scheme: str
    zero3_size: int
    accumulation: Accumulation
    offload: tuple[str, ...]
    reshards: Reshards | None
    memory: dict[str, int]
    peak: int
    cost: StepCost

    @property
    def host(self) -> int:
        """Number of bytes in host memory."""
        return sum(self.memory.values()) - device_bytes(self.memory)

    @property
    def excess(self) -> float:
        """Number of bytes by which `peak` exceeds the memory of the accelerator, or 0."""
        return max(0.0, self.peak - self.cost.cluster.room)

    @property
    def host_excess(self) -> float:
        """Number of bytes by which all ranks on a node together exceed its host memory, or 0."""
        cluster = self.cost.cluster
        return max(0.0, self.host * cluster.accelerators - cluster.host_memory * 1e9)

    @property
    def fits(self) -> bool:
        return not (self.excess or self.host_excess)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind without zeros, including the additional bytes of gathered units at the peak of a step."""
        gathered = self.peak - device_bytes(self.memory)
        return {kind: n for kind, n in {**self.memory, "gathered units": max(0, gathered)}.items() if n}

    @property
    def label(self) -> str:
        """Short text with the scheme and the settings."""
        if self.scheme != LAYERZERO:
            return f"{self.scheme} S={self.zero3_size}" if self.scheme in ("HSDP", "HFSDP") else self.scheme
        more = f", offload {'+'.join(self.offload)}" if self.offload else ""
        more += ", reshard_after_forward='step'" if self.reshards == "step" else ""
        return f"layerzero, zero3_size={self.zero3_size}, accumulation={self.accumulation!r}{more}"


@dataclass(frozen=True)
class Estimator:
    """Model, cluster and settings for which :class:`Row` objects are estimated.

    Attributes:
        units: units of the model. The root is the first unit.
        config: settings that all rows have in common.
        compute: cost of the model's computation.
        micro_batches: number of micro-batches per step.
    """

    units: Sequence[UnitDefinition]
    config: LayerZeroConfig
    cluster: Cluster
    compute: ComputeCost
    micro_batches: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [info.parameter for unit in self.units for info in unit.parameters]

    def settings(
        self, zero3_size: int, accumulation: Accumulation, offload: Sequence[str], reshards: Reshards
    ) -> LayerZeroConfig:
        """Return `config` with the settings of a row."""
        config, policy = self.config, self.config.mp_policy
        if accumulation == "local" and isinstance(policy, PrecisionPolicy):
            policy = replace(policy, accumulation_dtype=None)
        return replace(
            config,
            zero3_size=zero3_size,
            accumulation=accumulation,
            mp_policy=policy,
            offload=replace(config.offload, **dict.fromkeys(offload, True)),
            reshard_after_forward=reshards,
            shared_memory="off" if self.cluster.device == "cpu" else config.shared_memory,
        )

    def layerzero(
        self,
        zero3_size: int,
        accumulation: Accumulation,
        offload: Sequence[str] = (),
        reshards: Reshards | None = None,
    ) -> Row:
        """Return the row of layerzero with one combination of settings. None: `reshards` is that of `config`."""
        reshards = self.config.reshard_after_forward if reshards is None else reshards
        config, ranks = self.settings(zero3_size, accumulation, offload, reshards), self.cluster.ranks
        units = plan_unit_specs(self.units, config, ranks, on_device=self.cluster.device != "cpu")
        estimate = estimate_memory(units, config)
        state = {"host_optimizer" if config.offload.optimizer else "optimizer": optimizer_bytes(units, _STATE)}
        offloads = tuple(name for name in ("grads", "optimizer", "params") if getattr(config.offload, name))
        passes = _Passes(self.micro_batches)
        last = units[-1] if units[0].traits.on_device else None
        for unit in units:
            for handle in unit.handles:
                passes.add_handle(handle, unit, config, stays=unit.stays_gathered or unit is last)
        peak = estimate.peak + state.get("optimizer", 0) + sum(self._activations.values())
        memory, cost = estimate.kinds | state | self._activations, self._cost(passes, zero3_size)
        return Row(LAYERZERO, zero3_size, accumulation, offloads, reshards, memory, peak, cost)

    def other_scheme(self, name: str, zero3_size: int) -> Row:
        """Return the row of another scheme, from formulas that ignore padding.

        At the peak of a sharded scheme, the root and two units are gathered while the gradients of the root and one
        unit are reduced.
        """
        shards, ranks = self.cluster.ranks if name == "FSDP2" else zero3_size, self.cluster.ranks
        states = shards if name == "HSDP" else ranks
        numels = [sum(info.parameter.numel() for info in unit.parameters) for unit in self.units]
        trained_numels = [
            sum(info.parameter.numel() for info in unit.parameters if info.parameter.requires_grad)
            for unit in self.units
        ]
        numel, trained = sum(numels), sum(trained_numels)
        two_units = max((a + b for a, b in pairwise(numels[1:])), default=sum(numels[1:]))  # the current and the next
        weight, reduced = self._element_sizes()
        frozen_bytes = sum(p.numel() * p.itemsize for p in self.parameters if not p.requires_grad)
        memory = {
            "masters": (4 * trained + frozen_bytes) / states,  # of frozen parameters, the only copy, in its own dtype
            "gradients": 4 * trained / shards,
            "optimizer": 8 * trained / states,
        }
        if name in ("HFSDP", "ZeRO-1"):
            memory["masters"] = 4 * trained / states
            memory["weights"] = weight * numel / shards
            memory["gradients"] = reduced * trained / shards  # Megatron accumulates in the reduce dtype
        passes, share = _Passes(self.micro_batches), (ranks // shards - 1) / ranks  # of a buffer that hop 2 sends
        if shards > 1:
            memory["gathered"] = (numels[0] + two_units) * weight
            memory["reduce_buffer"] = (trained_numels[0] + max(trained_numels[1:], default=0)) * reduced
            sent = (shards - 1) / shards
            passes.zero3["each forward"] = sent * weight * numel
            # The root and the last unit stay gathered from the forward to the backward pass.
            passes.zero3["each backward"] = sent * (weight * sum(numels[1:-1]) + reduced * trained)
        if name != "HSDP":  # HSDP has the same masters on all replicas, so there is no refresh
            passes.replica["first forward"] = share * weight * trained
        all_reduce = 2 if name == "HSDP" else 1
        passes.replica["last backward"] = share * all_reduce * reduced * trained
        kinds = {kind: round(nbytes) for kind, nbytes in memory.items()}
        kinds |= self._activations
        return Row(name, shards, "", (), None, kinds, sum(kinds.values()), self._cost(passes, shards))

    def _element_sizes(self) -> tuple[int, int]:
        """Return the size in bytes of an element of compute weights, and of gradients in messages."""
        policy = self.config.root_policy(self.units[0].called[0])
        param_dtype = policy.param_dtype or next((p.dtype for p in self.parameters), torch.float32)
        return param_dtype.itemsize, (policy.reduce_dtype or param_dtype).itemsize

    @property
    def _activations(self) -> dict[str, int]:
        nbytes = round(self.compute.activation_bytes)
        return {"activations": nbytes} if nbytes else {}

    def _cost(self, passes: _Passes, zero3_size: int) -> StepCost:
        speed = self.cluster.tflops * 1e12
        durations = self.compute.forward / speed, self.compute.backward / speed
        return StepCost(tuple(passes.of_step(*durations)), zero3_size, self.cluster)


class _Passes:
    """Traffic of the passes of a step, in bytes by axis and by the passes in which it is sent.

    Passes are ``"each forward"``, ``"each backward"``, ``"first forward"``, which overlaps with the refresh that the
    previous step launched, and ``"last backward"``, which reduces accumulated gradients.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self.zero3, self.replica = defaultdict[str, float](float), defaultdict[str, float](float)

    def add_handle(self, handle: HandleSpec, unit: UnitSpec, config: LayerZeroConfig, *, stays: bool) -> None:
        """Add the traffic of a handle of layerzero.

        Args:
            stays: True if the unit stays gathered from its forward to its backward pass.
        """
        sent = {
            kind: float(sum(n)) for kind, n in predicted_traffic([replace(unit, handles=(handle,))], config).items()
        }
        if unit.reshard_after_backward:
            self.zero3["each forward"] += sent.get("gather", 0.0)
        elif handle.trainable:  # a step does not free frozen weights
            self.zero3["first forward"] += sent.get("gather", 0.0)
        self.zero3["each backward"] += 0.0 if stays else sent.get("regather", sent.get("gather", 0.0))
        if handle.trainable:
            spec = handle.reduction_spec
            each_time = spec.accumulating_stages
            for stage in spec.stages:
                axis = self.zero3 if stage.collective.value == "hop1" else self.replica
                axis["each backward" if stage in each_time else "last backward"] += sent[stage.collective.value]
            encoded = handle.encodes_refresh
            self.replica["first forward"] += (
                _encoded_refresh(handle, unit, config) if encoded else sent.get("refresh", 0)
            )

    def of_step(self, forward: float, backward: float) -> Iterator[Pass]:
        """Yield the passes of a step, whose computations take `forward` and `backward` seconds."""
        for each, special, seconds in (
            ("each forward", "first forward", forward),
            ("each backward", "last backward", backward),
        ):
            zero3, replica = self.zero3[each], self.replica[each]
            yield Pass(1, seconds, zero3 + self.zero3[special], replica + self.replica[special])
            if self._micro_batches > 1:
                yield Pass(self._micro_batches - 1, seconds, zero3, replica)


def _encoded_refresh(handle: HandleSpec, unit: UnitSpec, config: LayerZeroConfig) -> float:
    """Return the estimated number of bytes that a rank sends in an encoded refresh of a handle."""
    grid = unit.traits.grid
    numel = grid.numel(handle.layout, Extent.ZERO3) * (1 - 1 / grid.replicas)
    codec = config.codecs.refresh
    each = codec.message_bytes(2**20) / 2**20 if isinstance(codec, Int4Difference) else _LOSSLESS_BITS / 8
    if unit.traits.on_device:  # some refreshes send the weights
        each += (handle.precision.compute.itemsize - each) / COMPARE_EVERY
    return numel * each
