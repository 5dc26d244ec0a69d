"""Full parameters with other axes: tensor parallel ones, and experts on their own meshes."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from layerzero.comm.mesh_info import mesh_of_ranks
from layerzero.engine.hooks import get_state
from layerzero.muon.owner_table import owners_of
from layerzero.optimizers.compatibility_trial import steps_matrices_separately
from tests.dtensor.test_tensor_parallel import Net as Uneven
from tests.dtensor.test_tensor_parallel import parallel as uneven
from tests.muon.test_owner_state import Factored, expect, put_back, state_alone, whole_state
from tests.muon.test_owner_step import Wide, adamw, fill_with_integers, grouped, matrices, others
from tests.muon.test_owner_step import rows as rows_of
from tests.sharding.test_expert_parallel import UNITS as MIXTURE_UNITS
from tests.sharding.test_expert_parallel import Experts, meshes, mine
from tests.sharding.test_expert_parallel import Net as Mixture
from tests.support.models import (
    LayerwiseScaling,
    different,
    exact_sgd,
    follow_exactly,
    full_parameters,
    integer_batch,
    integer_loss,
    union,
    update,
)
from tests.support.ranks import needs_caching, on_ranks, run_ranks

pytestmark = pytest.mark.slow


def owned_sgd(model: nn.Module) -> Any:
    return layerzero.shard_optimizer(exact_sgd(model.parameters()), model, elementwise=False)


# Experts


def mixture(
    ep: int, size: int, *, expert_size: int, dtensor: bool, kind: type[Mixture] = Mixture, **settings: Any
) -> nn.Module:
    own, axis = meshes(ep, expert_size)
    rest = layerzero.init_mesh(size)
    return layerzero.shard_model(
        kind(axis, dtensor=dtensor),
        mesh=lambda name, module: own if isinstance(module, Experts) else rest,
        units=MIXTURE_UNITS,
        **settings,
    )


def _experts(rank: int, ep: int, size: int, expert_size: int, dtensor: bool, accumulation: str) -> None:
    model = mixture(ep, size, expert_size=expert_size, dtensor=dtensor, accumulation=accumulation)
    part = dict if dtensor else partial(mine, ep=ep, rank=rank)
    ranks = range(dist.get_world_size())
    follow_exactly(model, owned_sgd(model), Mixture(), rank=rank, ranks=ranks, micro_batches=2, part=part)


@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulation", ["sharded", "full", "local"])
@pytest.mark.parametrize("dtensor", [True, False])
def test_experts_on_a_mesh_of_their_own_are_updated_whole(dtensor: bool, accumulation: str) -> None:
    for ep, size, expert_size in ((2, 2, 2), (2, 4, 1), (4, 2, 1)):
        run_ranks(_experts, ep, size, expert_size, dtensor, accumulation)


# Tensor parallel


class Side(nn.Module):
    """Layers side by side whose gradients are small integers for any weights: exact for any optimizer."""

    UNITS = ("a", "b", "c")

    def __init__(self, tp: DeviceMesh | None = None, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.a, self.b, self.d = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 8)
        self.c = nn.Linear(8, 16, bias=False)
        fill_with_integers(self)
        if tp is not None:
            by_rows, by_columns = (
                ColwiseParallel(output_layouts=Replicate()),
                RowwiseParallel(input_layouts=Replicate()),
            )
            parallelize_module(self, tp, {"a": by_rows, "b": by_columns, "d": by_rows})
        if tied:
            self.d.weight = self.a.weight
        self.c.weight.requires_grad_(not frozen)

    forward = Wide.forward


rows = partial(rows_of, width=8)


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "SGD": lambda model: [exact_sgd(model.parameters())],
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.1)],
    "AdamW, then Muon": lambda model: [
        adamw(others(model)),
        torch.optim.Muon(matrices(model), lr=0.1),
    ],
    "groups of one": grouped,
    "state in lists": lambda model: [Factored(model.parameters())],
}


def shard_all(optimizers: list[Optimizer], model: nn.Module) -> list[Any]:
    word = {torch.optim.SGD: False}
    return [layerzero.shard_optimizer(each, model, elementwise=word.get(type(each))) for each in optimizers]


def steps_of(model: nn.Module, optimizers: list[Any], batches: range, steps: range, share: float = 1.0) -> None:
    for step in steps:
        for number, batch in enumerate(batches):
            later = hasattr(model, "no_sync") and number + 1 < len(batches)
            with layerzero.no_sync(model) if later else nullcontext():
                (model(rows(batch, step), ("abcd", "abd", "acd")[step % 3]) * share).backward()
        update(*optimizers)


def tensor_parallel(tp: int, size: int, **settings: Any) -> tuple[nn.Module, range]:
    """Return a model and the indices of this rank's batches, out of eight for all ranks."""
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    built = {key: settings.pop(key) for key in ("tied", "frozen") if key in settings}
    model = Side(mesh["tp"] if tp > 1 else None, **built)
    model = layerzero.shard_model(model, mesh=layerzero_mesh(mesh["dp"], size), units=Side.UNITS, **settings)
    mine = mesh["dp"].get_local_rank()
    return model, range(mine * 8 // dp, (mine + 1) * 8 // dp)


def layerzero_mesh(dp: DeviceMesh, size: int) -> DeviceMesh:
    return mesh_of_ranks(dp.mesh.tolist(), size, "cpu")


def alone(name: str, steps: int, **built: bool) -> tuple[nn.Module, list[Optimizer]]:
    net = Side(**built)
    optimizers = OPTIMIZERS[name](net)
    steps_of(net, optimizers, range(8), range(steps))
    return net, optimizers


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("tp", "size"), [(2, 1), (2, 2), (4, 1)])
@on_ranks()
def test_tensor_parallel_matrices_are_updated_whole(rank: int, tp: int, size: int, name: str) -> None:
    dp = dist.get_world_size() // tp
    for accumulation, built in (("sharded", {}), ("full", {"tied": True, "frozen": True})):
        model, batches = tensor_parallel(tp, size, accumulation=accumulation, **built)
        optimizers = shard_all(OPTIMIZERS[name](model), model)
        net = Side(**built)
        theirs = OPTIMIZERS[name](net)
        for step in range(3):
            steps_of(model, optimizers, batches, range(step, step + 1), float(dp))
            steps_of(net, theirs, range(8), range(step, step + 1))
            wrong = different(full_parameters(model), dict(net.named_parameters()))
            assert not wrong, f"{name} {accumulation} step {step}: {wrong}"
        for ours, their in zip(optimizers, theirs, strict=True):
            wrong = different(whole_state(ours), state_alone(their, net))
            assert not wrong, f"{name} {accumulation}: {wrong}"


