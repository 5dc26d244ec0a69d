"""Train several sites that synchronize every few steps instead of every step (DiLoCo).

[Note: Outer steps]
Each site trains its own copy of the model for H optimizer steps. All sites store the same weights, the anchor. A site
then computes its delta = anchor - weights (the outer gradient of DiLoCo), and the sites exchange their deltas. With the
mean of the deltas as a gradient, SGD with Nesterov momentum updates the anchor (the outer step). Each rank exchanges
only its own ZeRO-1 shard, with the ranks that have the same rows in the other sites. Anchors and momentum are therefore
sharded like the masters, and an outer step is an update of existing shards.

The model may be cut into fragments of whole units. The exchanges of fragments are spread evenly over the H steps, and
an exchange may overlap with the next `delay` steps (Streaming DiLoCo). A site keeps the updates of these steps: after
an outer step, its weights are

    new anchor + (weights - (anchor - delta as the other sites have decoded it)).

Without a codec, the last term is the progress since the exchange began. With a codec, it also contains the encoding
error. The error is thus part of the next delta (error feedback), and needs no memory of its own.

All sites decode the same bytes in the same order, so their anchors are bitwise equal. Each message starts with the
number of the step, the fragment and a checksum of the anchor, which the receivers compare with their own.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from layerzero import GatherCodec, ShardedOptimizer
from layerzero.ema import own_rows
from layerzero.extend import (
    Collective,
    Communicator,
    Handle,
    LayerZeroState,
    ManagedParam,
    Message,
    ParamRows,
    PendingCollective,
    StepObserver,
    agreed,
    all_gather,
    all_reduce,
    broadcast,
    codec_text,
    connect,
    get_state,
    group_count_fields,
    local_rows,
    record_writes,
    sharded,
    sum64,
    torch_compat,
)

_HEADER_BYTES = 32  # int64 values at the start of a message: step, fragment, checksum of the anchor, and padding
_ALIGNED = 16  # bytes
_MEMORY_KINDS = ("outer", "host_outer")  # on the device, and with Offload(optimizer=True)


class OuterSettings(NamedTuple):
    """Settings of :func:`outer`, which must be equal on all ranks of all sites."""

    every: int
    warmup: int
    fragments: int
    delay: int
    lr: float
    momentum: float
    codec: GatherCodec | None

    def check(self, units: int) -> None:
        """Raise ValueError if a setting is out of range.

        Args:
            units: number of trainable handles to divide into fragments.
        """
        for name, value, least in (
            ("every", self.every, 1),
            ("warmup", self.warmup, 0),
            ("fragments", self.fragments, 1),
            ("delay", self.delay, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} is not valid. Pass an int of at least {least}")
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay} is not less than every={self.every}, so two exchanges of the same weights would "
                f"overlap. Use a delay of at most {self.every - 1}"
            )
        if self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments} is more than every={self.every}, so a step would exchange several "
                f"fragments. Use at most {self.every} fragments"
            )
        if self.fragments > units:
            raise ValueError(
                f"fragments={self.fragments} is more than the {units} trainable units. Use at most {units}"
            )
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"lr={self.lr} and momentum={self.momentum} are not valid for the outer steps. Use lr > 0 and "
                "0 <= momentum < 1, for example lr=0.7 and momentum=0.5"
            )


def outer(
    model: nn.Module,
    *optimizers: ShardedOptimizer,
    sites: DeviceMesh | dist.ProcessGroup,
    every: int,
    warmup: int,
    fragments: int = 1,
    delay: int = 0,
    lr: float = 0.7,
    momentum: float = 0.5,
    codec: GatherCodec | None = None,
) -> OuterSteps:
    """Synchronize several sites every `every` steps (DiLoCo, arXiv:2311.08105; Streaming DiLoCo, arXiv:2501.18512).

    A site is a set of ranks with fast links, such as a cluster. Each site has its own mesh and trains the model on its
    own data. Results differ from synchronous data parallelism; the loss is usually higher. Use outer steps if the link
    between sites is too slow for communication in every step. All ranks of all sites must call this function, after
    :func:`shard_optimizer`. The function copies the weights of the first site to the other sites.

    Call :meth:`OuterSteps.step` after each optimizer step, including during the warm-up. In the first `warmup` steps,
    the sites average their gradients, as in synchronous training. After that, they train separately.

    Args:
        model: model that :func:`shard_model` returned, on the mesh of this rank's site.
        optimizers: all optimizers of the model, which :func:`shard_optimizer` returned.
        sites: 1-D mesh or process group of the ranks with the same position in each site, one per site.
        every: number H of optimizer steps between two outer steps of the same weights.
        warmup: number of synchronous steps before the sites train separately. Training from random weights without
            warm-up ends with a higher loss.
        fragments: number of parts into which the units are divided. Parts are exchanged at different steps.
        delay: number of steps between the start of an exchange and its outer step. It must be less than `every`.
        lr: learning rate of the outer steps.
        momentum: Nesterov momentum of the outer steps.
        codec: codec of the deltas, such as :class:`Int4Blocks`; None sends fp32. Encoding errors are added to the next
            delta, even with ``Int4Blocks(feedback=False)``.

    Returns:
        The object whose ``step()`` performs the outer steps. Its anchors and momentum take 8 bytes per element of the
        ZeRO-1 shard (4 without momentum).

    Raises:
        TypeError, ValueError: an argument is not valid, ranks pass different arguments, or sites have different models.

    Example::

        mesh = init_device_mesh("cuda", (2, 4, 8), mesh_dim_names=("site", "replica", "zero3"))
        model = layerzero.shard_model(model, mesh=mesh["replica", "zero3"], units={Block})
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        outer = layerzero.outer(model, optimizer, sites=mesh["site"], every=32, warmup=1000)
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
    """
    if not optimizers or not all(isinstance(optimizer, ShardedOptimizer) for optimizer in optimizers):
        raise TypeError(
            "layerzero.outer requires the optimizers that layerzero.shard_optimizer returned. Pass at least one"
        )
    lz_state = get_state(model)
    gc.collect()  # `lz_state.optimizers` may have optimizers that nothing else refers to
    if len(optimizers) != len(lz_state.optimizers) or not all(each in lz_state.optimizers for each in optimizers):
        raise ValueError(
            f"layerzero.outer got {len(optimizers)} optimizers, but the model has {len(lz_state.optimizers)}. Pass all "
            "optimizers that shard_optimizer has returned for this model"
        )
    if lz_state.attached_of(OuterSteps) is not None:
        raise ValueError("layerzero.outer was already called for this model. Call close() of its result first")
    settings = OuterSettings(every, warmup, fragments, delay, lr, momentum, codec)
    comm = _agree_and_connect(lz_state, sites, settings)
    return lz_state.attach(OuterSteps(lz_state, optimizers, comm, settings))


def _agree_and_connect(
    lz_state: LayerZeroState, sites: DeviceMesh | dist.ProcessGroup, settings: OuterSettings
) -> Communicator:
    """Check that all ranks of all sites agree on settings and model, and create the communicator between sites."""
    numbers = {key: v if isinstance(v, (int, float)) else repr(v) for key, v in settings._asdict().items()}
    fields = {**numbers, "codec": codec_text(settings.codec)}
    with agreed("layerzero.outer", fields, ranks=lz_state.ranks.ranks):
        user_group = _process_group_of(sites)
        site_peers = dist.get_process_group_ranks(user_group)
        _require_sites(lz_state, site_peers)
        position = lz_state.ranks.ranks.index(dist.get_rank())
        with agreed(
            "layerzero.outer, between sites",
            {**fields, "position of the rank in its site": position, "units": _describe_own_part(lz_state)},
            ranks=site_peers,
            groups=group_count_fields(site_peers),
            advice="Shard the same model in the same way in each site",
        ):
            settings.check(units=sum(handle.trainable for handle in lz_state.handles))
    kind = lz_state.mesh_info.mesh.device_type
    group = lz_state.mesh_info.groups.new(site_peers, like=user_group, device_type=kind)
    comm = Communicator.over("sites", "site", group, lz_state.mesh_info.counters, kind)
    connect(comm, lz_state.mesh_info.device, [Message("all_gather"), Message("all_reduce")])
    return comm


def _describe_own_part(lz_state: LayerZeroState) -> list[object]:
    """Describe this rank's part of the model. Ranks at the same position in each site must have equal descriptions."""
    return [
        [handle.name, handle.mesh_info.shard_index, handle.trainable, str(handle.weights.master.dtype)]
        + [[member.name, list(member.spec.full_shape), list(member.spec.bounds)] for member in handle.members]
        for handle in lz_state.handles
    ]


