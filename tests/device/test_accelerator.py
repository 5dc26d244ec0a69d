"""Devices of collectives, streams of memory, graph capture and warnings, on a simulated device."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero import Offload
from layerzero.comm.model_ranks import ModelRanks
from layerzero.device.accelerator import ConnectionCost, require_no_capture, synchronize_current_stream
from layerzero.device.buffer_pools import FullBufferPool
from layerzero.device.streams import DeviceStreams
from layerzero.engine.hooks import get_state
from layerzero.sharding.launchers import connections_warning
from tests.support.late_device import Device, DeviceCopies, Stream, on_device
from tests.support.models import IntegerNet, exact_model, integer_batch, integer_loss, integer_net, train, update
from tests.support.ranks import mesh_of, needs_caching, on_ranks, run_ranks


class _Seen(Exception):
    pass


@on_ranks(world_size=2)
def test_the_norm_of_host_gradients_is_reduced_on_the_device_of_the_communicator(rank: int) -> None:
    with pytest.warns(UserWarning, match="optimizer=True"):
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(1), offload=Offload(optimizer=True))
    integer_loss(model, integer_batch(rank=rank)).backward()
    # Gradients are in host memory, which is not the accelerator.
    object.__setattr__(get_state(model).mesh_info, "device", torch.device("meta"))
    object.__setattr__(get_state(model).ranks.mesh_info, "device", torch.device("meta"))
    devices: list[torch.device] = []

    def all_reduce(model_ranks: ModelRanks, number: Tensor, op: Any) -> None:
        devices.append(number.device)
        raise _Seen

    for norm_type in (2.0, math.inf):
        with mock.patch.object(ModelRanks, "all_reduce", all_reduce), pytest.raises(_Seen):
            layerzero.clip_grad_norm_(model, 1.0, norm_type)
    assert devices == [torch.device("meta")] * 2, "the communicator's device"


@on_ranks(world_size=2)
def test_capture_of_a_whole_step_is_refused(rank: int) -> None:
    with on_device() as (device, mesh):
        model, optimizer = exact_model(mesh=mesh)
        device.captures = True
        with pytest.raises(RuntimeError, match="forward of the root was called during the capture of a CUDA graph"):
            integer_loss(model, integer_batch(rank=rank))
        device.captures = False
        loss = integer_loss(model, integer_batch(rank=rank))
        device.captures = True
        with pytest.raises(RuntimeError, match=r"backward of unit 'head' was called .* Capture modules inside a unit"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called"):
            optimizer.step()
        device.captures = False
        optimizer.zero_grad()
        train(model, optimizer, rank, [0])


def test_a_device_without_graphs_captures_nothing() -> None:
    with mock.patch("layerzero.device.accelerator.device_module", lambda device: SimpleNamespace()):
        require_no_capture(torch.device("meta"), "a forward")


@on_ranks(world_size=2)
def test_local_gradients_are_checked_after_they_have_arrived_on_another_stream(rank: int) -> None:
    """Train with a guard on a stream that is not the one on which gradients arrive."""
    checked: list[int] = []
    with on_device() as (device, mesh):

        def check(bad: Tensor, outgoing: list[tuple[int, Tensor]]) -> None:
            checked.append(len(outgoing))
            device.current_stream().use([gradient for _, gradient in outgoing], "the check of local gradients")

        for mode in ("sharded", "full"):
            model, optimizer = exact_model(mesh=mesh, accumulation=mode)
            other = Stream(computes=True)
            with mock.patch("layerzero.reliability.local_gradient_check._mark_nonfinite", check):
                guard = layerzero.guard_steps(model, optimizer, locate=True)
                other.wait_stream(device.current_stream())
                with device.stream(other):
                    for number in range(2):
                        with layerzero.no_sync(model) if number == 0 else nullcontext():
                            integer_loss(model, integer_batch(micro_batch=number, rank=rank)).backward()
                device.current_stream().wait_stream(other)
                guard.close()
    assert sum(checked) == 7 * (2 + 1), "each gradient of two backwards, and the sum of two"


def _streams(rank: int) -> int:
    with on_device() as (device, mesh):
        before = len(device.streams)
        # Groups of the simulated backend have their own streams from their first collective on.
        layerzero.shard_model(integer_net(), mesh=mesh, units=IntegerNet.UNITS, sync_module_states=False)
        return len(device.streams) - before


def test_a_model_has_no_more_streams_than_communicators() -> None:
    # The backend's streams, since its groups connect when the model is built; and those on which layerzero reduces.
    assert run_ranks(_streams, world_size=4) == [3 + 2] * 4, "gathers, hop 1, the replica axis; hop 1, hop 2"


def test_one_hardware_queue_for_all_streams_is_warned_of() -> None:
    said = connections_warning("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert said is not None and "CUDA_DEVICE_MAX_CONNECTIONS=32" in said
    assert connections_warning("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) is None
    assert connections_warning("cuda", {}) is None
    assert connections_warning("cpu", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) is None


def test_connections_are_charged_with_the_memory_that_the_allocator_does_not_reserve() -> None:
    free, reserved = [900, 500], [50, 350]
    module = SimpleNamespace(
        mem_get_info=lambda device: (free.pop(0), 1000), memory_reserved=lambda device: reserved.pop(0)
    )
    cost = ConnectionCost(torch.device("cpu"))
    with mock.patch("layerzero.device.accelerator.device_module", lambda device: module), cost.measured():
        time.sleep(0.01)
    assert cost.nbytes == 100 and 0.01 <= cost.seconds < 10


@on_ranks(world_size=1)
def test_the_host_waits_for_a_late_copy(rank: int) -> None:
    with Device().installed():
        copies = DeviceCopies(torch.device("cpu"))
        source, target = torch.empty(4), copies.host_buffer(4, torch.float32)
        for value in range(10):
            copies.finish(copies.copy(target, source.fill_(value), to_host=True))
            assert target.eq(value).all()


def test_the_host_waits_for_the_current_stream_of_a_device() -> None:
    with mock.patch("torch.accelerator.current_stream") as current_stream:
        synchronize_current_stream(torch.device("cpu"))
        assert not current_stream.called
        synchronize_current_stream(torch.device("cuda", 0))
        current_stream.assert_called_once_with(torch.device("cuda", 0))
        current_stream.return_value.synchronize.assert_called_once_with()


class _Log:
    """Streams whose events and waits are recorded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "compute"

    def current_stream(self) -> Any:
        name = self.now
        return SimpleNamespace(
            record_event=lambda: f"event on {name}",
            wait_event=lambda event: self.log.append(f"{name} waits for {event}"),
        )


