"""Models that are sharded by one call for each unit train like those of `shard_model`, and like one process."""

from __future__ import annotations

import copy
import gc
import operator
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import layerzero
from layerzero import FSDPModule, fully_shard
from layerzero.comm.process_groups import current_groups
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.hooks import get_state
from tests.support.logs import logged
from tests.support.models import (
    BF16,
    IntegerNet,
    assert_same_bits,
    backward,
    backward_alone,
    different,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_net,
    update,
)
from tests.support.ranks import on_ranks

STEPS = 3


def mesh_with(axes: int) -> DeviceMesh:
    """Return a mesh of all four ranks with one axis, or with a replica axis and a shard axis."""
    shape, names = ((4,), ("dp",)) if axes == 1 else ((2, 2), ("replicate", "shard"))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard_units(net: nn.Module, *, root: bool = True, **settings: Any) -> nn.Module:
    """Call `fully_shard` for each unit of an IntegerNet, in another order than that of the model, and for the model."""
    for name in ("second", "first", "head"):
        assert fully_shard(getattr(net, name), **settings) is getattr(net, name)
    return fully_shard(net, **settings) if root else net


def have_values_of(model: nn.Module, net: nn.Module) -> bool:
    """Return whether the full tensors of the parameters are those of `net`. The model need not be complete."""
    full = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return all(torch.equal(full[name], parameter) for name, parameter in net.named_parameters())


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("first", ["optimizer", "forward"])
@pytest.mark.parametrize("reshards", [None, True, False])
@on_ranks(world_size=4)
def test_units_train_like_those_of_shard_model_and_like_one_process(
    rank: int, axes: int, first: str, reshards: bool | None
) -> None:
    """The model is complete after `first`."""
    mesh, model, alone, together = mesh_with(axes), integer_net(), integer_net(), integer_net()
    shard_units(model, mesh=mesh, reshard_after_forward=reshards)
    parameters = list(model.parameters())
    used = {held.name for held in current_groups() if len(held.ranks) > 1 and held.name}
    assert used <= {group.group_name for group in mesh.get_all_groups()}, "no group was created"
    for kind in (FSDPModule, torch.distributed.fsdp.FSDPModule):
        assert isinstance(model, kind) and isinstance(model.head, kind) and isinstance(model, IntegerNet)
    assert have_values_of(model, alone), "before the model is complete"
    layerzero.shard_model(together, mesh=mesh, units=IntegerNet.UNITS)
    nets = {net: exact_sgd(net.parameters()) for net in (model, together, alone)}
    if first == "forward":
        with torch.no_grad():
            model(integer_batch()[0])
    for net in (model, together):
        nets[net] = layerzero.shard_optimizer(nets[net], net)
    for step in range(STEPS):
        for net in (model, together):
            backward(net, rank, step)
        backward_alone(alone, step)
        update(*nets.values())
        assert_same_bits(model, alone, f"step {step}")
        assert not different(full_parameters(model), full_parameters(together))
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert [unit.name for unit in get_state(model).units] == ["", *IntegerNet.UNITS]
    assert layerzero.traffic(model).bytes.get("hop2") == layerzero.traffic(together).bytes.get("hop2")
    report = layerzero.memory(model)
    assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted
    layerzero.close(model)


@on_ranks(world_size=2)
def test_a_model_without_a_call_of_its_own_is_the_root(rank: int) -> None:
    """Its own parameter stays full on every rank, and its gradient is not averaged, as in FSDP2; a warning says so."""
    model, alone = shard_units(integer_net(), root=False), integer_net()
    assert isinstance(model.shift, nn.Parameter) and not isinstance(model.shift, RowShardedTensor)
    with logged() as lines:
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    assert any("parameter 'shift', and perhaps others, is in no call of fully_shard" in line for line in lines), lines
    assert [unit.name for unit in get_state(model).units] == ["", *IntegerNet.UNITS]
    with torch.no_grad():
        assert torch.equal(model(integer_batch()[0]), alone(integer_batch()[0]))
    backward(model, rank)
    optimizer.step()


