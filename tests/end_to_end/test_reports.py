"""Public reports of users of other packages, re-enacted: `docs/notes/reports.md` lists them with these figures."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import layerzero
from tests.support.models import full_gradients, full_parameters, update
from tests.support.ranks import run_ranks

WORLD = 4
FP64 = torch.float64
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Ranks(NamedTuple):
    """Rank, ZeRO-3 size and a folder that all ranks share."""

    rank: int
    size: int
    folder: Path


class Outcome(NamedTuple):
    """Values that must be equal; the page shows the first element of each."""

    right: Any
    ours: Any


# --- models, data and comparisons ---


def ones(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer without bias whose weights are 1."""
    layer = nn.Linear(inputs, outputs, bias=False, dtype=FP64)
    nn.init.ones_(layer.weight)
    return layer


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(ones(*pair) for pair in itertools.pairwise(sizes)))


def numbered(module: nn.Module) -> nn.Module:
    """Give each parameter small integers that differ."""
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 5 - 1)
    return module


def rows(rank: int, step: int = 0, *, width: int = 2, count: int = 2) -> Tensor:
    """Return the batch of a rank: small integers."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-2, 3, (count, width), generator=generator).double()


def all_rows(step: int = 0, *, width: int = 2) -> Tensor:
    return torch.cat([rows(rank, step, width=width) for rank in range(WORLD)])


def sgd(parameters: Iterable[Any], lr: float = 0.5, momentum: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def shard(at: Ranks, model: nn.Module, **settings: Any) -> nn.Module:
    return layerzero.shard_model(model, **{"zero3_size": at.size, **settings})


def sharded(at: Ranks, net: nn.Module, **settings: Any) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    """Return a sharded copy of a module and its SGD."""
    model = shard(at, copy.deepcopy(net), **settings)
    return model, layerzero.shard_optimizer(sgd(model.parameters()), model)


def step_of(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    update(optimizer)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor."""
    return (tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()).clone()


def parameters_of(net: nn.Module, model: nn.Module) -> Outcome:
    ours = full_parameters(model)
    return Outcome([p.detach() for p in net.parameters()], [ours[name] for name, _ in net.named_parameters()])


def gradients_of(net: nn.Module, model: nn.Module) -> Outcome:
    right = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    ours = full_gradients(model)
    assert right.keys() == ours.keys()
    return Outcome(list(right.values()), [ours[name] for name in right])


def values_of(result: Any) -> Iterator[Tensor]:
    if isinstance(result, list | tuple):
        for each in result:
            yield from values_of(each)
    else:
        yield whole(torch.as_tensor(result)).double()


def figure_of(result: Any) -> str:
    return f"{next(values_of(result)).flatten()[0].item():.6g}"


# --- FSDP2 ---


def epsilon_of_the_clip(at: Ranks) -> Outcome:
    found = []
    for of_torch in (True, False):
        model = shard(at, ones(16, 1))
        (1e-6 * model(torch.ones(1, 16, dtype=FP64))).sum().backward()
        if of_torch:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.5e-6)
        else:
            layerzero.clip_grad_norm_(model, 2.5e-6)
        found.append((1e6 * whole(model.weight.grad)).round(decimals=5))
    return Outcome([torch.full((1, 16), 0.5)] * 2, found)


