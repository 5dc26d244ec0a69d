"""Owner groups, the ranks that assemble full parameters: several optimizers, differing ranks, shared buffers."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero
from layerzero.comm.collectives import Collective
from layerzero.comm.mesh_info import mesh_of_ranks
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import get_state
from layerzero.engine.weight_storage import WeightStorage
from layerzero.extend import StepObserver, attach
from layerzero.layout.flat_layout import FlatLayout
from layerzero.muon import owner_table
from layerzero.muon.owner_table import owners_of
from layerzero.optimizers.compatibility_trial import steps_matrices_separately
from tests.muon.test_owner_meshes import (
    OPTIMIZERS,
    STACKS,
    EachMatrix,
    Linearly,
    alone,
    matrices,
    mixture,
    others,
    owned_sgd,
    rows,
    shard_all,
    stacks_step,
    steps_of,
    tensor_parallel,
)
from tests.muon.test_owner_state import state_alone, whole_state
from tests.muon.test_owner_step import Wide
from tests.muon.test_owner_step import rows as wide_rows
from tests.support.models import (
    IntegerNet,
    different,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    union,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks

# A second optimizer over the same parameters


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("names", [("each matrix", "whole stack"), ("whole stack", "each matrix")])
@on_ranks()
def test_a_second_optimizer_gets_the_stacks_as_it_needs_them(rank: int, names: tuple[str, str]) -> None:
    model, net = mixture(2, 2, expert_size=2, dtensor=True, kind=Linearly), Linearly()
    ours = [layerzero.shard_optimizer(STACKS[name](model), model) for name in names]
    theirs = [STACKS[name](net) for name in names]
    assert owners_of(get_state(model)).owners["layers.0.experts.weight"].axis == 0, (
        "one of them takes norms over whole stacks"
    )
    for step in range(3):
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            batches = [integer_batch(step=step, micro_batch=index, rank=r) for r in range(4)]
            integer_loss(model, batches[rank]).backward()
            integer_loss(net, union(batches)).backward()
            for each in (our, their):
                each.step()
                each.zero_grad()
            assert not different(full_parameters(model), dict(net.named_parameters())), (step, index)
    for our, their in zip(ours, theirs, strict=True):
        assert not different(whole_state(our), state_alone(their, net))


@on_ranks()
def test_rows_move_with_the_values_of_an_edit(rank: int) -> None:
    """Move rows to other ranks after an edit. Two ranks launch the refresh of the edit late."""
    model, net = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS), integer_net()
    with torch.no_grad():
        for parameter in (*model.parameters(), *net.parameters()):
            parameter.mul_(3)
    expected, moved = dict(net.named_parameters()), []
    launch, change = WeightStorage.launch_refresh, Handle.change_layout

    def launch_late(weights: WeightStorage, **settings: Any) -> None:
        time.sleep(0.2 if rank >= 2 else 0)
        launch(weights, **settings)

    def change_and_compare(handle: Handle, layout: FlatLayout) -> None:
        change(handle, layout)
        for member in handle.members:
            rows = member.spec.rows
            assert torch.equal(member.sharded.to_local(), expected[member.name][rows.start : rows.stop]), member.name
            moved.append(member.name)

    matrices_of_model = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    with (
        mock.patch.object(WeightStorage, "launch_refresh", launch_late),
        mock.patch.object(Handle, "change_layout", change_and_compare),
    ):
        layerzero.shard_optimizer(torch.optim.Muon(matrices_of_model), model)
    assert moved


@on_ranks()
def test_a_second_optimizer_that_needs_more_comes_before_the_first_step(rank: int) -> None:
    model = mixture(2, 2, expert_size=2, dtensor=True, kind=Linearly)
    first = layerzero.shard_optimizer(STACKS["each matrix"](model), model)
    stacks_step(model, first, rank, 0)
    before = full_parameters(model)
    again = layerzero.shard_optimizer(STACKS["each matrix"](model), model)  # needs no more than exists
    with pytest.raises(RuntimeError, match=r"another optimizer already has state for 'layers.\d.experts.weight'"):
        layerzero.shard_optimizer(STACKS["whole stack"](model), model)
    assert owners_of(get_state(model)).owners["layers.0.experts.weight"].axis is None
    assert not different(full_parameters(model), before)
    stacks_step(model, again, rank, 1)


@on_ranks()
def test_ranks_that_find_out_other_things_about_an_optimizer_are_one_error_on_all(rank: int) -> None:
    model = mixture(2, 2, expert_size=2, dtensor=True, kind=Linearly)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(owner_table, "steps_matrices_separately", lambda *_: False)
        with pytest.raises(ValueError, match=r"joined along model-parallel axes is .* on rank"):
            layerzero.shard_optimizer(STACKS["each matrix"](model), model)
    assert not owners_of(get_state(model)).owners
    stacks_step(model, layerzero.shard_optimizer(STACKS["each matrix"](model), model), rank, 0)


# Gradients on some ranks only


@pytest.mark.default_sample(1)
@pytest.mark.parametrize(("name", "there", "of"), [("c.weight", 1, 2), ("a.weight", 3, 4)])
@on_ranks()
def test_a_gradient_that_is_missing_in_one_owner_group_is_an_error_on_all_ranks(
    rank: int, name: str, there: int, of: int
) -> None:
    """Let a gradient of `c` be missing. `c` is a copy on both tensor ranks; `a` is cut over all four ranks."""
    model, batches = tensor_parallel(2, 2)
    (optimizer,) = shard_all(OPTIMIZERS["SGD"](model), model)
    before = full_parameters(model)
    model(rows(batches[0], 0)).backward()
    if rank == 0:
        dict(model.named_parameters())[name].grad = None
    match = rf"'{name}' .* a gradient on {there} of the {of} ranks that send its rows to its owner.* Set"
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()
    assert not different(full_parameters(model), before)
    optimizer.zero_grad()
    steps_of(model, [optimizer], batches, range(1), 2.0)
    assert not different(full_parameters(model), dict(alone("SGD", 1)[0].named_parameters()))


class Messages(StepObserver):
    """Records the comparisons of gradients that ranks launch, and the gathers of masters in flight meanwhile."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.during: list[int] = []  # for each comparison along an axis: number of gathers in flight

    def launched(self, works: Any) -> None:
        self.in_flight += works.launched.collective is Collective.OWNER_GATHER
        if works.launched.collective is Collective.METADATA:
            self.during.append(self.in_flight)

    def done(self, works: Any) -> None:
        self.in_flight -= works.launched.collective is Collective.OWNER_GATHER


