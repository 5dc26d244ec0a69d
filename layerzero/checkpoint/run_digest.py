"""Compute a chain of digests that shows whether a resumed run gives the same results as an uninterrupted run.

[Note: Independence of the number of ranks]
The digest of a parameter is a sum over its elements, weighted by their indices in the flattened full tensor. Each rank
sums over its own shard. The total equals the sum over the full tensor, regardless of the sharding. The digests of data
and random numbers are listed by rank.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.atomic_files import CheckpointError
from layerzero.checkpoint.rng_state import random_states
from layerzero.checkpoint.state_names import StateNames
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.engine.hooks import get_state
from layerzero.engine.state import LayerZeroState
from layerzero.muon.owner_step import OwnedParam
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer
from layerzero.utils.bit_sums import weighted_sum
from layerzero.utils.nonfinite import format_first_names

__all__ = ["Chain"]

_START = "0" * 64


class Chain:
    """Chain of digests that covers the states and the data of a run.

    A link covers the weights, the optimizer state, the random numbers, and the data used since the last link. Each link
    includes the previous link. If two runs have equal links, they had the same weights, optimizer state and random
    numbers at every link so far. They also used the same data in the same order. For unsharded tensors, such as
    buffers, a link covers the first rank's copy. Checkpoints contain this copy, too.

    Args:
        model: model that :func:`layerzero.shard_model` returned.
        optimizers: optimizers that :func:`layerzero.shard_optimizer` returned.

    Example::

        chain = checkpoint.Chain(model, optimizer)
        if found := checkpoint.load_latest("runs/1", model, optimizer):
            checkpoint.set_random_states(found.extra["random"])
            chain.resume(found.extra["chain"])
        for step in range(first_step, steps):
            chain.saw(indices)
            train_on(indices)
            if step % 1000 == 999:
                extra = {"chain": chain.link(step + 1), "random": checkpoint.random_states(seed, step + 1)}
                checkpoint.save(f"runs/1/step-{step + 1}", model, optimizer, extra)
    """

    def __init__(self, model: nn.Module, *optimizers: ShardedOptimizer) -> None:
        self._lz_state = get_state(model)
        if not all(optimizer in self._lz_state.optimizers for optimizer in optimizers):
            raise ValueError(
                "an optimizer belongs to another model, or is not from layerzero.shard_optimizer. Pass optimizers that "
                "layerzero.shard_optimizer returned for this model"
            )
        self._optimizers = optimizers
        self._head = _START
        self._data = hashlib.sha256()

    def saw(self, *data: object) -> None:
        """Record the data that this rank trains on.

        The data may be numbers, strings, tensors, arrays, lists or dicts. It is enough to pass the sample indices.

        Raises:
            TypeError: `data` contains a value of another type, because its text form may differ between processes.
        """
        self._data.update(_distinct_text(data).encode())

    def link(self, step: int) -> dict[str, Any]:
        """Return the next link, to be saved in ``extra``.

        All ranks must call this method. The link is the same on all ranks.
        """
        state, random = self._weighted_sums(), self._gather_texts(_random_digest())
        data = self._gather_texts(self._data.hexdigest())
        self._data = hashlib.sha256()
        message = json.dumps([self._head, step, state, random, data], sort_keys=True)
        self._head = hashlib.sha256(message.encode()).hexdigest()
        return {"head": self._head, "step": step, "weights": state, "random": random, "data": data}

    def resume(self, link: dict[str, Any]) -> bool:
        """Continue from a link after the checkpoint is loaded and the random states are set.

        All ranks must call this method.

        Returns:
            True if the same number of ranks created the link. If False, the random states were not compared.

        Raises:
            CheckpointError: the loaded state differs from the saved state; the message names the differences.
        """
        current = self._weighted_sums()
        differing = [
            name
            for name in dict.fromkeys([*link["weights"], *current])
            if link["weights"].get(name) != current.get(name)
        ]
        if differing:
            raise CheckpointError(
                f"the run does not continue from the state saved at step {link['step']}, because these tensors differ: "
                f"{format_first_names(differing)}. Load the checkpoint that contains the link"
            )
        random = self._gather_texts(_random_digest())
        same_ranks = len(random) == len(link["random"])
        if same_ranks and random != link["random"]:
            ranks = [str(rank) for rank, (a, b) in enumerate(zip(random, link["random"], strict=True)) if a != b]
            raise CheckpointError(
                f"the run does not continue from the state saved at step {link['step']}, because the random states of "
                f"the ranks {', '.join(ranks)} differ. Call checkpoint.set_random_states first"
            )
        self._head = link["head"]
        self._data = hashlib.sha256()
        return same_ranks

    @torch.no_grad()
    def _weighted_sums(self) -> dict[str, int]:
        """Return the weighted sum of each model tensor and of each parameter's optimizer state, keyed by name."""
        lz_state = self._lz_state
        mesh_info, members = lz_state.mesh_info, lz_state.members
        not_sharded = _unsharded_tensors(lz_state)
        names = [*members, *not_sharded]
        sums = torch.zeros(2, len(names), dtype=torch.int64, device=mesh_info.device)
        index_of = {name: index for index, name in enumerate(names)}
        positions = {name: _RowPositions.of(member.spec) for name, member in members.items()}
        for name, member in members.items():
            sums[0, index_of[name]] = positions[name].sum_of(member.master).to(mesh_info.device)
        for name, tensor in not_sharded.items() if lz_state.ranks.is_first else ():
            sums[0, index_of[name]] = weighted_sum(tensor.detach(), 0).to(mesh_info.device)
        for optimizer in self._optimizers:
            for name, values in optimizer.state_by_name().items():
                if name in members:
                    owned = optimizer.owned(name)
                    for key, value in sorted(values.items()):
                        part = _sum_of(value, positions[name]) if owned is None else _sum_of_owned(value, owned)
                        sums[1, index_of[name]] += (part * _odd_factor(key)).to(mesh_info.device)
        lz_state.ranks.all_reduce(sums, dist.ReduceOp.SUM)
        weights, state = sums.tolist()
        model_sums = dict(zip(names, weights, strict=True))
        return model_sums | {
            f"optimizer state of {name}": value for name, value in zip(names, state, strict=True) if value
        }

    def _gather_texts(self, text: str) -> list[str]:
        return self._lz_state.ranks.all_gather_text(text)