def unfreezing_after_an_evaluation(at: Ranks) -> Outcome:
    net = numbered(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    net[0].requires_grad_(False)
    model, optimizer = sharded(at, net, units=["0", "1"], reshard_after_forward=False)
    for each, steps, x in ((net, sgd(net.parameters()), all_rows), (model, optimizer, lambda s: rows(at.rank, s))):
        step_of(steps, each(x(0)).mean())
        with torch.no_grad():
            each(x(1))
        each[0].requires_grad_(True)
        step_of(steps, each(x(2)).mean())
    return parameters_of(net, model)


class SecondHead(nn.Module):
    """Norm and head that are called again after another layer; only an attribute has the second result."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head, self.extra = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        first = self.head(self.norm(hidden))
        self.second = self.head(self.norm(self.extra(hidden) + x))
        return first


def grouped_modules_called_twice(at: Ranks) -> Outcome:
    net = numbered(SecondHead())
    model = shard(at, copy.deepcopy(net), units=[["norm", "head"], "body", "extra"])
    for each, x in ((net, all_rows()), (model, rows(at.rank))):
        (each(x).mean() + each.second.mean()).backward()
    return gradients_of(net, model)


def dropout_of_each_rank(at: Ranks) -> Outcome:
    net = nn.Sequential(ones(1, 64), nn.Dropout(0.5), ones(64, 1))
    torch.manual_seed(at.rank)
    model = shard(at, copy.deepcopy(net), units=["0", "2"])
    layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    x = torch.ones(1, 1, dtype=FP64)
    model(x).sum().backward()
    for rank in range(WORLD):
        torch.manual_seed(rank)
        (net(x).sum() / WORLD).backward()
    right, ours = gradients_of(net, model)
    return Outcome([right[0].sum(), right], [ours[0].sum(), ours])


def decay_by_the_number_of_dims(at: Ranks) -> Outcome:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    for parameter in net.double().parameters():
        nn.init.ones_(parameter)
    model = shard(at, copy.deepcopy(net), units=["0"])
    found = []
    for each in (net, model):
        matrices = [p for p in each.parameters() if p.ndim >= 2]
        others = [p for p in each.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        inner = torch.optim.AdamW(groups, lr=0.5)
        optimizer = layerzero.shard_optimizer(inner, model) if each is model else inner
        step_of(optimizer, (0 * each(torch.ones(1, 2, dtype=FP64))).sum())
        found.append([whole(p) for p in (*matrices, *others)])
    return Outcome(*found)


class Language(nn.Module):
    """Embedding and head of a vocabulary of 7, which 4 ranks cannot share evenly."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


def language_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.tensor([rank, (rank + step) % 7])).mean()


def train_language(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, steps: range) -> None:
    """Train on the batch of one rank, or on those of all ranks."""
    for step in steps:
        ranks = range(WORLD) if rank is None else [rank]
        step_of(optimizer, torch.stack([language_loss(model, each, step) for each in ranks]).mean())


