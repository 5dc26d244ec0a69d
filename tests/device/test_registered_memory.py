"""Memory that is registered with a backend: what is allocated in it, for which groups, and until when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import UntypedStorage

import layerzero
from layerzero.engine.hooks import get_state
from tests.support import late_device
from tests.support.late_device import NAME, Device
from tests.support.models import SideBySide, different, exact_sgd, full_parameters, integer_batch, integer_loss
from tests.support.ranks import mesh_of, run_ranks
from tests.support.wrapped_gloo import mesh_on

UNITS = 3


class _Pool:
    """Stand-in for torch.cuda.MemPool. It records the sizes of the allocations that are made in it."""

    def __init__(self, allocator: object) -> None:
        self.allocator = allocator
        self.sizes: list[int] = []


class _RegisteringDevice(Device):
    """Simulated device with memory pools."""

    MemPool = _Pool
    has_synchronized = False

    def synchronize(self, device: torch.device) -> None:
        for stream in self.streams:
            stream.record_event().synchronize()
        self.has_synchronized = True

    @contextmanager
    def use_mem_pool(self, pool: _Pool) -> Iterator[None]:
        resize, zeros = UntypedStorage.resize_, torch.zeros

        def resizes(storage: UntypedStorage, nbytes: int) -> Any:
            pool.sizes.append(nbytes)
            return resize(storage, nbytes)

        def makes(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = zeros(*args, **kwargs)
            pool.sizes.append(tensor.untyped_storage().nbytes())
            return tensor

        assert threading.current_thread() is threading.main_thread()
        with mock.patch.object(UntypedStorage, "resize_", resizes), mock.patch("torch.zeros", makes):
            yield


class _RegisteringGroup(late_device._Group):
    """Group whose backend registers memory. Its communicator exists after the first collective, as with NCCL."""

    registered: ClassVar[list[tuple[_RegisteringGroup, _Pool]]] = []  # groups with their pools
    mem_allocator = "the backend's allocator"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._has_communicator = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device == torch.device("cpu")

    def launch(self, *args: Any) -> Any:
        self._has_communicator = True
        return super().launch(*args)

    def register_mem_pool(self, pool: _Pool) -> None:
        assert self._has_communicator, "a pool is registered before the first collective"
        self.registered.append((self, pool))

    def deregister_mem_pool(self, pool: _Pool) -> None:
        device = late_device._device()
        assert isinstance(device, _RegisteringDevice) and device.has_synchronized, "a collective may use the memory"
        self.registered.remove((self, pool))


def _train(model: Any, rank: int) -> dict[str, torch.Tensor]:
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    for step in range(2):
        integer_loss(model, integer_batch(step=step, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def _shard(mesh: Any, **settings: Any) -> Any:
    units = [f"units.{index}" for index in range(UNITS)]
    return layerzero.shard_model(SideBySide(UNITS), mesh=mesh, units=units, **settings)


def _gather_into_registered_memory(rank: int) -> None:
    late_device.wrapped_gloo.register(_RegisteringGroup)
    mesh = mesh_on(NAME, 2)
    expected = _train(_shard(mesh_of(2)), rank)
    registered = _RegisteringGroup.registered
    with _RegisteringDevice().installed():
        model = _shard(mesh, registered_memory=True)
        ((group, pool),) = registered
        assert group is get_state(model).mesh_info.zero3_gather_comm.group, "only the gathers use the memory"
        assert pool.allocator == _RegisteringGroup.mem_allocator
        handles = get_state(model).handles
        shards = sorted(handle.weights.zero3_shard.nbytes for handle in handles)
        assert sorted(pool.sizes) == shards, "shards are registered, from which gathers send"
        pool.sizes.clear()
        found = _train(model, rank)
        sizes = {handle.weights.buffer.full_bytes for handle in handles}
        assert set(pool.sizes) == sizes, "full buffers are registered, and nothing else"
        layerzero.close(model)
        assert not registered
        _train(_shard(mesh), rank)
        assert not registered, "without the setting, nothing is registered"
    assert not different(found, expected)


def test_gathers_use_registered_memory_until_the_model_is_closed() -> None:
    run_ranks(_gather_into_registered_memory, world_size=4)


def _without_gathers(rank: int) -> None:
    late_device.wrapped_gloo.register(_RegisteringGroup)
    mesh = mesh_on(NAME, 1)
    expected = _train(_shard(mesh_of(1)), rank)
    with _RegisteringDevice().installed():
        found = _train(_shard(mesh, registered_memory=True), rank)
    assert not _RegisteringGroup.registered and not different(found, expected)


def test_without_gathers_nothing_is_registered() -> None:
    run_ranks(_without_gathers, world_size=2)


def _refuse(rank: int) -> None:
    with pytest.raises(ValueError, match=r"registered_memory=True needs .* but gloo on cpu does not. Leave"):
        _shard(mesh_of(2), registered_memory=True)
    with pytest.raises(TypeError, match="registered_memory must be a bool, got 1"):
        _shard(mesh_of(2), registered_memory=1)


def test_a_backend_that_cannot_register_memory_is_refused() -> None:
    run_ranks(_refuse, world_size=2)
