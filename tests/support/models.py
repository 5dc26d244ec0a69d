"""Small models, data and references that several test files share.

[Note: Exact arithmetic]
:class:`IntegerNet` has integer weights, sparse integer data, a loss that is linear in the output, and power-of-two
scales. fp32 represents its gradients and SGD updates without rounding. Therefore every order of additions gives the
same bits, and tests may require equality. `end_to_end/test_parity.py` proves this with :func:`train_alone` in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import layerzero
from layerzero.comm.mesh_info import MeshInfo
from layerzero.dtensor.local_shard import plain

Batch = tuple[Tensor, Tensor]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class IntegerNet(nn.Module):
    """Three linear units and a root with its own parameter; see [Note: Exact arithmetic].

    Two units run in parallel: three in sequence would triple the digits of a gradient with every step.
    """

    UNITS = ("first", "second", "head")

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x) + self.second(x.flip(1)) + self.shift).relu())


def integer_net(seed: int = 0) -> IntegerNet:
    """Return an IntegerNet with weights in {-1, 0, 1}."""
    generator = torch.Generator().manual_seed(seed)
    net = IntegerNet()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return net


class SideBySide(nn.Module):
    """Parallel linear units and a parameter of the root; see [Note: Exact arithmetic]."""

    def __init__(self, units: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.units = nn.ModuleList(nn.Linear(5, 3) for _ in range(units))
        self.last = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return sum(unit(x.roll(index, 1)) for index, unit in enumerate(self.units)) + self.last


class OptionalBias(SideBySide):
    """Adds its own parameter to the output only if `uses_own` is True."""

    def forward(self, x: Tensor, *, uses_own: bool) -> Tensor:
        total = sum(unit(x) for unit in self.units)
        return total + self.last if uses_own else total


def integer_batch(*, step: int = 0, micro_batch: int = 0, rank: int = 0, samples: int = 2) -> Batch:
    """Return sparse inputs [samples, 5] and targets [samples, 3], in {-1, 0, 1}."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    inputs = F.one_hot(torch.randint(0, 5, (samples,), generator=generator), 5).float()
    targets = torch.randint(-1, 2, (samples, 3), generator=generator).float()
    return inputs, targets


def integer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over the samples, times a power of two that keeps the gradients integer."""
    inputs, targets = batch
    return 8 * (model(inputs) * targets).sum(1).mean()


def exact_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Return an SGD whose updates of an IntegerNet are exact."""
    return torch.optim.SGD(parameters, lr=2**-4, momentum=0.5)


def exact_model(net: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    """Shard an IntegerNet, or `net`, whose units have the same names; return it and its optimizer."""
    model = layerzero.shard_model(net or integer_net(), **{"units": IntegerNet.UNITS} | settings)
    return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)


def union(batches: Sequence[Batch]) -> Batch:
    """Join the ranks' batches into one batch, for training in one process."""
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


class Step(NamedTuple):
    """Result of an optimizer step, with full tensors by parameter name."""

    losses: list[Tensor]  # one for each micro-batch
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train_alone(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module, Batch], Tensor] = integer_loss,
) -> list[Step]:
    """Train in one process, without layerzero; `steps` holds the micro-batches of each step."""
    record = []
    for micro_batches in steps:
        losses = []
        for batch in micro_batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.detach())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        record.append(Step(losses, gradients, parameters))
    return record


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the full parameters of a sharded model, on every rank. All ranks must call this."""
    return _full({name: p.detach() for name, p in model.named_parameters()})


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the full gradients of a sharded model, on every rank. All ranks must call this."""
    return _full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def whole(value: Any) -> Tensor:
    """Return a copy of the full tensor of a parameter, or of a value in the state of an optimizer."""
    return (value.detach().full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value).detach()).clone()


def _full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``full_tensor()`` of each, with one collective for all instead of several for each, to save time."""
    alike: dict[MeshInfo, dict[str, Tensor]] = {}
    whole = {}
    for name, tensor in tensors.items():
        span = tensor._local_tensor.spec
        if span.model_parallel is None and span.mesh_info.data_parallel > 1:
            alike.setdefault(span.mesh_info, {})[name] = tensor
        else:
            whole[name] = tensor.full_tensor()
    for mesh_info, several in alike.items():
        whole |= _gathered(several, mesh_info)
    return {name: whole[name] for name in tensors}


def _gathered(tensors: dict[str, Tensor], mesh_info: MeshInfo) -> dict[str, Tensor]:
    spans = {name: tensor._local_tensor.spec for name, tensor in tensors.items()}
    rows = {name: plain(tensor) for name, tensor in tensors.items()}
    row_bytes = {name: math.prod(spans[name].stored_shape[1:]) * rows[name].element_size() for name in tensors}

    def sizes(k: int) -> list[int]:
        """Return the bytes of each tensor in the shard at position `k`."""
        return [(spans[name].bounds[k + 1] - spans[name].bounds[k]) * row_bytes[name] for name in tensors]

    longest = max(sum(sizes(k)) for k in range(mesh_info.data_parallel))
    mine = torch.cat([local.cpu().reshape(-1).view(torch.uint8) for local in rows.values()])
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
    gathered = padded
    for comm in mesh_info.control_comms:
        pieces = [torch.empty_like(gathered) for _ in range(comm.size)]
        if comm.held_group.reserved is not None:
            comm.held_group.reserved.wait()  # the control thread's messages come first on every rank
        dist.all_gather(pieces, gathered, group=comm.group)
        gathered = torch.cat(pieces)
    gathered = gathered.view(mesh_info.data_parallel, longest)
    cut = []
    for k in range(mesh_info.data_parallel):
        s, r = divmod(k, mesh_info.replicas)
        cut.append(gathered[r * mesh_info.zero3_size + s][: sum(sizes(k))].split(sizes(k)))
    return {
        name: torch.cat(pieces).view(rows[name].dtype).view(spans[name].shape).to(rows[name].device)
        for name, *pieces in zip(tensors, *cut, strict=True)
    }


def different(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors differ in any bit, or that only one of the dicts has."""
    names = ours.keys() | expected.keys()
    return sorted(n for n in names if n not in ours or n not in expected or not torch.equal(ours[n], expected[n]))