class Branching(nn.Module):
    """Module that a batch may use without its encoder of images."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.images = ones(2, 1), ones(2, 1)

    def forward(self, x: Tensor, images: bool) -> Tensor:
        return self.text(x) + self.images(x) if images else self.text(x)


def images_on_one_rank_only(at: Ranks) -> Outcome:
    model, optimizer = sharded(at, Branching())
    step_of(optimizer, model(torch.ones(1, 2, dtype=FP64), at.rank == 1).sum())
    return Outcome([torch.full((1, 2), 0.875), torch.full((1, 2), 0.5)], [model.images.weight, model.text.weight])


def optimizer_in_the_backward(at: Ranks) -> Outcome:
    model = shard(at, ones(2, 1))
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    stepped = []

    def step(parameter: Tensor) -> None:
        stepped.append(parameter)
        update(optimizer)

    model.weight.register_post_accumulate_grad_hook(step)
    for last in (False, False, True):
        with nullcontext() if last else layerzero.no_sync(model):
            model(torch.ones(1, 2, dtype=FP64)).sum().backward()
    return Outcome([torch.full((1, 2), -0.5), 1], [model.weight, len(stepped)])


def one_element_on_one_rank(at: Ranks) -> Outcome:
    net = nn.ModuleList([nn.Linear(2, 1, bias=False, dtype=FP64), nn.Linear(1, 1, dtype=FP64)])
    model = shard(at, nn.Sequential(*numbered(net)), units=["0", "1"])
    model(torch.ones(3, 2, dtype=FP64)).sum().backward()
    return Outcome([3.0, -1.0], [model[1].bias.grad.full_tensor()[0], whole(model[1].weight)[0, 0]])


def unfreezing_after_a_frozen_forward(at: Ranks) -> Outcome:
    model = shard(at, ones(2, 1).float().requires_grad_(False), mp_policy=BF16)
    model(torch.ones(1, 2))
    model.requires_grad_(True)
    (model(torch.ones(1, 2)).sum() * (1 + at.rank / 128)).backward()  # bf16 rounds the sum of the ranks
    assert model.weight.grad.dtype == torch.float32
    return Outcome(torch.full((1, 2), 1 + 1.5 / 128), model.weight.grad)


def one_row_from_the_first_rank(at: Ranks) -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Linear(17, 1, bias=False)
    net.weight = nn.Parameter(distribute_tensor(torch.zeros(1, 17), mesh["tp"], [Replicate()]))
    model = layerzero.shard_model(net, mesh=mesh["dp"])
    state = {"weight": torch.arange(17.0).view(1, 17)} if at.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return Outcome([136.0, torch.arange(17.0).view(1, 17)], [whole(model.weight).sum(), model.weight])


def pseudogradient(at: Ranks) -> Outcome:
    net = nn.Sequential(nn.Linear(5, 9), nn.Linear(3, 4, bias=False))
    model, optimizer = sharded(at, numbered(net))
    before = [whole(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    for old, parameter in zip(before, model.parameters(), strict=True):
        change = whole(parameter) - old
        parameter.grad = distribute_tensor(change, parameter.device_mesh, parameter.placements)  # as FSDP2 shards it
    optimizer.step()
    return Outcome(
        [2 * before[-1][0, 2], [2 * old for old in before]], [whole(model[1].weight)[0, 2], list(model.parameters())]
    )


# --- Accelerate ---


def step_count_in_a_sharded_checkpoint(at: Ranks) -> Outcome:
    net = numbered(Language())

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(model.parameters(), lr=0.5)
        return inner if model is net else layerzero.shard_optimizer(inner, model)

    model, other = shard(at, copy.deepcopy(net)), shard(at, numbered(Language()))
    optimizer, others = adam(model), adam(other)
    train_language(model, optimizer, at.rank, range(3))
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=at.folder / "step")
    empty = get_state_dict(other, others)
    loaded = {"model": empty[0], "optimizer": empty[1]}
    dcp.load(loaded, checkpoint_id=at.folder / "step")
    set_state_dict(other, others, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    count = float(others.state_dict()["state"][0]["step"])
    train_language(other, others, at.rank, range(3, 5))
    train_language(net, adam(net), None, range(5))
    right, ours = parameters_of(net, other)
    return Outcome([3, right], [count, ours])


def initialize(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def tied_weights_from_meta(at: Ranks) -> Outcome:
    net = Language(tied=True).double()
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    with torch.device("meta"):
        meta = Language(tied=True).double()
    model = shard(at, meta, param_init_fn=initialize)
    assert model.head.weight is model.embedding.weight
    language_loss(model, at.rank, 1).backward()
    torch.stack([language_loss(net, rank, 1) for rank in range(WORLD)]).mean().backward()
    return gradients_of(net, model)


class Adapted(nn.Module):
    """Frozen layer with a LoRA adapter."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def adapters_of_all_ranks(at: Ranks) -> Outcome:
    model, other = shard(at, numbered(Adapted())), shard(at, Adapted().double())
    adapters = layerzero.full_state_dict(model, trainable_only=True, rank0_only=False)
    missing = other.load_state_dict(adapters, strict=False).missing_keys
    right = list(numbered(Adapted()).state_dict().values())[2:]
    ours = [other.lora_A.weight, other.lora_B.weight]
    return Outcome([12, right], [12 if missing == ["base.weight", "base.bias"] else 0, ours])


def clipping_with_a_scaler_and_accumulation(at: Ranks) -> Outcome:
    model, optimizer = sharded(at, ones(4, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for last in (False, True):
        with nullcontext() if last else layerzero.no_sync(model):
            scaler.scale(model(torch.ones(1, 4, dtype=FP64)).sum() / 2).backward()
    scaler.unscale_(optimizer)
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0))
    scaler.step(optimizer)
    scaler.update()
    return Outcome([2.0, torch.full((1, 4), 0.5)], [norm, whole(model.weight).round(decimals=5)])


