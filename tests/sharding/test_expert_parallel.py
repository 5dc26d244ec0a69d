"""Units on a different mesh: experts, which are data-parallel over fewer ranks."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import layerzero
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

EXPERTS = 4


class AllToAll(torch.autograd.Function):
    """All-to-all of rows; the backward sends the gradient back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.how = received, sent, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return AllToAll.apply(gradient, *ctx.how), None, None, None


class Experts(nn.Module):
    """Experts of this rank, or the columns of them that a rank of `tp` has, in one tensor."""

    def __init__(self, weight: Tensor, tp: DeviceMesh | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.tp = tp

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        if self.tp is not None:
            x = DTensor.from_local(x, self.tp, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
            out = self._computed(x, chosen, weight)
            return DTensor.from_local(out, self.tp, [Shard(1)], run_check=False).full_tensor()
        return self._computed(x, chosen, weight)

    def _computed(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        out = x.new_zeros(len(x), weight.shape[2])
        for index, own in enumerate(weight.unbind()):
            tokens = (chosen == index).nonzero().squeeze(1)
            out = out.index_add(0, tokens, x[tokens] @ own)
        return out


class MixtureOfExperts(nn.Module):
    """Sends each token to the expert that a fixed router chooses, on any rank of `ep`."""

    def __init__(self, weight: Tensor, ep: DeviceMesh | None, *, skips: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.experts = Experts(weight)
        self.register_buffer("router", torch.tensor([[0, 0, 1, 1, 3]]).T)  # by one-hot index of a token; none go to 2
        self.ep = ep
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router[x.abs().argmax(1)].squeeze(1)
        x = x * self.scale
        if self.ep is None:
            return self.experts(x, chosen)
        group, local = self.ep.get_group(), EXPERTS // self.ep.size()
        order = chosen.argsort(stable=True)
        to = torch.bincount(chosen // local, minlength=self.ep.size())
        came = torch.empty_like(to)
        dist.all_to_all_single(came, to, group=group)
        sent, received = to.tolist(), came.tolist()
        theirs = torch.empty(sum(received), dtype=torch.int64)
        dist.all_to_all_single(theirs, chosen[order] % local, received, sent, group=group)
        rows = AllToAll.apply(x[order], sent, received, group)
        if len(rows) or not self.skips:
            out = self.experts(rows, theirs)
        else:
            out = rows.new_zeros(0, 6).requires_grad_()  # the backward of all ranks must include the all-to-all
            out = out + rows.sum() * 0
        back = AllToAll.apply(out, received, sent, group)
        return torch.zeros_like(back).index_add(0, order, back)


class Net(nn.Module):
    """Two mixtures of experts side by side, and a head."""

    def __init__(
        self, ep: DeviceMesh | None = None, *, dtensor: bool = True, skips: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList()
        for _ in range(2):
            weight = torch.randint(-1, 2, (EXPERTS, 5, 6), generator=generator).float()
            if ep is not None:
                weight = weight.chunk(ep.size())[ep.get_local_rank()].clone()
            if ep is not None and dtensor:
                weight = DTensor.from_local(weight, ep, [Shard(0)], run_check=False)
            self.layers.append(MixtureOfExperts(weight, ep, skips=skips))
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.layers[0](x) + self.layers[1](x.flip(1))).relu())


def meshes(ep: int, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh over which experts are sharded, with `size` ranks per shared copy, and the ep mesh."""
    replicas = dist.get_world_size() // ep // size
    whole = init_device_mesh("cpu", (replicas, size, ep), mesh_dim_names=("edp_replicate", "edp_shard", "ep"))
    return whole["edp_replicate", "edp_shard"], whole["ep"]


UNITS = (MixtureOfExperts, Experts)


def shard(ep: int, size: int, *, expert_size: int = 1, dtensor: bool = True, **settings: Any) -> tuple[nn.Module, Any]:
    seed, skips = settings.pop("seed", 0), settings.pop("skips", False)
    own, axis = meshes(ep, expert_size)
    rest = layerzero.init_mesh(size)
    model = layerzero.shard_model(
        Net(axis, dtensor=dtensor, skips=skips, seed=seed),
        mesh=lambda name, module: own if isinstance(module, Experts) else rest,
        units=settings.pop("units", UNITS),
        **settings,
    )
    return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)


def mine(values: dict[str, Tensor], ep: int, rank: int) -> dict[str, Tensor]:
    """Select from the values of one process those that this rank has; experts are plain tensors here."""
    return {n: v.chunk(ep)[rank % ep] if "experts" in n else v for n, v in values.items()}


def train(ep: int, size: int, rank: int, *, dtensor: bool = True, **settings: Any) -> None:
    part = dict if dtensor else partial(mine, ep=ep, rank=rank)
    ranks = range(dist.get_world_size())
    made = shard(ep, size, dtensor=dtensor, **settings)
    follow_exactly(*made, Net(), rank=rank, ranks=ranks, micro_batches=2, part=part, case=settings)


CASES = [  # ep; S of the rest, S of the experts
    (2, 1, 1, {}),
    (2, 2, 2, {"accumulation": "full"}),
    (2, 4, 1, {"dtensor": False}),
    (2, 2, 2, {"dtensor": False, "prefetch": 0, "accumulation": "full"}),
    (4, 2, 1, {}),
    (4, 4, 1, {"accumulation": "full", "reshard_after_forward": False}),
    (4, 1, 1, {"dtensor": False, "units": (Experts,)}),
    (2, 4, 2, {"reshard_after_forward": 2}),  # kept by two of four ranks, and experts by both of theirs: they are freed
]


@on_ranks(world_size=4)
def test_experts_on_a_mesh_of_their_own_train_as_one_process(rank: int) -> None:
    for ep, size, expert_size, settings in CASES:
        train(ep, size, rank, expert_size=expert_size, **settings)


class Late(torch.autograd.Function):
    """Identity whose backward is late on some ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, delays: list[float]) -> Tensor:
        ctx.delays = delays
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.delays.pop())
        return gradient, None


def _on_one_mesh(rank: int, skips: bool, seed: int) -> None:
    """Send tokens in groups that are axes of the meshes of the units."""
    draw = random.Random(10 * seed + rank)
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "expert_shard", "dp_shard"))
    own, ep, rest = whole["dp_replicate"], whole["dp_shard"], whole["dp_replicate", "dp_shard"]
    if skips:  # all ranks that share gathered weights must call their unit
        own = whole["dp_replicate", "expert_shard"]
    model = layerzero.shard_model(
        Net(ep, skips=skips), mesh=lambda name, module: own if isinstance(module, Experts) else rest, units=UNITS
    )
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, out: Late.apply(out, [draw.choice((0.0, 0.03))]))
        layer.experts.register_forward_hook(lambda _, args, out: Late.apply(out, [draw.choice((0.0, 0.03))]))
    follow_exactly(model, optimizer, Net(), rank=rank, ranks=range(4))


