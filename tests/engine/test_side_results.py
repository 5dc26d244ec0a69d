"""Results that a forward stores or returns in unusual ways, parameters as outputs, and selective checkpoints."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import layerzero
from layerzero.engine import side_results
from layerzero.engine.hooks import get_state
from tests.support.models import update
from tests.support.ranks import every_nth_setting, mesh_of, on_ranks, run_ranks

WORLD = 4
RUNS = [(size, shared) for size in (1, 2, 4) for shared in ("off", None)]


@dataclasses.dataclass(frozen=True)
class Output:
    """Output that ``dataclasses.replace`` cannot rebuild."""

    number: dataclasses.InitVar[int]
    y: Tensor
    kind: str = dataclasses.field(default="", init=False)


class Layer(nn.Module):
    """Layer with an auxiliary loss, which it computes before or after its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.router = nn.Linear(8, 8)

    def _auxiliary(self, x: Tensor) -> Tensor:
        if "weight" in self.kind:
            return self.weight.cos().square().sum()
        return self.router(x).softmax(-1).square().mean()

    def forward(self, x: Tensor) -> Any:
        if "before" in self.kind:
            self.auxiliary = self._auxiliary(x)
        y = torch.tanh(x @ self.weight.sin())
        if "residual" in self.kind:
            y = y + x
        if "after" in self.kind:
            self.auxiliary = self._auxiliary(x)
        return self._contained(y)

    def _contained(self, y: Tensor) -> Any:
        if "defaultdict" in self.kind:
            made: collections.defaultdict[str, list[Tensor]] = collections.defaultdict(list)
            made["y"].append(y)
            return made
        if "dataclass" in self.kind:
            return Output(1, y)
        if "values" in self.kind:
            return torch.return_types.max((y, torch.zeros(3)))
        return {"y": (y,)} if "in a dict" in self.kind else y


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            if isinstance(y, Output):
                y = y.y
            elif isinstance(y, (dict, tuple)):
                y = y["y"][0] if isinstance(y, dict) else y.values
            x = y
        return self.head(x)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 8, dtype=torch.double, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(
    rank: int, alone: nn.Module, units: Any, loss_of: Callable[[nn.Module, Tensor], Tensor], size: int, **settings: Any
) -> None:
    """Train `alone` in one process and a sharded copy, two micro-batches per step, and compare all weights."""
    model = layerzero.shard_model(copy.deepcopy(alone), mesh=mesh_of(size), units=units, **settings)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model)
    its_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        for micro_batch in range(2):
            for other in range(WORLD):
                (loss_of(alone, _batch(2 * step + micro_batch, other)) / WORLD).backward()
        with layerzero.no_sync(model):
            loss_of(model, _batch(2 * step, rank)).backward()
        loss_of(model, _batch(2 * step + 1, rank)).backward()
        update(optimizer, its_optimizer)
    for (name, parameter), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.full_tensor().detach(), expected.detach(), rtol=1e-12, atol=1e-12, msg=name
        )


class ViewLayer(nn.Module):
    """Layer that returns a view of what it computes."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(torch.tanh(self.linear(x)) @ self.linear.weight)


class InPlaceNet(Net):
    """Network that changes the outputs of its layers in place."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y.mul_(2)
            x = (
                y.sin()
                if y.shape == x.shape
                else y.reshape(x.shape[0], -1).repeat(1, x[0].numel() * len(x) // y.numel())
            )
        return self.head(x)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(-1, 2, 4),
    "columns": lambda y: y[:, :4],
    "view of a view": lambda y: y.t()[:].t(),
    "no view": lambda y: y,
}


@every_nth_setting(5)
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks(world_size=WORLD)
def test_a_view_that_a_unit_returns_may_be_changed_in_place(rank: int, size: int, stride: int) -> None:
    settings = [*itertools.product(VIEWS.items(), ("", "bias", "layer"), (0, 1))]
    for (kind, view), frozen, prefetch in settings[::stride]:
        torch.manual_seed(0)
        alone = InPlaceNet(lambda view=view: ViewLayer(view)).double()
        if frozen:
            alone.layers[1].linear.bias.requires_grad_(False)
            alone.layers[1].linear.weight.requires_grad_(frozen == "bias")
        try:
            _train(rank, alone, {ViewLayer}, lambda net, x: net(x).square().mean(), size, prefetch=prefetch)
        except Exception as error:
            raise AssertionError(f"{kind}, frozen: {frozen}, prefetch={prefetch}") from error


