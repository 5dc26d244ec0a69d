"""Backends, options and timeouts of the groups that a model creates."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import layerzero
from layerzero.comm.collectives import Communicator
from layerzero.engine.hooks import get_state
from layerzero.utils.torch_compat import default_store
from tests.support import wrapped_gloo
from tests.support.models import exact_model, follow_exactly, integer_net
from tests.support.ranks import on_ranks

WORLD = 4


def _comms(model: nn.Module) -> tuple[list[Communicator], list[Communicator]]:
    """Return the communicators for tensors on the device, and those for control messages."""
    mesh_info = get_state(model).mesh_info
    on_device = [mesh_info.zero3_gather_comm, mesh_info.zero3_reduce_comm, mesh_info.replica_comm]
    return on_device, [mesh_info.zero3_control_comm, mesh_info.replica_control_comm]


# --- Backends ---


def _named_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@on_ranks(world_size=WORLD)
def test_groups_of_a_model_have_only_the_backend_of_their_messages(rank: int) -> None:
    """Use a second name of gloo as the backend of the device, here the CPU, and gloo itself for another device type."""
    if "named" not in dist.Backend.backend_list:
        dist.Backend.register_backend("named", _named_gloo, devices=["cpu"])
    groups = [dist.new_group(ranks, backend="cpu:named,cuda:gloo") for ranks in ([0, 1, 2, 3], [0, 1], [2, 3])]
    mesh = layerzero.mesh_from_groups(groups[0], groups[1 + rank // 2])
    assert {len(group._device_types) for group in mesh.get_all_groups()} == {2}, "groups of meshes keep all backends"
    model, optimizer = exact_model(mesh=mesh)
    on_device, control = _comms(model)
    assert {comm.held_group.backends for comm in on_device} == {"cpu:named"}
    assert [comm.group._device_types for comm in on_device] == [[torch.device("cpu")]] * 3
    assert {comm.held_group.backends for comm in control} == {"cpu:gloo,cuda:gloo"}, "one backend, as torch lists it"
    follow_exactly(model, optimizer, integer_net(), rank=rank, ranks=range(WORLD), micro_batches=2)


@on_ranks(world_size=2)
def test_groups_on_gloo_alone_have_the_backends_of_the_mesh(rank: int) -> None:
    on_device, control = _comms(layerzero.shard_model(integer_net(), zero3_size=2))
    listed = dist.get_backend_config(dist.group.WORLD)
    assert {comm.held_group.backends for comm in (*on_device, *control)} == {listed}


# --- Options ---


class _Options:
    """Options like those of NCCL: a configuration, and entries that torch sets for each group."""

    def __init__(self, max_ctas: int = 32) -> None:
        self.backend, self.group_name, self._timeout = _WithOptions.NAME, "", timedelta(0)
        self.config = SimpleNamespace(max_ctas=max_ctas)
        self.split_from: object = None


class _WithOptions(wrapped_gloo.WrappedGloo):
    """Backend that has options."""

    NAME = "optional"
    in_use: list[_Options] = []  # noqa: RUF012

    def __init__(self, common: Any, options: _Options | None) -> None:
        super().__init__(common.store, common.group_rank, common.group_size, common.timeout)
        self._options = options or _Options()
        assert not any(each is self._options for each in self.in_use), "torch would write this name to another group's"
        assert self._options.split_from is None, "ranks outside of the group would have to take part"
        self._options.group_name = common.group_id
        self.in_use.append(self._options)

    @property
    def options(self) -> Any:
        return self._options

    def launch(self, run: Any, output: object, given: object) -> dist.Work:
        return run()


def _start_default_group(rank: int, options: _Options) -> None:
    """Replace the default group by one whose backend has options."""
    if _WithOptions.NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_WithOptions.NAME, _WithOptions, extended_api=True, devices=["cpu"])
    store = dist.PrefixStore("with options", default_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(_WithOptions.NAME, store=store, rank=rank, world_size=WORLD, pg_options=options)


def _max_ctas(model: nn.Module) -> list[int]:
    """Return the option of the groups for gathers, hop 1 and the replica axis."""
    on_device, _ = _comms(model)
    return [comm.group._get_backend(torch.device("cpu")).options.config.max_ctas for comm in on_device]


@on_ranks(world_size=WORLD)
def test_options_of_each_axis_reach_the_groups_of_a_model(rank: int) -> None:
    _start_default_group(rank, _Options(16))
    assert _max_ctas(layerzero.shard_model(integer_net(), zero3_size=2)) == [16, 16, 16], "those of the default group"
    given = _Options(4)
    for axes, expected in ((("replica",), [16, 16, 4]), (("zero3",), [4, 4, 16]), (("replica", "zero3"), [4, 4, 4])):
        mesh = layerzero.init_mesh(2, "cpu", pg_options=dict.fromkeys(axes, given))
        assert _max_ctas(layerzero.shard_model(integer_net(), mesh=mesh)) == expected, axes
    assert not given.group_name and given.config.max_ctas == 4, "the user's options are not changed"
    assert layerzero.init_mesh(2, "cpu", pg_options={"zero3": _Options(4)}) == layerzero.init_mesh(2, "cpu")
    own = [dist.new_group(r, pg_options=_Options(1 + len(r))) for r in (range(4), [0, 1], [2, 3], [0, 2], [1, 3])]
    for group in own:  # as if torch had split them off the default group
        if isinstance(group, _WithOptions):
            group.options.split_from = "the default group"
    zero3, replica = own[1 + rank // 2], own[3 + rank % 2]
    table = torch.arange(4).view(2, 2)
    mesh = DeviceMesh.from_group([replica, zero3], "cpu", mesh=table, mesh_dim_names=("replicate", "shard"))
    model, optimizer = exact_model(mesh=mesh)
    assert _max_ctas(model) == [3, 3, 3]
    follow_exactly(model, optimizer, integer_net(), rank=rank, ranks=range(WORLD))
    assert _max_ctas(layerzero.shard_model(integer_net(), mesh=layerzero.mesh_from_groups(own[0], zero3))) == [3, 3, 5]


@on_ranks(world_size=WORLD)
def test_ranks_with_different_options_and_bad_options_raise_on_all_ranks(rank: int) -> None:
    gloo = {"replica": _Options()}
    with pytest.raises(ValueError, match=r"pg_options\['replica'\] is of the type _Options, .* gloo, which has no opt"):
        layerzero.init_mesh(2, "cpu", pg_options=gloo)
    _start_default_group(rank, _Options())
    with pytest.raises(ValueError, match=r"pg_options.*max_ctas.*8"):
        layerzero.init_mesh(2, "cpu", pg_options={"replica": _Options(8 if rank == 3 else 4)})
    with pytest.raises(ValueError, match="pg_options"):
        layerzero.init_mesh(2, "cpu", pg_options={"replica": _Options()} if rank == 3 else None)
    for bad in ({"shard": _Options()}, {"zero3": object()}, _Options()):
        with pytest.raises(ValueError, match="pg_options"):
            layerzero.init_mesh(2, "cpu", pg_options=bad)  # type: ignore[arg-type]