def assert_same_bits(model: nn.Module, net: nn.Module, case: str) -> None:
    """Assert that a sharded IntegerNet and one that was trained in one process have equal parameters."""
    wrong = different(full_parameters(model), dict(net.named_parameters()))
    assert not wrong, f"{case}: parameters {wrong}"


def assert_close(ours: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    """Assert equality up to a few fp32 roundings."""
    assert ours.keys() == expected.keys(), case
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{case} {n}: {m}")


def backward(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """Run forward and backward of this rank's batch; return the loss."""
    loss = integer_loss(model, integer_batch(step=step, rank=rank))
    loss.backward()
    return loss.detach()


def backward_alone(net: nn.Module, step: int = 0, *, world_size: int = 4) -> None:
    """Run forward and backward of all ranks' batches in one process."""
    integer_loss(net, union([integer_batch(step=step, rank=rank) for rank in range(world_size)])).backward()


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: Iterable[int]) -> None:
    """Train for some steps on this rank's batches."""
    for step in steps:
        backward(model, rank, step)
        update(optimizer)


def update(*optimizers: Optimizer) -> None:
    """Step the optimizers and clear their gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def in_lockstep(
    rank: int, ours: tuple[nn.Module, Optimizer], alone: tuple[nn.Module, Optimizer], steps: Iterable[int]
) -> None:
    """Train for the same steps with layerzero and in one process."""
    net, theirs = alone
    for step in steps:
        train(*ours, rank, [step])
        backward_alone(net, step, world_size=dist.get_world_size())
        update(theirs)


def follow_exactly(
    model: nn.Module,
    optimizer: Optimizer,
    alone: nn.Module,
    *,
    rank: int,
    ranks: Sequence[int],
    micro_batches: int = 1,
    norm_types: Sequence[float] = (2.0,),
    part: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    case: object = "",
) -> None:
    """Take two steps with layerzero and in one process; compare gradients, norms and parameters.

    Args:
        rank: this rank trains on the batches with this number, and `alone` on those of all `ranks`.
        part: selects from the values of one process those that this rank has.
    """
    exact = exact_sgd(alone.parameters())
    for step in range(2):
        at = f"{case} step {step}"
        for micro_batch in range(micro_batches):
            with layerzero.no_sync(model) if micro_batch + 1 < micro_batches else nullcontext():
                integer_loss(model, integer_batch(step=step, micro_batch=micro_batch, rank=rank)).backward()
            batches = [integer_batch(step=step, micro_batch=micro_batch, rank=each) for each in ranks]
            integer_loss(alone, union(batches)).backward()
        wrong = different(full_gradients(model), part({name: p.grad for name, p in alone.named_parameters()}))
        assert not wrong, f"{at}: gradients of {wrong}"
        for norm_type in norm_types:
            ours = layerzero.clip_grad_norm_(model, 1e9, norm_type)
            theirs = nn.utils.clip_grad_norm_(alone.parameters(), 1e9, norm_type)
            rounding = {} if norm_type == 2.0 else {"rtol": 0, "atol": 0}  # of the square root
            torch.testing.assert_close(ours, theirs, msg=lambda text, at=at: f"{at}: {text}", **rounding)
        update(optimizer, exact)
        wrong = different(full_parameters(model), part(dict(alone.named_parameters())))
        assert not wrong, f"{at}: parameters {wrong}"


def refusal_of(call: Callable[[], Any]) -> str:
    """Return the message of the error that `call` raises."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        call()
    return str(caught.value)


class Rule(Optimizer):
    """SGD of which a subclass changes the gradients."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    def change(self, parameter: Tensor) -> Tensor:
        """Return the change of a parameter with a learning rate of 1."""
        return parameter.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.change(parameter), alpha=group["lr"])


class LayerwiseScaling(Optimizer):
    """SGD with gradients divided by the norm of the full gradient matrix, as in LARS and LAMB."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    def norm(self, parameter: Tensor) -> Tensor:
        return parameter.grad.norm()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            norms = [self.norm(p) if p.grad is not None else None for p in group["params"]]
            for parameter, norm in zip(group["params"], norms, strict=True):
                if norm is not None:
                    parameter.sub_(parameter.grad / (norm + 1e-6), alpha=group["lr"])


class GlobalScaling(LayerwiseScaling):
    """SGD with gradients divided by their norm over all parameters, as in optimizers that clip or tune their rate."""

    def norm(self, parameter: Tensor) -> Tensor:
        gradients = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.stack(gradients).norm()


class Block(nn.Module):
    """Transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # the gradient of a key bias would be rounding noise
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedTransformer(nn.Module):
    """Language model with tied head and embedding."""

    UNITS = ("blocks.0", "blocks.1")

    def __init__(self, *, vocabulary: int = 13, width: int = 12, heads: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the next token."""
        tokens, targets = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    @staticmethod
    def batch(*, step: int, micro_batch: int = 0, rank: int = 0) -> Batch:
        """Return tokens and next tokens, [2, 6] each."""
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
        text = torch.randint(0, 13, (2, 7), generator=generator)
        return text[:, :-1], text[:, 1:]
