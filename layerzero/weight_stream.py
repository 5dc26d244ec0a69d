"""Stream the compute weights of a sharded model to inference engines, bucket by bucket.

[Note: Values of a weight stream]
A stream yields the weights that the next forward pass uses. They are gathered from the ZeRO-3 shards, in the
compute dtype and inside the ZeRO-3 group. The masters are not read, and nothing is sent between replicas. Before the
first gather, a stream launches the refreshes that the next forward pass would launch, and waits for them.

[Note: End of a weight stream]
The ranks of a ZeRO-3 group take part in each gather. If the consumer on one rank stops early, Python closes its
generator. The generator then runs the remaining gathers and drops their results, so that the other ranks do not wait.
If a generator is neither exhausted nor closed, passes and changes of weights raise an error on this rank. Its peers
raise within the timeout of the process group.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero.extend import (
    Collective,
    Handle,
    LayerZeroState,
    ManagedParam,
    ParamView,
    PendingCollective,
    Slot,
    agreed,
    all_gather,
    get_state,
    overlap,
    refuse_rank_local,
)
from layerzero.slow_links import PacketPosition, make_packet

_BUCKET_BYTES = 512 << 20


def stream_weights(
    model: nn.Module, *, bucket_bytes: int = _BUCKET_BYTES, rank0_only: bool = False
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the names and full tensors of the state dict, with the values that the next forward pass uses.

    Use this function to pass weights to an inference engine. Parameters have the compute dtype. They are gathered
    inside the ZeRO-3 group, in buckets, and nothing is sent between replicas. Buffers and ignored parameters are
    yielded as they are in the module. The names are the same as in ``model.state_dict()``. The names of a tied
    parameter are yielded one after the other, with the same tensor. Entries that are not tensors are omitted.

    A tensor is valid until the next parameter or buffer is requested. It is then emptied: its shape becomes [0].
    Therefore the stream uses at most ``max(bucket_bytes, largest tensor)`` in addition to the model. With
    `rank0_only`, a peer of the first rank may briefly hold two buckets. Parameters that tensor or expert parallelism
    splits also need memory for their parts. To keep a tensor, copy it, or keep ``tensor.detach()``, which also
    keeps the memory. The tensors share no memory with the model.

    All ranks must iterate over the stream, between passes. Until a rank has exhausted its generator, forward passes,
    backward passes and changes of weights raise an error on this rank. If a rank leaves its loop early, the rest of the
    stream is gathered and dropped when the generator is closed, so that the other ranks can continue.

    Args:
        model: a sharded model.
        bucket_bytes: maximum number of bytes that are gathered together. A larger tensor is gathered alone.
        rank0_only: yield tensors on the first rank only. The other ranks of its replica still gather, but yield
            nothing. Other replicas gather only parameters that tensor or expert parallelism splits, and DTensors of
            other frameworks.

    Raises:
        TypeError, ValueError: `model` is not sharded, `bucket_bytes` is not a positive integer, ranks pass different
            arguments, or a name refers to different parameters on different ranks.
        RuntimeError: a pass, another stream, :func:`unsharded`, :func:`gathered` or :func:`full_precision` is active.
            Errors are raised when the first tensor is requested.

    Example::

        for name, tensor in layerzero.stream_weights(model, rank0_only=True):
            engine.load_weight(name, tensor)  # on the first rank; the others only take part
    """
    lz_state = get_state(model)
    _check_bucket(bucket_bytes)
    return _stream(lz_state, bucket_bytes, rank0_only)


def _stream(lz_state: LayerZeroState, bucket_bytes: int, rank0_only: bool) -> Generator[tuple[str, Tensor], None, None]:
    entries = _prepare_stream(lz_state, "stream_weights", bucket_bytes=bucket_bytes, rank0_only=rank0_only)
    with closing(_gather_buckets(lz_state, _buckets(entries, bucket_bytes), rank0_only=rank0_only)) as buckets:
        for bucket in buckets:
            for names, tensor in bucket:
                for name in names:
                    yield name, tensor
                _release_memory(tensor)