@on_ranks()
def test_ranks_compare_their_gradients_while_masters_are_gathered(rank: int) -> None:
    """In the third step, the parameters of the first round have no gradient. The fourth is an error on all ranks."""
    model, net, messages = layerzero.shard_model(Wide(), mesh=mesh_of(2), units=Wide.UNITS), Wide(), Messages()
    ours, theirs = owned_sgd(model), exact_sgd(net.parameters())
    attach(model, messages)
    for step, gathers in enumerate((0, 1, 1, 1)):
        for each in range(4):
            (net(wide_rows(each, step)) * 0.25).backward()
        model(wide_rows(rank, step)).backward()
        for module in (model, net) if step == 2 else (model,) if step == 3 and rank == 0 else ():
            for parameter in matrices(module):
                parameter.grad = None
        messages.during.clear()
        with pytest.raises(RuntimeError, match=r"a gradient on . of the 2 ranks") if step == 3 else nullcontext():
            ours.step()
        assert messages.during[:2] == [gathers] * 2 and messages.in_flight == 0, step
        if step < 3:
            theirs.step()
        assert not different(full_parameters(model), dict(net.named_parameters())), step
        ours.zero_grad(), theirs.zero_grad()


# Process groups


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_group_ranks)


@on_ranks()
def test_owner_groups_are_made_once_and_before_rows_move(rank: int) -> None:
    model, batches = tensor_parallel(2, 1)
    before, start = full_parameters(model), groups()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    first = layerzero.shard_optimizer(torch.optim.Muon(matrices(model), lr=0.1), model)
    assert groups() == start + 1 + (rank == 0), "one for the owner groups"
    second = layerzero.shard_optimizer(torch.optim.SGD(others(model), lr=0.5), model, elementwise=False)
    again = layerzero.shard_optimizer(torch.optim.Adafactor(model.parameters()), model)
    assert groups() == start + 1 + (rank == 0), "owner groups are shared"
    assert not different(full_parameters(model), before)
    steps_of(model, [first, second, again], batches, range(2))