@on_ranks(world_size=2)
def test_values_written_before_the_first_forward_are_used(rank: int) -> None:
    """Values are loaded, drawn or assigned after the calls, as on meta, with and without mixed precision."""
    for policy in (MixedPrecisionPolicy(), BF16):
        source = integer_net(seed=3)
        with torch.device("meta"):
            model = shard_units(IntegerNet(), mp_policy=policy)
        model.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match="no values were written to"):
            model(integer_batch()[0])
        model.load_state_dict(source.state_dict(), assign=True)
        assert have_values_of(model, source)
        with torch.no_grad():
            assert torch.equal(model(integer_batch()[0]).float(), source(integer_batch()[0]))
        loaded = shard_units(integer_net(), mp_policy=policy)
        loaded.load_state_dict(source.state_dict())
        with torch.no_grad():
            assert torch.equal(loaded(integer_batch()[0]).float(), source(integer_batch()[0]))
            loaded.head.weight.mul_(2)
            source.head.weight.mul_(2)
            assert torch.equal(loaded(integer_batch()[0]).float(), source(integer_batch()[0]))


@on_ranks(world_size=4)
def test_units_that_are_held_back_give_the_gradients_of_one_process(rank: int) -> None:
    """Some units, or the root alone, synchronize later than the others."""
    model, alone = shard_units(integer_net(), mesh=mesh_with(2)), integer_net()
    optimizers = layerzero.shard_optimizer(exact_sgd(model.parameters()), model), exact_sgd(alone.parameters())
    for step, (held_back, recurse) in enumerate([("first", True), ("", False), ("", True), ("head", False)]):
        module = model.get_submodule(held_back)
        for micro_batch in range(3):
            module.set_requires_gradient_sync(micro_batch == 2, recurse=recurse)
            backward(model, rank, 10 * step + micro_batch)
            backward_alone(alone, 10 * step + micro_batch)
        update(*optimizers)
        assert_same_bits(model, alone, f"step {step}")


@on_ranks(world_size=2)
def test_settings_before_the_first_forward_apply_in_the_order_of_the_calls(rank: int) -> None:
    model = integer_net()
    fully_shard(model.first)
    model.first.set_requires_gradient_sync(False)
    model.first.set_gradient_divide_factor(1.0)
    fully_shard(model.head).set_reshard_after_backward(False)
    fully_shard(model)
    model.set_modules_to_forward_prefetch([model.first, model.head])
    model.set_requires_gradient_sync(True)
    alone = integer_net()
    backward(model, rank)
    backward_alone(alone, world_size=2)
    for name, parameter in alone.named_parameters():
        scale = 2 if name.startswith("first.") else 1
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), parameter.grad * scale), name
    scheduler = get_state(model).scheduler
    assert [unit.name for unit in scheduler.prefetched_forward[get_state(model).units[0]]] == ["first", "head"]


@pytest.mark.parametrize("axes", [1, 2])
@on_ranks(world_size=4)
def test_tensors_that_torch_has_distributed_are_accepted(rank: int, axes: int) -> None:
    """They become values and gradients, before and after the first forward."""
    mesh, source = mesh_with(axes), integer_net(seed=2)
    model, alone = shard_units(integer_net(), mesh=mesh), integer_net(seed=2)

    def distributed(name: str, full: torch.Tensor) -> torch.Tensor:
        parameter = model.get_parameter(name)
        return distribute_tensor(full.detach().clone(), parameter.device_mesh, parameter.placements)

    if axes == 1:
        assert all(each.device_mesh == mesh and each.placements == (Shard(0),) for each in model.parameters())
    for assign in (False, True):  # before and after the first forward
        before = list(model.parameters())
        state = {name: distributed(name, value) for name, value in source.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        assert have_values_of(model, source) and all(map(operator.is_, model.parameters(), before))
        with torch.no_grad():
            assert torch.equal(model(integer_batch()[0]), source(integer_batch()[0]))
    optimizers = layerzero.shard_optimizer(exact_sgd(model.parameters()), model), exact_sgd(alone.parameters())
    backward_alone(alone)
    for name, parameter in alone.named_parameters():
        model.get_parameter(name).grad = distributed(name, parameter.grad)
    update(*optimizers)
    assert_same_bits(model, alone, "assigned gradients")


@on_ranks(world_size=2)
def test_models_whose_calls_and_forwards_alternate_are_separate(rank: int) -> None:
    """Two models, and two towers inside a third one."""
    nets = [integer_net(seed) for seed in (0, 1)]
    for name in ("first", "second", "head"):
        for net in nets:
            fully_shard(getattr(net, name))
    for net in nets:
        fully_shard(net)
    towers = nn.ModuleDict({"one": integer_net(2), "two": integer_net(3)})
    both = nn.Sequential(*towers.values())
    for tower in towers.values():
        shard_units(tower)
    with torch.no_grad():
        for seed, net in reversed([*enumerate(nets)]):
            assert torch.equal(net(integer_batch()[0]), integer_net(seed)(integer_batch()[0]))
    assert get_state(nets[0]).mesh_info.groups is not get_state(nets[1]).mesh_info.groups
    assert layerzero.units(both) and len(get_state(both).units) == 9
    layerzero.close(nets[1])
    for net in (nets[0], both[0], both[1]):
        backward(net, rank)


@on_ranks(world_size=2, pg_timeout=20)
def test_only_rank_0_may_have_values(rank: int) -> None:
    """The other ranks build the model on meta, and torch broadcasts the state."""
    source = integer_net(seed=4)
    with torch.device("meta" if rank else "cpu"):
        model = IntegerNet()
    shard_units(model).to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="no values were written to"):
        model(integer_batch()[0])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if rank else source.state_dict(), options=options)
    with torch.no_grad():
        assert torch.equal(model(integer_batch()[0]), source(integer_batch()[0]))