@pytest.mark.parametrize("can_cache", [False, pytest.param(True, marks=needs_caching)])
def test_memory_is_freed_on_the_stream_that_it_was_allocated_on(can_cache: bool) -> None:
    device = _Log()
    with (
        mock.patch("layerzero.device.buffer_pools.device_module", lambda _: device),
        mock.patch.object(FullBufferPool, "can_cache", can_cache),
    ):
        pool = FullBufferPool(torch.device("cpu"))
        storage = torch.empty(0).untyped_storage()
        device.now = "ahead"
        pool.allocate(storage, 64)
        device.now = "compute"
        pool.free(storage)
        assert device.log == ["ahead waits for event on compute"]
        assert storage.nbytes() == 0
        if can_cache:  # cached first, then freed to make room for memory of another size
            pool.limit = 64
            device.now = "ahead"
            pool.allocate(storage, 64)
            device.now = "compute"
            device.log.clear()
            pool.free(storage)
            assert device.log == [] and pool.cached_bytes == 64
            device.now = "other"
            pool.allocate(storage, 32)
            assert device.log == ["ahead waits for event on compute"]
            pool.free(storage)
            device.now = "ahead"
            device.log.clear()
            pool.allocate(storage, 32)  # reuses cached memory, whose last use was on another stream
            assert device.log == ["ahead waits for event on other"]


@on_ranks(world_size=2)
def test_scratch_of_a_failed_backward_is_reused_after_the_additions_to_it(rank: int) -> None:
    """Raise in a backward while gradients are still being added on the stream of their leaves."""
    with on_device() as (_, mesh):
        model = layerzero.shard_model(integer_net(), mesh=mesh, units=IntegerNet.UNITS)
        streams = get_state(model).gradients.queue.streams

        def fail(gradient: Tensor) -> None:
            raise _Seen

        def watch(module: nn.Module, args: object, output: Tensor) -> None:
            output.register_hook(fail)

        handle = model.first.register_forward_hook(watch)
        loss = integer_loss(model, integer_batch(rank=rank))
        record, events = type(streams).record_gradients_event, []

        def recording(streams: DeviceStreams) -> mock.Mock:
            events.append(mock.Mock(wraps=record(streams)))
            return events[-1]

        with mock.patch.object(type(streams), "record_gradients_event", recording):
            with pytest.raises(_Seen):
                loss.backward()
            before = len(events)
            model.zero_grad()
            handle.remove()
            integer_loss(model, integer_batch(rank=rank))
            assert len(events) == before + 1 and events[-1].wait.called, "the recovery waits for gradients"


@on_ranks()
def test_the_root_and_the_last_unit_stay_gathered_until_the_backward_pass(rank: int) -> None:
    for reshards, once in ((True, 2), (False, 4)):
        with on_device() as (_, mesh):
            model, optimizer = exact_model(mesh=mesh, reshard_after_forward=reshards)
            gathered = []
            for step in range(3):
                train(model, optimizer, rank, [step])
                gathered.append(layerzero.traffic(model, reset=True).calls["gather"])
            others = len(layerzero.units(model)) - once
            # The first forward pass does not know which unit is called last.
            assert gathered == [once + 2 * others + reshards, once + 2 * others, once + 2 * others], gathered
            assert not any(handle.weights.full_buffer.untyped_storage().nbytes() for handle in get_state(model).handles)


@on_ranks(world_size=2)
def test_a_unit_that_is_called_directly_does_not_stay_gathered(rank: int) -> None:
    with on_device() as (_, mesh):
        model, optimizer = exact_model(mesh=mesh)
        for _ in range(3):
            output = model.head(torch.ones(1, 6))
            assert not any(handle.weights.full_buffer.untyped_storage().nbytes() for handle in get_state(model).handles)
            output.sum().backward()
            update(optimizer)
