"""Random sequences of user operations on a sharded model, compared with a plain model in one process.

[Note: Exact arithmetic after any operation]
The optimizers round weights to small integers after every step. Therefore activations and gradients are exact in fp32,
bf16 and fp16, every order of additions gives the same bits, and the two models must be equal, not only close.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import checkpoint
from tests.support.models import IntegerNet, different, full_parameters, integer_batch, integer_loss, integer_net, union
from tests.support.ranks import mesh_of, run_ranks

Operation = tuple[str, int]  # name of the operation, seed of its random choices
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WORLD = 4


class Setting(NamedTuple):
    """Settings with which the model is sharded."""

    size: int
    dtype: str
    accumulation: str  # "sharded", "full", "local" or "by unit"
    shared_memory: str
    muon: bool


class Program(NamedTuple):
    setting: Setting
    operations: tuple[Operation, ...]


class _Rounding:
    """Optimizer whose parameters are small integers after each step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.round_().clamp_(-2, 2)


class Rounded(_Rounding, torch.optim.SGD):
    """SGD with rounding."""


class RoundedMuon(_Rounding, torch.optim.Muon):
    """Muon, which needs full matrices, with rounding."""


def _by_unit(name: str, module: nn.Module) -> str:
    return "full" if name in ("first", "head") else "sharded"


class _Broken(Exception):
    """Exception that a forward or a backward raises on purpose."""