@on_ranks(world_size=2, pg_timeout=20)
def test_changes_before_the_first_forward_are_noticed(rank: int) -> None:
    frozen = shard_units(integer_net().bfloat16().requires_grad_(False)).requires_grad_(True)
    with pytest.raises(ValueError, match=r"frozen when it was sharded"):
        backward(frozen, rank)
    differs = shard_units(integer_net())
    differs.head.requires_grad_(rank == 1)
    with pytest.raises(ValueError, match="ranks disagree"):
        backward(differs, rank)
    model = shard_units(integer_net())
    with torch.inference_mode():
        assert torch.equal(model(integer_batch()[0]), integer_net()(integer_batch()[0]))
    backward(model, rank)
    for wrong in (torch.full((1,), 7.0), torch.tensor(7.0)):
        with pytest.raises(RuntimeError, match="size mismatch for shift"):
            model.load_state_dict({"shift": wrong}, assign=True, strict=False)
    set_twice = shard_units(integer_net())
    set_twice.first.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    set_twice.set_requires_gradient_sync(False)
    with pytest.raises(ValueError, match="neither a model"):
        set_twice(integer_batch()[0])
    assert get_state(set_twice).scheduler.held_back["requires_gradient_sync"], "later changes apply nevertheless"
    removed = fully_shard(integer_net())
    removed.head = nn.Identity()
    with pytest.raises(ValueError, match="a Linear with parameters was removed from FSDPIntegerNet"):
        removed(integer_batch()[0])
    several = nn.ModuleList([shard_units(integer_net()), shard_units(integer_net())])
    several[0](integer_batch()[0])
    with layerzero.unsharded(several):
        assert not any(isinstance(parameter, RowShardedTensor) for parameter in several.parameters())
    for wrap in (DistributedDataParallel, torch_fully_shard):
        with pytest.raises((ValueError, AssertionError), match=r"layerzero has sharded|already been applied"):
            wrap(shard_units(integer_net()))