class WeightSender:
    """Encoder of a model's weights. Its packets contain only the changes since the last version.

    The first version, and each version with ``full=True``, sends all values. Other versions send the differences of
    16-bit weights losslessly: as integer differences of their bits, compressed with zstd if ``zstandard`` is installed
    on the first rank, and otherwise with zlib. Other dtypes are sent as they are. Units whose weights have not been
    refreshed since the last version, such as a frozen base model, are neither gathered nor sent.

    Most bf16 weights do not change in a step with a small learning rate (Miahi and Belilovsky 2026, arXiv:2602.03839).

    The first rank keeps the previous values of trainable parameters and of buffers in host memory; see :attr:`nbytes`.

    Args:
        model: a sharded model.
        bucket_bytes: maximum number of bytes of the tensors that one packet covers; see :func:`stream_weights`.

    Attributes:
        version: number of the last version, or 0 before the first version.

    Example::

        sender = layerzero.WeightSender(model)
        for step, batch in enumerate(batches):
            train(batch)
            for packet in sender.packets():  # on all ranks; yields packets on the first rank
                connection.send_bytes(packet)
    """

    def __init__(self, model: nn.Module, *, bucket_bytes: int = _BUCKET_BYTES) -> None:
        get_state(model)
        _check_bucket(bucket_bytes)
        self.version = 0
        self._model = model
        self._bucket_bytes = bucket_bytes
        self._name = secrets.token_hex(8)
        self._is_complete = False  # True if all packets of the last version were made
        self._sent_versions: dict[str, int] = {}  # Handle.weights_version by parameter, of the last version
        # Values of the last version by first name, on the host of the first rank.
        self._previous: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes of the previous values that this rank keeps, or 0 on all ranks except the first."""
        return sum(tensor.nbytes for tensor in self._previous.values())

    def packets(self, *, full: bool = False) -> Generator[bytes, None, None]:
        """Yield the packets of the next version on the first rank, and nothing on other ranks.

        All ranks must iterate, as over :func:`stream_weights`. Send each packet to a
        :class:`layerzero.WeightReceiver`, in order. If the first rank leaves its loop early, the next version sends all
        values.

        Args:
            full: send all values, for example because a receiver has started or has missed a version. If any rank
                passes True, all values are sent.

        Raises:
            TypeError: a parameter or buffer has a tensor class whose values cannot be sent.
            RuntimeError, ValueError: see :func:`stream_weights`.
        """
        lz_state = get_state(self._model)
        entries = _prepare_stream(
            lz_state, "WeightSender.packets", check=_refuse_classes, bucket_bytes=self._bucket_bytes
        )
        versions = {entry.names[0]: entry.handle.weights_version for entry in entries if entry.handle is not None}
        full, changed = self._agree_on_entries_to_send(lz_state, entries, versions, full)
        self._is_complete = False
        self.version += 1
        buckets = _buckets(changed, self._bucket_bytes) or [[]]
        base, count = None if full else self.version - 1, len(buckets)
        names_to_keep = {entry.names[0] for entry in entries if entry.handle is None or entry.handle.trainable}
        with closing(_gather_buckets(lz_state, buckets, rank0_only=True)) as gathered:
            for index, bucket in enumerate(gathered):
                if lz_state.ranks.is_first:
                    yield self._packet(
                        PacketPosition(self._name, self.version, base, index, count), bucket, names_to_keep
                    )
        self._sent_versions, self._is_complete = versions, True

    def _agree_on_entries_to_send(
        self, lz_state: LayerZeroState, entries: Sequence[_Entry], versions: dict[str, int], full: bool
    ) -> tuple[bool, list[_Entry]]:
        """Return whether to send all values, and the entries to send. Both results are the same on all ranks."""
        flags = [full or not self._is_complete]
        flags += [self._sent_versions.get(entry.names[0]) != versions.get(entry.names[0], -1) for entry in entries]
        flags_on_device = torch.tensor(flags, dtype=torch.int32, device=lz_state.mesh_info.device)
        lz_state.ranks.all_reduce(flags_on_device, dist.ReduceOp.MAX)
        full, *changed = flags_on_device.bool().tolist()
        return full, [entry for entry, has_changed in zip(entries, changed, strict=True) if full or has_changed]

    def _packet(
        self, position: PacketPosition, bucket: Sequence[tuple[tuple[str, ...], Tensor]], names_to_keep: set[str]
    ) -> bytes:
        if position.base is None and position.packet == 0:
            self._previous.clear()
        tensors = [(names, tensor.cpu().contiguous(), self._previous.get(names[0])) for names, tensor in bucket]
        packet = make_packet(position, tensors)
        for (name, *_), values, previous in tensors:
            if previous is not None:
                previous.copy_(values)
            elif name in names_to_keep:
                self._previous[name] = values.clone()
        return packet


@dataclass(frozen=True, eq=False)
class _Entry:
    """Tensor of a state dict."""

    names: tuple[str, ...]  # several if the tensor is tied
    value: Tensor
    handle: Handle | None = None  # handle, parameter and slot of a sharded parameter, otherwise None
    param: ManagedParam | None = None
    slot: Slot | None = None

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes, as the stream yields it."""
        if self.handle is None or self.param is None:
            return self.value.numel() * self.value.element_size()
        return torch.Size(self.param.spec.full_shape).numel() * self.handle.precision.compute.itemsize

    def is_needed(self, first_rank: int) -> bool:
        """Return whether this rank must take part in a gather for the first rank of the model."""
        if self.param is None:
            return isinstance(self.value, DTensor)
        spec = self.param.spec
        if spec.model_parallel is not None and spec.model_parallel.is_sharded:
            return True
        ranks, size = spec.mesh_info.ranks, spec.mesh_info.zero3_size
        return first_rank in ranks and ranks.index(first_rank) // size == spec.mesh_info.grid.replica_rank

    def launch(self) -> tuple[Tensor, PendingCollective | None]:
        """Launch the gather of a sharded parameter, or copy a tensor that is not sharded by layerzero."""
        if self.handle is not None and self.slot is not None:
            return launch_slot_gather(self.handle, self.slot)
        if isinstance(self.value, DTensor):  # a DTensor of another framework, whose ranks all call this method
            value: Any = self.value.detach()
            return value.full_tensor(), None
        return self.value.detach().clone(memory_format=torch.contiguous_format), None

    def finish(self, gathered: Tensor, pending: PendingCollective | None) -> Tensor:
        """Wait for the gather and return the full tensor."""
        if pending is not None:
            pending.wait()
        if self.param is None:
            return gathered
        spec = self.param.spec
        part = gathered.resize_(spec.shape)  # a view would keep the memory when the stream empties it
        return part if spec.model_parallel is None else spec.model_parallel.gather_global(part)