@pytest.mark.sample(1)
@pytest.mark.parametrize("skips", [False, True])
def test_the_groups_of_the_mesh_may_be_those_of_the_models_own_collectives(skips: bool) -> None:
    for seed in range(3):
        run_ranks(_on_one_mesh, skips, seed, pg_timeout=20, timeout=60)


@on_ranks(world_size=4)
def test_experts_without_tokens_have_a_gradient_where_they_are_one_parameter_with_others(rank: int) -> None:
    """Send all tokens to the first experts in one layer and to the last ones in the other."""
    batch = torch.eye(5)[:1].repeat(2, 1), torch.ones(2, 3)
    alone = Net()
    integer_loss(alone, batch).backward()
    for dtensor in (True, False):
        model, _ = shard(2, 2, dtensor=dtensor, skips=True)
        integer_loss(model, batch).backward()
        for place, layer in enumerate(model.layers):
            gradient, expected = layer.experts.weight.grad, alone.layers[place].experts.weight.grad
            if dtensor:
                assert torch.equal(gradient.full_tensor(), expected)
            elif rank % 2 == place:
                assert torch.equal(gradient.full_tensor(), expected.chunk(2)[place])
            else:
                assert gradient is None


@on_ranks(world_size=4)
def test_ranks_whose_experts_got_no_tokens_keep_nobody_waiting(rank: int) -> None:
    """In other expert-parallel groups other units are called, between all-to-alls of tokens."""
    for ep, size, settings in ((2, 2, {}), (4, 2, {"accumulation": "full"}), (4, 4, {})):
        train(ep, size, rank, skips=True, **settings)


