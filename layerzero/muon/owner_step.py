"""Step owned parameters: the owner gathers the full parameter, steps it, and scatters its rows.

[Note: Owner rounds]
All ZeRO-1 rows of an owned parameter are on ranks of one owner group (owner_groups.py). In each round, every rank of
the group steps one of the parameters that it owns, in order of decreasing update cost. The rank receives the rows of
the master and of the final gradient from the other ranks, steps the parameter, and sends the rows of the master back. A
round runs three all-to-alls: one gathers the masters, one gathers the gradients, and one scatters the masters. All
ranks therefore compute at the same time. Each rank stores one full parameter and its gradient, and all communication
stays inside the group. A parameter whose rows are all on its owner needs no communication. Such a parameter is stepped
together with the element-wise parameters.

All ranks of an owner group agree on the owners, on the parameters that have gradients, and on the order. Therefore they
run the same collectives. A rank belongs to several owner groups if parameters are on several meshes or are sharded
along model-parallel axes. All ranks process their groups in the same order.

[Note: Early gather]
Before any rank updates a parameter, the ranks compare which parameters have gradients. The messages take as long as the
slowest link. Meanwhile, the masters of the first round of the last step are gathered. All ranks launch this gather,
whatever gradients they have now. If the first round has changed, its masters are gathered again. There is no early
gather with several owner groups, because ranks would launch gathers of different groups in different orders.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from layerzero.extend import (
    BufferPool,
    Collective,
    FullParam,
    ManagedParam,
    MeshInfo,
    ModelRanks,
    PendingCollective,
    RowShardSpec,
    Size,
    StepObserver,
    all_gather_small,
    all_to_all,
    has_peers,
)
from layerzero.muon.owner_groups import OwnerGroup, sharded_axes
from layerzero.muon.owner_layout import ParamOwner, update_cost
from layerzero.muon.split_step import Turn, step_param_by_param

GroupKey = tuple[MeshInfo, int | None]  # identifies an owner group: its mesh, and the axis along which parts are joined


@dataclass(eq=False)
class ModelOwners(StepObserver):
    """Owners of a model's parameters. A parameter has an owner if any optimizer of the model needs it in full.

    Attributes:
        owners: owners, by parameter name.
        groups: owner groups, by mesh and by the axis along which parts are joined.
    """

    owners: dict[str, ParamOwner] = field(default_factory=dict)
    groups: dict[GroupKey, OwnerGroup] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class OwnedParam(FullParam):
    """Parameter that one rank, its owner, updates in full."""

    member: ManagedParam
    group: MutableMapping[str, Any]  # parameter group of the inner optimizer
    model_owners: ModelOwners

    @property
    def owner(self) -> ParamOwner:
        return self.model_owners.owners[self.member.name]

    @property
    def group_of_ranks(self) -> OwnerGroup:
        """This rank's owner group, which assembles the parameter if `is_in_owner_group`."""
        return self.model_owners.groups[self.member.spec.mesh_info, self.owner.axis]

    @property
    def place(self) -> tuple[int, int]:
        """Position of the owner in its owner group: (rank in the ZeRO-3 group, coordinate on the joined axis)."""
        return self.owner.s, self.owner.t

    @property
    def is_in_owner_group(self) -> bool:
        """True if the parameter's rows are on the ranks of this rank's owner group."""
        return self.owner.r == self.member.spec.mesh_info.grid.replica_rank

    @property
    def is_owned_by_this_rank(self) -> bool:
        return self.is_in_owner_group and self.place == self.group_of_ranks.place

    @property
    def owner_has_all_rows(self) -> bool:
        """True if the owner already has all rows, so that no communication is needed."""
        return self.numel_on(self.owner.s) == self.numel

    @property
    def step_sort_key(self) -> tuple[int, str]:
        """Sort key that orders parameters by decreasing update cost, then by name."""
        return -update_cost(self.shape), self.member.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter on the owner."""
        model_parallel, axis = self.member.spec.model_parallel, self.owner.axis
        return self.member.spec.shape if model_parallel is None or axis is None else model_parallel.joined_shape(axis)

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def rows_on(self, s: int) -> range:
        """Return the rows on ZeRO-3 rank `s` of the owner group, as indices into that rank's model-parallel part."""
        spec = self.member.spec
        k = s * spec.mesh_info.replicas + self.owner.r
        return range(spec.bounds[k], spec.bounds[k + 1])

    def numel_on(self, s: int) -> int:
        return len(self.rows_on(s)) * int(torch.Size(self.member.spec.shape[1:]).numel())

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """Return views of the full parameter `whole`, one for the rows of each rank in the owner group.

        The views are in rank order. The parts of the parameter must be joined along a model-parallel axis.
        """
        model_parallel, axis = self.member.spec.model_parallel, self.owner.axis
        assert model_parallel is not None and axis is not None
        dim = model_parallel.sharded_dim(axis)
        assert dim is not None
        parts = whole.view(self.shape).chunk(model_parallel.mesh.size(axis), dim)
        rows = [(t, self.rows_on(s)) for s, t in self.group_of_ranks.order]
        return [parts[t][each.start : each.stop] for t, each in rows]

    # State of the parameter

    def global_state_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the global shape of a state tensor whose shape on the owner is `shape`.

        If ranks own different matrices of a stack, the global shape covers all matrices. In this case, return None if
        the size of dim 0 is not the number of matrices on the owner.
        """
        model_parallel = self.member.spec.model_parallel
        if model_parallel is None or not sharded_axes(model_parallel, joined=self.owner.axis):
            return tuple(shape)
        return (model_parallel.shape[0], *shape[1:]) if shape[0] == self.shape[0] else None

    def state_spec(self, shape: Sequence[int]) -> RowShardSpec:
        """Return the sharding of a state tensor of global shape `shape` whose rows are all on the owner."""
        spec, mesh_info = self.member.spec, self.member.spec.mesh_info
        k = self.owner.s * mesh_info.replicas + self.owner.r
        model_parallel = spec.model_parallel
        if model_parallel is not None:
            model_parallel = model_parallel.of_state(shape, axis=self.owner.axis, coordinate=self.owner.t)
            shape = [each.stop - each.start for each in model_parallel.global_slices]
        bounds = (0,) * (k + 1) + (shape[0],) * (mesh_info.data_parallel - k)
        return RowShardSpec(self.member.name, tuple(shape), bounds, mesh_info, model_parallel)


def by_owner_group(owned: Iterable[OwnedParam]) -> dict[OwnerGroup, list[OwnedParam]]:
    """Group the parameters by owner group, sorted by name so that all ranks have the same order."""
    members_by_group: dict[OwnerGroup, list[OwnedParam]] = {}
    for param in sorted(owned, key=lambda param: param.member.name):
        members_by_group.setdefault(param.group_of_ranks, []).append(param)
    return members_by_group


def peak_buffer_counts(owned: Iterable[OwnedParam]) -> Counter[Size]:
    """Return the number of buffers, by (numel, dtype), that are in use at the same time in a step that updates `owned`.

    Owner groups take their steps one after another and share buffers.
    """
    maximum: Counter[Size] = Counter()
    for owner_group, members in by_owner_group(owned).items():
        counts: Counter[Size] = Counter()
        for dtype, sizes in _buffer_sizes(members, owner_group).items():
            counts.update((numel, dtype) for numel in sizes)
        maximum |= counts
    return maximum


def _buffer_sizes(owned: Iterable[OwnedParam], owner_group: OwnerGroup) -> dict[torch.dtype, list[int]]:
    """Return the sizes, in elements, of the buffers that the rounds of one owner group use, by dtype.

    There is one buffer for the largest full parameter that this rank owns, one for the parameter's gradient, and one
    for the rows that the rank sends in one round. If parts are joined along a model-parallel axis, another buffer
    receives the parts. The sizes take all parameters into account, with or without a gradient, so that each step uses
    the same buffers.
    """
    to_gather = [param for param in owned if param.is_in_owner_group and not param.owner_has_all_rows]
    sizes_by_dtype = {}
    for dtype in {param.member.master.dtype for param in to_gather}:
        full_numel, rows = 0, dict.fromkeys(owner_group.order, 0)  # `rows` is keyed by owner
        for param in to_gather:
            if param.member.master.dtype == dtype:
                full_numel = max(full_numel, param.numel if param.is_owned_by_this_rank else 0)
                rows[param.place] = max(rows[param.place], param.numel_on(owner_group.place[0]))
        sizes_by_dtype[dtype] = [
            full_numel,
            full_numel,
            sum(rows.values()),
            *([] if owner_group.axis is None else [full_numel]),
        ]
    return sizes_by_dtype


class OwnerSteps:
    """Steps of one optimizer that update all parameters with a gradient: owned ones in full, all others by rows.

    Args:
        inner: optimizer whose groups list this rank's rows with their final gradients.
        model_ranks: ranks that must call the methods.
        pool: pool from which the buffers for full parameters and their gradients are acquired.
    """

    def __init__(self, inner: Optimizer, model_ranks: ModelRanks, pool: BufferPool) -> None:
        self._inner = inner
        self._model_ranks = model_ranks
        self._pool = pool
        self._expected: _Rounds | None = None  # first rounds of the last step; see [Note: Early gather]

    def forget(self) -> None:
        """Forget the rounds of the last step, because owners or the optimizer's parameters have changed."""
        self._expected = None

    def step(self, owned: Sequence[OwnedParam], take_step: Callable[[], Any]) -> None:
        """Step all parameters that have a gradient.

        Args:
            take_step: function that steps the optimizer.

        Raises:
            RuntimeError: a parameter has a gradient on only some ranks of its owner group. All ranks raise the error.
        """
        scalars = [each for each in owned if not each.shape and each.is_owned_by_this_rank and each.owner_has_all_rows]
        owner_groups, rounds = by_owner_group(owned), [] if self._expected is None else [self._expected]
        try:
            if rounds:
                rounds[0].begin()
            _require_gradients_alike(owner_groups, self._model_ranks)
            gradients, rounds = self._plan_rounds(owner_groups, *rounds)
            for param in scalars:
                _reshape_master(param, ())
            turns = chain.from_iterable(each.run(gradients) for each in rounds)
            step_param_by_param(self._inner, take_step, turns)
        finally:
            for each in rounds:
                each.end()
            for param in scalars:
                _reshape_master(param, (1,))
            self._pool.trim()

    def _plan_rounds(
        self, owner_groups: Mapping[OwnerGroup, Sequence[OwnedParam]], early: _Rounds | None = None
    ) -> tuple[dict[OwnedParam, Tensor], list[_Rounds]]:
        """Return the gradients of this rank's rows of the parameters to gather, and the rounds that step them.

        Args:
            early: rounds that have begun.
        """
        gradients = _take_gradients(owner_groups)
        rounds: list[_Rounds] = []
        for owner_group, members in owner_groups.items():
            sizes = _buffer_sizes(members, owner_group)
            for dtype in sorted(sizes, key=str):
                to_gather = [each for each in members if each in gradients and gradients[each].dtype == dtype]
                if to_gather:
                    rounds.append(_Rounds(to_gather, owner_group, dtype, sizes[dtype], self._pool))
        if early is not None:
            early.hand_over(rounds)
        has_one_group = all(len(param.model_owners.groups) == 1 for param in gradients)
        self._expected = rounds[0] if rounds and has_one_group else None
        return gradients, rounds


