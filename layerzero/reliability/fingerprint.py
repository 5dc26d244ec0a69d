"""Compare weights that must be bitwise equal: the compute weights of all replicas, and the masters cast to their dtype.

[Note: Redundant copies]
After a refresh, all replicas have bitwise equal ZeRO-3 shards, and each rank's part of its shard equals its masters
cast to the compute dtype. Therefore, a flipped bit in the compute weights makes one replica differ from the other
replicas and from the element's master. A flipped bit in a master makes all replicas differ from that master if the bit
is visible in the compute dtype. If a master and its compute weight share memory, the value on the majority of the
replicas counts as correct. Without a majority, the value on the rank that has the master counts as correct, provided
that this rank has verified that its masters are unchanged since the last step.

If `Codecs.refresh` is not lossless, compute weights are compared between replicas only, because they differ from the
cast masters. The value on the majority of the replicas counts as correct.

The comparison uses 64-bit sums. Only shards whose sums differ are gathered and compared element by element.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero.extend import (
    Collective,
    Extent,
    FlatLayout,
    Handle,
    LayerZeroState,
    MeshInfo,
    all_gather,
    all_reduce_over,
    as_integers,
    get_state,
    sum64,
)

_SHOWN = 8  # maximum number of elements per entry that are listed
_UNKNOWN, _CHANGED, _SOUND = range(3)  # state of masters since the last step; see _kind_and_replicas
_STATE_OF_FLAG = {None: _UNKNOWN, False: _CHANGED, True: _SOUND}


@dataclass(frozen=True)
class Corruption:
    """Corrupted elements of one parameter.

    Attributes:
        kind: "compute weights", "masters", "optimizer state 'NAME'" or "gradient". If it is unknown which copy is
            wrong, the kind is "masters or compute weights" (the two differ on one rank) or "weights" (replicas differ).
        ranks: global ranks that have wrong bits. For "weights", these are all ranks that have a copy. At least one of
            these copies is wrong. The same applies to "compute weights" that have no majority and are refreshed with
            :class:`layerzero.Int4Difference`.
        handle: name of the handle that stores the elements.
        parameter: name of the parameter that contains the elements.
        detail: description of the elements and of the comparison that failed.
    """

    kind: str
    ranks: tuple[int, ...]
    handle: str
    parameter: str
    detail: str

    def __str__(self) -> str:
        subject = "one of the ranks" if self.kind == "weights" else "the ranks"
        location = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"{subject} {list(self.ranks)}"
        return f"{self.kind} of {self.parameter!r} ({self.handle}) on {location}: {self.detail}"


@dataclass(frozen=True)
class Fingerprint:
    """Result of :func:`fingerprint`.

    Attributes:
        sums: 64-bit sum of this rank's ZeRO-3 shard of each handle, by name of the handle. If no bit is corrupted, the
            sums on all replicas are equal. The sum is 0 if the weights share memory with their masters and have changed
            since the last refresh.
        corruptions: corrupted elements, the same on all ranks; empty if all copies are equal.
    """

    sums: dict[str, int]
    corruptions: tuple[Corruption, ...]

    @property
    def ok(self) -> bool:
        return not self.corruptions


@torch.no_grad()
def fingerprint(model: nn.Module) -> Fingerprint:
    """Compare the copies of a sharded model's weights that must be bitwise equal.

    All ranks must call this function, between forward passes. Each rank reads its masters and its ZeRO-3 shard once and
    sends eight bytes per handle to other replicas. The result lists differences by rank, handle and parameter.

    The next forward pass refreshes weights that were changed since the last forward pass. If masters and compute
    weights share memory, as in fp32, changed weights are compared only after this refresh. Therefore, if a loop changes
    the weights right before each call, they are never compared.

    Example::

        found = layerzero.fingerprint(model)
        assert found.ok, found.corruptions
    """
    return compare_copies(get_state(model), (), {})


def compare_copies(lz_state: LayerZeroState, own: Sequence[Corruption], sound: Mapping[str, bool]) -> Fingerprint:
    """Compare the copies as :func:`fingerprint` does, and include corruptions that some ranks have already found.

    Args:
        lz_state: state of the sharded model.
        own: corruptions that this rank has found.
        sound: by parameter name: True if the parameter's masters on this rank are unchanged since the last step, False
            if their bits have changed without a write. Parameters whose state is unknown are omitted.
    """
    handles = lz_state.handles
    for handle in handles:
        handle.weights.finish_refresh(of_peers=True)
    sums = (
        torch.stack([_sum_zero3_shard(handle) for handle in handles]) if handles else torch.zeros(0, dtype=torch.int64)
    )
    suspect = torch.zeros(len(handles), dtype=torch.bool, device=sums.device)
    for mesh_info in {id(handle.mesh_info): handle.mesh_info for handle in handles}.values():
        indices = [index for index, handle in enumerate(handles) if handle.mesh_info is mesh_info]
        suspect[indices] = _find_suspect(mesh_info, [handles[index] for index in indices], sums[indices])
    differs = (suspect.any() | bool(own)).to(torch.int32).view(1)
    lz_state.ranks.all_reduce(differs, dist.ReduceOp.MAX)
    corruptions: list[Corruption] = []
    if differs.item():
        found = list(own)
        for handle, is_suspect in zip(handles, suspect.tolist(), strict=True):
            if is_suspect:
                found += _locate(handle, handle.mesh_info, sound)
        messages = lz_state.ranks.all_gather_text(json.dumps([asdict(each) for each in found]))
        entries = [Corruption(**{**e, "ranks": tuple(e["ranks"])}) for text in messages for e in json.loads(text)]
        corruptions = list(dict.fromkeys(entries))
    named = dict(zip((handle.name for handle in handles), sums.tolist(), strict=True))
    return Fingerprint(named, tuple(corruptions))


def _find_suspect(mesh_info: MeshInfo, handles: Sequence[Handle], sums: Tensor) -> Tensor:
    """Return which of the handles of one mesh have copies that differ, as a bool tensor [handles].

    The result is the same on all replicas.

    Args:
        sums: 64-bit sum of each handle's ZeRO-3 shard, int64 [handles].
    """
    copies = sums.expand(mesh_info.replicas, -1).contiguous()
    if mesh_info.replica_comm.size > 1:
        all_gather(mesh_info.replica_comm, Collective.METADATA, copies.view(-1), sums).wait()
    flags = (copies != sums).any(dim=0)
    for index, handle in enumerate(handles):
        if _must_equal_master(handle) and not handle.refresh_due:
            flags[index] |= (as_integers(_cast_master(handle)) != as_integers(_own_part(handle))).any()
    flags = flags.to(torch.int32)
    # Reduce over replicas only, because ranks along model-parallel axes may have different handles.
    all_reduce_over([mesh_info.replica_comm], flags, dist.ReduceOp.MAX)
    return flags.bool()


def _must_equal_master(handle: Handle) -> bool:
    """Return whether the compute weights are in separate memory and must equal the cast masters."""
    return handle.weights.equals_cast_master and not handle.weights.shares_master


def _sum_zero3_shard(handle: Handle) -> Tensor:
    """Return the 64-bit sum of the bits of a handle's ZeRO-3 shard as a 0-dim int64 tensor.

    The result is 0 if the shard shares memory with the masters, and the masters have changed since the last refresh.
    """
    sum_of_bits = sum64(handle.weights.read_zero3())
    return torch.zeros_like(sum_of_bits) if handle.weights.shares_master and handle.refresh_due else sum_of_bits


def _own_part(handle: Handle) -> Tensor:
    """Return the part of a handle's ZeRO-3 shard to which this rank's masters are copied."""
    return handle.weights.read_zero3()[handle.mesh_info.grid.slice_within(handle.layout, Extent.ZERO1, Extent.ZERO3)]


def _cast_master(handle: Handle) -> Tensor:
    return handle.weights.master.to(device=handle.mesh_info.device, dtype=handle.precision.compute)


def _locate(handle: Handle, mesh_info: MeshInfo, masters_unchanged: Mapping[str, bool]) -> list[Corruption]:
    """Return the differences in one handle, between replicas or between compute weights and masters.

    All ranks of the replica group must call this function. The result is the same on these ranks.

    Args:
        masters_unchanged: same as `sound` in :func:`compare_copies`.
    """
    zero3 = handle.weights.read_zero3()
    replicas, shard = mesh_info.replicas, as_integers(zero3).view(torch.uint8)  # many backends lack other integers
    copies_of_replicas = shard.expand(replicas, -1).contiguous()
    master_bits: Tensor | None = None
    parts = mesh_info.grid.replica_part_sizes(handle.layout)
    if replicas > 1:
        all_gather(
            mesh_info.replica_comm, Collective.UNSHARD, copies_of_replicas.view(-1), shard, name=handle.label
        ).wait()
    copies = copies_of_replicas.view(as_integers(zero3).dtype)
    if _must_equal_master(handle):
        cast_masters = torch.empty_like(zero3)
        own_part = cast_masters[mesh_info.grid.slice_within(handle.layout, Extent.ZERO1, Extent.ZERO3)].copy_(
            _cast_master(handle)
        )
        if replicas > 1:
            all_gather(
                mesh_info.replica_comm, Collective.UNSHARD, cast_masters, own_part, name=handle.label, parts=parts
            ).wait()
        master_bits = as_integers(cast_masters)
    names = {slot.name: index for index, slot in enumerate(handle.layout.slots)}
    own_states = torch.tensor(
        [_STATE_OF_FLAG[masters_unchanged.get(name)] for name in names], dtype=torch.uint8, device=shard.device
    )
    states = own_states.expand(replicas, -1).contiguous()  # [replicas, slots]
    if replicas > 1:
        all_gather(mesh_info.replica_comm, Collective.METADATA, states.view(-1), own_states, name=handle.label).wait()
    differs = (copies != copies[0]).any(dim=0)
    if master_bits is not None:
        differs |= copies[0] != master_bits
    positions, state_lists = differs.nonzero().view(-1).tolist(), states.tolist()
    ends_of_parts = list(accumulate(parts or (handle.layout.shard_numel,) * replicas))
    start = mesh_info.grid.range_of(handle.layout, Extent.ZERO3).start
    elements: dict[tuple[str, tuple[int, ...], str], list[int]] = {}  # elements by kind, ranks and parameter
    for position in positions[: 64 * _SHOWN]:
        values = copies[:, position].tolist()
        parameter, element = _parameter_at(handle.layout, start + position)
        owner = bisect_right(ends_of_parts, position)  # replica that has the master of the element
        state = state_lists[owner][names[parameter]] if parameter in names else _SOUND
        kind, wrong_replicas = _kind_and_replicas(
            values,
            None if master_bits is None else int(master_bits[position]),
            owner if handle.weights.equals_cast_master else None,
            state,
        )
        ranks = tuple(mesh_info.ranks[r * mesh_info.zero3_size + mesh_info.grid.zero3_rank] for r in wrong_replicas)
        elements.setdefault((kind, ranks, parameter), []).append(element)
    return [
        Corruption(
            kind,
            ranks,
            handle.name,
            parameter,
            f"{_format_elements(element_list)}, "
            f"{_describe_difference(kind, master_bits is not None, is_known=len(ranks) < replicas)}",
        )
        for (kind, ranks, parameter), element_list in elements.items()
    ]


def _parameter_at(layout: FlatLayout, flat: int) -> tuple[str, int]:
    """Return the parameter that contains the element at the flat position `flat`, and its flat index in the parameter.

    If the element is padding, return ``"padding"`` and `flat`.
    """
    slot = next((slot for slot in layout.slots if slot.offset <= flat < slot.end), None)
    return ("padding", flat) if slot is None else (slot.name, flat - slot.offset)


def _kind_and_replicas(
    values: Sequence[int], master: int | None, owner: int | None, state: int
) -> tuple[str, list[int]]:
    """Return the kind of corruption of one element, and the replicas on which the element is wrong.

    Args:
        values: bits of the compute weight on each replica, as integers.
        master: bits of the master cast to the compute dtype, as an integer. If None, the owner's compute weight is the
            master.
        owner: replica that has the master. None if compute weights need not equal the cast master.
        state: state of the owner's master since the last step: ``_SOUND`` (unchanged), ``_CHANGED`` (changed without a
            write) or ``_UNKNOWN`` (not recorded, or written to).
    """
    if master is not None:
        assert owner is not None
        wrong_replicas = [r for r, value in enumerate(values) if value != master]
        if len(wrong_replicas) < len(values) or state == _SOUND:
            return "compute weights", wrong_replicas
        # All replicas differ from the master. A single replica does not show which copy is wrong.
        return ("masters" if len(values) > 1 or state == _CHANGED else "masters or compute weights"), [owner]
    (majority, times), *_ = Counter(values).most_common()
    if 2 * times > len(values):
        wrong_replicas = [r for r, value in enumerate(values) if value != majority]
        return ("masters" if owner in wrong_replicas else "compute weights"), wrong_replicas
    if owner is None:
        return "compute weights", list(range(len(values)))
    if state == _SOUND:
        return "compute weights", [r for r, value in enumerate(values) if value != values[owner]]
    return ("masters", [owner]) if state == _CHANGED else ("weights", list(range(len(values))))


def _describe_difference(kind: str, has_truth: bool, *, is_known: bool) -> str:
    if kind == "weights" or not (has_truth or is_known):
        return "replicas differ, and the wrong replica is unknown"
    if kind == "masters or compute weights":
        return "the compute weight is not the cast master"
    if has_truth:
        return "all replicas differ from the master" if kind == "masters" else "differ from the cast master"
    return "differ from other replicas"


def _format_elements(elements: Sequence[int]) -> str:
    more = f" and {len(elements) - _SHOWN} more" if len(elements) > _SHOWN else ""
    return f"element{'s' * (len(elements) > 1)} {', '.join(map(str, elements[:_SHOWN]))}{more}"
