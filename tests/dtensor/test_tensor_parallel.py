"""Tensor parallelism: parameters that are DTensors on a model-parallel axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from typer.testing import CliRunner

import layerzero
from layerzero.checkpoint.whole_model_files import export_model
from layerzero.cli import app
from tests.support.models import (
    different,
    exact_sgd,
    follow_exactly,
    full_parameters,
    integer_batch,
    integer_loss,
    union,
    update,
)
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Column-wise and row-wise linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Net(nn.Module):
    """Two blocks side by side, a head of odd width, and parameters of the root: one replicated by tp, one plain."""

    UNITS = ("blocks.0", "blocks.1", "head")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.zeros(5))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to_local(grad_placements=[Replicate()]) if isinstance(self.scale, DTensor) else self.scale
        return self.head(self.blocks[0](x) + self.blocks[1](x.flip(1)) + scale) + self.shift


PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def net(seed: int = 0) -> Net:
    generator = torch.Generator().manual_seed(seed)
    made = Net()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return made


def parallel(tp: DeviceMesh, seed: int = 0) -> Net:
    """Return the net on a tp axis: Shard(0), Shard(1), Replicate, an unevenly divided dim, and a plain parameter."""
    made = parallelize_module(net(seed), tp, PLAN | {"head": ColwiseParallel(output_layouts=Replicate())})
    made.scale = nn.Parameter(distribute_tensor(made.scale.detach(), tp, [Replicate()]))
    return made


def train(model: nn.Module, dp: DeviceMesh) -> None:
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    own, ranks, norm_types = dp.get_local_rank(), range(dp.size()), (2.0, float("inf"), 1.0)
    follow_exactly(model, optimizer, net(), rank=own, ranks=ranks, micro_batches=2, norm_types=norm_types)


def _trains(rank: int, tp: int, shared_memory: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    for size, accumulation in ((1, "full"), (2, "sharded"), (2, "full")):
        model = layerzero.shard_model(
            parallel(mesh["tp"]),
            zero3_size=size,
            units=Net.UNITS,
            accumulation=accumulation,
            shared_memory=shared_memory,
        )
        assert model.head.weight.shape == (3, 5)
        train(model, mesh["dp"])


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_tensor_parallel_trains_as_one_process(shared_memory: str) -> None:
    run_ranks(_trains, 2, shared_memory, world_size=4)


def test_eight_ranks_train_as_one_process() -> None:
    run_ranks(_trains, 2, "off", world_size=8, timeout=400, pg_timeout=300)


def shard(mesh: DeviceMesh, size: int, seed: int = 0, **settings: Any) -> tuple[nn.Module, Any]:
    model = layerzero.shard_model(parallel(mesh["tp"], seed), zero3_size=size, units=Net.UNITS, **settings)
    return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)


def one_step(model: nn.Module, optimizer: Any, rank: int, step: int = 0) -> None:
    integer_loss(model, integer_batch(step=step, rank=rank)).backward()
    update(optimizer)


@torch.enable_grad()
def _alone(steps: int, ranks: int = 2) -> Net:
    alone = net()
    exact = exact_sgd(alone.parameters())
    for step in range(steps):
        integer_loss(alone, union([integer_batch(step=step, rank=r) for r in range(ranks)])).backward()
        update(exact)
    return alone


@on_ranks(world_size=4)
def test_users_see_tensors_of_the_true_shape(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = shard(mesh, 2)
    expected = dict(net().named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == expected[name].shape and parameter.device_mesh.mesh_dim_names == (
            "tp",
            "zero3",
            "replica",
        )
        assert torch.equal(parameter.detach().full_tensor(), expected[name]), name
        for ours, theirs in (
            (parameter.detach().norm().full_tensor(), expected[name].norm()),
            (parameter.detach().mean().full_tensor(), expected[name].mean()),
            (parameter.detach().max().full_tensor(), expected[name].max()),
        ):
            torch.testing.assert_close(ours, theirs)
    # torch's clipping, if all parameters are on one mesh.
    one_step(model, optimizer, mesh["dp"].get_local_rank())
    integer_loss(model, integer_batch(step=1, rank=mesh["dp"].get_local_rank())).backward()
    ours = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(ours.full_tensor(), layerzero.clip_grad_norm_(model, 1e9))
    optimizer.zero_grad()
    # Random numbers equal those of one process.
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    torch.manual_seed(5)
    for name, parameter in expected.items():
        assert torch.equal(model.get_parameter(name).detach().full_tensor(), parameter.detach().normal_()), name


@on_ranks(world_size=4)
def test_whole_states_are_those_of_one_process(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for size in (1, 2):
        model, optimizer = shard(mesh, size, accumulation="full")
        one_step(model, optimizer, mesh["dp"].get_local_rank())
        expected = _alone(1).state_dict()
        assert not different(layerzero.full_state_dict(model), expected if rank == 0 else {})
        assert not different(layerzero.full_state_dict(model, rank0_only=False), expected)
        x, _ = integer_batch(step=9)
        with layerzero.unsharded(model, writeback=True), torch.no_grad():
            assert torch.equal(model(x), _alone(1)(x))
            assert model.blocks[0].up.weight.placements == (Shard(0),)
            for parameter in model.parameters():
                parameter.mul_(2)
        assert not different(full_parameters(model), {name: 2 * value for name, value in expected.items()})
        other = net(seed=1).state_dict()
        layerzero.load_full_state_dict(model, other if rank == 0 else None)
        assert not different(full_parameters(model), other)
        model.load_state_dict(expected)  # full tensors, the same on all ranks
        assert not different(full_parameters(model), expected)
        with torch.no_grad():
            assert torch.equal(model(x), _alone(1)(x))
        problem = pytest.raises(ValueError if rank == 0 else RuntimeError, match=r"head.bias: expected shape \[3\]")
        with problem:
            layerzero.load_full_state_dict(model, expected | {"head.bias": torch.zeros(4)})


@on_ranks(world_size=4)
def test_torchs_own_state_dicts_go_by_true_shapes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = shard(mesh, 2)
    one_step(model, optimizer, mesh["dp"].get_local_rank())
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, kept = get_state_dict(model, optimizer, options=whole)
    assert not different(state, _alone(1).state_dict() if rank == 0 else {})
    other, its = shard(mesh, 1, seed=1)
    first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=first)
    set_optimizer_state_dict(other, its, kept, options=first)
    one_step(other, its, mesh["dp"].get_local_rank(), step=1)
    assert not different(full_parameters(other), _alone(2).state_dict())


@on_ranks(world_size=4)
def test_a_scaler_and_a_guard_skip_on_all_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = shard(mesh, 2)
    place = mesh["dp"].get_local_rank()

    def spoil() -> None:
        """Put infinities into gradients that only one tp rank holds, on one or two of its data-parallel ranks."""
        if mesh.get_local_rank("tp") == 1:
            held = [block.up.weight.grad.to_local() for block in model.blocks]
            next(iter([rows for rows in held if rows.numel()]), torch.zeros(1)).fill_(float("inf"))

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step, overflows in enumerate((True, False, True)):
        scaler.scale(integer_loss(model, integer_batch(rank=place))).backward()
        if overflows:
            spoil()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (2.0, 2.0, 1.0)[step]
        assert not different(full_parameters(model), _alone(min(step, 1)).state_dict()), step

    guard = layerzero.guard_steps(model, optimizer, skips=2)
    for overflows in (True, False):
        before = {name: value.clone() for name, value in full_parameters(model).items()}
        integer_loss(model, integer_batch(rank=place)).backward()
        if overflows:
            spoil()
        update(optimizer)
        assert bool(different(full_parameters(model), before)) is not overflows
    assert guard.skipped == 1


def _saves(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = shard(mesh, 2)
    ema = layerzero.EMA(model, decay=0.5)
    one_step(model, optimizer, mesh["dp"].get_local_rank())
    ema.update()
    extra = {"ema": ema.state_dict(), "rank": layerzero.checkpoint.per_rank(rank)}
    layerzero.checkpoint.save(folder / "ours", model, optimizer, extra)
    layerzero.checkpoint.save_async(folder / "later", model, optimizer).wait()
    if rank == 0:
        result = CliRunner().invoke(app, ["inspect", str(folder / "ours")])
        assert "saved by 4 ranks with zero3_size=" in result.stdout, result.output
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "torch")
    if rank == 0:
        export_model(folder / "ours", folder / "whole.safetensors")
        assert not different(load_file(folder / "whole.safetensors"), _alone(1).state_dict())


def _loads(rank: int, folder: Path, tp: int, size: int) -> None:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    for path in ("ours", "later"):
        model, optimizer = shard(mesh, size, seed=1)
        extra = layerzero.checkpoint.load(folder / path, model, optimizer)
        assert not different(full_parameters(model), _alone(1).state_dict()), path
        # Momentum was loaded, too: batches of two ranks, on any number of ranks.
        ranks = range(mesh["dp"].size())
        batch = integer_batch(step=1, rank=mesh["dp"].get_local_rank() % 2)
        if len(ranks) == 1:
            batch = union([integer_batch(step=1, rank=r) for r in range(2)])
        integer_loss(model, batch).backward()
        update(optimizer)
        assert not different(full_parameters(model), _alone(2).state_dict()), path
        if path == "ours":
            assert extra["rank"] == (rank if world == 4 else None)
            for name, average in extra["ema"]["averages"].items():
                assert torch.equal(average.full_tensor(), _alone(1).get_parameter(name)), name
    model, _ = shard(mesh, size, seed=1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "torch")
    model.load_state_dict(state["model"])
    assert not different(full_parameters(model), _alone(1).state_dict())


def test_a_checkpoint_goes_to_other_sizes_of_all_axes(tmp_path: Path) -> None:
    run_ranks(_saves, tmp_path, world_size=4)
    for world, tp, size in ((4, 2, 1), (4, 4, 1), (4, 1, 2), (2, 2, 1), (2, 1, 2)):
        run_ranks(_loads, tmp_path, tp, size, world_size=world)


@on_ranks(world_size=4)
def test_ranks_that_start_apart_get_the_values_of_the_first_one_with_their_part(rank: int) -> None:
    """Start with different values per rank: dp's first rank counts; for copies, the first of all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = parallel(mesh["tp"])
    for parameter in made.parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        held.detach().add_(rank)
    model = layerzero.shard_model(made, mesh=mesh["dp"])
    expected = {name: value.detach().clone() for name, value in net().named_parameters()}
    for name, dim, size in (("blocks.0.up.weight", 0, 4), ("blocks.1.down.weight", 1, 4), ("head.weight", 0, 2)):
        expected[name].narrow(dim, size, expected[name].shape[dim] - size).add_(1)
    ours = full_parameters(model)
    for name in ("blocks.0.up.weight", "blocks.1.down.weight", "head.weight", "scale", "shift", "blocks.0.down.bias"):
        assert torch.equal(ours[name], expected[name]), name