@on_ranks(world_size=4)
def test_users_see_all_experts(rank: int) -> None:
    alone = Net()
    for ep, size in ((2, 2), (4, 1)):
        model, _ = shard(ep, 2, expert_size=size)
        weight = model.layers[0].experts.weight
        assert weight.shape == (EXPERTS, 5, 6) and weight.device_mesh.mesh_dim_names == ("ep", "zero3", "replica")
        assert not different(layerzero.full_state_dict(model), alone.state_dict() if rank == 0 else {})
        other = Net(seed=1).state_dict()
        layerzero.load_full_state_dict(model, other if rank == 0 else None)
        assert not different(full_parameters(model), {n: v for n, v in other.items() if "router" not in n})
        model.load_state_dict(alone.state_dict())
        x, _ = integer_batch(rank=rank)
        with torch.no_grad():
            assert torch.equal(model(x), alone(x))
            with layerzero.unsharded(model):
                assert torch.equal(model(x), alone(x))
    integer_loss(model, integer_batch(rank=rank)).backward()
    with pytest.raises(RuntimeError):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # Plain experts train, but a full state dict could not tell them apart.
    model, optimizer = shard(2, 2, dtensor=False)
    for ask in (
        lambda: layerzero.full_state_dict(model),
        lambda: layerzero.load_full_state_dict(model, alone.state_dict()),
        lambda: layerzero.checkpoint.save("/nowhere", model, optimizer),
        layerzero.unsharded(model, rank0_only=True).__enter__,
    ):
        with pytest.raises(ValueError) as error:
            ask()
        assert "'layers.0.experts.weight' (2 like it) is sharded over only some ranks" in str(error.value), error.value
    # Values that differ between the ranks that share them are an error, as for all parameters.
    with torch.no_grad():
        model.layers[0].experts.weight.copy_(torch.full((2, 5, 6), float(rank % 2)))
        model(integer_batch(rank=rank)[0])
        model.layers[0].experts.weight.copy_(torch.full((2, 5, 6), float(rank)))
        with pytest.raises(ValueError, match=r"ranks disagree: digest .* for 'layers.0.experts.weight'"):
            model(integer_batch(rank=rank)[0])


