"""Streams of a device: no early read, no overwrite during a read, one order of launches.

See tests/support/late_device.py for the simulated device.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero
from layerzero import Codecs, Offload, PrecisionPolicy
from layerzero.comm.collectives import Collective, PendingCollective, PendingSmallGather, all_gather, all_gather_small
from layerzero.device import buffer_pools
from layerzero.device.streams import DeviceStreams
from layerzero.engine.handle import GatherState
from layerzero.engine.handle_gradients import HandleGradients
from layerzero.engine.hooks import get_state
from layerzero.engine.reduction_queue import ReductionQueue
from layerzero.extend import StepObserver, attach
from tests.support.late_device import NAME, Device, Event, Stream, on_device, register
from tests.support.launches import three_steps
from tests.support.models import (
    SideBySide,
    different,
    exact_model,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_loss,
    train,
    update,
)
from tests.support.ranks import every_nth_setting, mesh_of, on_ranks, run_ranks
from tests.support.wrapped_gloo import mesh_on

pytestmark = pytest.mark.slow

UNITS = 5


def _shard(mesh: Any, **settings: Any) -> nn.Module:
    return layerzero.shard_model(
        SideBySide(UNITS), mesh=mesh, units=[f"units.{index}" for index in range(UNITS)], **settings
    )


def _steps(model: nn.Module, rank: int, device: Device | None = None) -> tuple[list[str], dict[str, Tensor]]:
    """Return the launches and weights of :func:`three_steps`; on `device`, the last step is on a different stream."""
    around = nullcontext if device is None else lambda step: _on_another_stream(device) if step == 2 else nullcontext()
    return three_steps(model, rank, around)


@contextmanager
def _on_another_stream(device: Device) -> Iterator[None]:
    before, other = device.current_stream(), Stream(computes=True)
    other.wait_stream(before)
    with device.stream(other):
        yield
    before.wait_stream(other)


MODES = ("sharded", "full", "local")
# Every fifth setting offloads the optimizer, offloads gradients, or offloads nothing.
SETTINGS: list[dict[str, Any]] = [
    {"accumulation": mode, "offload": Offload(grads=True, optimizer=True)} for mode in MODES
]
SETTINGS += [
    {"accumulation": mode, "offload": Offload(grads=offload), **policy}
    for offload in (False, True)
    for policy in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)})
    for mode in MODES
]
SETTINGS += [{"accumulation": mode, "mp_policy": PrecisionPolicy(fp32_accumulation=True)} for mode in MODES]


def _settings_of(zero3_size: int) -> list[dict[str, Any]]:
    """Return the settings to test for S; with S = 1, "sharded" equals "full"."""
    return [each for each in SETTINGS if zero3_size > 1 or each["accumulation"] != "sharded"]


def _compare(rank: int, zero3_size: int, stride: int) -> list[list[str]]:
    logs = []
    register()
    mesh = mesh_on(NAME, zero3_size)
    on_cpu: dict[tuple[str, str], dict[str, Tensor]] = {}  # the weights, with any offloading
    for settings in _settings_of(zero3_size)[::stride]:
        key = settings["accumulation"], str(settings.get("mp_policy"))
        if key not in on_cpu:
            plain = {key: value for key, value in settings.items() if not key.startswith("offload")}
            _, on_cpu[key] = _steps(_shard(mesh_of(zero3_size), **plain), rank)
        with Device().installed() as device:
            log, found = _steps(_shard(mesh, **settings), rank, device)
        assert not different(found, on_cpu[key]), settings
        logs.append(log)
    return logs


@pytest.mark.parametrize(
    ("world_size", "zero3_size"),
    [(4, 2), *(pytest.param(*grid, marks=pytest.mark.exhaustive) for grid in [(2, 2), (4, 1)])],
)
@every_nth_setting(5)
def test_late_streams_change_no_bit_and_all_ranks_launch_alike(world_size: int, zero3_size: int, stride: int) -> None:
    by_rank = run_ranks(_compare, zero3_size, stride, world_size=world_size, pg_timeout=30, timeout=300)
    for settings, *logs in zip(_settings_of(zero3_size)[::stride], *by_rank, strict=True):
        sums = [entry for entry in logs[0] if entry.startswith("hop")]
        assert len(sums) >= 3 * UNITS
        if zero3_size > 1:
            assert logs[0].count("gather units.0") == 12, "for each forward and backward of three steps"
            assert logs[0].count("gather the root") == 6, "it stays from a forward to its backward"
        for rank, log in enumerate(logs):
            assert log == logs[0], f"{settings}, rank {rank}: {log} instead of {logs[0]}"


# --- the host ---


class _Reads(TorchDispatchMode):
    """Counts reads of computed numbers by the host, which would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_of_128() -> Iterator[None]:
    """Run as rank 0 of 128 on a fake backend, whose collectives return at once with garbage."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=128)
    yield
    dist.destroy_process_group()


class _Waits(NamedTuple):
    """Waits of the host in three steps, after two others."""

    for_numbers: int = 0  # computed numbers
    for_events: int = 0
    in_backward: int = 0  # for an agreement of the same step
    later: int = 0  # the same, outside of a backward
    for_the_last_step: int = 0  # for an agreement of the step before, and for other messages between ranks
    agreements: int = 0  # started agreements


def _waits_of_steps(model: nn.Module, *, uses_all: bool) -> _Waits:
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    reads, control = _Reads(), get_state(model).mesh_info.control_comms
    made: list[PendingSmallGather] = []  # in the current step
    fresh: list[PendingCollective] = []
    old: list[PendingCollective] = []
    backwards = 0
    wait = PendingCollective.wait

    def launch(*args: Any) -> PendingSmallGather:
        heard = all_gather_small(*args)
        heard.said.copy_(heard.sent.view_as(heard.said))  # torch 2.11 leaves it unwritten on fake ranks
        made.append(heard)
        return heard

    def seen(works: PendingCollective, **how: bool) -> None:
        if works.launched.communicator in control and not how.get("off_main_thread"):
            (fresh if works in [heard.work for heard in made] else old).append(works)
        wait(works, **how)

    with (
        mock.patch.object(PendingCollective, "wait", seen),
        mock.patch("layerzero.engine.used_params.all_gather_small", launch),
        mock.patch.object(Event, "synchronize") as synchronize,
    ):
        for step in range(5):
            made.clear()
            if step == 2:
                layerzero.traffic(model, reset=True)
                fresh.clear(), old.clear(), synchronize.reset_mock()
            with reads if step >= 2 else nullcontext():
                for number in range(2):
                    with layerzero.no_sync(model) if number == 0 else nullcontext():
                        x = torch.ones(2, 5)
                        loss = (model(x) if uses_all else model.units[0](x)).sum()
                        before = len(fresh)
                        loss.backward()
                        backwards += len(fresh) - before if step >= 2 else 0
                layerzero.clip_grad_norm_(model, 1.0)
                update(optimizer)
    made_in_all = layerzero.traffic(model).calls["metadata"]
    return _Waits(reads.count, synchronize.call_count, backwards, len(fresh) - backwards, len(old), made_in_all)


@pytest.mark.sample(4)
@pytest.mark.parametrize("offload_grads", [False, True])
@pytest.mark.parametrize("accumulation", ["sharded", "full", "local"])
def test_on_a_device_the_host_waits_for_nothing_inside_a_step_of_128_ranks(
    accumulation: str, offload_grads: bool, one_of_128: None
) -> None:
    settings: Any = {
        "zero3_size": 8,
        "units": [f"units.{i}" for i in range(UNITS)],
        "accumulation": accumulation,
        "offload": Offload(grads=offload_grads),
    }
    encoded = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "codecs": Codecs(refresh=layerzero.Int4Difference()),
    }
    for more in ({}, encoded):
        with Device().installed():
            model = layerzero.shard_model(SideBySide(UNITS), **settings, **more)
            waits = _waits_of_steps(model, uses_all=True)
            assert waits == _Waits(for_the_last_step=6, agreements=6), "others are told, as they may have used less"
    with Device().installed():
        waits = _waits_of_steps(layerzero.shard_model(SideBySide(UNITS), **settings), uses_all=False)
        assert waits == _Waits(later=6, agreements=6), "what others have used is heard from them only"


@pytest.mark.parametrize(("accumulation", "zero3_size"), [("local", 8), ("sharded", 8), ("sharded", 128)])
def test_an_optimizer_on_the_host_waits_for_gradients_once_per_step(
    accumulation: Any, zero3_size: int, one_of_128: None
) -> None:
    units = [f"units.{i}" for i in range(UNITS)]
    with Device().installed():
        model = layerzero.shard_model(
            SideBySide(UNITS),
            zero3_size=zero3_size,
            units=units,
            accumulation=accumulation,
            offload=Offload(optimizer=True),
        )
        assert _waits_of_steps(model, uses_all=True).for_events == 3, "not for each unit or micro-batch"


def _events_of_reductions(rank: int) -> list[tuple[int, int]]:
    """Return the numbers of recorded events and of waits per reduction of the last of three steps."""
    counts = [0, 0]
    record, wait, start = Stream.record_event, Stream.wait_event, ReductionQueue._start
    per_reduction: list[tuple[int, int]] = []

    def recording(stream: Stream) -> Event:
        counts[0] += 1
        return record(stream)

    def waiting(stream: Stream, event: Event) -> None:
        counts[1] += 1
        wait(stream, event)

    def starting(queue: ReductionQueue, *args: Any) -> None:
        counts[:] = 0, 0
        start(queue, *args)
        per_reduction.append((counts[0], counts[1]))

    with on_device() as (_, mesh):
        model = _shard(mesh)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        with (
            mock.patch.object(Stream, "record_event", recording),
            mock.patch.object(Stream, "wait_event", waiting),
            mock.patch.object(ReductionQueue, "_start", starting),
        ):
            train(model, optimizer, rank, range(3))
    return per_reduction[-UNITS:]


def test_a_reduction_needs_few_events() -> None:
    """Three events order the stages, two are for the watchdog, and three for buffers that are released.

    Both stages wait for an event of another stream, and for the memory that they receive. The launch waits for the
    memory to which it copies gradients. The first and the last reduction also allocate and return memory.
    """
    for counts in run_ranks(_events_of_reductions):
        assert counts[1:-1] == [(8, 5)] * (UNITS - 2), counts


@on_ranks()
def test_each_hop_has_its_own_stream(rank: int) -> None:
    streams = defaultdict(set)
    with on_device() as (device, mesh):
        model = _shard(mesh)

        class Recorder(StepObserver):
            def launched(self, works: PendingCollective) -> None:
                streams[works.launched.collective].add(device.current_stream())

        attach(model, Recorder())
        integer_loss(model, integer_batch(step=0, rank=rank)).backward()
        (hop1,), (hop2,) = streams[Collective.HOP1], streams[Collective.HOP2]
        assert hop1 is not hop2 and not (hop1.computes or hop2.computes)


@on_ranks()
def test_a_refresh_and_a_reduction_between_replicas_do_not_overlap(rank: int) -> None:
    """The refreshes of units that a forward pass does not use are still in flight when other units are reduced."""
    with on_device() as (_, mesh):
        model = _shard(mesh)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        for step in range(6):
            (model if step % 2 else model.units[0])(torch.ones(2, 5)).sum().backward()
            update(optimizer)


@on_ranks()
def test_reductions_do_not_overlap_with_other_collectives_of_their_communicators(rank: int) -> None:
    """Backward passes inside no_sync leave reductions in flight. Other collectives follow on their communicators."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with on_device() as (_, mesh):
        for accumulation, codec in itertools.product(("local", "sharded"), (None, layerzero.Int8Blocks())):
            model = _shard(mesh, accumulation=accumulation, mp_policy=bf16, codecs=Codecs(hop2=codec))
            optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
            for step in range(4):
                with layerzero.no_sync(model):
                    integer_loss(model, integer_batch(step=step, rank=rank)).backward()
                with torch.no_grad(), layerzero.full_precision(model):
                    model(torch.ones(2, 5))
                with layerzero.no_sync(model):
                    integer_loss(model, integer_batch(step=step, rank=rank)).backward()
                layerzero.refresh(model)
                update(optimizer)
            assert layerzero.traffic(model).calls["unshard"]