def _loss_with_auxiliary(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean() + sum(layer.auxiliary for layer in net.layers)


@pytest.mark.default_sample(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "shared_memory"), RUNS)
@on_ranks(world_size=WORLD)
def test_an_auxiliary_loss_in_an_attribute_has_the_gradients_of_one_process(
    rank: int, size: int, shared_memory: str | None
) -> None:
    contained = [f"weight after, {how}" for how in ("in a dict", "defaultdict", "dataclass", "values")]
    for kind in ("router before", "router after", "weight before", "weight after", *contained[: 4 if size == 4 else 1]):
        for prefetch in (0, 1):
            torch.manual_seed(0)
            alone = Net(lambda kind=kind: Layer(kind)).double()
            _train(rank, alone, {Layer}, _loss_with_auxiliary, size, prefetch=prefetch)


class Changed(Net):
    """Net that hooks and changes the outputs of its units in place."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(lambda: Layer("weight after, residual"))
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda gradient: self.seen.append("hook"))
            x = x.add_(1.0)
            x[0] += 0.5
        return self.head(x.relu_())


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks(world_size=WORLD)
def test_callers_change_and_hook_outputs_that_have_side_results(rank: int, size: int) -> None:
    seen: list[str] = []
    torch.manual_seed(0)
    alone = Changed(seen).double()
    _train(rank, alone, {Layer}, _loss_with_auxiliary, size, prefetch=0)
    model = layerzero.shard_model(Changed(seen).double(), mesh=mesh_of(size), units={Layer})
    seen.clear()
    model(_batch(0, rank)).sum().backward()
    assert len(seen) == 3, seen
    hidden = model.layers[0](_batch(0, rank))
    assert not hidden.detach_().requires_grad  # as in truncated backpropagation through time


@on_ranks(world_size=2)
def test_a_unit_that_creates_no_node_returns_its_input(rank: int) -> None:
    model = layerzero.shard_model(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), mesh=mesh_of(2))
    same = layerzero.shard_model(Same(), mesh=mesh_of(2))
    x = model(torch.randn(3, 8))
    x.square()  # a later node, which the next unit has not created
    assert same(x) is x


class Same(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Table(nn.Module):
    """Learned positions and a head, which the model reads without calls to their units."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.body, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with layerzero.gathered(self.positions) if isinstance(self.body.weight, DTensor) else nullcontext():
            h = x + self.positions.weight[:3]
        with layerzero.gathered(self.head) if isinstance(self.body.weight, DTensor) else nullcontext():
            bias = self.head.bias.sum()
        return self.head(self.body(h)) + bias


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(world_size=WORLD)
def test_gathered_weights_of_which_nothing_is_saved_get_gradients(rank: int, size: int) -> None:
    torch.manual_seed(0)
    alone = Table().double()
    _train(rank, alone, ["positions", "body", "head"], lambda net, x: net(x).square().mean(), size)