# --- Lightning ---


def resumed_on_two_ranks(at: Ranks) -> Outcome:
    """Train on four ranks and save, or resume on two ranks."""
    net, world = numbered(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))), dist.get_world_size()
    model, optimizer = sharded(at, net, units=["0", "1"])
    if world == 2:
        layerzero.checkpoint.load(at.folder / "step", model, optimizer)
    for step in range(2) if world == WORLD else range(2, 4):
        batches = [rows(rank, step) for rank in range(at.rank, WORLD, world)]
        step_of(optimizer, model(torch.cat(batches)).mean() / 4)
    if world == WORLD:
        layerzero.checkpoint.save(at.folder / "step", model, optimizer)
    alone = sgd(net.parameters())
    for step in range(2 if world == WORLD else 4):
        step_of(alone, net(all_rows(step)).mean() / 4)
    return parameters_of(net, model)


def one_optimizer_of_a_pair_at_a_time(at: Ranks) -> Outcome:
    found = []
    for is_sharded in (False, True):
        model = chain(2, 2, 1)
        if is_sharded:
            shard(at, model, units=["0", "1"])
        pair = [sgd(part.parameters(), lr=0.25, momentum=0.0) for part in model]
        if is_sharded:
            pair = [layerzero.shard_optimizer(each, model) for each in pair]
        for turn in range(4):
            for index, part in enumerate(model):
                part.requires_grad_(index == turn % 2)
            step_of(pair[turn % 2], (-1) ** turn * model(torch.ones(1, 2, dtype=FP64)).sum())
        found.append([whole(p) for p in model.parameters()])
    return Outcome(*found)


def epoch_that_ends_inside_a_window(at: Ranks) -> Outcome:
    model = shard(at, ones(2, 1))
    optimizer = layerzero.shard_optimizer(sgd(model.parameters(), lr=0.25, momentum=0.0), model)
    for micro_batch in range(5):
        with nullcontext() if micro_batch % 4 == 3 else layerzero.no_sync(model):
            in_window = 4 if micro_batch < 4 else 1
            (model(torch.ones(1, 2, dtype=FP64)).sum() / in_window).backward()
        if micro_batch % 4 == 3 or micro_batch == 4:
            update(optimizer)
    return Outcome(torch.full((1, 2), 0.5), model.weight)


def load_under_inference_mode(at: Ranks) -> Outcome:
    net = chain(2, 2, 1)
    model, optimizer = sharded(at, net, units=["0", "1"])
    state = {name: 2 * value for name, value in net.state_dict().items()}
    with torch.inference_mode():
        model.load_state_dict(state)
        model(rows(at.rank))
    net.load_state_dict(state)
    step_of(optimizer, model(rows(at.rank)).mean())
    step_of(sgd(net.parameters()), net(all_rows()).mean())
    return parameters_of(net, model)


def penalty_in_the_last_micro_batch(at: Ranks) -> Outcome:
    model, optimizer = sharded(at, ones(2, 1))
    for last in (False, True):
        with nullcontext() if last else layerzero.no_sync(model):
            model(torch.ones(1, 2, dtype=FP64)).sum().backward()
    model.weight.grad += 0.5 * model.weight.detach()
    optimizer.step()
    return Outcome(torch.full((1, 2), -0.25), model.weight)


# --- DeepSpeed ---