def _unsharded_tensors(lz_state: LayerZeroState) -> dict[str, Tensor]:
    """Return the tensors that only the first rank saves: persistent buffers and ignored parameters."""
    sharded = {id(member.sharded) for member in lz_state.members.values()}
    return {
        name: target
        for name, target in StateNames(lz_state).targets.items()
        if isinstance(target, Tensor) and not isinstance(target, DTensor) and id(target) not in sharded
    }


class _RowPositions(NamedTuple):
    """Positions of this rank's rows of a parameter in the flattened full tensor.

    Attributes:
        first: index of the first element.
        run, pitch: see :func:`weighted_sum`.
        counts: whether this rank adds its rows. If several ranks have copies of the same rows, only one rank adds them.
        leads: whether this rank adds the scalars of the full parameter. Exactly one rank adds the scalars.
    """

    first: int
    run: int
    pitch: int
    counts: bool
    leads: bool

    @classmethod
    def of(cls, spec: RowShardSpec) -> _RowPositions:
        shape, box = spec.full_shape or (1,), spec.global_slices
        sharded_dim = next(
            (dim for dim in range(1, len(shape)) if box[dim] != slice(0, shape[dim])), 0
        )  # 0: only dim 0
        inner_size = math.prod(shape[sharded_dim + 1 :])
        first = box[0].start * math.prod(shape[1:]) + (box[sharded_dim].start * inner_size if sharded_dim else 0)
        counts = spec.model_parallel is None or spec.model_parallel.is_primary_copy
        leads = counts and bool(spec.rows) and not any(dim_slice.start for dim_slice in box)
        if not sharded_dim:
            return cls(first, 1, 1, counts, leads)
        return cls(
            first,
            max(1, (box[sharded_dim].stop - box[sharded_dim].start) * inner_size),
            shape[sharded_dim] * inner_size,
            counts,
            leads,
        )

    def sum_of(self, rows: Tensor) -> Tensor:
        return weighted_sum(rows, self.first, self.run, self.pitch) if self.counts else _zero_sum()


def _zero_sum() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _sum_of(value: Any, positions: _RowPositions | None) -> Tensor:
    """Return this rank's contribution to the weighted sum of an optimizer state entry, as a 0-dim int64 tensor.

    Only one rank adds a scalar, but each rank adds its rows.

    Args:
        positions: positions of the rows, or None if the entry is not sharded.
    """
    if isinstance(value, Tensor) and value.ndim and positions is not None:
        return positions.sum_of(value)
    if positions is not None and not positions.leads:
        return _zero_sum()
    if isinstance(value, Tensor):
        return weighted_sum(value, 0)
    if isinstance(value, (list, tuple)):
        items = [_sum_of(item, None) * _odd_factor(str(index)) for index, item in enumerate(value)]
        return torch.stack([item.cpu() for item in items] or [_zero_sum()]).sum()
    return torch.tensor(_odd_factor(repr(value)), dtype=torch.int64)


def _sum_of_owned(value: Any, owned: OwnedParam) -> Tensor:
    """Return this rank's contribution to the weighted sum of a state entry of a parameter that it owns."""
    if isinstance(value, Tensor) and value.ndim:
        return _RowPositions.of(owned.state_spec(owned.global_state_shape(value.shape) or value.shape)).sum_of(value)
    if isinstance(value, (list, tuple)):
        items = [_sum_of_owned(item, owned) * _odd_factor(str(index)) for index, item in enumerate(value)]
        return torch.stack([item.cpu() for item in items] or [_zero_sum()]).sum()
    return _sum_of(value, None) if owned.is_primary_owner else _zero_sum()


def _odd_factor(text: str) -> int:
    """Return an odd 62-bit number derived from a string."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2 | 1


def _random_digest() -> str:
    digest = hashlib.sha256()
    states = random_states(0, 0)["states"].value
    digest.update(_distinct_text([states[key] for key in sorted(states)]).encode())
    return digest.hexdigest()


def _distinct_text(value: Any) -> str:
    """Return a string that identifies a value and is the same in all processes.

    Lists, tuples and ranges with equal items have the same string.
    """
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.detach().cpu().reshape(-1).tolist()}"
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # a NumPy value; NumPy may not be installed
        return f"{value.dtype}{value.shape}{_distinct_text(value.tolist())}"
    if isinstance(value, dict):
        return (
            "{" + ",".join(sorted(f"{_distinct_text(key)}:{_distinct_text(item)}" for key, item in value.items())) + "}"
        )
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(map(_distinct_text, value)) + "]"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    raise TypeError(
        f"checkpoint.Chain cannot compare a {type(value).__name__} between processes. Pass numbers, strings, tensors "
        "or NumPy arrays, or lists, tuples and dicts of these"
    )