def _weights_after_no_sync(mesh: Any, rank: int, *, is_late: bool) -> dict[str, Tensor]:
    """Return the weights after a step whose backward passes were all inside no_sync.

    If `is_late` is True, the reductions of the last backward pass are in flight when the step begins.
    """
    # One handle: a wait for the memory of another handle would hide a missing wait.
    model, optimizer = exact_model(mesh=mesh, units=[])
    for number in range(2):
        with layerzero.no_sync(model):
            loss = integer_loss(model, integer_batch(micro_batch=number, rank=rank))
            if is_late:
                get_state(model).gradients._streams.zero3._stream.give(lambda: time.sleep(0.2))
            loss.backward()
    optimizer.step()
    return full_parameters(model)


@on_ranks()
def test_a_step_waits_for_the_reductions_of_the_last_no_sync(rank: int) -> None:
    expected = _weights_after_no_sync(mesh_of(2), rank, is_late=False)
    with on_device() as (_, mesh):
        found = _weights_after_no_sync(mesh, rank, is_late=True)
    assert not different(found, expected)


@on_ranks()
def test_no_reduction_is_in_flight_when_parameters_are_frozen(rank: int) -> None:
    with on_device() as (_, mesh):
        model = _shard(mesh)
        with layerzero.no_sync(model):
            integer_loss(model, integer_batch(rank=rank)).backward()
        gradients = [handle.gradients for handle in get_state(model).handles]
        assert all(each.reduction is not None for each in gradients)
        model.units[0].requires_grad_(False)
        model(torch.ones(2, 5))
        assert not any(each.reduction for each in gradients), "the queue of the reductions has been replaced"