# State at one coordinate only


class Largest(TorchDispatchMode):
    """Records the largest number of elements of a created tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, Tensor) and each.dtype != torch.uint8:
                self.numel = max(self.numel, each.numel())
        return made


@on_ranks()
def test_state_of_one_place_is_told_to_the_others_in_one_copy(rank: int) -> None:
    model, _ = tensor_parallel(4, 1)
    owned_sgd(model)
    model_parallel = get_state(model).members["a.weight"].spec.model_parallel
    assert model_parallel is not None
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        whole = torch.arange(24).view(8, 3).to(dtype)
        for place in (0, 3):
            held = model_parallel.of_state(whole.shape, axis=0, coordinate=place)
            part = whole.T.contiguous().T if rank == place else whole.new_empty(0, 3)
            with Largest() as made:
                told = held.gather_global(part)
            assert told.dtype == dtype and told.device == whole.device and not told.requires_grad
            assert torch.equal(told.view(torch.uint8), whole.view(torch.uint8))
            assert made.numel <= whole.numel(), "one copy, not one for each place"


# Stacks of few matrices


class NeverEmpty(EachMatrix):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        assert all(gradient.max() > -1e9 for gradient in gradients)
        super().step()


class Few(nn.Module):
    """Stack of one matrix, none of which is at the second coordinate of an axis."""

    def __init__(self, axis: DeviceMesh | None = None) -> None:
        super().__init__()
        whole = torch.arange(16.0).view(1, 4, 4) % 3
        self.weight = nn.Parameter(whole if axis is None else distribute_tensor(whole, axis, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        local = self.weight if torch.is_tensor(self.weight) and not hasattr(self.weight, "to_local") else None
        stack = self.weight.to_local() if local is None else local
        return (stack * x).sum()


def _few(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, net = layerzero.shard_model(Few(mesh["ep"]), mesh=mesh["dp"]), Few()
    with pytest.raises(ValueError, match="sharded unevenly along dim 0 over 2 ranks"):
        layerzero.shard_optimizer(NeverEmpty(model.parameters()), model)
    ours, theirs = layerzero.shard_optimizer(EachMatrix(model.parameters()), model), EachMatrix(net.parameters())
    for x in (1.0, -2.0):
        for each, module in ((ours, model), (theirs, net)):
            module(torch.tensor(x)).backward()
            each.step()
            each.zero_grad()
        assert not different(full_parameters(model), dict(net.named_parameters()))


def test_a_place_without_matrices_is_no_error_where_the_optimizer_takes_none() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    assert steps_matrices_separately(EachMatrix([parameter]), torch.device("cpu"), 3)
    assert not steps_matrices_separately(NeverEmpty([parameter]), torch.device("cpu"), 3)
    run_ranks(_few)


# Axes that the root does not have


class Branches(nn.Module):
    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.root, self.inner = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.inner.weight = nn.Parameter(distribute_tensor(self.inner.weight.detach(), tp, [Shard(0)]))


@on_ranks()
def test_an_axis_beside_some_units_on_which_the_root_has_nothing_is_one_clear_error(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ranks = mesh["dp"].mesh.tolist()
    root, own = mesh_of_ranks(ranks, 2, "cpu"), mesh_of_ranks(ranks, 1, "cpu")
    with pytest.raises(
        ValueError, match=r"DTensors on the ranks \[\d, \d\], but the root, .* has no DTensor on these axes"
    ):
        layerzero.shard_model(
            Branches(mesh["tp"]), mesh=lambda name, module: own if name == "inner" else root, units=("inner",)
        )