class Odd(nn.Module):
    """Two layers that hide their result from hooks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.second(torch.tanh(self.first(x)))
        hidden = {"iterator": iter([y]), "generator": (each for each in [y]), "function": lambda: y}
        return hidden.get(self.kind, y)


@on_ranks(world_size=WORLD)
def test_a_forward_whose_result_no_hook_sees_is_refused(rank: int) -> None:
    for kind, nested in itertools.product(("iterator", "generator", "function"), (False, True)):
        torch.manual_seed(0)
        plain = nn.Sequential(Odd(kind), nn.Tanh()).double() if nested else Odd(kind).double()
        model = layerzero.shard_model(copy.deepcopy(plain), mesh=mesh_of(4), units={Odd})
        with pytest.raises(RuntimeError, match=r"returned only a .*, inside which layerzero finds no tensors"):
            model(_batch(0, rank))
        for net in (plain, model):  # the refusal leaves a model that trains, beginning with the edit of a weight
            (net[0] if nested else net).kind = "tensor"
            with torch.no_grad():
                net.get_parameter("0.first.weight" if nested else "first.weight").mul_(2)
        for other in range(WORLD):
            (plain(_batch(0, other)).sum() / WORLD).backward()
        model(_batch(0, rank)).sum().backward()
        for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12, msg=name)
        odd = model[0] if nested else model
        odd.kind = kind
        with torch.no_grad():
            odd(_batch(0, rank))
        assert not any(unit.gathered for unit in get_state(model).units)


class Elsewhere(nn.Module):
    """Layer that stores its result outside of the attributes of its module."""

    made: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> None:
        self.made.append(torch.tanh(x @ self.weight.sin()))


@on_ranks(world_size=WORLD)
def test_a_result_that_no_hook_sees_is_an_error_in_the_backward(rank: int) -> None:
    model = layerzero.shard_model(nn.Sequential(Elsewhere()).double(), mesh=mesh_of(4), units={Elsewhere})
    with torch.no_grad(), layerzero.gathered(model[0]):  # as in an evaluation, without a graph
        assert model[0].weight.any()
    model[0](_batch(0, rank))
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' got a gradient before .* unit, '0'"):
        Elsewhere.made.pop().sum().backward()


class Silent(nn.Module):
    """Model of several layers that stores its loss. It returns nothing that requires a gradient, or another output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.losses = kind, [torch.zeros(())]
        self.other = nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        other = self.other(y) if self.kind == "before" else None
        self.loss = y.square().mean()
        self.losses = [self.loss]
        if self.kind in ("beside", "list beside"):
            other = self.other(y)
        return y.detach() if self.kind == "detached" else other


class Outer(nn.Module):
    """Model without parameters of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Silent(kind)

    def forward(self, x: Tensor) -> None:
        self.inner(x)


def _stored_loss(net: nn.Module, x: Tensor) -> Tensor:
    net(x)
    inner = getattr(net, "inner", net)
    return inner.losses[0] if "list" in inner.kind else inner.loss


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks(world_size=WORLD)
def test_a_loss_that_only_an_attribute_holds_has_the_gradients_of_one_process(rank: int, size: int) -> None:
    for make, kind, units in (
        (Silent, "none", None),
        (Silent, "list", None),
        (Silent, "detached", {nn.Linear}),
        (Outer, "none", None),
        (Outer, "detached", {Silent}),
        (Silent, "beside", None),
        (Silent, "list beside", {nn.Linear}),
        (Outer, "beside", {Silent}),
        (Outer, "before", {Silent}),
    ):
        torch.manual_seed(0)
        _train(rank, make(kind).double(), units, _stored_loss, size)


@pytest.mark.parametrize("has_attribute", [False, True])
@on_ranks(world_size=2)
def test_a_hook_may_store_a_loss_on_a_layer_of_torch_after_the_first_step(rank: int, has_attribute: bool) -> None:
    torch.manual_seed(0)
    alone = Silent("beside").double()
    if has_attribute:
        alone.body[2].energy = None
    model = layerzero.shard_model(copy.deepcopy(alone), mesh=mesh_of(2))
    for net in (alone, model):
        _stored_loss(net, _batch(0, 0)).backward()
        net.zero_grad()
        net.body[2].register_forward_hook(
            lambda module, args, output: setattr(module, "energy", output.square().mean())
        )
        net(_batch(1, 0))
        net.body[2].energy.backward()
    expected = alone.body[2].weight.grad
    torch.testing.assert_close(model.body[2].weight.grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)


class Queries(nn.Module):
    """Unit that returns its own parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(8, 8))

    def forward(self) -> Any:
        if self.how == "view":
            return self.weight.t()
        return [self.weight] if self.how == "in a list" else self.weight