@on_ranks(world_size=1)
def test_a_synchronization_waits_for_both_streams(rank: int) -> None:
    with Device().installed() as device:
        streams = DeviceStreams(torch.device("cpu"))
        for stream in (streams.zero3, streams.replica):
            result = torch.zeros(1)
            stream.wait_event(streams.record_gradients_event())
            stream._stream.give(lambda: time.sleep(0.1))
            stream.run(partial(result.add_, 1))
            events = deque([stream.record_event()])
            streams.synchronize([events])
            assert result == 1 and not events and device.current_stream().computes


@on_ranks(world_size=1)
def test_gradients_are_copied_after_they_are_written_and_freed_after_they_are_copied(rank: int) -> None:
    with Device().installed() as device:
        streams, gradient, other = DeviceStreams(torch.device("cpu")), torch.zeros(1), Stream(computes=True)
        first = device.current_stream()
        first.write([gradient])
        with device.stream(other):
            with pytest.raises(AssertionError, match="has not waited for"):
                other.use([gradient], "a copy")
            with streams.joined_with_gradients():
                other.use([gradient], "a copy")
                other.write([gradient])
        first.use([gradient], "the next owner of the memory")


@on_ranks(world_size=2)
def test_gradients_are_freed_after_their_streams_have_joined(rank: int) -> None:
    """The memory of a gradient may belong to a third stream, which waits for the streams known when it is freed."""
    arrived: list[weakref.ref[Tensor]] = []
    joins = []
    receive, join = HandleGradients.receive, DeviceStreams.joined_with_gradients

    def receiving(gradients: HandleGradients, slot: int, gradient: Tensor) -> None:
        arrived.append(weakref.ref(gradient))
        receive(gradients, slot, gradient)

    @contextmanager
    def joining(streams: DeviceStreams) -> Iterator[None]:
        with join(streams):
            yield
        joins.append([each() is not None for each in arrived])
        arrived.clear()

    with on_device() as (_, mesh):
        model = _shard(mesh)
        with (
            mock.patch.object(HandleGradients, "receive", receiving),
            mock.patch.object(DeviceStreams, "joined_with_gradients", joining),
        ):
            integer_loss(model, integer_batch(rank=rank)).backward()
    assert any(joins) and all(map(all, joins)), joins