def _take_gradients(owner_groups: Mapping[OwnerGroup, Sequence[OwnedParam]]) -> dict[OwnedParam, Tensor]:
    """Return the gradients of this rank's rows of the parameters to gather.

    Remove the gradient of each parameter, except those of which this rank is the owner and has all rows.
    """
    gradients: dict[OwnedParam, Tensor] = {}
    for param in chain.from_iterable(owner_groups.values()):
        gradient = param.master.grad
        if gradient is None or (param.is_owned_by_this_rank and param.owner_has_all_rows):
            continue
        param.master.grad = None
        if param.is_in_owner_group and not param.owner_has_all_rows:
            gradients[param] = gradient
    return gradients


def _require_gradients_alike(owner_groups: Mapping[OwnerGroup, Sequence[OwnedParam]], model_ranks: ModelRanks) -> None:
    """Raise RuntimeError on all ranks if the ranks of an owner group have gradients for different parameters.

    Without this check, ranks could send rows of different parameters to each other. The check sums one number over all
    ranks. An owner group's contributions sum to 0 if the ranks of the group have gradients for the same parameters.
    """
    own_groups = {
        owner_group: [each for each in owner_groups[owner_group] if each.is_in_owner_group]
        for owner_group in owner_groups
        if owner_group.communicator.size > 1
    }
    if not own_groups or not has_peers(model_ranks.ranks):
        return
    number = torch.zeros(1, dtype=torch.int64)
    for index, (owner_group, members) in enumerate(own_groups.items()):
        identity = [index, *owner_group.ranks, *(_has_gradient(each) for each in members)]
        digest = int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=5).digest(), "little")
        number += digest * (owner_group.communicator.size - 1 if owner_group.communicator.rank == 0 else -1)
    for comm in model_ranks.control_comms:
        if comm.size > 1:
            number = all_gather_small(comm, Collective.METADATA, number).wait().sum(0)
    if number.any():
        raise RuntimeError(_gradient_mismatch(own_groups, model_ranks))


