"""Reference implementation of hybrid ZeRO-1/ZeRO-3 sharding. Read it from top to bottom before you read the engine.

This module does the same arithmetic as :func:`layerzero.shard_model` and :func:`layerzero.shard_optimizer`, but with
blocking collectives. It imports only torch. ``tests/end_to_end/test_reference.py`` compares the results of the two
implementations bit for bit. For training, use the engine.

D data-parallel ranks form R = D/S replicas of S ranks. A rank has coordinates (r, s). A unit has N elements::

    extent         weights                          gradients
    full, N        full buffer, compute dtype       full gradient, fp32
                   ^ gather, ZeRO-3 group           v hop 1, ZeRO-3 group
    ZeRO-3, N/S    ZeRO-3 shard, compute dtype      ZeRO-3 gradient shard, fp32
                   ^ refresh, replica group         v hop 2, replica group
    ZeRO-1, N/D    master, fp32                     final gradient, fp32

For each unit, every micro-batch runs two gathers and one hop 1. Every optimizer step runs one hop 2 and one refresh.
Only hop 2 and the refresh use the slow links between replicas.

Only the engine supports overlap, prefetch, alignment; accumulation other than ``"sharded"``; frozen, unused, 0-d or
empty parameters; mixed dtypes; weights tied across units; activation checkpointing; recovery from failures; ranks that
start with different weights; edited masters; gradient clipping; checkpoints; tensor and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# 1. Layout: consists of integers only and is the same on all ranks.


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in the flat order of its unit."""

    name: str
    shape: tuple[int, ...]  # has at least one dim
    offset: int  # in elements, from the start of the flat order

    def elements_in(self, positions: range) -> slice:
        """Return the part of `positions` that this parameter occupies, as a slice of `positions` that may be empty."""
        start = max(self.offset, positions.start)
        stop = max(start, min(self.offset + prod(self.shape), positions.stop))
        return slice(start - positions.start, stop - positions.start)


@dataclass(frozen=True)
class FlatLayout:
    """Flat order of a unit, split into S ZeRO-3 shards of R ZeRO-1 shards each.

    ZeRO-1 shard k = s*R + r of rank (r, s) lies inside ZeRO-3 shard s, so each collective needs one group. Example::

        ZeRO-3 |           s=0           |           s=1           |
        ZeRO-1 | k=0 (0, 0) | k=1 (1, 0) | k=2 (0, 1) | k=3 (1, 1) |
    """

    slots: tuple[Slot, ...]
    shard_numel: int  # number of elements in one ZeRO-1 shard, including padding
    replicas: int  # R
    zero3_size: int  # S

    @property
    def full_range(self) -> range:
        """Range of flat positions that the full buffer covers."""
        return range(self.shard_numel * self.replicas * self.zero3_size)

    def zero1_range(self, r: int, s: int) -> range:
        """Return the range of flat positions in the ZeRO-1 shard of rank (r, s)."""
        start = (s * self.replicas + r) * self.shard_numel
        return range(start, start + self.shard_numel)