class _Monkey:
    """Sharded and plain model on one rank, with the operations on them.

    Each method in OPERATIONS takes a random generator for its choices.
    """

    def __init__(self, rank: int, setting: Setting, folder: str) -> None:
        self.rank = rank
        self.setting = setting
        self.folder = folder
        self.turn = 0  # number of batches so far
        self.net = integer_net()
        self.net_optimizers = self._optimizers_of(self.net)
        self.scale = 8.0
        self.saved: list[tuple[str, Any]] = []
        self.net_ema: list[Tensor] | None = None
        self.ema: layerzero.EMA | None = None
        self._shard(setting.size)

    def _shard(self, size: int) -> None:
        accumulation: Any = self.setting.accumulation
        if accumulation == "by unit":
            accumulation = _by_unit
        dtype = DTYPES[self.setting.dtype]
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
        )
        self.model: nn.Module = layerzero.shard_model(
            copy.deepcopy(self.net),
            mesh=mesh_of(size),
            units=IntegerNet.UNITS,
            mp_policy=policy,
            accumulation=accumulation,
            shared_memory=self.setting.shared_memory,
        )
        self.optimizers = [
            layerzero.shard_optimizer(optimizer, self.model, elementwise=isinstance(optimizer, Rounded))
            for optimizer in self._optimizers_of(self.model)
        ]
        self.ema, self.net_ema = None, None

    def _optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        if not self.setting.muon:
            return [Rounded(model.parameters(), lr=2**-3, momentum=0.5)]
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        return [
            RoundedMuon(matrices, lr=0.5, momentum=0.5, weight_decay=0.0),
            Rounded(vectors, lr=2**-3, momentum=0.5),
        ]

    # Parts of operations

    def _batches(self) -> tuple[Any, Any]:
        """Return this rank's batch, and the union of all ranks' batches."""
        self.turn += 1
        every = [integer_batch(step=self.turn, rank=rank) for rank in range(WORLD)]
        return every[self.rank], union(every)

    def _zero(self, to_none: bool = True) -> None:
        for optimizer in (*self.optimizers, *self.net_optimizers):
            optimizer.zero_grad(set_to_none=to_none)

    def _step(self) -> None:
        for optimizer in (*self.optimizers, *self.net_optimizers):
            optimizer.step()

    def _pass(self, *, scale: float = 1.0) -> None:
        ours, all_of_them = self._batches()
        (scale * integer_loss(self.model, ours)).backward()
        (scale * integer_loss(self.net, all_of_them)).backward()

    # Operations

    def train(self, draw: random.Random) -> None:
        for micro_batch in range(count := draw.choice((1, 1, 2, 3))):
            if draw.random() < (0.3 if micro_batch == count - 1 else 0.6):
                with layerzero.no_sync(self.model):
                    self._pass()
            else:
                self._pass()
        self._step()
        self._zero(draw.random() < 0.8)

    def clip(self, draw: random.Random) -> None:
        self._pass()
        norm = layerzero.clip_grad_norm_(self.model, draw.choice((2.0, 1e9)), float("inf"))
        largest = torch.stack([p.grad.abs().max() for p in self.net.parameters() if p.grad is not None]).max()
        assert torch.equal(norm, largest), (norm, largest)
        self._zero()  # scaled gradients are not exact

    def evaluate(self, draw: random.Random) -> None:
        ours, _ = self._batches()
        self.model.eval()
        context = torch.inference_mode() if draw.random() < 0.3 else torch.no_grad()
        with context:
            assert torch.equal(self.model(ours[0]), self.net(ours[0])), "outputs differ"
        self.model.train()

    def two_graphs(self, draw: random.Random) -> None:
        graphs = []
        for _ in range(2):
            ours, all_of_them = self._batches()
            graphs.append((integer_loss(self.model, ours), integer_loss(self.net, all_of_them)))
        if draw.random() < 0.5:
            graphs.reverse()
        for loss, net_loss in graphs:
            loss.backward()
            net_loss.backward()
        self._step()
        self._zero()

    def dropped_graph(self, draw: random.Random) -> None:
        ours, _ = self._batches()
        loss = integer_loss(self.model, ours)
        del loss

    def accumulate(self, draw: random.Random) -> None:
        """Leave gradients for the next operation."""
        if draw.random() < 0.5:
            with layerzero.no_sync(self.model):
                self._pass()
        else:
            self._pass()

    def zero(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            self._zero()
        else:
            self.model.zero_grad()
            self.net.zero_grad()

    def save(self, draw: random.Random) -> None:
        self._zero()
        path = f"{self.folder}/{len(self.saved)}"
        extra = {"ema": None if self.ema is None else self.ema.state_dict(), "turn": self.turn}
        first, *others = self.optimizers
        extra["others"] = [other.state_dict() for other in others]
        if draw.random() < 0.5:
            checkpoint.save(path, self.model, first, extra)
        else:
            checkpoint.save_async(path, self.model, first, extra).wait()
        state = [copy.deepcopy(each.state_dict()) for each in (self.net, *self.net_optimizers)]
        averages = None if self.net_ema is None else [each.clone() for each in self.net_ema]
        self.saved.append((path, (state, averages)))

    def load(self, draw: random.Random) -> None:
        if not self.saved:
            return
        self._zero()
        path, (state, averages) = draw.choice(self.saved)
        requires = [p.requires_grad for p in self.net.parameters()]
        if draw.random() < 0.4:
            for parameter in self.net.parameters():
                parameter.requires_grad_(True)  # parameters that are frozen when sharded have no fp32 masters
            self._shard(draw.choice((1, 2, 4)))
            for p, wanted in zip(self.model.parameters(), requires, strict=True):
                p.requires_grad_(wanted)
        for p, wanted in zip(self.net.parameters(), requires, strict=True):
            p.requires_grad_(wanted)
        if averages is not None and self.ema is None:
            if all(requires):
                self._average()
            else:
                averages = None
        first, *others = self.optimizers
        extra = checkpoint.load(path, self.model, first)
        for other, values in zip(others, extra["others"], strict=True):
            other.load_state_dict(values)
        for each, values in zip((self.net, *self.net_optimizers), copy.deepcopy(state), strict=True):
            each.load_state_dict(values)
        if averages is not None:
            assert self.ema is not None
            self.ema.load_state_dict(extra["ema"])
            self.net_ema = [each.clone() for each in averages]
        else:
            self.ema, self.net_ema = None, None

    def freeze(self, draw: random.Random) -> None:
        name = draw.choice([name for name, _ in self.net.named_parameters()])
        wanted = draw.random() < 0.5
        self._zero()
        for model in (self.model, self.net):
            dict(model.named_parameters())[name].requires_grad_(wanted)
        if not any(p.requires_grad for p in self.net.parameters()):
            self.unfreeze(draw)

    def unfreeze(self, draw: random.Random) -> None:
        for model in (self.model, self.net):
            model.requires_grad_(True)

    def _average(self) -> None:
        self.evaluate(random.Random(0))  # a change of requires_grad takes effect in the next forward
        self.ema = layerzero.EMA(self.model, decay=0.5)
        self.net_ema = [p.detach().clone() for p in self.net.parameters()]

    def average(self, draw: random.Random) -> None:
        masters = [p.detach() for p in self.net.parameters()]
        if self.ema is None or self.net_ema is None:
            if not all(p.requires_grad for p in self.net.parameters()):
                return
            self._average()
            assert self.ema is not None
            self.ema.update()
            return
        self.ema.update()
        if self.ema.n_averaged == 1:
            torch._foreach_copy_(self.net_ema, masters)
        else:
            torch._foreach_lerp_(self.net_ema, masters, 0.5)

    def swap(self, draw: random.Random) -> None:
        if self.ema is None or self.net_ema is None:
            return
        self._zero()
        with self.ema.swapped():
            averages = dict(zip(dict(self.net.named_parameters()), self.net_ema, strict=True))
            wrong = different(full_parameters(self.model), averages)
            assert not wrong, f"averages of {wrong}"

    def unsharded(self, draw: random.Random) -> None:
        self._zero()
        with layerzero.unsharded(self.model, writeback=True), torch.no_grad():
            for model in (self.model, self.net):
                model.get_parameter("head.weight").data.neg_()

    def edit(self, draw: random.Random) -> None:
        self._zero()
        name, kind = draw.choice([name for name, _ in self.net.named_parameters()]), draw.randrange(3)
        with torch.no_grad():
            for model in (self.model, self.net):
                parameter = dict(model.named_parameters())[name]
                if kind == 0:
                    parameter.neg_()
                elif kind == 1:
                    parameter.data.clamp_(-1, 1)
                else:
                    parameter.detach().zero_()

    def load_states(self, draw: random.Random) -> None:
        self._zero()
        whole = {name: value.clone() for name, value in full_parameters(self.model).items()}
        if draw.random() < 0.5:
            self.model.load_state_dict(whole)
        else:
            layerzero.load_full_state_dict(self.model, whole)

    def gathers(self, draw: random.Random) -> None:
        state = layerzero.full_state_dict(self.model, rank0_only=False)
        assert not different(state, dict(self.net.state_dict())), "full_state_dict differs"

    def overflow(self, draw: random.Random) -> None:
        """Step with a loss scaler and a batch that overflows on one rank or on none."""
        self._zero()
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=1000)
        ours, all_of_them = self._batches()
        bad, overflows = draw.randrange(WORLD), draw.random() < 0.5
        loss = integer_loss(self.model, ours)
        scaler.scale(loss * (float("inf") if overflows and self.rank == bad else 1.0)).backward()
        # A scaler raises for an optimizer without gradients, as if all of its parameters are frozen.
        graded = [o for o in self.optimizers if any(p.grad is not None for g in o.param_groups for p in g["params"])]
        for optimizer in graded:
            scaler.unscale_(optimizer)
        for optimizer in graded:
            scaler.step(optimizer)
        if not overflows:
            integer_loss(self.net, all_of_them).backward()
            for net_optimizer in self.net_optimizers:
                net_optimizer.step()
        self._zero()

    def guarded(self, draw: random.Random) -> None:
        """Step under guard_steps with a batch whose loss is NaN on one rank or on none."""
        self._zero()
        guard = layerzero.guard_steps(self.model, *self.optimizers)
        ours, all_of_them = self._batches()
        bad, spoils = draw.randrange(WORLD), draw.random() < 0.5
        loss = integer_loss(self.model, ours)
        (loss * (float("nan") if spoils and self.rank == bad else 1.0)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if not spoils:
            integer_loss(self.net, all_of_them).backward()
            for net_optimizer in self.net_optimizers:
                net_optimizer.step()
        assert guard.skipped == int(spoils) and (not spoils or f"rank {bad}" in guard.found), guard.found
        guard.close()
        self._zero()

    def fails(self, draw: random.Random) -> None:
        """Raise in a forward or a backward, on all ranks."""
        where, in_backward = draw.choice(("first", "second", "head")), draw.random() < 0.5

        def broken(*args: Any) -> None:
            raise _Broken

        def breaks_later(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(broken)

        unit = self.model.get_submodule(where)
        hook = unit.register_forward_hook(breaks_later if in_backward else broken)
        ours, _ = self._batches()
        try:
            integer_loss(self.model, ours).backward()
        except _Broken:
            pass
        finally:
            hook.remove()
        self._zero()

    def fingerprint(self, draw: random.Random) -> None:
        found = layerzero.fingerprint(self.model)
        assert found.ok, found.corruptions

    def compare(self, what: str) -> None:
        wrong = different(full_parameters(self.model), dict(self.net.named_parameters()))
        assert not wrong, f"after {what}: parameters {wrong}"


OPERATIONS: dict[str, tuple[Callable[[_Monkey, random.Random], None], int]] = {  # name: (method, relative frequency)
    method.__name__: (method, weight)
    for method, weight in (
        (_Monkey.train, 10),
        (_Monkey.clip, 2),
        (_Monkey.evaluate, 3),
        (_Monkey.two_graphs, 3),
        (_Monkey.dropped_graph, 1),
        (_Monkey.accumulate, 3),
        (_Monkey.zero, 1),
        (_Monkey.save, 2),
        (_Monkey.load, 2),
        (_Monkey.freeze, 3),
        (_Monkey.unfreeze, 2),
        (_Monkey.average, 3),
        (_Monkey.swap, 2),
        (_Monkey.unsharded, 2),
        (_Monkey.edit, 3),
        (_Monkey.load_states, 2),
        (_Monkey.gathers, 1),
        (_Monkey.overflow, 2),
        (_Monkey.guarded, 2),
        (_Monkey.fails, 3),
        (_Monkey.fingerprint, 2),
    )
}


def program_of(seed: int, length: int = 40) -> Program:
    """Return the random program of a seed."""
    draw = random.Random(seed)
    setting = Setting(
        size=draw.choice((1, 2, 4)),
        dtype=("fp32", "bf16", "fp16")[seed % 3],
        accumulation=draw.choice(("sharded", "full", "local", "by unit")),
        shared_memory=draw.choice(("auto", "off")),
        muon=draw.random() < 0.4,
    )
    names, weights = list(OPERATIONS), [weight for _, weight in OPERATIONS.values()]
    return Program(setting, tuple((name, draw.randrange(1 << 30)) for name in draw.choices(names, weights, k=length)))


def _run(rank: int, program: Program, folder: str) -> None:
    monkey = _Monkey(rank, program.setting, folder)
    for number, (name, seed) in enumerate(program.operations):
        draw = random.Random(seed)
        try:
            OPERATIONS[name][0](monkey, draw)
            if draw.random() < 0.5 or number + 1 == len(program.operations):
                monkey.compare(name)
        except Exception as error:
            raise AssertionError(f"operation {number}, {name}: {type(error).__name__}: {error}") from error
    dist.barrier()


def failure_of(program: Program, folder: str) -> str | None:
    """Run a program on ranks; return the error message, or None."""
    try:
        run_ranks(_run, program, folder, world_size=WORLD, timeout=90, pg_timeout=30)
    except AssertionError as error:
        return str(error)
    return None


def shrunk(operations: Sequence[Operation], fails: Callable[[tuple[Operation, ...]], bool]) -> tuple[Operation, ...]:
    """Return a shorter program that still fails, but does not fail if any one operation is removed."""
    left, size = tuple(operations), max(1, len(operations) // 2)
    while True:
        start, has_shrunk = 0, False
        while start < len(left):
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left, has_shrunk = fewer, True
            else:
                start += size
        if size == 1 and not has_shrunk:
            return left
        size = size if has_shrunk and size == 1 else max(1, size // 2)