def _process_group_of(sites: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if isinstance(sites, DeviceMesh):
        if sites.ndim != 1:
            raise ValueError(
                f'sites is a mesh with {sites.ndim} axes, but sites are connected along one axis. Pass mesh["site"], '
                "the axis of the sites"
            )
        return sites.get_group()
    if not isinstance(sites, dist.ProcessGroup):
        raise TypeError(
            f"sites must be a 1-D DeviceMesh or a ProcessGroup, got {type(sites).__name__}. Pass the axis of a mesh "
            "that connects the ranks with the same position in each site"
        )
    return sites


def _require_sites(lz_state: LayerZeroState, site_peers: Sequence[int]) -> None:
    common = sorted(set(site_peers) & set(lz_state.ranks.ranks))
    if common != [dist.get_rank()]:
        raise ValueError(
            f"sites={list(site_peers)} must contain one rank of this rank's site {list(lz_state.ranks.ranks)}, rank "
            f"{dist.get_rank()}, but contains {common}. Pass one rank of each site, at the same position in each"
        )


class _Exchange(NamedTuple):
    """Exchange of the deltas of one fragment."""

    messages: Tensor  # uint8 [sites, bytes], on the communicator's device
    works: PendingCollective


class _Deltas(NamedTuple):
    """Decoded deltas of one fragment, 1-D [n]; see :class:`_Fragment`."""

    mean: Tensor  # of all sites
    own: Tensor  # of this site, as the other sites have decoded it


@dataclass(eq=False)
class _Fragment:
    """Handles whose deltas are exchanged in one message. This rank has n elements of their masters."""

    index: int
    handles: tuple[Handle, ...]
    anchor: Tensor  # 1-D [n], fp32 (fp64 if masters are): this rank's rows of the weights after the last outer step
    velocity: Tensor | None  # 1-D [n], momentum of the outer steps
    due: int | None = None  # value of OuterSteps.steps at which the outer step of the exchange is taken
    exchange: _Exchange | None = None
    deltas: _Deltas | None = None  # of the exchange in flight, once its messages are decoded

    @cached_property
    def blocks(self) -> list[ParamRows]:
        """Range of each parameter's elements in a 1-D tensor [n], for the codec.

        A codec never uses one scale for two of these ranges. Otherwise, ranks on a tensor-parallel axis would decode
        different values for their copies of a parameter, because the elements around the copies differ.
        """
        blocks, first = [], 0
        for handle in self.handles:
            spans = (member.shard_slice for member in handle.members)
            blocks += [
                ParamRows(first + span.start, 1, span.stop - span.start) for span in spans if span.stop > span.start
            ]
            first += handle.weights.master.numel()
        return blocks

    def parts(self, flat: Tensor) -> Iterator[tuple[Handle, Tensor]]:
        """Yield each handle with its part of the 1-D tensor `flat` [n]."""
        sizes = [handle.weights.master.numel() for handle in self.handles]
        yield from zip(self.handles, torch.split(flat, sizes), strict=True)


class OuterSteps(StepObserver):
    """Outer steps of one model. Created by :func:`outer`; see [Note: Outer steps].

    Attributes:
        steps: number of calls to :meth:`step`.
        settings: settings of :func:`outer`.
    """

    def __init__(
        self,
        lz_state: LayerZeroState,
        optimizers: Sequence[ShardedOptimizer],
        comm: Communicator,
        settings: OuterSettings,
    ) -> None:
        self.steps = 0
        self.settings = settings
        self._lz_state = lz_state
        self._comm = comm
        self._averaged_backwards = -1  # number of backward passes before the last average of gradients
        self._has_begun = False  # True after the first optimizer step, or after a state was loaded
        self._broadcast_first_site()
        self._handles = tuple(handle for handle in lz_state.handles if handle.trainable)
        self._layouts = tuple(handle.layout for handle in self._handles)
        self._fragment_handles = _divide_handles(self._handles, settings.fragments)
        self._start_positions = start_positions(settings.every, settings.fragments)
        self._fragments: list[_Fragment] = []  # empty during the warm-up
        self._is_open = True
        self._optimizers = tuple(optimizers)
        if not settings.warmup:
            self._set_anchors()

    @property
    def in_warmup(self) -> bool:
        """True if the next optimizer step is synchronous."""
        return self.steps < self.settings.warmup

    @property
    def nbytes(self) -> int:
        """Size in bytes of the anchors and the momentum on this rank."""
        kept = [tensor for each in self._fragments for tensor in (each.anchor, each.velocity) if tensor is not None]
        return sum(tensor.nbytes for tensor in kept)

    def kept_bytes(self) -> dict[str, int]:
        return {_MEMORY_KINDS[self._lz_state.config.offload.optimizer]: self.nbytes}

    def close(self) -> None:
        """Stop averaging gradients, and free the anchors and the momentum.

        Later calls to :meth:`step` raise an error.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._fragments.clear()
        self.detach()

    @torch.no_grad()
    def gradients_final(self, optimizer: Optimizer) -> None:
        """Prepare for an optimizer step."""
        if not any(optimizer is each for each in self._optimizers):
            return
        if not self._has_begun:
            self._require_usable()
            for fragment in self._fragments:  # weights may have been loaded since the anchors were set
                fragment.anchor.copy_(_flat_master(fragment.handles))
            self._has_begun = True
        self.average_gradients()

    # Synchronous steps

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all sites during the warm-up, and do nothing afterwards.

        ``optimizer.step()`` calls this method. Call it yourself before code that reads gradients, such as
        :func:`clip_grad_norm_` or ``GradScaler.unscale_``. Further calls before the next backward pass have no effect.
        """
        if not (self._is_open and self.in_warmup):
            return
        self._require_usable()
        self._lz_state.scheduler.complete_gradients()
        if self._averaged_backwards == self._lz_state.gradients.backwards:
            return
        self._averaged_backwards = self._lz_state.gradients.backwards
        used = self._members_used_by_any_site()
        if not used:
            return
        device = self._lz_state.mesh_info.device
        gradients = [member.sharded.grad for member in used]
        rows = [local_rows(gradient).view(-1) for gradient in gradients if gradient is not None]
        flat = torch.cat(rows).to(device)
        all_reduce(self._comm, Collective.SITE_GRADIENTS, flat, dist.ReduceOp.SUM).wait()
        flat.div_(self._comm.size)
        torch_compat.foreach_copy_(rows, list(torch.split(flat.to(rows[0].device), [each.numel() for each in rows])))
        record_writes(gradient for gradient in gradients if gradient is not None)

    def _members_used_by_any_site(self) -> list[ManagedParam]:
        """Return the parameters that have gradients in any site, after giving them zero gradients in the other sites.

        Raises:
            RuntimeError: the sites are at different steps.
        """
        members = [member for handle in self._handles for member in handle.members]
        flags = [member.sharded.grad is not None for member in members]
        numbers = torch.tensor(
            [self.steps, -self.steps, *flags], dtype=torch.int32, device=self._lz_state.mesh_info.device
        )
        all_reduce(self._comm, Collective.SITE_GRADIENTS, numbers, dist.ReduceOp.MAX).wait()
        latest, earliest, *flags = numbers.tolist()
        if latest != -earliest:
            raise RuntimeError(
                f"layerzero.outer: the sites are at different steps: {self.steps} on rank {dist.get_rank()}, "
                f"{-earliest} to {latest} on the ranks {list(self._comm.held_group.ranks)}. Call step() once per "
                "optimizer step in all sites. With a GradScaler, also call average_gradients() before unscale_()"
            )
        used = [member for member, flag in zip(members, flags, strict=True) if flag]
        if absent := [member for member in used if member.sharded.grad is None]:  # only other sites have used them
            for member in absent:
                member.sharded.grad = torch.zeros_like(member.sharded)
            self._lz_state.scheduler.complete_gradients()
        return used

    def _require_usable(self) -> None:
        """Raise an error if the outer steps cannot use the current parameters.

        Raises:
            RuntimeError: a context such as ``layerzero.unsharded`` is active, a load has failed, the shard boundaries
                have changed, or parameters have been unfrozen.
        """
        status = self._lz_state.status
        status.refuse_inside(what="a step of layerzero.outer", why="where the parameters are not those of the training")
        if status.load_error:
            raise RuntimeError(status.load_error)
        if any(handle.layout is not layout for handle, layout in zip(self._handles, self._layouts, strict=True)):
            raise RuntimeError(
                "shard_optimizer changed the shard boundaries of the model after layerzero.outer was called. Call "
                "layerzero.outer after the last shard_optimizer"
            )
        if added := [
            handle.name for handle in self._lz_state.handles if handle.trainable and handle not in self._handles
        ]:
            raise RuntimeError(
                f"parameters of {', '.join(added)} were unfrozen after layerzero.outer was called, so the sites would "
                "not exchange them. Call close() of the outer steps, and layerzero.outer again"
            )

    def _broadcast_first_site(self) -> None:
        """Copy the weights of the first site to the other sites."""
        self._lz_state.refreshes.before_master_write()
        with torch.no_grad():
            for handle in self._lz_state.handles:
                master, device = handle.weights.master, self._lz_state.mesh_info.device
                on_device = master.detach().to(device)
                if on_device.numel():
                    broadcast(self._comm, Collective.BROADCAST, on_device)
                if on_device.data_ptr() != master.data_ptr():
                    master.copy_(on_device)
        self._lz_state.refreshes.launch()

    # Outer steps

    @torch.no_grad()
    def step(self) -> None:
        """Exchange deltas and take outer steps if they are due. Call this method after each optimizer step.

        All ranks of all sites must call this method the same number of times, even if a loss scaler or a guard has
        skipped the optimizer step in some sites.

        Raises:
            RuntimeError: the sites are at different steps, or their anchors differ. All ranks of all sites raise.
        """
        if not self._is_open:
            raise RuntimeError(
                "step() was called after the outer steps, or the model, were closed. Call layerzero.outer again on an "
                "open model"
            )
        self._require_usable()
        self.steps += 1
        if self.steps < self.settings.warmup:
            return
        if self.steps == self.settings.warmup:
            self._set_anchors()
            return
        for fragment in self._fragments:
            if fragment.due == self.steps:
                self._take_outer_step(fragment)
        position = (self.steps - self.settings.warmup) % self.settings.every
        for fragment in self._fragments:
            if position == self._start_positions[fragment.index]:
                self._start_exchange(fragment)
                if not self.settings.delay:
                    self._take_outer_step(fragment)

    def _set_anchors(self) -> None:
        """Use the current weights as anchors. Raise RuntimeError if they differ between sites."""
        self._fragments = [self._new_fragment(*each) for each in enumerate(self._fragment_handles)]
        own = torch.stack([sum64(fragment.anchor) for fragment in self._fragments]).to(self._lz_state.mesh_info.device)
        gathered = own.new_empty(self._comm.size, len(own))
        all_gather(self._comm, Collective.SITE_DELTAS, gathered.view(-1), own, name="checksums").wait()
        differs = (gathered != own).any().to(torch.int32)
        self._lz_state.ranks.all_reduce(differs, dist.ReduceOp.MAX)  # other ranks of the site may have equal rows
        if differs.item():
            raise RuntimeError(
                f"layerzero.outer: after {self.steps} synchronous steps, the weights on the ranks "
                f"{list(self._comm.held_group.ranks)} of different sites differ, but outer steps must begin with equal "
                "weights. Pass all optimizers to layerzero.outer, call step() after each optimizer step, and use the "
                "same learning rates and weight changes in all sites"
            )

    def _new_fragment(self, index: int, handles: tuple[Handle, ...]) -> _Fragment:
        """Return a fragment whose anchor is the current weights."""
        anchor = _flat_master(handles)
        return _Fragment(index, handles, anchor, torch.zeros_like(anchor) if self.settings.momentum else None)

    def _start_exchange(self, fragment: _Fragment) -> None:
        """Start the all-gather of the deltas of all sites."""
        payload_bytes = self._payload_bytes(fragment)
        width = _HEADER_BYTES + -(-payload_bytes // _ALIGNED) * _ALIGNED
        message = torch.zeros(width, dtype=torch.uint8, device=fragment.anchor.device)
        header = message[:_HEADER_BYTES].view(torch.int64)
        header[0], header[1], header[2] = self.steps, fragment.index, sum64(fragment.anchor)
        self._encode(fragment, message[_HEADER_BYTES : _HEADER_BYTES + payload_bytes])
        messages = torch.empty(self._comm.size, width, dtype=torch.uint8, device=self._lz_state.mesh_info.device)
        messages[self._comm.rank].copy_(message)
        name = f"fragment {fragment.index}"
        works = all_gather(self._comm, Collective.SITE_DELTAS, messages.view(-1), messages[self._comm.rank], name=name)
        fragment.exchange, fragment.due = _Exchange(messages, works), self.steps + self.settings.delay

    def _wait_and_decode(self, fragment: _Fragment) -> _Deltas | None:
        """Wait for the exchange in flight, if there is one, and decode its messages."""
        exchange = fragment.exchange
        if exchange is None:
            return fragment.deltas
        exchange.works.wait()
        messages = exchange.messages.to(fragment.anchor.device)
        self._require_same_step(fragment, messages[:, :_HEADER_BYTES].contiguous().view(torch.int64))
        payloads = messages[:, _HEADER_BYTES : _HEADER_BYTES + self._payload_bytes(fragment)]
        mean, own = torch.zeros_like(fragment.anchor), torch.empty_like(fragment.anchor)
        for site, payload in enumerate(payloads):
            delta = self._decode(fragment, payload)
            mean.add_(delta)
            if site == self._comm.rank:
                own.copy_(delta)
        fragment.deltas, fragment.exchange = _Deltas(mean.div_(self._comm.size), own), None
        return fragment.deltas

    def _encode(self, fragment: _Fragment, payload: Tensor) -> None:
        """Write this site's delta of `fragment` to `payload`, the message without its header, 1-D uint8."""
        delta = fragment.anchor - _flat_master(fragment.handles)
        if self.settings.codec is None:
            payload.view(delta.dtype).copy_(delta)
        elif fragment.blocks:
            self.settings.codec.encode(delta.float(), fragment.blocks, payload)

    def _decode(self, fragment: _Fragment, payload: Tensor) -> Tensor:
        """Decode the delta in `payload`, a message without its header. Without a codec, the result is a view."""
        if self.settings.codec is None:
            return payload.view(fragment.anchor.dtype)
        values = torch.zeros_like(fragment.anchor, dtype=torch.float32)  # padding is not encoded
        if fragment.blocks:
            self.settings.codec.decode(payload, fragment.blocks, values)
        return values.to(fragment.anchor.dtype)

    def _payload_bytes(self, fragment: _Fragment) -> int:
        """Return the size of an encoded delta in bytes, without the header."""
        if self.settings.codec is None:
            return fragment.anchor.nbytes
        return self.settings.codec.nbytes(fragment.blocks, torch.float32) if fragment.blocks else 0

    def _require_same_step(self, fragment: _Fragment, headers: Tensor) -> None:
        """Raise RuntimeError on all ranks of the site if messages differ in their step, fragment or anchor checksum."""
        differs = (headers != headers[self._comm.rank]).any()
        on_any_rank = differs.to(self._lz_state.mesh_info.device, torch.int32)
        self._lz_state.ranks.all_reduce(on_any_rank, dist.ReduceOp.MAX)
        if not on_any_rank.item():
            return
        if not differs:
            raise RuntimeError(
                f"layerzero.outer: other ranks of this site have received messages for fragment {fragment.index} from "
                "sites that are at another step or have other anchors. Their errors name the steps and the anchors"
            )
        sent = "; ".join(
            f"rank {rank}: step {step}, fragment {index}, anchor {checksum & (2**64 - 1):x}"
            for rank, (step, index, checksum, _) in zip(self._comm.held_group.ranks, headers.tolist(), strict=True)
        )
        raise RuntimeError(
            f"layerzero.outer: the sites are at different steps, or have different anchors of fragment "
            f"{fragment.index}, which begins with {fragment.handles[0].name!r} ({sent}). Call step() equally "
            "often in all sites, load the same weights in all sites, and resume them from checkpoints of the same step"
        )

    def _take_outer_step(self, fragment: _Fragment) -> None:
        """Take the outer step of a fragment: update its anchor, and add this site's later progress to it."""
        deltas = self._wait_and_decode(fragment)
        assert deltas is not None
        fragment.deltas = fragment.due = None
        start = fragment.anchor - deltas.own  # weights when the exchange began, as the other sites have decoded them
        update = deltas.mean
        if fragment.velocity is not None:
            fragment.velocity.mul_(self.settings.momentum).add_(deltas.mean)
            update = deltas.mean + self.settings.momentum * fragment.velocity
        fragment.anchor.sub_(update, alpha=self.settings.lr)
        self._lz_state.refreshes.before_master_write(fragment.handles, outside_step=False)
        for (handle, start_part), (_, anchor) in zip(
            fragment.parts(start), fragment.parts(fragment.anchor), strict=True
        ):
            master = handle.weights.master
            master.copy_(anchor + (master - start_part))
        # Errors of encoded gradients and differences to the previous weights remain valid.
        self._lz_state.refreshes.launch(fragment.handles, outside_step=False)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the outer steps, to be saved with this site's model and optimizer.

        All ranks of the site must call this method. It waits for exchanges in flight, but does not take their outer
        steps.

        Returns:
            ``{"steps": number, "anchors": {name: tensor}, "velocities": {name: tensor}, "means": {name: tensor},
            "own": {name: tensor}, "due": {name: number}}``. Tensors are sharded like the parameters. The last three
            entries describe exchanges in flight. Pass the result in ``extra`` of :func:`layerzero.checkpoint.save`.
        """
        state: dict[str, Any] = {
            "steps": self.steps,
            **{key: {} for key in ("anchors", "velocities", "means", "own", "due")},
        }
        for fragment in self._fragments:
            deltas = self._wait_and_decode(fragment)
            named = {"anchors": fragment.anchor, "velocities": fragment.velocity}
            if deltas is not None:
                named |= {"means": deltas.mean, "own": deltas.own}
            for key, flat in named.items():
                if flat is not None:
                    state[key] |= {m.name: sharded(rows, m.spec) for m, rows in _iter_rows(fragment, flat)}
            if deltas is not None:
                state["due"] |= {member.name: fragment.due for member, _ in _iter_rows(fragment, fragment.anchor)}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Load the model and the optimizer of this site first.

        If the state has no momentum, the momentum starts at zero.

        Raises:
            ValueError: parameters are missing or unexpected, or an exchange was in flight and the fragments differ.
        """
        steps, anchors = int(state_dict["steps"]), state_dict["anchors"]
        names = {member.name for handle in self._handles for member in handle.members}
        expected = names if steps >= self.settings.warmup else set()
        if set(anchors) != expected:
            missing, unexpected = sorted(expected - set(anchors)), sorted(set(anchors) - expected)
            raise ValueError(
                f"the state of the outer steps does not fit the model after {steps} steps with "
                f"warmup={self.settings.warmup}: missing {missing}, unexpected {unexpected}. Load a state with the "
                "same parameters and the same warmup"
            )
        fragments = []
        for index, handles in enumerate(self._fragment_handles if expected else ()):
            fragment = self._new_fragment(index, handles)
            _load_rows(fragment, fragment.anchor, anchors)
            if fragment.velocity is not None and state_dict["velocities"]:
                _load_rows(fragment, fragment.velocity, state_dict["velocities"])
            _load_deltas(fragment, state_dict)
            fragments.append(fragment)
        self.steps, self._fragments, self._averaged_backwards, self._has_begun = steps, fragments, -1, True


def _divide_handles(handles: Sequence[Handle], fragments: int) -> list[tuple[Handle, ...]]:
    """Divide handles, in their order, into fragments of about equal size. The result is the same on all ranks."""
    sizes = [sum(math.prod(member.spec.full_shape) for member in handle.members) for handle in handles]
    return [tuple(handles[index] for index in indices) for indices in divide_into_fragments(sizes, fragments)]


def _flat_master(handles: Sequence[Handle]) -> Tensor:
    """Return a copy of this rank's masters, 1-D [n], in fp32 or fp64."""
    masters = [handle.weights.master.view(-1) for handle in handles]
    dtype = torch.float64 if any(master.dtype == torch.float64 for master in masters) else torch.float32
    return torch.cat([master.to(dtype) for master in masters])


def _iter_rows(fragment: _Fragment, flat: Tensor) -> Iterator[tuple[ManagedParam, Tensor]]:
    """Yield each parameter of a fragment with its rows in the 1-D tensor `flat` [n]."""
    for handle, part in fragment.parts(flat):
        for member in handle.members:
            yield member, part[member.shard_slice].view(member.master.shape)


def _load_rows(fragment: _Fragment, flat: Tensor, loaded: Mapping[str, Any]) -> None:
    for member, rows in _iter_rows(fragment, flat):
        rows.copy_(own_rows(member, loaded[member.name], "outer state"))


def _load_deltas(fragment: _Fragment, state_dict: Mapping[str, Any]) -> None:
    """Load the deltas of the exchange that was in flight during the save, if there was one."""
    names = [member.name for handle in fragment.handles for member in handle.members]
    due = {state_dict["due"].get(name) for name in names}
    if due == {None}:
        return
    if len(due) > 1:
        raise ValueError(
            "the state of the outer steps was saved with other fragments while an exchange was in flight. Load it with "
            "the same units and number of fragments"
        )
    fragment.due = int(due.pop())
    fragment.deltas = _Deltas(torch.zeros_like(fragment.anchor), torch.zeros_like(fragment.anchor))
    _load_rows(fragment, fragment.deltas.mean, state_dict["means"])
    _load_rows(fragment, fragment.deltas.own, state_dict["own"])


def divide_into_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Divide a sequence of items into contiguous groups of about equal total size.

    Args:
        sizes: size of each item. There are at least `fragments` items.
        fragments: number of groups.

    Returns:
        The indices of the items of each group. No group is empty.
    """
    starts = [0]
    done, total = 0, sum(sizes)
    for index, size in enumerate(sizes):
        remaining = len(sizes) - index
        has_reached_share = len(starts) * total <= done * fragments
        must_start = remaining <= fragments - len(starts)
        if index > starts[-1] and len(starts) < fragments and (has_reached_share or must_start):
            starts.append(index)
        done += size
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def start_positions(every: int, fragments: int) -> list[int]:
    """Return the position, in a period of `every` steps, of the step after which each fragment is sent.

    Position 1 is the first step of a period, and position 0 the last. The last fragment is sent at the end of a period.
    """
    return [every * (index + 1) // fragments % every for index in range(fragments)]