def _reshape_master(owned: OwnedParam, shape: Sequence[int]) -> None:
    """Reshape the master of a parameter without dims, whose rows have one dim."""
    gradient, owned.master.grad = owned.master.grad, None
    owned.master.data = owned.member.master.view(shape)
    owned.master.grad = None if gradient is None else gradient.view(shape)


def _has_gradient(owned: OwnedParam) -> bool:
    return owned.master.grad is not None


def _gradient_mismatch(own_groups: Mapping[OwnerGroup, Sequence[OwnedParam]], model_ranks: ModelRanks) -> str:
    """Return the error message for a parameter that has a gradient on only some ranks of its owner group.

    All ranks must call this function. The message is the same on all ranks.
    """
    own_flags = [
        (owner_group.ranks, each.member.name, _has_gradient(each))
        for owner_group, members in own_groups.items()
        for each in members
    ]
    with_gradient: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for message in model_ranks.all_gather_text(json.dumps(own_flags)):
        for ranks, name, has in json.loads(message):
            with_gradient[name, tuple(ranks)] += has
    name, ranks = min(each for each, count in with_gradient.items() if count not in (0, len(each[1])))
    return (
        f"parameter {name!r} has a gradient on {with_gradient[name, ranks]} of the {len(ranks)} ranks that send its "
        "rows to its owner, so the owner cannot update the full parameter. Set .grad to None, or to a tensor, on all "
        "of these ranks"
    )