@on_ranks(world_size=4)
def test_a_model_on_meta_is_initialized_on_each_ranks_part(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        made = parallelize_module(Net(), mesh["tp"], PLAN | {"head": ColwiseParallel(output_layouts=Replicate())})

    def initialize(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 3.0 + rank // 2)  # the first ranks' values count

    model = layerzero.shard_model(made, mesh=mesh["dp"], units=Net.UNITS, param_init_fn=initialize)
    assert all((value == 3).all() for value in full_parameters(model).values())
    layerzero.load_full_state_dict(model, net().state_dict() if rank == 0 else None)
    train(model, mesh["dp"])


class Normed(nn.Module):
    """Net with an embedding tied to the head, sequence-parallel norms, and attention-like linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8, dtype=torch.float64)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)
        self.last = nn.LayerNorm(8, dtype=torch.float64)
        self.head = nn.Linear(8, 8, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(self.last(x))


@on_ranks(world_size=4)
def test_norms_in_sequence_parallel_get_the_sum_of_their_gradients(rank: int) -> None:
    """Check sums over copies, whose gradients are partial, and a tied weight that is cut once."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    torch.manual_seed(0)
    alone = Normed()
    torch.manual_seed(0)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    made = parallelize_module(Normed(), mesh["tp"], plan)
    made.head.weight = made.embed.weight  # tied again
    model = layerzero.shard_model(made, mesh=mesh["dp_replicate", "dp_shard"], units=["up", "down"])
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    exact = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(0, 8, (2, 2, 4), generator=generator)  # [rank, batch, sequence]
        model(tokens[rank // 2]).square().mean().backward()
        alone(tokens.flatten(0, 1)).square().mean().backward()
        norm = layerzero.clip_grad_norm_(model, 0.05)
        torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(alone.parameters(), 0.05), rtol=1e-5, atol=0)
        update(optimizer, exact)
        for name, parameter in alone.named_parameters():
            ours = model.get_parameter(name).detach().full_tensor()
            torch.testing.assert_close(ours, parameter.detach(), rtol=1e-6, atol=1e-8, msg=name)


@on_ranks(world_size=4)
def test_what_cannot_be_right_is_one_error_on_all_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"Pass mesh, such as mesh\['dp'\], or zero3_size"):
        layerzero.shard_model(parallel(mesh["tp"]))
    with pytest.raises(ValueError, match=r"zero3_size=4 does not divide the 2 data-parallel ranks"):
        layerzero.shard_model(parallel(mesh["tp"]), zero3_size=4)
    with pytest.raises(ValueError, match=r"'scale' is a DTensor of another framework on several of the ranks"):
        layerzero.shard_model(parallel(mesh["tp"]), mesh=layerzero.init_mesh(2))
    made = parallel(mesh["tp"])
    made.scale = nn.Parameter(distribute_tensor(torch.zeros(5), mesh["dp"], [Replicate()]))
    with pytest.raises(ValueError, match=r"'scale' is a DTensor of another framework"):
        layerzero.shard_model(made, mesh=mesh["dp"])
    made = parallel(mesh["tp"])
    made.scale = nn.Parameter(DTensor.from_local(torch.zeros(5), mesh["tp"], [Partial()], run_check=False))
    with pytest.raises(ValueError, match=r"'scale' is a DTensor with placement Partial"):
        layerzero.shard_model(made, mesh=mesh["dp"])
    made = parallel(mesh["tp"])
    with pytest.raises((ValueError, RuntimeError), match=r"prefetch|failed with ValueError"):  # on one rank alone
        layerzero.shard_model(made, mesh=mesh["dp"], prefetch=-1 if rank == 3 else 1)
    # Ranks of a tp group that cut a parameter in different ways.
    made = parallel(mesh["tp"])
    placement = [Shard(0) if mesh["tp"].get_local_rank() else Replicate()]
    made.shift = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh["tp"], placement, run_check=False))
    with pytest.raises((ValueError, RuntimeError), match=r"parameter 'shift'"):
        layerzero.shard_model(made, mesh=mesh["dp"])