class Sharing(nn.Module):
    """Two layers with one weight and one bias, a layer between them, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.unused = (nn.Linear(2, 2) for _ in range(4))
        self.last.weight, self.last.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def shared_layers_in_every_stage(at: Ranks) -> Outcome:
    net = numbered(Sharing())
    model, optimizer = sharded(at, net, units=["first", "middle", "last", "unused"])
    alone = sgd(net.parameters())
    for step in range(2):
        step_of(optimizer, model(rows(at.rank, step)).mean() / 4)
        step_of(alone, net(all_rows(step)).mean() / 4)
    return parameters_of(net, model)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def frozen_weights_inside_checkpoints(at: Ranks) -> Outcome:
    net = numbered(Checkpointed())
    names = [name for name, module in net.named_modules() if isinstance(module, Adapted | nn.Linear)]
    model = shard(at, copy.deepcopy(net), units=names)
    model(rows(at.rank)).mean().backward()
    net(all_rows()).mean().backward()
    return gradients_of(net, model)


def parameter_of_one_micro_batch(at: Ranks) -> Outcome:
    model = shard(at, Branching())
    for micro_batch in range(3):
        with layerzero.no_sync(model) if micro_batch < 2 else nullcontext():
            model(torch.ones(1, 2, dtype=FP64), micro_batch == 0).sum().backward()
    return Outcome([torch.ones(1, 2), torch.full((1, 2), 3.0)], [model.images.weight.grad, model.text.weight.grad])


class Packed(nn.Module):
    """Experts in one parameter of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(3, 2, 2, dtype=FP64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eij->bj", x, self.experts)


def packed_experts_are_loaded(at: Ranks) -> Outcome:
    net = numbered(Packed())
    model = shard(at, Packed())
    layerzero.load_full_state_dict(model, net.state_dict() if at.rank == 0 else None)
    model(rows(at.rank)).mean().backward()
    net(all_rows()).mean().backward()
    right, ours = parameters_of(net, model), gradients_of(net, model)
    return Outcome([right.right[0].sum(), right.right, ours.right], [right.ours[0].sum(), right.ours, ours.ours])


# --- Megatron ---


def first_update_of_adam(at: Ranks) -> Outcome:
    net = ones(2, 1)
    model = shard(at, copy.deepcopy(net))
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0), model)
    optimizer.state_dict()
    step_of(optimizer, 3 * model(torch.ones(1, 2, dtype=FP64)).sum())
    step_of(torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.0), 3 * net(torch.ones(1, 2, dtype=FP64)).sum())
    return parameters_of(net, model)


def tied_weights_in_two_units(at: Ranks) -> Outcome:
    outcomes = []
    for units in (["embedding", "middle", "head"], ["head"], ["embedding"]):
        net = numbered(Language(tied=True))
        model = shard(at, copy.deepcopy(net), units=units)
        language_loss(model, at.rank, 1).backward()
        torch.stack([language_loss(net, rank, 1) for rank in range(WORLD)]).mean().backward()
        outcomes.append(gradients_of(net, model))
    return Outcome([each.right for each in outcomes], [each.ours for each in outcomes])