class _Rounds:
    """Rounds of one owner group that step parameters of one dtype; see [Note: Owner rounds].

    Args:
        sizes: sizes of the buffers, in elements.
    """

    def __init__(
        self,
        to_gather: Iterable[OwnedParam],
        owner_group: OwnerGroup,
        dtype: torch.dtype,
        sizes: Sequence[int],
        pool: BufferPool,
    ) -> None:
        by_owner: dict[tuple[int, int], list[OwnedParam]] = {place: [] for place in owner_group.order}
        for param in sorted(to_gather, key=lambda each: each.step_sort_key):
            by_owner[param.place].append(param)
        self._rounds = [_OwnerRound(chosen, owner_group) for chosen in zip_longest(*by_owner.values())]
        self._dtype, self._sizes, self._pool = dtype, sizes, pool
        self._buffers: list[Tensor] = []
        self._gather: PendingCollective | None = None  # of the masters of the first round

    def begin(self) -> None:
        """Acquire the buffers, and launch the gather of the masters of the first round."""
        self._buffers = [self._pool.acquire(numel, self._dtype) for numel in self._sizes]
        self._gather = self._rounds[0].launch_masters(*self._buffers)

    def hand_over(self, others: Sequence[_Rounds]) -> None:
        """Hand the buffers and the gather over to the first of `others`, if it begins with the same round. End this."""
        if others and others[0]._rounds[0].chosen == self._rounds[0].chosen:
            others[0]._buffers, others[0]._gather = self._buffers, self._gather
            self._buffers, self._gather = [], None
        self.end()

    def run(self, gradients: Mapping[OwnedParam, Tensor]) -> Iterator[Turn]:
        """Run the rounds and yield this rank's turns.

        Args:
            gradients: gradients of this rank's rows.
        """
        if self._gather is None:
            self.begin()
        for owner_round in self._rounds:
            gather, self._gather = self._gather or owner_round.launch_masters(*self._buffers), None
            yield from owner_round.run(gather, gradients, *self._buffers)
        self.end()

    def end(self) -> None:
        """Release the buffers, after the end of a gather that was not used."""
        if self._gather is not None:
            with suppress(RuntimeError):  # the next collective raises the error of a failed one
                self._gather.wait()
        while self._buffers:
            self._pool.release(self._buffers.pop())
        self._gather = None