def plan_layout(shapes: dict[str, tuple[int, ...]], *, replicas: int, zero3_size: int) -> FlatLayout:
    """Return a layout in which no shard boundary falls inside a dim-0 row.

    The offset of each slot is a multiple of the slot's row length, and the shard length is a multiple of all row
    lengths. The engine's layouts need less padding.
    """
    row_numel = {name: prod(shape[1:]) for name, shape in shapes.items()}
    slots: list[Slot] = []
    end = 0
    for name in sorted(shapes, key=lambda name: -row_numel[name]):  # longest rows first: fewer gaps
        slots.append(Slot(name, shapes[name], offset=-(-end // row_numel[name]) * row_numel[name]))
        end = slots[-1].offset + prod(shapes[name])
    multiple = lcm(*row_numel.values())
    shard_numel = -(-end // (replicas * zero3_size * multiple)) * multiple
    return FlatLayout(tuple(slots), shard_numel, replicas, zero3_size)


# 2. Collectives: pieces are ordered by rank in the group.

_all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older torch
_reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = shard.new_empty(shard.numel() * group.size())
    _all_gather_into(gathered, shard, group=group)
    return gathered


def _reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    shard = tensor.new_empty(tensor.numel() // group.size())
    _reduce_scatter_into(shard, tensor, group=group)
    return shard


# 3. Unit: parameters that are gathered and freed together.


class Unit:
    """Weights and gradients of one unit on one rank, and the collectives that move them."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        zero3_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup,
        compute_dtype: torch.dtype,
    ) -> None:
        self.zero3_group, self.replica_group, self.compute_dtype = zero3_group, replica_group, compute_dtype
        shapes = {name: tuple(param.shape) for name, param in params.items()}
        self.layout = plan_layout(shapes, replicas=replica_group.size(), zero3_size=zero3_group.size())
        self.shard_range = self.layout.zero1_range(replica_group.rank(), zero3_group.rank())

        initial = next(iter(params.values())).new_zeros(len(self.layout.full_range), dtype=torch.float32)  # [N]
        for name, full in self.parts_of(initial, self.layout.full_range).items():
            full.copy_(params[name].detach())
        self.master = initial[self.shard_range.start : self.shard_range.stop].clone()  # [N/D], fp32
        # Parameters of the optimizer: views of the master, [rows, *rest], possibly without rows.
        self.masters = {name: nn.Parameter(rows) for name, rows in self.parts_of(self.master, self.shard_range).items()}
        self.refresh()

        # The autograd leaves are views of the full buffer. Autograd rejects saved tensors whose version counter has
        # changed, and the gather before backward writes to the buffer. `.data` gives the leaves a separate counter.
        self.full_buffer = self.zero3_shard.new_empty(len(self.layout.full_range))  # [N], compute dtype
        leaves = self.parts_of(self.full_buffer.data, self.layout.full_range)
        self.gathered = {name: nn.Parameter(full) for name, full in leaves.items()}
        self.reshard()
        self.gradients: dict[str, Tensor] = {}  # gradients from the current backward, full shape, compute dtype
        self.zero3_gradient: Tensor | None = None  # [N/S], fp32, summed over micro-batches and the ZeRO-3 group

    def parts_of(self, flat: Tensor, elements: range) -> dict[str, Tensor]:
        """Return a view ``[rows, *rest]`` of each parameter's rows in `flat`, which covers the positions `elements`."""
        return {slot.name: flat[slot.elements_in(elements)].view(-1, *slot.shape[1:]) for slot in self.layout.slots}

    def refresh(self) -> None:
        """Copy the masters of all replicas to the ZeRO-3 shard. Cast the masters first, to send fewer bytes."""
        self.zero3_shard = _all_gather(self.master.to(self.compute_dtype), self.replica_group)  # [N/S], compute dtype

    def gather(self) -> None:
        """Fill the full buffer from the ZeRO-3 shards. Keep its storage object, because autograd saves views of it."""
        storage = self.full_buffer.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.full_buffer.numel() * self.full_buffer.itemsize)
            _all_gather_into(self.full_buffer, self.zero3_shard, group=self.zero3_group)

    def reshard(self) -> None:
        """Free the memory of the full buffer."""
        self.full_buffer.untyped_storage().resize_(0)

    def reduce_in_zero3_group(self) -> None:
        """Run hop 1: sum the full gradients over the ZeRO-3 group and add the sum to the ZeRO-3 gradient shard."""
        full_gradient = self.master.new_zeros(len(self.layout.full_range))  # [N], fp32
        for name, part in self.parts_of(full_gradient, self.layout.full_range).items():
            part.copy_(self.gradients.pop(name))
        reduced = _reduce_scatter(full_gradient, self.zero3_group)
        self.zero3_gradient = reduced if self.zero3_gradient is None else self.zero3_gradient + reduced

    def reduce_across_replicas(self) -> None:
        """Run hop 2: add the mean over all ranks to the final gradient, which is the `grad` of the masters."""
        if self.zero3_gradient is None:
            return
        reduced = _reduce_scatter(self.zero3_gradient, self.replica_group)  # [N/D], fp32
        reduced /= self.zero3_group.size() * self.replica_group.size()
        self.zero3_gradient = None  # otherwise the next hop 2 would count this gradient twice
        for name, rows in self.parts_of(reduced, self.shard_range).items():
            master = self.masters[name]
            master.grad = rows if master.grad is None else master.grad + rows


# 4. Step: controls when units are gathered, reduced and refreshed.


class ReferenceModel:
    """Module that is sharded in place, with one unit for each name in `units` and one for the remaining parameters.

    Args:
        module: module whose parameters have the same values on all ranks.
        units: names of submodules, which all ranks must call in the same order, so that their collectives match.
        zero3_group: group of the S ranks in this replica, which share compute weights.
        replica_group: group of the R ranks with the same s, one from each replica.
        compute_dtype: dtype of gathered parameters, and of floating-point inputs of units. Masters are fp32.

    Example::

        model = ReferenceModel(module, ["blocks.0", "blocks.1"], zero3_group=node, replica_group=across_nodes)
        optimizer = torch.optim.AdamW(model.masters.values())
        with model.no_sync():
            loss(model(first)).backward()
        loss(model(second)).backward()
        model.step(optimizer)
        optimizer.zero_grad()
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        *,
        zero3_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        unassigned = dict(module.named_parameters())
        if unsupported := [name for name, p in unassigned.items() if not (p.requires_grad and p.ndim and p.numel())]:
            raise ValueError(f"Parameters {unsupported} are frozen, 0-d or empty. Use layerzero.shard_model.")
        self.module = module
        self.requires_gradient_sync = True
        self.units: list[Unit] = []
        leaves: dict[nn.Parameter, nn.Parameter] = {}  # keyed by original parameter
        for prefix in [*sorted(units, key=len, reverse=True), ""]:  # a parameter belongs to its innermost unit
            names = [name for name in unassigned if not prefix or name.startswith(f"{prefix}.")]
            if params := {name: unassigned.pop(name) for name in names}:
                unit = Unit(params, zero3_group, replica_group, compute_dtype)
                self.units.append(unit)
                leaves |= {param: unit.gathered[name] for name, param in params.items()}
                self._register_hooks(unit, module.get_submodule(prefix))
        for submodule in module.modules():
            for attribute, param in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(submodule, attribute, leaves[param])
        self.masters = {name: rows for unit in self.units for name, rows in unit.masters.items()}

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def _register_hooks(self, unit: Unit, module: nn.Module) -> None:
        module.register_forward_pre_hook(partial(self._pre_forward, unit))
        module.register_forward_hook(partial(self._post_forward, unit))
        for name, leaf in unit.gathered.items():
            hook: Any = leaf.register_post_accumulate_grad_hook
            hook(partial(self._post_accumulate_grad, unit, name))

    def _pre_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        unit.gather()
        return tuple(a.to(unit.compute_dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in args)

    def _post_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit.reshard()
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: unit.gather())  # backward reaches a unit's output first

    def _post_accumulate_grad(self, unit: Unit, name: str, leaf: Tensor) -> None:
        """Store a gradient in backward. Once all gradients of the unit have arrived, reduce them."""
        assert leaf.grad is not None
        unit.gradients[name], leaf.grad = leaf.grad, None
        if len(unit.gradients) == len(unit.gathered):
            unit.reshard()  # a gradient arrives only after the backward of every operation on its weight
            unit.reduce_in_zero3_group()
            if self.requires_gradient_sync:
                unit.reduce_across_replicas()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager that skips hop 2 in backward passes."""
        self.requires_gradient_sync = False
        try:
            yield
        finally:
            self.requires_gradient_sync = True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run hop 2 if `no_sync` skipped it, update the masters with an element-wise optimizer, and refresh."""
        for unit in self.units:
            if unit.gradients:
                raise RuntimeError("A backward did not use all parameters of a unit. Use layerzero.shard_model.")
            unit.reduce_across_replicas()
        optimizer.step()
        for unit in self.units:
            unit.refresh()

    def full_parameters(self) -> dict[str, Tensor]:
        """Return all parameters as full fp32 tensors by name. All ranks must call this method."""
        full: dict[str, Tensor] = {}
        for unit in self.units:
            flat = _all_gather(_all_gather(unit.master, unit.replica_group), unit.zero3_group)  # [N], fp32
            full |= unit.parts_of(flat, unit.layout.full_range)
        return full