def _outputs_in_full_precision(mesh: Any, rank: int) -> list[Tensor]:
    """Return the outputs of a bf16 model that computes with its masters after each of three steps."""
    model = _shard(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    outputs = []
    for step in range(3):
        integer_loss(model, integer_batch(step=step, rank=rank)).backward()
        update(optimizer)
        with torch.no_grad(), layerzero.full_precision(model):
            outputs.append(model(torch.ones(2, 5)).clone())
    return outputs


@pytest.mark.parametrize("zero3_size", [1, 2, 4])
@on_ranks()
def test_full_precision_waits_for_late_gathers(rank: int, zero3_size: int) -> None:
    expected = _outputs_in_full_precision(mesh_of(zero3_size), rank)
    with on_device(zero3_size) as (_, mesh):
        found = _outputs_in_full_precision(mesh, rank)
    assert all(map(torch.equal, found, expected)), (found, expected)


@on_ranks()
def test_a_gather_waits_for_an_earlier_collective_of_its_communicator(rank: int) -> None:
    """A collective on the backend's stream is in flight when a gather of the same communicator is launched."""
    with on_device() as (_, mesh):
        model = _shard(mesh)
        comm = get_state(model).mesh_info.replica_comm
        for number in range(8):
            own, gathered = torch.full((3,), 10.0 * rank + number), torch.empty(3 * comm.size)
            before = all_gather_small(comm, Collective.METADATA, own)
            all_gather(comm, Collective.METADATA, gathered, own).wait()
            expected = [10.0 * each + number for each in dist.get_process_group_ranks(comm.group)]
            assert gathered.view(-1, 3)[:, 0].tolist() == expected
            assert before.wait()[:, 0].tolist() == expected


@on_ranks()
def test_the_computation_does_not_wait_for_reductions_inside_no_sync(rank: int) -> None:
    register()
    mesh = mesh_on(NAME, 2)
    for mode in ("sharded", "full", "local"):
        with Device().installed() as device:
            model, optimizer = exact_model(mesh=mesh, accumulation=mode, units=["head"])
            streams = get_state(model).gradients._streams
            assert isinstance(streams, DeviceStreams)
            engine = {stream._stream for stream in (streams.zero3, streams.replica)}
            recorded: set[Event] = set()
            waits: list[int] = []
            record, wait = Stream.record_event, Stream.wait_event

            def recording(stream: Stream) -> Event:
                event = record(stream)  # noqa: B023
                if stream in engine:  # noqa: B023
                    recorded.add(event)  # noqa: B023
                return event

            def waiting(stream: Stream, event: Event) -> None:
                waits[-1] += stream.computes and event in recorded  # noqa: B023
                wait(stream, event)  # noqa: B023

            def calling(queue: ReductionQueue) -> None:
                before = waits[-1]  # noqa: B023
                call(queue)  # noqa: B023
                for_memory[-1] += waits[-1] - before  # noqa: B023
                waits[-1] = before  # noqa: B023

            call = ReductionQueue.record_unit_call
            for_memory: list[int] = []
            with (
                mock.patch.object(Stream, "record_event", recording),
                mock.patch.object(Stream, "wait_event", waiting),
                mock.patch.object(ReductionQueue, "record_unit_call", calling),
            ):
                for step in range(2):
                    for micro_batch in range(4):
                        waits.append(0)
                        for_memory.append(0)
                        with layerzero.no_sync(model) if micro_batch < 3 else nullcontext():
                            integer_loss(model, integer_batch(step=step, rank=rank)).backward()
                    assert not any(waits[-4:-1]) and waits[-1], (mode, waits)
                    # The next forward returns scratch memory, which would otherwise be needed for each micro-batch.
                    in_flight = [False] + [mode != "full"] * 3
                    assert [each > 0 for each in for_memory[-4:]] == in_flight, (mode, for_memory)
                    handles = get_state(model).handles
                    assert len({tensor.data_ptr() for tensor in device.kept}) == (
                        0 if mode == "full" else len(handles)
                    ), mode
                    # Once for each stream, and again after the order of reductions was agreed in the first step.
                    assert len(device.kept) == (0 if mode == "full" else 2 * (step + 1) * len(handles)), mode
                    update(optimizer)
            del model, optimizer, streams, handles
            gc.collect()


@on_ranks()
def test_gathers_and_not_the_computation_wait_for_refreshes(rank: int) -> None:
    with on_device() as (device, mesh):
        model = _shard(mesh, prefetch=2)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        mesh_info = get_state(model).mesh_info
        streams = {"gather": mesh_info.zero3_gather_comm.stream, "refresh": mesh_info.replica_comm.stream}
        names = {stream._stream: name for name, stream in streams.items()}
        recorded_on: dict[Event, Stream] = {}
        waits: defaultdict[str, list[str]] = defaultdict(list)  # what each stream waits for, in order
        record, wait = Stream.record_event, Stream.wait_event

        def recording(stream: Stream) -> Event:
            event = record(stream)
            recorded_on[event] = stream
            return event

        def waiting(stream: Stream, event: Event) -> None:
            if (awaited := names.get(recorded_on.get(event, stream))) is not None:
                waits["compute" if stream.computes else names.get(stream, "reduce")].append(awaited)
            wait(stream, event)

        with mock.patch.object(Stream, "record_event", recording), mock.patch.object(Stream, "wait_event", waiting):
            train(model, optimizer, rank, range(2))
            waits.clear()
            model(torch.ones(2, 5))
        units = UNITS + 1
        assert waits["gather"].count("refresh") == units, waits
        assert waits["compute"] == ["gather", "refresh"] * units, waits
        assert not device.kept

        integer_loss(model, integer_batch(rank=rank)).backward()
        optimizer.step()
        model.units[0].unshard(async_op=True)
        handles = get_state(model).handles
        used = {each.weights.zero3_shard.data_ptr() for each in handles}
        used |= {each.weights.full_buffer.data_ptr() for each in handles if each.state is GatherState.GATHERING}
        assert len(used) == len(handles) + 1
        del model, optimizer, handles
        gc.collect()
        assert used <= {tensor.data_ptr() for tensor in device.kept}, "a gather and refreshes may still use the memory"


@on_ranks()
def test_encoded_gathers_and_regathers_change_no_bit(rank: int) -> None:
    """Gathers of encoded weights, of weights that two of four ranks keep after the forward, and once per step."""
    register()
    mesh, bf16 = mesh_on(NAME, 4), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    kept = ({"reshard_after_forward": each} for each in (2, "step"))
    for settings in ({"codecs": Codecs(gather=layerzero.Float8Rows())}, *kept):
        log, expected = _steps(_shard(mesh_of(4), mp_policy=bf16, **settings), rank)
        assert any(launch.startswith("regather") for launch in log) == (settings.get("reshard_after_forward") == 2)
        with Device().installed() as device:
            log, found = _steps(_shard(mesh, mp_policy=bf16, **settings), rank, device)
        assert not different(found, expected), settings
        assert (log.count("gather units.0") == 3) == (settings.get("reshard_after_forward") == "step"), log
    assert log.count("gather the root") == 3


@on_ranks()
def test_scratch_memory_is_returned_in_the_next_forward_and_kept_for_reductions_of_deleted_models(rank: int) -> None:
    """A model that is deleted after a backward inside no_sync leaves memory to its reductions."""
    with on_device() as (_, mesh), mock.patch.object(buffer_pools, "keep_until_done") as keep:
        for calls_units in (False, True):
            model = _shard(mesh)
            pools = get_state(model).gradients.queue._pools
            for skipped in (0, 1, 2):
                assert keep.call_count == 0
                x = torch.ones(2, 5)
                with layerzero.no_sync(model):
                    called = list(model.units)[skipped:] if calls_units else [model]
                    loss = sum(module(x).sum() for module in called)
                    held = [pool.held_bytes for pool in pools]
                    loss.backward()
                assert not any(held), "the forward has returned what the last reductions used"
                assert any(pool.held_bytes for pool in pools)
            del model, pools, loss, called
            gc.collect()
            assert keep.call_count, "reductions may still use the memory"
            keep.reset_mock()


@on_ranks()
def test_gradients_that_are_dropped_inside_no_sync_stay_zero(rank: int) -> None:
    register()
    mesh = mesh_on(NAME, 2)
    for mode in ("sharded", "local"):
        with Device().installed():
            model, optimizer = exact_model(mesh=mesh, accumulation=mode, units=["head"])
            integer_loss(model, integer_batch(rank=rank)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
            with layerzero.no_sync(model):
                integer_loss(model, integer_batch(step=1, rank=rank)).backward()
            optimizer.zero_grad(set_to_none=False)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None and not parameter.grad.to_local().any(), (mode, name)
            for stream in (get_state(model).gradients._streams.zero3, get_state(model).gradients._streams.replica):
                stream.record_event().wait()
            for name, parameter in model.named_parameters():
                assert not parameter.grad.to_local().any(), (mode, name, "a reduction has written later")
            for write in (lambda each: each.zero(0), lambda each: each.replace_rows(0, each.final.part(0).clone())):
                gradients, waited = get_state(model).handles[0].gradients, mock.Mock()
                gradients.reduction = waited
                write(gradients)
                assert waited.wait.called, "a write to memory that a reduction may still use"
                gradients.reduction = None
            for group in optimizer.param_groups:
                group["momentum"] = 0.0
            optimizer.step()
            assert all(torch.equal(before[name], p.to_local()) for name, p in model.named_parameters()), mode