class _OwnerRound:
    """Round of an owner group, in which each rank steps at most one parameter.

    Args:
        chosen: for each rank of the group, in rank order, the parameter that the rank steps, or None.
    """

    def __init__(self, chosen: Sequence[OwnedParam | None], owner_group: OwnerGroup) -> None:
        s, _ = owner_group.place
        self.chosen = [each for each in chosen if each is not None]
        self._own_param = own_param = chosen[owner_group.communicator.rank]
        self._to_each = [0 if each is None else each.numel_on(s) for each in chosen]
        self._from_each = [0 if own_param is None else own_param.numel_on(peer) for peer, _ in owner_group.order]
        self._comm, self._zero3_rank = owner_group.communicator, s
        self.sent, self.received = sum(self._to_each), sum(self._from_each)

    def launch_masters(
        self, full: Tensor, gradient: Tensor, rows: Tensor, received: Tensor | None = None
    ) -> PendingCollective:
        """Launch the gather of the masters, with the buffers of :meth:`run`."""
        return self._launch_gather(full, rows, received, [param.member.master for param in self.chosen])

    def run(
        self,
        masters: PendingCollective,
        gradients: Mapping[OwnedParam, Tensor],
        full: Tensor,
        gradient: Tensor,
        rows: Tensor,
        received: Tensor | None = None,
    ) -> Iterator[Turn]:
        """Gather the parameter that this rank steps, yield its turn, and scatter its rows after the step.

        Args:
            masters: gather of the masters, which uses the buffers.
            gradients: gradients of this rank's rows.
            full: 1-D buffer for the full parameter.
            gradient: 1-D buffer for the full gradient.
            rows: 1-D buffer for the rows that this rank sends.
            received: 1-D buffer for the received rows, if their order differs from that in the full parameter.
        """
        self._wait_for_gather(masters, full, received)
        pending = self._launch_gather(gradient, rows, received, [gradients[param] for param in self.chosen])
        self._wait_for_gather(pending, gradient, received)
        full, gradient, rows = full[: self.received], gradient[: self.received], rows[: self.sent]
        if self._own_param is not None:
            member, master = self._own_param.member, self._own_param.master
            master.data, master.grad = full.view(self._own_param.shape), gradient.view(self._own_param.shape)
            try:
                yield self._own_param.group, master
            finally:
                master.grad = None
                master.data = member.master
        sent = full
        if received is not None:
            sent = received[: self.received]
            for target, part in self._iter_received_rows(full, sent):
                target.copy_(part)
        splits = {"from_each": self._to_each, "to_each": self._from_each}
        all_to_all(self._comm, Collective.OWNER_SCATTER, rows, sent, **splits, name=self._param_name).wait()
        for part, param in zip(self._split_rows(rows), self.chosen, strict=True):
            param.member.master.copy_(part.view(param.member.master.shape))

    def _launch_gather(
        self, full: Tensor, rows: Tensor, received: Tensor | None, parts: Sequence[Tensor]
    ) -> PendingCollective:
        rows = rows[: self.sent]
        for piece, part in zip(self._split_rows(rows), parts, strict=True):
            piece.copy_(part.reshape(-1))
        splits = {"from_each": self._from_each, "to_each": self._to_each}
        target = (full if received is None else received)[: self.received]
        return all_to_all(self._comm, Collective.OWNER_GATHER, target, rows, **splits, name=self._param_name)

    def _wait_for_gather(self, pending: PendingCollective, full: Tensor, received: Tensor | None) -> None:
        pending.wait()
        if received is not None:
            for piece, part in self._iter_received_rows(full[: self.received], received[: self.received]):
                part.copy_(piece)

    @property
    def _param_name(self) -> str:
        return "" if self._own_param is None else self._own_param.member.name

    def _iter_received_rows(self, full: Tensor, received: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pair for each rank of the group: its rows in `received`, and the same rows in `full`."""
        if self._own_param is not None:
            pieces = self._own_param.pieces(full)
            for received_rows, piece in zip(torch.split(received, self._from_each), pieces, strict=True):
                yield received_rows.view(piece.shape), piece

    def _split_rows(self, rows: Tensor) -> Sequence[Tensor]:
        """Split the buffer of this rank's rows into one piece for each parameter in the round."""
        return torch.split(rows, [each.numel_on(self._zero3_rank) for each in self.chosen])