# Refusals


@on_ranks()
def test_parts_that_cannot_be_put_together_are_one_error_on_all_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = layerzero.shard_model(uneven(mesh["tp"]), zero3_size=2, units=Uneven.UNITS)
    before = full_parameters(model)
    with pytest.raises(ValueError, match=r"but .head.weight. of shape .* sharded unevenly along dim 0"):
        layerzero.shard_optimizer(torch.optim.Muon(matrices(model)), model)
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "head" not in name]
    rest = [p for p in model.parameters() if all(p is not other for other in inner)]
    optimizers = [
        layerzero.shard_optimizer(torch.optim.Muon(inner, lr=0.1), model),
        layerzero.shard_optimizer(torch.optim.AdamW(rest), model),
    ]
    assert not different(full_parameters(model), before)
    integer_loss(model, integer_batch(rank=mesh["dp"].get_local_rank())).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert different(full_parameters(model), before)

    both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "one", "other"))
    twice = nn.Linear(4, 4, bias=False)
    placed = distribute_tensor(torch.ones(4, 4), both["one", "other"], [Shard(0), Shard(1)])
    twice.weight = nn.Parameter(placed)
    model = layerzero.shard_model(twice, mesh=both["dp"])
    with pytest.raises(ValueError, match=r"'weight' is sharded along 2 model-parallel axes"):
        layerzero.shard_optimizer(torch.optim.Muon(model.parameters()), model)


# States and checkpoints


def trained(tp: int, size: int, name: str, steps: range) -> tuple[nn.Module, list[Any], range]:
    model, batches = tensor_parallel(tp, size)
    optimizers = shard_all(OPTIMIZERS[name](model), model)
    steps_of(model, optimizers, batches, steps, dist.get_world_size() / tp)
    return model, optimizers, batches


def _saves(rank: int, path: str, tp: int, size: int, name: str) -> None:
    model, optimizers, batches = trained(tp, size, name, range(2))
    expect(model, optimizers, alone(name, 2), "trained")
    for index, optimizer in enumerate(optimizers):
        checkpoint.save(f"{path}-{index}", model, optimizer)
    go_on = partial(steps_of, model, optimizers, batches, share=dist.get_world_size() / tp)
    put_back(model, optimizers, partial(alone, name), go_on, name)


def _resumes(rank: int, path: str, tp: int, size: int, name: str) -> None:
    model, optimizers, batches = trained(tp, size, name, range(5, 6))  # has a state already, none of which may remain
    for index, optimizer in enumerate(optimizers):
        checkpoint.load(f"{path}-{index}", model, optimizer)
    case = f"D={dist.get_world_size()} tp={tp} S={size}"
    expect(model, optimizers, alone(name, 2), f"{case} loaded")
    steps_of(model, optimizers, batches, range(2, 4), dist.get_world_size() / tp)
    expect(model, optimizers, alone(name, 4), f"{case} resumed")