@on_ranks(world_size=2)
def test_ddp_around_a_model_may_ignore_its_parameters(rank: int) -> None:
    model = nn.Sequential(shard_units(integer_net()), nn.Linear(3, 3, bias=False))
    nn.init.eye_(model[1].weight)
    ignored = [name for name, parameter in model.named_parameters() if isinstance(parameter, RowShardedTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    backward(DistributedDataParallel(model), rank)
    alone = nn.Sequential(integer_net(), nn.Linear(3, 3, bias=False))
    nn.init.eye_(alone[1].weight)
    backward_alone(alone, world_size=2)
    for name, parameter in alone.named_parameters():
        gradient = model.get_parameter(name).grad
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        assert torch.equal(full, parameter.grad), name


@on_ranks(world_size=2)
def test_a_complete_model_is_freed_with_its_last_reference(rank: int) -> None:
    gc.collect()
    gc.disable()
    model = shard_units(integer_net())
    model(integer_batch()[0])
    ref = weakref.ref(model)
    del model
    assert ref() is None
    gc.enable()


@on_ranks(world_size=2)
def test_hooks_run_in_the_order_of_fsdp2_in_each_forward(rank: int) -> None:
    """A hook that is prepended after the call runs before the gather, and one registered after it behind it."""
    model, seen = shard_units(integer_net()), []
    for prepend in (True, False):
        model.first.register_forward_pre_hook(
            lambda module, args: seen.append(isinstance(module.weight, RowShardedTensor)), prepend=prepend
        )
    for _ in range(2):
        model(integer_batch()[0])
    assert seen == [True, False] * 2


@on_ranks(world_size=2, pg_timeout=20)
def test_models_that_are_not_complete_say_what_is_wrong(rank: int) -> None:
    offloaded = integer_net()
    with pytest.warns(UserWarning, match="there is no device memory to free"):
        fully_shard(offloaded.first, offload_policy=layerzero.Offload(grads=True))
    with pytest.raises(ValueError, match="different offload policies"):
        fully_shard(offloaded)(integer_batch()[0])
    unwrapped = shard_units(integer_net())
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) would update parameter 'shift'.*shard_optimizer"):
        torch.optim.SGD(unwrapped.parameters()).step()
    failing = shard_units(integer_net())
    with mock.patch("layerzero.fsdp2.unfinished.make_root", side_effect=OSError("no memory")):
        with pytest.raises(OSError, match="no memory"):
            failing(integer_batch()[0])
        for call in (lambda: failing(integer_batch()[0]), lambda: layerzero.memory(failing)):
            with pytest.raises(RuntimeError, match=r"could not be completed: OSError: no memory"):
                call()


@on_ranks(world_size=2, pg_timeout=20)
def test_wrong_calls_are_errors_on_all_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = integer_net()
    fully_shard(model.first, mesh=mesh)
    buffers = layerzero.PrecisionPolicy(buffer_dtype=torch.bfloat16)
    for call, error, text in (
        (lambda: fully_shard(model.first), AssertionError, "already been applied to this FSDPLinear"),
        (lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ValueError, "containers that do not implement forward"),
        (lambda: fully_shard([]), ValueError, "got an empty list"),
        (lambda: fully_shard(model.head, mesh="dp"), TypeError, r"expects mesh to be a DeviceMesh, got 'dp'"),
        (lambda: fully_shard(model.head, mp_policy=buffers), ValueError, "only layerzero.shard_model supports"),
        (lambda: fully_shard(model.head, shard_placement_fn=lambda parameter: Shard(1)), ValueError, "by rows"),
        (lambda: model.first.set_all_reduce_hook(print), NotImplementedError, "set_all_reduce_hook is not supported"),
        (lambda: copy.deepcopy(model), TypeError, "deepcopy"),
        (
            lambda: torch_fully_shard.state(model.first)._comm_ctx,
            NotImplementedError,
            r"needs the state of FSDP2 \(_comm_ctx\)",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    tied = integer_net()
    tied.second.weight = tied.first.weight
    fully_shard(tied.first)
    with pytest.raises(ValueError, match=r"belongs to the unit of another call.*as one list"):
        fully_shard(tied.second)
    apart = integer_net()
    fully_shard(apart.first, mesh=mesh)
    fully_shard(apart, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    apart(integer_batch()[0])
    assert len({unit.mesh_info for unit in get_state(apart).units}) == 1, "meshes of equal ranks are one"
    replaced = shard_units(integer_net())
    replaced.head.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"parameter '.*bias' was replaced"):
        replaced(integer_batch()[0])
    partly, other = integer_net(), nn.Linear(5, 6)
    fully_shard([partly.first, other])
    with pytest.raises(ValueError, match="a FSDPLinear of one unit is not inside the FSDPIntegerNet"):
        fully_shard(partly)(integer_batch()[0])
    added = shard_units(integer_net())
    added.head.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"'head\.scale' joined the model after its module was sharded"):
        added(integer_batch()[0])
    for setting in ({"reshard_after_forward": rank == 0}, {"mp_policy": BF16 if rank else MixedPrecisionPolicy()}):
        uneven = shard_units(integer_net(), **setting)
        before = {held.name for held in current_groups()}
        with pytest.raises(ValueError, match=f"ranks disagree.*{next(iter(setting))}"):
            uneven(integer_batch()[0])
        assert {held.name for held in current_groups()} == before, "ranks did not connect"
    tied = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    if rank == 1:
        tied[1].running_mean = tied[0].running_mean
    with pytest.raises(ValueError, match=r"ranks disagree.*names of the buffer '0\.running_mean'"):
        fully_shard(tied)(torch.zeros(2, 4))
    alone = integer_net()
    fully_shard(alone.first)
    alone.first(integer_batch()[0])
    with pytest.raises(RuntimeError, match="is a complete model or a unit of one"):
        fully_shard(alone)
