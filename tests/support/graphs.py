"""Models of float64 layers, schedules of a step, and comparison with training in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from tests.support.models import full_gradients, update
from tests.support.ranks import mesh_of

WORLD, SIZE, WIDTH = 4, 2, 6


def batch(rank: int, step: int, micro_batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return (output * output).mean() + output.sum()


class Block(nn.Module):
    """Layer that is recomputed in the backward if `reentrant` is given."""

    UNIT = True

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(call(self.linear, x, self.reentrant))


def call(module: nn.Module, x: Tensor, reentrant: bool | None) -> Tensor:
    return module(x) if reentrant is None else checkpoint(module, x, use_reentrant=reentrant)


class Chain(nn.Module):
    """Module that calls its units one after the other, in `order` if given; used as root and as nested unit."""

    UNIT = True

    def __init__(self, *units: nn.Module, order: Any = None, own: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.order = range(len(units)) if order is None else order
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64)) if own else None
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = call(self.units[place], x, self.reentrant)
        return x if self.scale is None else x * self.scale


def join(model: nn.Module, output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else sum(model.unwrap(output))


def run_script(model: nn.Module, rank: int, step: int, *, script: str) -> None:
    """Run a script of forwards and backwards.

    F0: forward of micro-batch 0; B0: its backward; R0: its backward with retain_graph; B01: backward of both losses.
    """
    losses = {}
    for action, *micro_batches in script.split():
        if action == "F":
            x = batch(rank, step, int(micro_batches[0])).requires_grad_()
            losses[micro_batches[0]] = loss_of(join(model, model(x)))
        else:
            sum(losses[m] for m in micro_batches).backward(retain_graph=action == "R")


one_pass = partial(run_script, script="F0 B0")
IN_FLIGHT = partial(run_script, script="F0 F1 B0 F2 B1 B2")


class Attending(nn.Module):
    """Layer with two inputs."""

    UNIT = True

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.memory = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.in_place = in_place
        self.is_deaf = False

    def forward(self, x: Tensor, memory: Tensor | list[Tensor]) -> Tensor:
        x = x.mul_(0.5) if self.in_place else x * 0.5
        if self.is_deaf:
            return torch.tanh(self.linear(x))
        if self.in_place and isinstance(memory, Tensor):  # the output is an input
            return x.add_(torch.tanh(self.linear(memory)) * self.memory(memory))
        if isinstance(memory, list):  # the caller sees the change
            memory.append(memory[-1] + x)
            memory = memory[0]
        return x + torch.tanh(self.linear(x)) * self.memory(memory)


class EncoderDecoder(nn.Module):
    """Encoder whose output all layers of a decoder use, so that its gradient is complete only after all of them.

    Args:
        listed: pass the encoder's output in a list, to which the layers append.
    """

    def __init__(self, *, reentrant: bool | None = None, in_place: bool = False, listed: bool = False) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(reentrant=reentrant) for _ in range(2))
        self.decoder = nn.ModuleList(Attending(in_place=in_place) for _ in range(4))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64))
        self.reentrant, self.listed = reentrant, listed

    def forward(self, x: Tensor) -> Tensor:
        memory, y = x, x * self.scale
        for layer in self.encoder:
            memory = layer(memory)
        seen = [memory]
        for layer in self.decoder:
            if self.reentrant is None:
                y = layer(y, seen if self.listed else memory)
            else:
                y = checkpoint(layer, y, memory, use_reentrant=self.reentrant)
        return y + seen[-1]


class SideBySide(nn.Module):
    """Units with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.units = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return sum(unit(x) for unit in self.units)


def blocks(count: int = 3, **settings: Any) -> Chain:
    return Chain(*(Block() for _ in range(count)), **settings)


def freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, int, int], None] = one_pass
    settings: dict[str, Any] | None = None
    prepare: Callable[[nn.Module], object] = lambda model: None  # changes the model before it is sharded


def shard(model: nn.Module, size: int = SIZE, **settings: Any) -> nn.Module:
    """Shard the model; all modules of classes with ``UNIT = True``, such as Block and Chain, are units."""
    inside = {type(module) for child in model.children() for module in child.modules()}
    present = {kind for kind in inside if getattr(kind, "UNIT", False)}
    return layerzero.shard_model(model, **({"mesh": mesh_of(size), "units": present} | settings))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_step(model: nn.Module, optimizer: Any, step: int) -> None:
    one_pass(model, dist.get_rank(), step)
    update(optimizer)


def trained(size: int = SIZE, steps: int = 2, **settings: Any) -> tuple[nn.Module, Any]:
    """Return a sharded model of three blocks after some steps, and its optimizer."""
    model = shard(blocks(3), size=size, **settings)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def boom(*_: object) -> NoReturn:
    """Hook that fails."""
    raise LookupError("boom")


def message_of(call: Callable[[], Any], *, with_cause: bool = False) -> str:
    """Return the class and the message of the error that `call` raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a second error of a module that has already failed
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}" + f" [{error.__cause__}]" * with_cause
    return "nothing was raised"


def assert_same_gradients(model: nn.Module, alone: nn.Module, case: object) -> None:
    """Assert that gradients equal those of `alone`, which has the sum of the gradients of all ranks."""
    _assert_gradients(model, _mean_gradients(alone), case)


def _mean_gradients(alone: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.div_(WORLD) for name, p in alone.named_parameters() if p.grad is not None}


def _assert_gradients(model: nn.Module, expected: dict[str, Tensor], case: object) -> None:
    """Assert equal gradients; with fp64 masters the tolerance is tight."""
    exact = all(p.dtype == torch.float64 for p in model.parameters())
    close = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(full_gradients(model), expected, msg=lambda text: f"{case}: {text}", **close)


def compare(rank: int, name: str, case: Case, *others: dict[str, Any], **settings: Any) -> None:
    """Train with `settings`, or with each of `others` added to them, and compare with training in one process."""
    torch.manual_seed(0)
    start = case.make()
    found = [_train_alone(copy.deepcopy(start), case) if rank == 0 else None]
    dist.broadcast_object_list(found)
    for each in others or ({},):
        _compare_one(rank, name, case, copy.deepcopy(start), settings | each, found[0])


def _compare_one(
    rank: int, name: str, case: Case, model: nn.Module, settings: dict[str, Any], expected: list[dict[str, Tensor]]
) -> None:
    case.prepare(model)
    shard(model, **((case.settings or {}) | settings))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    for step, gradients in enumerate(expected):
        case.step(model, rank, step)
        _assert_gradients(model, gradients, (name, settings, step))
        assert layerzero.memory(model).measured["full_buffer"] == 0, (name, settings, step)
        update(optimizer)


def _train_alone(alone: nn.Module, case: Case) -> list[dict[str, Tensor]]:
    """Train for two steps in one process; return the mean gradients of each."""
    optimizer, found = sgd(alone), []
    for step in range(2):
        for rank in range(WORLD):
            case.step(alone, rank, step)
        found.append({name: gradient.clone() for name, gradient in _mean_gradients(alone).items()})
        update(optimizer)
    return found


MODES = (
    {"accumulation": "sharded"},
    {"accumulation": "full", "prefetch": 0},
    {"accumulation": "local"},
    {"accumulation": "sharded", "prefetch": 3, "reshard_after_forward": False},
)