PLACES = [(4, 2, 2), (2, 2, 1), (4, 1, 2), (1, 1, 1)]  # ranks, tp, S


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "saved_on"), [("Adafactor", (4, 2, 1)), ("AdamW, then Muon", (2, 1, 2)), ("state in lists", (4, 2, 2))]
)
def test_a_checkpoint_of_tensor_parallel_matrices_goes_to_other_sizes(
    tmp_path: Path, name: str, saved_on: tuple[int, int, int]
) -> None:
    path = str(tmp_path / "step-2")
    run_ranks(_saves, path, *saved_on[1:], name, world_size=saved_on[0])
    for ranks, tp, size in PLACES:
        run_ranks(_resumes, path, tp, size, name, world_size=ranks)


# Stacks of experts


class Linearly(Mixture):
    """Trains only experts, whose gradients are integers for any weights."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        del self.head
        self.unused = nn.Parameter(torch.zeros(2), requires_grad=False)
        for layer in self.layers:
            layer.scale.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x) + 2 * self.layers[1](x.flip(1))
        return y[:, :3] - y[:, 3:]


def stacks(model: nn.Module) -> list[Tensor]:
    return [layer.experts.weight for layer in model.layers]


class EachMatrix(Optimizer):
    """Scales each matrix of a stack by its own norm, and keeps sums of its rows."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if (gradient := parameter.grad) is not None:
                matrix = gradient.ndim > 1
                sums = (gradient**2).sum(-1) if matrix else gradient**2
                state = self.state[parameter].setdefault("sums", torch.zeros_like(sums))
                state.mul_(0.5).add_(sums)
                norm = state.sum(-1, keepdim=True).unsqueeze(-1) if matrix else state.sum()
                parameter.sub_(gradient / (1 + norm), alpha=self.param_groups[0]["lr"])


STACKS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "each matrix": lambda model: EachMatrix(stacks(model)),
    "whole stack": lambda model: torch.optim.Adafactor(stacks(model), lr=0.1),
}


def stacks_alone(name: str, steps: int) -> tuple[nn.Module, list[Optimizer]]:
    net = Linearly()
    theirs = STACKS[name](net)
    for step in range(steps):
        integer_loss(net, union([integer_batch(step=step, rank=r) for r in range(4)])).backward()
        update(theirs)
    return net, [theirs]


def stacks_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    each = 4 // dist.get_world_size()
    integer_loss(model, union([integer_batch(step=step, rank=rank * each + i) for i in range(each)])).backward()
    update(optimizer)


def _saves_stacks(rank: int, path: str, name: str) -> None:
    model = mixture(2, 2, expert_size=2, dtensor=True, kind=Linearly)
    optimizer = layerzero.shard_optimizer(STACKS[name](model), model)
    owner = owners_of(get_state(model)).owners["layers.0.experts.weight"]
    assert (owner.axis is None) is (name == "each matrix"), "nothing crosses the ep axis where nothing has to"
    for step in range(2):
        stacks_step(model, optimizer, rank, step)
    expect(model, [optimizer], stacks_alone(name, 2), name)
    kept = copy.deepcopy(optimizer.state_dict_by_name())
    optimizer.load_state_dict(kept)
    checkpoint.save(path, model, optimizer)


def _resumes_stacks(rank: int, path: str, name: str, ep: int, expert_size: int) -> None:
    model = mixture(ep, 2, expert_size=expert_size, dtensor=True, kind=Linearly)
    optimizer = layerzero.shard_optimizer(STACKS[name](model), model)
    checkpoint.load(path, model, optimizer)
    expect(model, [optimizer], stacks_alone(name, 2), name)
    stacks_step(model, optimizer, rank, 2)
    expect(model, [optimizer], stacks_alone(name, 3), name)


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_experts_have_owners_and_go_to_other_sizes(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "saved")
    run_ranks(_saves_stacks, path, name)
    for world, ep, expert_size in ((4, 4, 1), (4, 1, 2), (2, 2, 1)):
        run_ranks(_resumes_stacks, path, name, ep, expert_size, world_size=world)


def test_it_is_tried_out_whether_stacks_are_treated_matrix_by_matrix() -> None:
    def apart(kind: Callable[..., Optimizer], dims: int = 3, **settings: Any) -> bool:
        return steps_matrices_separately(kind([nn.Parameter(torch.ones(2, 2))], **settings), torch.device("cpu"), dims)

    assert apart(EachMatrix) and apart(torch.optim.SGD, lr=0.1, momentum=0.9) and apart(torch.optim.AdamW)
    assert not apart(torch.optim.Adafactor) and not apart(LayerwiseScaling) and not apart(Factored)
    assert not apart(torch.optim.Muon), "it takes no stacks"
    assert not apart(EachMatrix, dims=7), "not tried"