class Sinks(nn.Module):
    """Vector with one element for each head; tensor parallelism splits the heads."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.offset = nn.Parameter(distribute_tensor(torch.ones(2, dtype=FP64), tp, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset.to_local() * x).sum()


def group_of_one_rank(at: Ranks) -> Outcome:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ep", "dp"))
    model = layerzero.shard_model(ones(3, 2), mesh=mesh["dp"])
    for _ in range(4):
        model(torch.ones(1, 3, dtype=FP64)).sum().backward()
    return Outcome(torch.full((2, 3), 4.0), model.weight.grad)


def sinks_in_the_norm(at: Ranks) -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Sinks(mesh["tp"])
    model = layerzero.shard_model(net, mesh=mesh["dp"])
    model(torch.tensor([3.0, 4.0], dtype=FP64)[mesh["tp"].get_local_rank()]).backward()
    return Outcome(5.0, layerzero.clip_grad_norm_(model, 10.0))


def nothing_stays_gathered_after_recomputation(at: Ranks) -> Outcome:
    model = shard(at, numbered(Checkpointed()), units=[Adapted])
    optimizer = layerzero.shard_optimizer(sgd(p for p in model.parameters() if p.requires_grad), model)
    model(rows(at.rank)).mean().backward()
    gathered = layerzero.memory(model).measured["full_buffer"]
    optimizer.zero_grad()
    left = sum(p.grad is not None for p in model.parameters())
    return Outcome([0, 0], [gathered, left])


# --- torchtune, verl, peft, VeOmni ---


def tokens(rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    count = 1 + (3 * rank + 2 * micro_batch) % 5
    return rows(rank, micro_batch, count=count), torch.arange(count) % 3


def tokens_of_unequal_micro_batches(at: Ranks) -> Outcome:
    net = numbered(nn.Linear(2, 3))
    model = shard(at, copy.deepcopy(net))
    total = sum(len(tokens(rank, index)[1]) for rank in range(WORLD) for index in range(2))
    for index in range(2):
        x, targets = tokens(at.rank, index)
        with layerzero.no_sync(model) if index == 0 else nullcontext():
            (F.cross_entropy(model(x), targets, reduction="sum") * WORLD / total).backward()
    batches = [tokens(rank, index) for rank in range(WORLD) for index in range(2)]
    F.cross_entropy(net(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
    return gradients_of(net, model)


def tied_weights_of_the_first_rank(at: Ranks) -> Outcome:
    net = numbered(Language(tied=True))
    with torch.device("meta"):
        meta = Language(tied=True).double()
    model = shard(at, meta, param_init_fn=initialize, units=["embedding", "head"])
    layerzero.load_full_state_dict(model, net.state_dict() if at.rank == 0 else None)
    language_loss(model, at.rank, 1).backward()
    torch.stack([language_loss(net, rank, 1) for rank in range(WORLD)]).mean().backward()
    return gradients_of(net, model)


def freezing_between_forward_and_backward(at: Ranks) -> Outcome:
    net = numbered(Adapted(2))
    model, optimizer = sharded(at, net, units=["base"])
    for each, steps, x in ((net, sgd(net.parameters()), all_rows), (model, optimizer, lambda s: rows(at.rank, s))):
        step_of(steps, each(x(0)).mean())
        loss = each(x(1)).mean()
        each.lora_A.requires_grad_(False)
        with torch.no_grad():
            each(x(2))
        step_of(steps, loss)
        each.lora_A.requires_grad_(True)
        step_of(steps, each(x(3)).mean())
    return parameters_of(net, model)


class Report(NamedTuple):
    """A public report, its re-enactment, and the numbers of ranks on which it runs, one after the other."""

    number: str
    run: Callable[[Ranks], Outcome]
    worlds: tuple[int, ...] = (WORLD,)


REPORTS = [
    Report("pytorch/pytorch#149768", epsilon_of_the_clip),
    Report("pytorch/pytorch#105371", unfreezing_after_an_evaluation),
    Report("pytorch/pytorch#183702", grouped_modules_called_twice),
    Report("pytorch/pytorch#146190", dropout_of_each_rank),
    Report("pytorch/pytorch#101343", decay_by_the_number_of_dims),
    Report("pytorch/pytorch#174862", images_on_one_rank_only),
    Report("pytorch/pytorch#124523", optimizer_in_the_backward),
    Report("pytorch/pytorch#144045", one_element_on_one_rank, (1,)),
    Report("pytorch/pytorch#186998", unfreezing_after_a_frozen_forward),
    Report("pytorch/pytorch#136228", one_row_from_the_first_rank),
    Report("meta-pytorch/torchft#168", pseudogradient),
    Report("huggingface/accelerate#3971", step_count_in_a_sharded_checkpoint),
    Report("huggingface/accelerate#3154", tied_weights_from_meta),
    Report("huggingface/accelerate#4206", adapters_of_all_ranks),
    Report("huggingface/accelerate#641", clipping_with_a_scaler_and_accumulation),
    Report("Lightning-AI/pytorch-lightning#16815", resumed_on_two_ranks, (WORLD, 2)),
    Report("Lightning-AI/pytorch-lightning#5642", one_optimizer_of_a_pair_at_a_time),
    Report("Lightning-AI/pytorch-lightning#19987", epoch_that_ends_inside_a_window),
    Report("Lightning-AI/pytorch-lightning#16908", load_under_inference_mode),
    Report("Lightning-AI/pytorch-lightning#1549", penalty_in_the_last_micro_batch),
    Report("deepspeedai/DeepSpeed#966", shared_layers_in_every_stage),
    Report("deepspeedai/DeepSpeed#8130", frozen_weights_inside_checkpoints),
    Report("deepspeedai/DeepSpeed#545", parameter_of_one_micro_batch),
    Report("deepspeedai/DeepSpeed#7848", packed_experts_are_loaded),
    Report("NVIDIA/Megatron-LM#5974", first_update_of_adam),
    Report("NVIDIA/Megatron-LM#844", tied_weights_in_two_units),
    Report("NVIDIA/Megatron-LM#6660", group_of_one_rank),
    Report("NVIDIA/Megatron-LM#7452", sinks_in_the_norm),
    Report("NVIDIA/Megatron-LM#6153", nothing_stays_gathered_after_recomputation),
    Report("verl-project/verl#5625", tokens_of_unequal_micro_batches),
    Report("verl-project/verl#7834", tied_weights_of_the_first_rank),
    Report("huggingface/peft#2977", freezing_between_forward_and_backward),
]
BY_NUMBER = {report.number: report for report in REPORTS}


def figures(outcome: Outcome) -> tuple[str, str]:
    """Compare all values of an outcome, and return the first of each as the page shows them."""
    right, ours = list(values_of(outcome.right)), list(values_of(outcome.ours))
    assert len(right) == len(ours) > 0
    for theirs, mine in zip(right, ours, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    return figure_of(outcome.right), figure_of(outcome.ours)


def _run(rank: int, number: str, size: int, folder: Path) -> tuple[str, str]:
    """Return the figures of a report, or the type and the text of its error, so that the other reports run, too."""
    try:
        return figures(BY_NUMBER[number].run(Ranks(rank, size, folder)))
    except Exception as error:
        return type(error).__name__, str(error)


OTHERS = [(1, "off"), (4, "off"), (2, None)]  # other groups, and shared memory


PAGE = Path(__file__).resolve().parents[2] / "docs" / "notes" / "reports.md"


def on_the_page() -> dict[str, tuple[str, str]]:
    """Return the right value and layerzero's value of each report."""
    row = re.compile(r"^\| ([\w.-]+/[\w.-]+#\d+) \|[^|]*\|[^|]*\| (\S+) \| (\S+) \|$", re.MULTILINE)
    return {number: (right, ours) for number, right, ours in row.findall(PAGE.read_text(encoding="utf-8"))}