class Returning(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.queries, self.bias, self.frozen = Queries(how), nn.Parameter(torch.randn(8)), nn.Parameter(torch.ones(8))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        queries = self.queries()
        y = x @ (queries[0] if isinstance(queries, list) else queries)
        return y, self.bias, self.frozen[2:], self.bias.detach()


@on_ranks(world_size=1)
def test_modules_of_torch_are_not_searched_for_what_sharding_adds_to_them(rank: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
    layerzero.shard_model(net)
    assert all(side_results._stores_nothing(layer) for layer in net)
    net[0].last = torch.ones(1)
    assert not side_results._stores_nothing(net[0])


def _return_everywhere(rank: int, size: int) -> None:
    """Return a parameter with other strides, and parameters in full precision."""
    model = nn.Sequential(Queries("parameter"))
    model[0].weight = nn.Parameter(torch.arange(64.0).view(8, 8).t())
    alone = copy.deepcopy(model)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for settings in ({}, {"mp_policy": bf16}):
        model = layerzero.shard_model(copy.deepcopy(alone), mesh=mesh_of(size), units={Queries}, **settings)
        assert torch.equal(model[0]().float(), alone[0]())
        with torch.no_grad(), layerzero.full_precision(model):
            assert torch.equal(model[0](), alone[0]())


def _returned(net: nn.Module, x: Tensor) -> Tensor:
    y, bias, frozen, detached = net(x)
    return (y + bias).square().sum() + frozen.sum() * bias.sum() + (detached * y).sum()


@pytest.mark.default_sample(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "shared_memory"), RUNS)
@on_ranks(world_size=WORLD)
def test_parameters_and_their_views_can_be_outputs(rank: int, size: int, shared_memory: str | None) -> None:
    _return_everywhere(rank, size)
    for how in ("parameter", "view", "in a list"):
        torch.manual_seed(0)
        alone = Returning(how).double()
        _train(rank, alone, {Queries}, lambda net, x: _returned(net, x) / 64, size)
        model = layerzero.shard_model(copy.deepcopy(alone), mesh=mesh_of(size), units={Queries})
        with torch.no_grad():
            for ours, theirs in zip(model(_batch(0, 0)), alone(_batch(0, 0)), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Policy(Queries):
    """Unit that returns its parameter in a distribution, as policy networks do."""

    def forward(self) -> Any:
        return torch.distributions.Normal(self.weight, self.weight.detach().square() + 1)


@on_ranks(world_size=2)
def test_a_parameter_in_an_object_is_an_error(rank: int) -> None:
    model = layerzero.shard_model(
        nn.Sequential(Policy("")), mesh=mesh_of(2), units={Policy}, reshard_after_forward=False
    )
    model[0]().log_prob(torch.zeros(8, 8)).sum().backward()
    assert model[0].weight.grad.full_tensor().any()
    model = layerzero.shard_model(nn.Sequential(Policy("")), mesh=mesh_of(2), units={Policy})
    with pytest.raises(RuntimeError, match=r"whose memory is freed after the forward\. Return a copy"):
        model[0]()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.two(torch.tanh(self.one(x))))


_MATMULS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.t.default)
POLICIES: dict[str, Callable[..., CheckpointPolicy]] = {
    "all but products": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.PREFER_RECOMPUTE if op in _MATMULS else CheckpointPolicy.MUST_SAVE
    ),
    "products": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.MUST_SAVE if op in _MATMULS[:2] else CheckpointPolicy.PREFER_RECOMPUTE
    ),
}


class Checkpointed(nn.Module):
    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy, self.blocks = POLICIES[policy], nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(self.policy)
            )
        return x


_UNITS = ({Block}, {nn.Linear}, {Block, nn.Linear})
_CASES = (
    *itertools.product(POLICIES, _UNITS, ({}, {"prefetch": 0}, {"prefetch": 2})),
    ("products", _UNITS[1], {"reshard_after_forward": 2}),
)


def _checkpoint_selectively(rank: int, cases: Sequence[tuple[str, set[type], dict[str, int]]], size: int) -> None:
    for policy, units, settings in cases:
        torch.manual_seed(0)
        alone = Checkpointed(policy).double()
        _train(rank, alone, units, lambda net, x: net(x).square().mean(), size, **settings)


@pytest.mark.slow
@pytest.mark.sample(1)
@every_nth_setting(5)
@pytest.mark.parametrize(("size", "shared_memory"), RUNS)
def test_selective_checkpoints_around_units_change_nothing(size: int, shared_memory: str | None, stride: int) -> None:
    run_ranks(_checkpoint_selectively, _CASES[::stride], size, world_size=WORLD, shared_memory=shared_memory)
