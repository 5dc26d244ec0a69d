"""Store the weights of one handle (master, ZeRO-3 shard and full buffer), and copy weights between these three.

[Note: Shared storage of equal shards]
The ZeRO-1 shard is a part of the ZeRO-3 shard. If both have the same dtype, the master is a view of that part and needs
no extra memory. If S = 1, the ZeRO-3 shard is the full buffer, and no gathers are needed. A transport with resident
full buffers also needs no gathers. Its memory contains the ZeRO-3 shards of all ranks in order. Together, these shards
are the full buffer of every rank. [Note: Write rounds] in comm/transport/base.py defines when ranks may write and read
this memory.

[Note: Version counters]
Collectives write to the full buffer. `compute` is an alias of the full buffer with a separate version counter, and the
gathered parameters are views of `compute`. The alias is needed because gloo bumps the counter of its output from
another thread, and autograd would report this as an in-place change. All gathered parameters share the counter of
`compute`, except DTensors and parameters with custom strides, which have separate counters. A changed counter shows
that a forward pass has changed gathered weights. Such a change would be lost. After an optimizer step, the counter is
bumped, so that autograd rejects older graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from layerzero.comm.collectives import Collective, PendingCollective, all_gather
from layerzero.comm.refreshers import COMPARE_EVERY, EncodedRefresher, PendingRefresh, RefreshInput
from layerzero.comm.transport.base import FullBuffer, GatherOptions
from layerzero.config import Precision
from layerzero.device.host_shard import HostShard
from layerzero.device.streams import Waitable
from layerzero.dtensor.gather_extension import ExtendedGather, GatherExtension
from layerzero.engine.gathered_params import GatheredParams
from layerzero.engine.resources import MeshResources
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent, overlap


class WeightStorage:
    """Master, ZeRO-3 shard and full buffer of one handle, and the gathered parameters that are views of the buffer.

    Args:
        layout: positions of the parameters in the flat order.
        parameters: full parameters, one per slot. The constructor copies this rank's rows.
        precision: dtypes of masters and compute weights.
        mesh: transport and pools.
        options: options for gathers, such as the codec and the ranks that keep post-forward shards.
        label: name of the unit, for traces.
        updated_on_host: True if the master is stored in host memory when the optimizer is offloaded.
        refresher: object that encodes refreshes, or None.
        extension: all-gather extension of the only parameter in `layout`, which gathers the shard, or None. With an
            extension, there is no full buffer.
        previous: weights whose shards are copied instead of rows of `parameters`, or None.

    Attributes:
        master: ZeRO-1 shard, 1-D [L].
        buffer: full buffer of the transport, with the ZeRO-3 shard.
        compute: alias of the full buffer, 1-D [G]; see [Note: Version counters].
        to_host: object that copies the master if the optimizer runs on the host, or None; see gradient_storage.py.
        host_shard: ZeRO-3 shard in host memory; see device/host_shard.py. If it is None, the shard is on the device.
        extended: gathers of the parameter through its all-gather extension, or None.
        params: gathered parameters.
        refresh_in_full: True if the next refresh must not be sent as differences.
        last_change: last change of each compute weight, 1-D [G / S], int16, from which `refresher` predicts the next
            change; None if it predicts nothing. See [Note: Lossless differences] in slow_links/lossless_differences.py.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[Tensor],
        precision: Precision,
        mesh: MeshResources,
        options: GatherOptions,
        *,
        label: str,
        updated_on_host: bool,
        refresher: EncodedRefresher | None,
        extension: GatherExtension | None,
        previous: WeightStorage | None = None,
    ) -> None:
        self.layout = layout
        self.precision = precision
        self.mesh_info = mesh.mesh_info
        self.pool = mesh.pools.full
        self.to_host = mesh.pools.to_host if updated_on_host else None
        self.host_shard: HostShard | None = None
        self.label = label
        self.refresher = refresher
        self.refresh_in_full = True
        self._refreshing: PendingRefresh | None = None
        self._refreshes = 0  # the same number on all ranks

        grid, dtype = self.mesh_info.grid, precision.compute
        numel, copies = grid.numel(layout, Extent.ZERO3), mesh.pools.weights_to_host
        if copies is not None and not mesh.transport.traits.shares_memory:
            self.host_shard = HostShard(numel, dtype, copies, mesh.pools.scratch)
        self.buffer: FullBuffer
        if extension is not None:
            shard = torch.zeros(numel, dtype=dtype, device=self.mesh_info.device)
            self.buffer = FullBuffer(shard, shard)
        else:
            self.buffer = mesh.transport.full_buffer(layout, dtype, options._replace(host_shard=self.host_shard))
        self._own_part = self.zero3_shard[grid.slice_within(layout, Extent.ZERO1, Extent.ZERO3)]
        predicts = refresher is not None and refresher.predicts
        self.last_change = torch.zeros(numel, dtype=torch.int16, device=self.mesh_info.device) if predicts else None
        self.master = self._new_master()
        self.compute = self.buffer.full.data
        self._set_values(parameters if previous is None else previous)
        self.extended: ExtendedGather | None = None
        if extension is not None:
            name, shape = layout.slots[0].name, tuple(parameters[0].shape)
            self.extended = extension(name, shape, self.zero3_shard, self.mesh_info, self.pool, label=label)
        self.params: GatheredParams | ExtendedGather = self.extended or GatheredParams(self.compute)
        self._version = self.params.version

    # Memory

    @property
    def zero3_shard(self) -> Tensor:
        """Compute weights of this rank, 1-D [G / S]."""
        return self.buffer.shard

    @property
    def full_buffer(self) -> Tensor:
        """Full buffer, 1-D [G]. Its storage is empty while the buffer is freed."""
        return self.buffer.full

    @cached_property
    def shares_master(self) -> bool:
        """True if the master is a view of the ZeRO-3 shard; see [Note: Shared storage of equal shards]."""
        return self.precision.master == self.precision.compute and self.to_host is None and self.host_shard is None

    @property
    def equals_cast_master(self) -> bool:
        """True if refreshed compute weights equal the cast masters.

        Otherwise, they differ by the error of a codec; see [Note: Lossy differences] in slow_links/int4_difference.py.
        """
        return self.refresher is None or self.refresher.lossless

    @property
    def peers_read_master(self) -> bool:
        """True if other ranks read the master in place. The master may then be written only in rounds.

        See [Note: Write rounds] in comm/transport/base.py.
        """
        return self.shares_master and self.buffer.read_by_peers

    @cached_property
    def needs_gather(self) -> bool:
        """True if weights must be gathered, or copied from host memory, before a unit computes."""
        if self.host_shard is not None:
            return True
        return not self.buffer.read_by_peers and not self.mesh_info.grid.same_elements(Extent.ZERO3, Extent.FULL)

    def _new_master(self) -> Tensor:
        """Return memory for the master, 1-D [L]; see [Note: Shared storage of equal shards]."""
        if self.shares_master:
            return self._own_part.data
        numel = self.mesh_info.grid.numel(self.layout, Extent.ZERO1)
        if self.to_host is not None:
            return self.to_host.host_buffer(numel, self.precision.master).zero_()
        return torch.zeros(numel, dtype=self.precision.master, device=self.mesh_info.device)

    @torch.no_grad()
    def _set_values(self, source: Sequence[Tensor] | WeightStorage) -> None:
        grid, layout = self.mesh_info.grid, self.layout
        if isinstance(source, WeightStorage):
            self.zero3_shard.copy_(source.zero3_shard)
            self.master.copy_(source.master)
        else:
            for slot, parameter in zip(layout.slots, source, strict=True):
                values = parameter.detach().contiguous().view(-1)
                for extent, target in ((Extent.ZERO3, self.zero3_shard), (Extent.ZERO1, self.master)):
                    common = overlap(slot, grid.range_of(layout, extent))
                    target[common.of_range] = values[common.of_slot]
        self.buffer.publish(None)

    @torch.no_grad()
    def change_layout(self, layout: FlatLayout) -> None:
        """Change to the ZeRO-1 shards of `layout`, which has the same flat order but different shard boundaries.

        All ranks must call this method between passes.
        """
        self.finish_refresh()
        mesh_info, old_layout = self.mesh_info, self.layout
        self.refresh_in_full = True
        own_slice = mesh_info.grid.slice_within(layout, Extent.ZERO1, Extent.ZERO3)
        self.layout = layout
        self._own_part = self.zero3_shard[own_slice]  # after a refresh, the shard has the values of all replicas
        if self.shares_master:
            self.master = self._new_master()
            return
        all_masters = torch.empty(len(self.zero3_shard), dtype=self.precision.master, device=mesh_info.device)
        own_master = self.master.to(mesh_info.device)
        parts = mesh_info.grid.replica_part_sizes(old_layout)
        pending = all_gather(
            mesh_info.replica_comm, Collective.UNSHARD, all_masters, own_master, name=self.label, parts=parts
        )
        pending.wait()
        self.master = self._new_master().copy_(all_masters[own_slice])

    # Gather and reshard

    def gather(self) -> Waitable | None:
        """Launch the gather of the full buffer. Return it, or None if there is nothing to wait for."""
        if self.buffer.gather_waits_for_refresh:
            refreshing = self._refreshing
            assert refreshing is None or isinstance(refreshing, PendingCollective)
            return self.buffer.gather(name=self.label, after=refreshing)
        if self.extended is not None:
            self.finish_refresh()
            return self.extended.gather(name=self.label)
        if self.needs_gather:
            self.finish_refresh()
        return self.buffer.gather(name=self.label)

    def fill(self) -> None:
        """Fill the gathered parameters after the wait for the gather."""
        self.finish_refresh()
        self.params.fill(self.pool)

    @property
    def edited(self) -> bool:
        """True if a gathered parameter was changed in place since the last call to :meth:`free`."""
        return self.params.version != self._version

    def free(self) -> bool:
        """Free the full buffer. The next gather refills the storage of views that autograd has saved.

        Return True if a gathered parameter was changed in place since the last call.
        """
        previous, self._version = self._version, self.params.version
        self.params.free(self.pool)
        self.buffer.free()
        return self._version != previous

    @property
    def gathered_bytes(self) -> int:
        """Number of bytes currently allocated for gathered weights."""
        return self.buffer.nbytes + self.params.nbytes

    def invalidate_graphs(self) -> None:
        """Make backward passes of graphs that have saved gathered parameters fail, because the weights change."""
        self.buffer.drop_post_forward()  # it contains the old weights
        self.params.bump_version()
        self._version = self.params.version

    # Refresh

    @torch.no_grad()
    def launch_refresh(self) -> None:
        """Copy the master to its part of the ZeRO-3 shard, and launch an all-gather for the other replicas' parts."""
        self.finish_refresh()
        self._refreshes += 1
        compares, refresher = self._refreshes % COMPARE_EVERY == 0, self.refresher
        if refresher is not None and not (refresher.on_device and (self.refresh_in_full or compares)):
            self._launch_encoded(refresher, compares=compares)
            return
        self.refresh_in_full = False
        zero3, own_part = self.zero3_shard, self._own_part
        if self.host_shard is not None:
            zero3 = self.host_shard.acquire_scratch()
            own_part = zero3[self.mesh_info.grid.slice_within(self.layout, Extent.ZERO1, Extent.ZERO3)]
        if not self.shares_master:
            self._cast_master(own_part)
        replica = self.mesh_info.replica_comm
        if replica.size > 1:
            self._refreshing = all_gather(
                replica,
                Collective.REFRESH,
                zero3,
                own_part,
                name=self.label,
                only_reads_shard=self.shares_master,
                parts=self.mesh_info.grid.replica_part_sizes(self.layout),
            )
        if self.host_shard is not None:
            self.finish_refresh()
            self.host_shard.store(zero3)
        self.buffer.publish(self._refreshing)

    def _launch_encoded(self, refresher: EncodedRefresher, *, compares: bool) -> None:
        sizes, zero3 = self.mesh_info.grid.replica_part_sizes(self.layout), self.zero3_shard
        if self.host_shard is not None and refresher.on_device:
            zero3 = self.host_shard.acquire_scratch()
            self.host_shard.start_fetch(zero3).wait()
        self._refreshing = refresher.launch(
            RefreshInput(
                self.label,
                zero3,
                list(sizes or (len(self._own_part),) * self.mesh_info.replicas),
                self._cast_master,
                in_full=self.refresh_in_full,
                compares=compares,
                last_change=self.last_change,
            )
        )
        self.refresh_in_full = False
        if self.host_shard is not None and refresher.on_device:
            self.finish_refresh()
            self.host_shard.store(zero3)
        self.buffer.publish(self._refreshing)

    def _cast_master(self, out: Tensor) -> None:
        """Write the master to `out`, in the compute dtype."""
        if self.to_host is not None:
            self.to_host.wait(self.to_host.copy(out, self.master, to_host=False))
        else:
            out.copy_(self.master)

    def request_full_refresh(self, *, agreed: bool) -> None:
        """Let the next refresh send weights instead of differences.

        On a device, the request has no effect unless all replicas make it (`agreed`): the ranks do not exchange the
        sizes of messages, for which the host would have to wait. Replicas are equal in any case.
        """
        if agreed or self.refresher is None or not self.refresher.on_device:
            self.refresh_in_full = True

    def finish_refresh(self, *, of_peers: bool = False) -> None:
        """Wait for the last refresh of this rank's shard.

        If `of_peers` is True, also wait for the refreshes of the other shards in the ZeRO-3 group.
        """
        if self._refreshing is not None:
            self._refreshing.wait()
            self._refreshing = None
        if of_peers:
            self.buffer.wait_published(self.label)

    def read_zero3(self) -> Tensor:
        """Return the ZeRO-3 shard, 1-D [G / S], on the device, after waiting for the last refresh.

        If the shard is in host memory, it is copied to the device.
        """
        self.finish_refresh()
        return self.zero3_shard if self.host_shard is None else self.host_shard.read_on_host().to(self.mesh_info.device)