@torch.no_grad()
def launch_slot_gather(handle: Handle, slot: Slot) -> tuple[Tensor, PendingCollective | None]:
    """Launch the gather of one slot of a handle into new memory, in any state of the full buffer.

    All ranks of the ZeRO-3 group must call this function, after ``finish_refresh(of_peers=True)``. Ranks that share
    memory copy the slot without a collective.

    Returns:
        The slot's elements, 1-D [slot.numel], compute dtype, and the collective that fills them. The collective is
        None if no wait is needed.
    """
    weights, mesh_info = handle.weights, handle.mesh_info
    full = torch.empty(slot.numel, dtype=handle.precision.compute, device=mesh_info.device)
    if weights.buffer.read_by_peers:
        return full.copy_(weights.full_buffer[slot.offset : slot.end]), None
    size = mesh_info.zero3_size
    shard = weights.zero3_shard if weights.host_shard is None else weights.host_shard.read_on_host()
    overlaps = [overlap(slot, handle.layout.zero3_range(rank, size)) for rank in range(size)]
    own_overlap = overlaps[mesh_info.grid.zero3_rank]
    own_part = full[own_overlap.of_slot].copy_(shard[own_overlap.of_range])
    if size == 1 or not slot.numel:
        return full, None
    parts = [each.of_slot.stop - each.of_slot.start for each in overlaps]
    # With `only_reads_shard`, gloo writes the parts in place, without a buffer of its own.
    return full, all_gather(
        mesh_info.zero3_gather_comm,
        Collective.UNSHARD,
        full,
        own_part,
        name=slot.name,
        only_reads_shard=True,
        parts=None if len(set(parts)) == 1 else parts,
    )


def _check_bucket(bucket_bytes: int) -> None:
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r} is not a positive integer. Pass a number of bytes")


def _refuse_classes(entries: Sequence[_Entry]) -> None:
    """Raise TypeError if a tensor is of a subclass whose values cannot be read from its memory."""
    for entry in entries:
        if entry.param is None and type(entry.value) not in (Tensor, nn.Parameter, DTensor):
            raise TypeError(
                f"WeightSender.packets: {entry.names[0]!r} is a {type(entry.value).__name__}, whose values cannot be "
                "sent in packets. Use layerzero.stream_weights(model)"
            )


