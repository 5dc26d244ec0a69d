"""The memory report predicts every kind of memory to the byte at any speed of collectives, and the peak of a step."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from layerzero import Offload, PrecisionPolicy
from layerzero.comm.collectives import PendingReduction
from layerzero.device.buffer_pools import BufferPool, DeviceBufferPool, FullBufferPool, Size
from layerzero.engine import reduction_queue
from layerzero.engine.handle import GatherState, Handle
from layerzero.engine.hooks import get_state
from tests.support.graphs import WIDTH, Chain, EncoderDecoder, SideBySide, batch, blocks, loss_of, sgd, shard
from tests.support.late_device import NAME, Device, register
from tests.support.models import TiedTransformer, update
from tests.support.ranks import (
    BOTH,
    BOTH_SHARED_EXHAUSTIVE,
    every_nth_setting,
    mesh_of,
    needs_caching,
    on_ranks,
    run_ranks,
)
from tests.support.wrapped_gloo import mesh_on

pytestmark = pytest.mark.slow


POLICIES = (
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
)

# By zero3_size. With 1 there is one reduction spec and no shared memory; see `_sizes_of`.
MODES = {1: ("sharded", "local"), 2: ("sharded", "full", "local"), 4: ("sharded", "full")}


def _sizes_of(shared_memory: str | None) -> tuple[int, ...]:
    return (1, 2, 4) if shared_memory == "off" else (2, 4)


def _layouts(sizes: Iterable[int]) -> list[tuple[int, str]]:
    return [(size, mode) for size in sizes for mode in MODES[size]]


@contextmanager
def _in_use(pool: BufferPool) -> Iterator[dict[Size, int]]:
    """Record the largest number of buffers of each size in use at once."""
    most: dict[Size, int] = {}
    now: dict[Size, int] = {}
    take, give = pool.acquire, pool.release

    lock = threading.Lock()

    def taking(numel: int, dtype: torch.dtype) -> torch.Tensor:
        with lock:
            now[numel, dtype] = now.get((numel, dtype), 0) + 1
            most[numel, dtype] = max(most.get((numel, dtype), 0), now[numel, dtype])
        return take(numel, dtype)

    def giving(buffer: torch.Tensor) -> None:
        with lock:
            now[buffer.numel(), buffer.dtype] -= 1
        give(buffer)

    pool.acquire, pool.release = taking, giving  # type: ignore[method-assign]
    yield most
    assert not any(now.values()), "all of it has been given back"


def _train(model: nn.Module, rank: int, micro_batches: Sequence[int], optimizer: Optimizer | None = None) -> Optimizer:
    """Train one step per number of micro-batches; in the second, the order of units is known."""
    optimizer = optimizer or layerzero.shard_optimizer(sgd(model), model)
    for step, count in enumerate(micro_batches):
        for micro_batch in range(count):
            with layerzero.no_sync(model) if micro_batch + 1 < count else nullcontext():
                loss_of(model(batch(rank, step, micro_batch).float())).backward()
        update(optimizer)
    return optimizer


def _assert_predicted(model: nn.Module, case: object) -> None:
    report = layerzero.memory(model)
    kinds = {kind: size for kind, size in report.measured.items() if not kind.endswith("optimizer")}
    assert kinds == report.predicted, (case, report)
    assert report.measured_peak == report.predicted_peak, (case, report)


_wait = PendingReduction.wait


def _waiting(seconds: float) -> Callable[..., None]:
    """Return a wait that takes longer than the program expects."""

    def wait(pending: PendingReduction, **how: bool) -> None:
        time.sleep(seconds)
        _wait(pending, **how)

    return wait


OFFLOADED = {"offload": Offload(grads=True, optimizer=True)}


def _predicted(rank: int, sizes: Sequence[int], accumulation_dtype: torch.dtype | None) -> None:
    warnings.simplefilter("ignore")  # the CPU has no device memory to free
    modes = [(size, mode) for size, mode in _layouts(sizes) if accumulation_dtype is None or mode != "local"]
    offloads = ({},) if accumulation_dtype is None else ({}, OFFLOADED)
    for (size, mode), each, offload in itertools.product(modes, POLICIES, offloads):
        policy = PrecisionPolicy.of(each, accumulation_dtype=accumulation_dtype)
        settings = {"mp_policy": policy, "accumulation": mode, **offload}
        # One unit more than may be in flight, and the root.
        model = shard(_seeded(max(reduction_queue.IN_FLIGHT) + 2), size=size, **settings)
        pool, optimizer = get_state(model).pools.scratch, None
        for wait, micro_batches in ((0.02, (1, 2)), (0.0, (3,))):
            case = (size, wait, micro_batches, settings)
            with mock.patch.object(PendingReduction, "wait", _waiting(wait)), _in_use(pool) as most:
                optimizer = _train(model, rank, micro_batches, optimizer)
            assert all(count <= pool.predicted[size] for size, count in most.items()), (case, most, pool.predicted)
            _assert_predicted(model, case)


# Of three micro-batches: which backwards run inside no_sync, and whether gradients are zeroed to None after a step.
LOOPS = {
    "one reduction a step": ((True, True, False), True),
    "each backward reduces": ((False, False, False), True),
    "one in between reduces": ((False, True, False), True),
    "zeros are kept": ((True, True, False), False),
}


def _predicted_within_a_step(rank: int, sizes: Sequence[int]) -> None:
    for (size, mode), policy, (name, loop) in itertools.product(_layouts(sizes), POLICIES[1:], LOOPS.items()):
        inside_no_sync, to_none = loop
        model = shard(_seeded(4), size=size, mp_policy=policy, accumulation=mode)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        for step in range(3):
            for micro_batch, waits in enumerate(inside_no_sync):
                with layerzero.no_sync(model) if waits else nullcontext():
                    loss_of(model(batch(rank, step, micro_batch).float())).backward()
                if step:  # reduce buffers are allocated by the first reduction
                    _assert_predicted(model, (size, mode, policy, name, step, micro_batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            _assert_predicted(model, (size, mode, policy, name, step))
        aside = size == 2 and mode == "sharded" and name != "one reduction a step"
        assert (layerzero.memory(model).measured["gradient_shard"] > 0) == (mode != "sharded" or size != 2 or aside)


@pytest.mark.exhaustive
@BOTH_SHARED_EXHAUSTIVE
def test_memory_is_predicted_between_micro_batches_whatever_the_loop(shared_memory: str | None) -> None:
    run_ranks(_predicted_within_a_step, _sizes_of(shared_memory), shared_memory=shared_memory, timeout=240)


def _seeded(count: int) -> nn.Module:
    torch.manual_seed(0)
    return blocks(count).float()


@pytest.mark.sample(1)
@BOTH
def test_every_kind_of_memory_is_predicted(shared_memory: str | None) -> None:
    run_ranks(_predicted, _sizes_of(shared_memory), None, shared_memory=shared_memory, timeout=240)


@pytest.mark.exhaustive
@BOTH_SHARED_EXHAUSTIVE
def test_accumulators_in_bf16_are_predicted(shared_memory: str | None) -> None:
    run_ranks(_predicted, _sizes_of(shared_memory), torch.bfloat16, shared_memory=shared_memory, timeout=240)


@pytest.mark.parametrize(
    "accumulation_dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)], ids=str
)
@every_nth_setting(3)
@on_ranks(timeout=240)
def test_memory_on_a_device_is_predicted_whatever_is_gathered_ahead(
    rank: int, accumulation_dtype: torch.dtype | None, stride: int
) -> None:
    register()
    plain = [(*layout, policy, {}) for layout in _layouts((1, 2, 4)) for policy in POLICIES[:2]]
    others = (
        {"prefetch": 3},
        {"offload": Offload(grads=True)},
        OFFLOADED,
        {"mp_policy": PrecisionPolicy.of(POLICIES[1], fp32_accumulation=True)},
    )
    every = [*plain, *((*layout, POLICIES[1], s) for layout in _layouts((2,)) for s in others)]
    if accumulation_dtype is not None:
        every = [(2, mode, POLICIES[1], s) for mode in ("sharded", "full") for s in ({}, *others[1:])]
    for size, mode, policy, settings in every[::stride]:
        mesh, case = mesh_on(NAME, size), (size, mode, policy, settings)
        with Device().installed():
            chain = Chain(*(_Wide(width) for width in (3, 40, 7, 7, 5, 7, 7))).float()
            more = {"mp_policy": policy, **settings}
            more["mp_policy"] = PrecisionPolicy.of(more["mp_policy"], accumulation_dtype=accumulation_dtype)
            model = shard(chain, mesh=mesh, accumulation=mode, **more)
            _train(model, rank, (1, 3))
            _assert_predicted(model, case)
            pool = get_state(model).pools.scratch
            assert isinstance(pool, DeviceBufferPool) and pool.held_bytes == 0, "activations can use the memory"
            for handle in get_state(model).handles:
                assert handle.gradients is not None
                for buffer in handle.gradients.buffers.values():
                    assert not (buffer.storage.returns_memory and buffer._parts), "a view would keep the memory"


class _Wide(nn.Module):
    """Layer of any width between two others."""

    UNIT = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


# Differences between units, and whether each way of prefetching depends on them.
ODD: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "sizes that differ": (lambda: Chain(*(_Wide(width) for width in (3, 40, 7, 7, 5, 7))), True),
    "strides of their own": (lambda: Chain(*(_strided(_Wide(8)) for _ in range(4))), False),
    "fewer units than are gathered ahead": (lambda: Chain(_Wide(5)), False),
}


def _strided(block: nn.Module) -> nn.Module:
    block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())
    return block


@on_ranks(shared_memory="off")
def test_units_inside_units_are_predicted_too(rank: int) -> None:
    torch.manual_seed(0)
    inner = (Chain(_Wide(7), _Wide(7)), Chain(_Wide(7), _Wide(30)))
    model = shard(Chain(_Wide(9), *inner, _Wide(9)).float(), size=2)
    _train(model, rank, (1, 2))
    report = layerzero.memory(model)
    # The order of units decides which of two sizes is cached between the steps.
    assert abs(report.measured["cached_buffer"] - report.predicted["cached_buffer"]) < 0.03 * report.total
    for kind in report.predicted.keys() - {"cached_buffer"}:
        assert report.measured[kind] == report.predicted[kind], (kind, report)
    assert report.measured_peak == report.predicted_peak, report


@on_ranks(shared_memory="off")
def test_units_with_several_inputs_are_predicted_too(rank: int) -> None:
    """Units with several inputs, or with an input that other units use, too, are freed as early as others."""
    for make, micro_batches in itertools.product((EncoderDecoder, SideBySide), (1, 2)):
        torch.manual_seed(0)
        model = shard(make().float(), size=2)
        _train(model, rank, (micro_batches, micro_batches))
        _assert_predicted(model, (make, micro_batches))


@BOTH_SHARED_EXHAUSTIVE
@on_ranks()
def test_models_of_odd_sizes_are_predicted_too(rank: int, shared_memory: str | None) -> None:
    plain: Any = ({}, {"prefetch": 0}, {"prefetch": 3}, *({"reshard_after_forward": each} for each in (False, "step")))
    kept = ({"size": 4, "reshard_after_forward": 2, **ahead} for ahead in ({}, {"prefetch": 0}))
    for settings in (*plain, *kept):
        for case, (make, all_settings) in ODD.items():
            if settings.get("prefetch", 3) != 3 and not all_settings:
                continue
            torch.manual_seed(0)
            model = shard(make().float(), **({"size": 2} | settings))
            _train(model, rank, (1, 2))
            _assert_predicted(model, (case, settings))
            if not FullBufferPool.can_cache:
                assert layerzero.memory(model).measured["cached_buffer"] == 0


def _predicted_with_owners(rank: int, sizes: Sequence[int]) -> None:
    """Predict memory with owners of full parameters, some of which are assembled there in each step."""
    for (size, mode), policy in itertools.product(_layouts(sizes), POLICIES[:2]):
        torch.manual_seed(0)
        chain = Chain(*(_Wide(width) for width in (3, 40, 7, 5, 7))).float()
        model = shard(chain, size=size, mp_policy=policy, accumulation=mode)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        optimizers = [
            layerzero.shard_optimizer(torch.optim.Muon(matrices, lr=0.01), model),
            layerzero.shard_optimizer(torch.optim.AdamW(rest), model),
        ]
        pool = get_state(model).pools.scratch
        for used, count in ((range(5), 1), (range(1, 5), 2), (range(5), 2)):
            model.order = used
            with _in_use(pool) as most:
                for micro_batch in range(count):
                    with layerzero.no_sync(model) if micro_batch + 1 < count else nullcontext():
                        loss_of(model(batch(rank, 0, micro_batch).float())).backward()
                for optimizer in optimizers:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            assert all(count <= pool.predicted[key] for key, count in most.items()), (size, most, pool.predicted)
        report = layerzero.memory(model)
        for kind in report.predicted.keys() - {"cached_buffer"}:  # units of one size may be cached in another order
            assert report.measured[kind] == report.predicted[kind], (kind, size, policy, mode, report)


@pytest.mark.exhaustive
@BOTH_SHARED_EXHAUSTIVE
def test_scratch_is_predicted_after_rows_have_moved_to_owners(shared_memory: str | None) -> None:
    run_ranks(_predicted_with_owners, _sizes_of(shared_memory), shared_memory=shared_memory)


@on_ranks()
def test_the_test_notices_memory_that_was_not_planned(rank: int) -> None:
    """Check that more reductions in flight than planned take more memory than predicted."""
    model = shard(_seeded(8), size=2)
    with (
        mock.patch.object(PendingReduction, "wait", _waiting(0.2)),
        mock.patch.object(reduction_queue, "IN_FLIGHT", (3, 8)),
    ):
        _train(model, rank, (1, 1))
    with pytest.raises(AssertionError):
        _assert_predicted(model, "")
    report = layerzero.memory(model)
    assert report.measured["reduce_buffer"] > report.predicted["reduce_buffer"]
    assert report.measured_peak > report.predicted_peak


def _peak(rank: int, sizes: Sequence[int]) -> None:
    """Measure a language model with tied head and embedding; the root's full gradient stays through a backward."""
    ahead = [(size, "sharded", {"prefetch": 0}) for size in sizes]
    for size, mode, settings in (*((*layout, {}) for layout in _layouts(sizes)), *ahead):
        model = layerzero.shard_model(
            TiedTransformer(),
            mesh=mesh_of(size),
            units=TiedTransformer.UNITS,
            mp_policy=POLICIES[1],
            accumulation=mode,
            **settings,
        )
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        for step in range(2):
            TiedTransformer.loss(model, TiedTransformer.batch(step=step, rank=rank)).backward()
            update(optimizer)
        report = layerzero.memory(model)
        assert report.measured["optimizer"] > 0
        assert abs(report.measured_peak / report.predicted_peak - 1) < 0.03, (size, mode, settings, report)


