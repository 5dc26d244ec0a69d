"""A device's streams: nothing is read before it is there or overwritten while it is read; one order of launches.

See tests/support/late_device.py for what stands in for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero
from layerzero.comm.collectives import Heard, Works, tell_all
from layerzero.engine.hooks import runtime_of
from tests.support.late_device import NAME, Device, Stream, register
from tests.support.models import SideBySide, different, exact_sgd, full_parameters, integer_batch, integer_loss
from tests.support.ranks import mesh_of, run_ranks
from tests.support.wrapped_gloo import mesh_on

UNITS = 5


def _shard(mesh: Any, **settings: Any) -> nn.Module:
    return layerzero.shard_model(
        SideBySide(UNITS), mesh=mesh, units=[f"units.{index}" for index in range(UNITS)], **settings
    )


def _steps(model: nn.Module, rank: int, path: str, device: Device | None = None) -> tuple[list[str], dict[str, Tensor]]:
    """What this rank launched in three steps of two micro-batches, by unit and exchange; the weights after."""
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    with layerzero.trace(model, f"{path}-{rank}.json") as trace:
        for step in range(3):
            # The last step runs on another stream than the one that shard_model was called under.
            other = device.stream(Stream(computes=True)) if device is not None and step == 2 else nullcontext()
            with other:
                for number in range(2):
                    with layerzero.no_sync(model) if number == 0 and step else nullcontext():
                        integer_loss(model, integer_batch(step=step, micro_batch=number, rank=rank)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 0)
    log = [f"{event.exchange} {event.name}" for event in trace.events if event.kind == "launch"]
    return log, full_parameters(model)


SETTINGS = [
    {"accumulation": mode, "offload_grads": offload, **policy}
    for mode in ("sharded", "full")
    for offload in (False, True)
    for policy in ({}, {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)})
] + [{"accumulation": mode, "offload_grads": True, "offload_optimizer": True} for mode in ("full", "sharded")]


def _settings_of(zero3_size: int) -> list[dict[str, Any]]:
    """With S = 1 there is one route, whatever the accumulation."""
    return [each for each in SETTINGS if zero3_size > 1 or each["accumulation"] == "full"]


def _compare(rank: int, zero3_size: int, path: str) -> list[list[str]]:
    logs = []
    register()
    mesh = mesh_on(NAME, zero3_size)
    on_cpu: dict[tuple[str, bool], dict[str, Tensor]] = {}  # the weights, whatever is offloaded
    for settings in _settings_of(zero3_size):
        key = settings["accumulation"], "mp_policy" in settings
        if key not in on_cpu:
            plain = {key: value for key, value in settings.items() if not key.startswith("offload")}
            _, on_cpu[key] = _steps(_shard(mesh_of(zero3_size), **plain), rank, path)
        with Device().installed() as device:
            log, found = _steps(_shard(mesh, **settings), rank, path, device)
        assert not different(found, on_cpu[key]), settings
        logs.append(log)
    return logs


@pytest.mark.parametrize(("world_size", "zero3_size"), [(2, 2), (4, 2), (2, 1)])
def test_late_streams_change_no_bit_and_all_ranks_launch_alike(world_size: int, zero3_size: int, tmp_path: Any) -> None:
    by_rank = run_ranks(_compare, zero3_size, str(tmp_path / "trace"), world_size=world_size, pg_timeout=30)
    for settings, *logs in zip(_settings_of(zero3_size), *by_rank, strict=True):
        sums = [entry for entry in logs[0] if entry.startswith("hop")]
        assert len(sums) >= 3 * UNITS
        if zero3_size > 1:
            assert logs[0].count("gather units.0") == 12, "for each forward and backward of three steps"
            assert logs[0].count("gather the root") == 6, "it stays from a forward to its backward"
        for rank, log in enumerate(logs):
            assert log == logs[0], f"{settings}, rank {rank}: {log} instead of {logs[0]}"


# --- the host ---


class _Reads(TorchDispatchMode):
    """Counts where the host needs a number that was computed: on a device it would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_of_128() -> Iterator[None]:
    """Rank 0 of many, whose exchanges return at once, with garbage."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=128)
    yield
    dist.destroy_process_group()


def _waits_of_steps(model: nn.Module, *, uses_all: bool) -> tuple[int, int, int]:
    """In three steps, after two: numbers read, agreements waited for in the step that made them, agreements made."""
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    reads, control = _Reads(), runtime_of(model).topology.control
    made: list[Heard] = []  # in the step that runs
    waited: list[Works] = []
    wait = Works.wait

    def launch(*args: Any) -> Heard:
        made.append(tell_all(*args))
        return made[-1]

    def seen(works: Works, **how: bool) -> None:
        if works.issued.lane is control and works in [heard.work for heard in made]:
            waited.append(works)
        wait(works, **how)

    with mock.patch.object(Works, "wait", seen), mock.patch("layerzero.comm.census.tell_all", launch):
        for step in range(5):
            made.clear()
            if step == 2:
                layerzero.traffic(model, reset=True)
                waited.clear()
            with reads if step >= 2 else nullcontext():
                for number in range(2):
                    with layerzero.no_sync(model) if number == 0 else nullcontext():
                        x = torch.ones(2, 5)
                        (model(x) if uses_all else model.units[0](x)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return reads.count, len(waited), layerzero.traffic(model).calls["agree"]


@pytest.mark.parametrize("accumulation", ["sharded", "full"])
def test_on_a_device_the_host_waits_for_nothing_inside_a_step_of_128_ranks(accumulation: str, one_of_128: None) -> None:
    settings: Any = {"zero3_size": 8, "units": [f"units.{i}" for i in range(UNITS)], "accumulation": accumulation}
    with Device().installed():
        model = layerzero.shard_model(SideBySide(UNITS), **settings)
        reads, waits, made = _waits_of_steps(model, uses_all=True)
        assert (reads, waits, made) == (0, 0, 3), "the others are told, as they may have used less"
        reads, waits, _ = _waits_of_steps(layerzero.shard_model(SideBySide(UNITS), **settings), uses_all=False)
        assert (reads, waits) == (0, 3), "what others have used is heard from them only"