def _scaled(rank: int, experts_first: bool) -> None:
    """Let the experts of one ep rank overflow."""
    for dtensor, expert_size in ((True, 2), (False, 1)):
        model, _ = shard(2, 2, expert_size=expert_size, dtensor=dtensor)
        own = sorted(model.named_parameters(), key=lambda entry: ("experts" in entry[0]) is not experts_first)
        optimizer = layerzero.shard_optimizer(exact_sgd([p for _, p in own]), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step, overflows in enumerate((True, False)):
            before = {name: value.clone() for name, value in full_parameters(model).items()}
            scaler.scale(integer_loss(model, integer_batch(rank=rank))).backward()
            gradient = model.layers[0].experts.weight.grad.to_local()
            if overflows and rank == 1 and gradient.numel():
                gradient[0, 0, 0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 2.0, (dtensor, step)
            assert bool(different(full_parameters(model), before)) is not overflows


def test_a_scaler_skips_on_all_ranks() -> None:
    run_ranks(_scaled, True, world_size=4)
    run_ranks(_scaled, False, world_size=4)


@on_ranks(world_size=4)
def test_a_scaler_of_plain_experts_alone_is_refused(rank: int) -> None:
    """Refuse an optimizer of experts only: ranks without tokens would not take part in its overflow check."""
    model, _ = shard(2, 2, dtensor=False)
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    optimizer = layerzero.shard_optimizer(exact_sgd(experts), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(integer_loss(model, integer_batch(rank=rank))).backward()
    with pytest.raises(
        NotImplementedError, match=r"experts.weight.*Add parameters that all ranks share to the optimizer"
    ):
        scaler.step(optimizer)


def _step(model: nn.Module, optimizer: Any, batches: Any) -> None:
    integer_loss(model, batches).backward()
    update(optimizer)


def _saves(rank: int, folder: Path) -> None:
    model, optimizer = shard(2, 2, expert_size=2)
    _step(model, optimizer, integer_batch(rank=rank))
    layerzero.checkpoint.save(folder / "saved", model, optimizer)


def _loads(rank: int, folder: Path, ep: int, expert_size: int) -> None:
    world = dist.get_world_size()
    model, optimizer = shard(ep, 2, expert_size=expert_size, seed=1)
    layerzero.checkpoint.load(folder / "saved", model, optimizer)
    alone = Net()
    exact = exact_sgd(alone.parameters())
    for step in range(2):
        if step == 1:
            assert not different(full_parameters(model), dict(alone.named_parameters()))
            share = [integer_batch(step=1, rank=r) for r in range(rank * 4 // world, (rank + 1) * 4 // world)]
            _step(model, optimizer, union(share))
        _step(alone, exact, union([integer_batch(step=step, rank=r) for r in range(4)]))
    assert not different(full_parameters(model), dict(alone.named_parameters()))


def test_one_checkpoint_has_all_experts_and_goes_to_other_sizes(tmp_path: Path) -> None:
    run_ranks(_saves, tmp_path, world_size=4)
    for world, ep, expert_size in ((4, 2, 1), (4, 4, 1), (4, 1, 4), (2, 2, 1), (2, 1, 2)):
        run_ranks(_loads, tmp_path, ep, expert_size, world_size=world)


@on_ranks(world_size=4)
def test_meshes_that_do_not_fit_are_one_error_on_all_ranks(rank: int) -> None:
    own, axis = meshes(2, 1)
    rest = layerzero.init_mesh(2)

    def refused(match: str, mesh: Any, **settings: Any) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
            layerzero.shard_model(Net(axis, **settings), mesh=mesh, units=UNITS)

    refused("mesh must be a DeviceMesh, got str", lambda name, module: "ep" if name else rest)
    refused(r"is a DTensor of another framework.*unit on another mesh", rest)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "other"))
    wrong = pairs["pair" if rank < 2 else "other"]
    refused("mesh is .* for some units on", lambda name, _: wrong if "experts" in name else rest, dtensor=False)
    refused("shape of the mesh of unit", lambda name, _: own if rank and "experts" in name else rest, dtensor=False)
    # Nested calls: the message names the one that works.
    inner = Net(axis)
    layerzero.shard_model(inner.layers[0].experts, mesh=own)
    with pytest.raises(ValueError, match=r"mesh=callable"):
        layerzero.shard_model(inner, mesh=rest)
    outer = layerzero.shard_model(Net(), mesh=rest)
    with pytest.raises(ValueError, match=r"mesh=callable"):
        layerzero.shard_model(outer.layers[0].experts, mesh=own)


@on_ranks(world_size=8, timeout=300, pg_timeout=100)
def test_expert_data_and_tensor_parallel_together_train_as_one_process(rank: int) -> None:
    """Shard experts on (ep, tp), the rest tensor parallel: four data-parallel ranks, two of them for experts."""
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    ep, tp = whole["dp_shard"], whole["tp"]
    net = parallelize_module(Net(ep, dtensor=False), tp, {"head": ColwiseParallel(output_layouts=Replicate())})
    for layer in net.layers:
        columns = layer.experts.weight.detach().chunk(2, dim=2)[tp.get_local_rank()].clone()
        placed = DTensor.from_local(columns, whole["dp_shard", "tp"], [Shard(0), Shard(2)], run_check=False)
        layer.experts = Experts(placed, tp)
    rest = whole["dp_replicate", "dp_shard"]
    model = layerzero.shard_model(
        net, mesh=lambda name, module: whole["dp_replicate"] if isinstance(module, Experts) else rest, units=UNITS
    )
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    alone = Net()
    follow_exactly(model, optimizer, alone, rank=rank // 2, ranks=range(4))
    state = layerzero.full_state_dict(model)
    assert not different(state, alone.state_dict() if rank == 0 else {})