@pytest.mark.sample(1)
@BOTH
def test_the_peak_of_a_step_is_predicted(shared_memory: str | None) -> None:
    run_ranks(_peak, _sizes_of(shared_memory), shared_memory=shared_memory)


@needs_caching
@on_ranks(shared_memory="off")
def test_a_unit_is_gathered_at_the_same_address_in_each_pass(rank: int) -> None:
    whole = Handle.wait
    seen: list[list[int]] = []  # by pass: address of each unit in order of gathering, forward and then backward

    def wait(handle: Handle) -> None:
        comes = handle.state is GatherState.GATHERING
        whole(handle)
        if comes and handle.label != "the root":
            seen[-1].append(handle.weights.full_buffer.data_ptr())

    for prefetch in (1, 2):
        model = shard(_seeded(5), size=2, prefetch=prefetch)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        seen.clear()
        with mock.patch.object(Handle, "wait", wait):
            for step in range(6):
                seen.append([])
                loss_of(model(batch(rank, step).float())).backward()
                update(optimizer)
        assert [len(each) for each in seen] == [10] * 6 and 0 not in seen[-1], seen
        assert seen[2:] == [seen[2]] * 4, (prefetch, seen)
        forward, backward = seen[2][:5], seen[2][5:]
        assert forward == backward[::-1], "in its backward a unit lies where it lay in its forward"
        assert len(set(forward)) == 1 + prefetch, "units take turns"