def _both_axes(rank: int, name: str) -> None:
    """Train stacks that ep cuts into matrices and tp into columns, all on one replica."""
    whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    ep, tp = whole["dp_shard"], whole["tp"]
    net = Linearly(ep, dtensor=False)
    for layer in net.layers:
        columns = layer.experts.weight.detach().chunk(2, dim=2)[tp.get_local_rank()].clone()
        placed = DTensor.from_local(columns, whole["dp_shard", "tp"], [Shard(0), Shard(2)], run_check=False)
        layer.experts = Experts(placed, tp)
    net.unused = nn.Parameter(distribute_tensor(net.unused.detach(), tp, [Replicate()]), requires_grad=False)
    rest = whole["dp_replicate", "dp_shard"]
    model = layerzero.shard_model(
        net,
        mesh=lambda name, module: whole["dp_replicate"] if isinstance(module, Experts) else rest,
        units=(Experts,),
    )
    if name == "whole stack":
        with pytest.raises(ValueError, match=r"'layers.0.experts.weight' is sharded along 2 model-parallel axes"):
            layerzero.shard_optimizer(STACKS[name](model), model)
        return
    optimizer = layerzero.shard_optimizer(STACKS[name](model), model)
    with pytest.raises(ValueError, match=r"'layers.0.experts.weight' is sharded along 2 model-parallel axes"):
        layerzero.shard_optimizer(STACKS["whole stack"](model), model)  # the first one leaves matrices apart on ep
    for step in range(3):
        share = [integer_batch(step=step, rank=r) for r in range(rank // 2 * 2, rank // 2 * 2 + 2)]
        integer_loss(model, union(share)).backward()
        update(optimizer)
    expect(model, [optimizer], stacks_alone(name, 3), name)


def test_stacks_of_experts_that_tensor_parallelism_cuts_are_put_together_along_that_axis_alone() -> None:
    for name in STACKS:
        run_ranks(_both_axes, name)


# Memory and traffic


def _held(rank: int, size: int) -> int:
    model, batches = tensor_parallel(2, size)
    (optimizer,) = shard_all(OPTIMIZERS["SGD"](model), model)
    counted = None
    for step in (0, 3, 6):
        layerzero.traffic(model, reset=True)
        steps_of(model, [optimizer], batches, range(step, step + 1))
        counted = layerzero.traffic(model)
    report = layerzero.memory(model)
    for kind in ("zero1_shard", "zero3_shard", "gradient_shard", "accumulator", "reduce_buffer"):
        assert report.measured[kind] == report.predicted[kind], kind
    lz_state, sent = get_state(model), Counter[str]()
    grid = lz_state.mesh_info.grid
    for member in lz_state.members.values():
        owner, model_parallel, own = (
            owners_of(lz_state).owners[member.name],
            member.spec.model_parallel,
            member.master.numel(),
        )
        is_mine = owner[:2] == (grid.replica_rank, grid.zero3_rank) and (
            owner.axis is None or model_parallel.coordinate_on(owner.axis) == owner.t
        )
        whole = math.prod(member.spec.shape if owner.axis is None else model_parallel.shape)
        sent["owner_gather"] += 2 * 4 * own if owner.r == grid.replica_rank and not is_mine else 0
        sent["owner_scatter"] += 4 * (whole - own) if is_mine else 0
    for name in ("owner_gather", "owner_scatter"):
        assert counted.bytes.get(name, 0) == sent[name], name
    return report.measured["optimizer"]


@pytest.mark.parametrize("size", [1, 2])
def test_the_state_exists_once_and_memory_and_traffic_are_as_predicted(size: int) -> None:
    cut = {"a.weight", "a.bias", "b.weight", "d.weight", "d.bias"}  # the others are copies
    numels = {name: parameter.numel() for name, parameter in Side().named_parameters()}
    expected = 4 * sum(numel * (1 if name in cut else 2) for name, numel in numels.items())
    held = run_ranks(_held, size)
    assert sum(held) == expected
    assert max(held) < 0.5 * expected, "owners are balanced"


@needs_caching
@on_ranks()
def test_memory_is_as_predicted_with_owners_on_several_meshes(rank: int) -> None:
    for dtensor in (True, False):
        model = mixture(2, 2, expert_size=2, dtensor=dtensor)
        optimizer = owned_sgd(model)
        for step in range(3):
            integer_loss(model, integer_batch(rank=rank, step=step)).backward()
            update(optimizer)
        report = layerzero.memory(model)
        assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted, dtensor