def _prepare_stream(
    lz_state: LayerZeroState, subject: str, *, check: Callable[[Sequence[_Entry]], None] | None = None, **fields: object
) -> list[_Entry]:
    """Prepare a stream on all ranks and return the tensors of the state dict.

    Afterwards, compute weights have the values of the next forward pass. See [Note: Values of a weight stream].
    """
    with agreed(subject, fields, ranks=lz_state.ranks.ranks):
        _refuse_contexts(lz_state, f"layerzero.{subject}")
        entries = _entries_of(lz_state)
        refuse_rank_local(
            subject, (entry.param.spec for entry in entries if entry.param is not None), lz_state.ranks.size
        )
        if check is not None:
            check(entries)
        fields["tensors"] = [entry.names for entry in entries]
    with torch.no_grad():
        lz_state.scheduler.prepare_gathers()
    for handle in lz_state.handles:
        handle.weights.finish_refresh(of_peers=True)
    return entries


def _refuse_contexts(lz_state: LayerZeroState, subject: str) -> None:
    """Raise RuntimeError during a pass, a weight stream, or a context other than ``EMA.swapped()``.

    Also raise if the model is not usable, for example after a failed load. If the previous pass was interrupted,
    recover from it first.
    """
    lz_state.scheduler.require_no_active_pass(subject)
    lz_state.scheduler.recover_interrupted_pass()
    lz_state.refreshes.require_no_active_use(subject)
    lz_state.status.refuse_inside(ParamView.UNSHARDED, ParamView.FULL_PRECISION, what=subject)
    lz_state.status.require_usable()


def _entries_of(lz_state: LayerZeroState) -> list[_Entry]:
    """Return one entry for each tensor of the state dict, in the order of its first names."""
    slots = {
        id(param.sharded): (handle, param, slot)
        for handle in lz_state.handles
        for param, slot in zip(handle.members, handle.layout.slots, strict=True)
    }
    values: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in lz_state.model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            values.setdefault(id(value), (value, []))[1].append(name)
    return [_Entry(tuple(names), value, *slots.get(id(value), ())) for value, names in values.values()]


def _buckets(entries: Sequence[_Entry], bucket_bytes: int) -> list[list[_Entry]]:
    """Divide the entries into buckets of at most `bucket_bytes`. A larger tensor gets its own bucket."""
    buckets: list[list[_Entry]] = []
    remaining = 0
    for entry in entries:
        if not buckets or entry.nbytes > remaining:
            buckets.append([])
            remaining = bucket_bytes
        buckets[-1].append(entry)
        remaining -= entry.nbytes
    return buckets


def _gather_buckets(
    lz_state: LayerZeroState, buckets: Sequence[Sequence[_Entry]], *, rank0_only: bool
) -> Generator[list[tuple[tuple[str, ...], Tensor]], None, None]:
    """Yield the names and full tensors of each bucket. The tensors are emptied when the next bucket is requested.

    With `rank0_only`, yield empty lists on all ranks except the first one. See [Note: End of a weight stream].
    """
    waiting = iter(buckets)
    with lz_state.scheduler.streaming():
        try:
            for bucket in waiting:
                gathered = _gather(lz_state, bucket, rank0_only=rank0_only)
                yield gathered
                for _, tensor in gathered:
                    _release_memory(tensor)
        except GeneratorExit:
            for bucket in waiting:
                _gather(lz_state, bucket, rank0_only=rank0_only)
            raise


def _gather(
    lz_state: LayerZeroState, bucket: Sequence[_Entry], *, rank0_only: bool
) -> list[tuple[tuple[str, ...], Tensor]]:
    lz_state.require_open()
    receives = lz_state.ranks.is_first or not rank0_only
    needed = [entry for entry in bucket if receives or entry.is_needed(lz_state.ranks.ranks[0])]
    with torch.inference_mode(False), torch.no_grad():  # the tensors must allow `_release_memory` in every mode
        launched = [(entry, *entry.launch()) for entry in needed]
        tensors = [(entry.names, entry.finish(gathered, pending)) for entry, gathered, pending in launched]
    return tensors if receives else []


def _release_memory(tensor: Tensor) -> None:
    """Release the memory of a tensor, unless another tensor uses it."""
    if type(tensor) is Tensor:
        tensor.data = tensor.new_empty(0)