def _run_all(rank: int, size: int, folder: Path) -> dict[str, tuple[str, str]]:
    """Run the reports that run on this number of ranks."""
    world = dist.get_world_size()
    numbers = [report.number for report in REPORTS if world in report.worlds]
    return {number: _run(rank, number, min(size, world), folder / number) for number in numbers}


@pytest.mark.parametrize(
    ("size", "shared_memory"), [(2, "off"), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_reports_have_the_figures_of_the_page(size: int, shared_memory: str | None, tmp_path: Path) -> None:
    for number in BY_NUMBER:
        (tmp_path / number).mkdir(parents=True)
    page, wrong, found = on_the_page(), [], set[str]()
    for world in (1, WORLD, 2):
        ranks = run_ranks(_run_all, size, tmp_path, world_size=world, shared_memory=shared_memory, timeout=300)
        for rank, result in enumerate(ranks):
            found |= result.keys()
            for number, (right, ours) in result.items():
                # A report on several numbers of ranks has the figures of the last one.
                expected = page[number] if world == BY_NUMBER[number].worlds[-1] else (right, right)
                if (right, ours) != expected:
                    wrong.append(f"{number} on rank {rank} of {world}: {(right, ours)} instead of {expected}")
    assert not wrong, "\n".join(wrong)
    assert found == BY_NUMBER.keys()


def test_the_page_lists_every_report_once() -> None:
    numbers = re.findall(r"^\| ([\w.-]+/[\w.-]+#\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(numbers) == len(set(numbers)) and set(BY_NUMBER) <= set(numbers)
    for project in ("pytorch/", "huggingface/accelerate", "Lightning-AI/", "deepspeedai/", "NVIDIA/Megatron"):
        assert sum(number.startswith(project) for number in numbers) >= 3
