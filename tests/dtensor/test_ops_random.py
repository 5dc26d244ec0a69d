"""Random numbers in sharded parameters equal those of one process with the same seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import layerzero
from layerzero.dtensor.local_shard import plain
from tests.support.models import different, full_parameters
from tests.support.ranks import mesh_of, on_ranks

WORLD = 4


class Odd(nn.Module):
    """Parameters with long rows, fewer rows than ranks, one row, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 37)
        self.conv = nn.Conv1d(4, 6, 3)
        self.one = nn.Parameter(torch.zeros(1, 20))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.conv.weight.sum() * self.one.sum() + self.none.sum()


def _odd_model(size: int | None) -> nn.Module:
    torch.manual_seed(7)
    return Odd() if size is None else layerzero.shard_model(Odd(), mesh=mesh_of(size))


def _weight_init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv1d)):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.02, b=0.02)
        nn.init.zeros_(module.bias)
    if isinstance(module, Odd):
        nn.init.normal_(module.one)


def _reset(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv1d)):
        module.reset_parameters()


Fill = Callable[..., object]
INITS: dict[str, Fill] = {
    name: getattr(nn.init, name)
    for name in ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
                 "kaiming_normal_", "eye_", "ones_")
}  # fmt: skip


def _in_pieces(parameter: Tensor, generator: torch.Generator | None) -> None:
    """Initialize like fused projections: each part is drawn in full, in a separate tensor."""
    first, *rest = (min(1, len(parameter)), *parameter.shape[1:])
    top = nn.init.trunc_normal_(parameter.new_empty(1, first, *rest))
    below = nn.init.normal_(parameter.new_zeros((1, len(parameter) - first, *rest)))
    parameter.copy_(torch.cat([top, below], dim=1)[0])


FILLS: dict[str, Fill] = {
    "p.normal_": lambda p, g: p.normal_(1.0, 0.5, generator=g),
    "p.data.uniform_": lambda p, g: p.data.uniform_(-1, 1, generator=g),
    "p.detach().exponential_": lambda p, g: p.detach().exponential_(2.0, generator=g),
    "p.to_local().normal_": lambda p, g: (p.to_local() if hasattr(p, "to_local") else p).normal_(generator=g),
    "cauchy_": lambda p, g: p.cauchy_(generator=g),
    "log_normal_": lambda p, g: p.log_normal_(generator=g),
    "geometric_": lambda p, g: p.geometric_(0.3, generator=g),
    "random_": lambda p, g: p.random_(generator=g),
    "random_ to": lambda p, g: p.random_(17, generator=g),
    "random_ from to": lambda p, g: p.random_(3, 17, generator=g),
    "bernoulli_": lambda p, g: p.bernoulli_(0.3, generator=g),
    "bernoulli_ of a tensor": lambda p, g: p.bernoulli_(torch.full_like(p, 0.3), generator=g),
    "torch.bernoulli": lambda p, g: p.copy_(torch.bernoulli(p, generator=g)),
    "torch.normal": lambda p, g: p.copy_(torch.normal(p, 0.5, generator=g)),
    "rand_like": lambda p, g: p.copy_(torch.rand_like(p) if g is None else torch.rand_like(p, generator=g)),
    "randn_like": lambda p, g: p.add_(torch.randn_like(p), alpha=0.1),
    "randint_like": lambda p, g: p.copy_(torch.randint_like(p, 3, 9)),
    "in pieces": _in_pieces,
    "dropout": lambda p, g: p.copy_(F.dropout(p, 0.4)),
    "dropout in place": lambda p, g: F.dropout(p, 0.4, inplace=True),
    "rows.bernoulli_": lambda p, g: (p.to_local() if hasattr(p, "to_local") else p).bernoulli_(0.4, generator=g),
}  # fmt: skip
NEEDS_TWO_DIMS = {"eye_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world_size=WORLD)
def test_random_numbers_are_those_of_one_process_with_the_seed(rank: int, size: int) -> None:
    alone, model = _odd_model(None), _odd_model(size)
    generators = [torch.Generator(), torch.Generator()]
    for seeded in (False, True):
        for name, fill in {**INITS, **FILLS}.items():
            for (path, whole), ours in zip(alone.named_parameters(), model.parameters(), strict=True):
                if name in NEEDS_TWO_DIMS and (
                    whole.ndim < 2 or whole.numel() == 0 or (name == "eye_" and whole.ndim > 2)
                ):
                    continue
                states = []
                for target, generator in ((whole, generators[0]), (ours, generators[1])):
                    torch.manual_seed(3)
                    generator.manual_seed(4)
                    with torch.no_grad():
                        if name in ("eye_", "ones_"):
                            fill(target)
                        elif name in INITS:
                            fill(target, generator=generator if seeded else None)
                        else:
                            fill(target, generator if seeded else None)
                    states.append((torch.get_rng_state(), generator.get_state()))
                rows = ours.to_local().spec.rows
                expected = whole[rows.start : rows.stop]
                assert torch.equal(plain(ours), expected), f"{name} of {path}, S = {size}, {seeded}: {ours.to_local()}"
                assert all(torch.equal(a, b) for a, b in zip(*states, strict=True)), f"{name}: generators"
                with torch.no_grad():  # numbers that all functions can take
                    whole.copy_(torch.linspace(0, 1, whole.numel()).view(whole.shape))
                    plain(ours).copy_(expected)


@on_ranks(world_size=WORLD)
def test_model_apply_of_an_init_function_after_sharding_is_what_it_is_before(rank: int) -> None:
    """Initialize in the ways users do, and compare the forward on every replica."""
    x = torch.ones(2, 5)
    for init in (_weight_init, _reset):
        alone = _odd_model(None)
        torch.manual_seed(0)
        alone.apply(init)
        for size in (1, 2, 4):
            model = _odd_model(size)
            torch.manual_seed(0)
            model.apply(init)
            assert torch.equal(model(x), alone(x)), (init, size)
            assert not different(full_parameters(model), dict(alone.named_parameters()))


@on_ranks(world_size=WORLD)
def test_draws_that_cannot_be_made_by_rows_are_refused(rank: int) -> None:
    model = _odd_model(2)
    weight = model.linear.weight
    before = full_parameters(model)
    refused: dict[str, Callable[[], object]] = {
        "leaf": weight.normal_,
        "a part": plain_rows(weight)[:, :2].uniform_,
        "turned": plain_rows(weight).t().normal_,
        "poisson": lambda: torch.poisson(plain_rows(weight)),
        "multinomial": lambda: torch.multinomial(plain_rows(weight).abs() + 1, 1),
    }
    for name, draw in refused.items():
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            draw()
        patterns = ("leaf Variable",) if name == "leaf" else ("linear.weight", "unsharded")
        assert all(pattern in str(caught.value) for pattern in patterns), f"{name}: {caught.value}"
    assert not different(full_parameters(model), before)

    torch.manual_seed(5)
    with layerzero.unsharded(model, writeback=True):  # text of the error
        nn.init.orthogonal_(model.linear.weight)
    torch.manual_seed(5)
    expected = nn.init.orthogonal_(torch.empty(37, 5))
    assert torch.equal(weight.detach().full_tensor(), expected)

    if "accept_buf" in nn.init._no_grad_trunc_normal_.__code__.co_varnames:
        with pytest.raises(NotImplementedError, match=r"trunc_normal_.*unsharded"):
            nn.init.trunc_normal_(weight, a=1.2, b=4.0)
    else:  # older versions of torch map uniform numbers one by one, whatever the bounds
        torch.manual_seed(6)
        nn.init.trunc_normal_(weight, a=1.2, b=4.0)
        torch.manual_seed(6)
        assert torch.equal(weight.detach().full_tensor(), nn.init.trunc_normal_(torch.empty(37, 5), a=1.2, b=4.0))
    with layerzero.unsharded(model, writeback=True):
        nn.init.trunc_normal_(model.linear.weight, a=1.2, b=4.0)
    assert weight.detach().full_tensor().ge(1.2).all()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of random DTensors on the CPU
        dropped = F.dropout(weight, 0.5)  # with a gradient
    dropped.to_local().sum().backward()
    scale = weight.grad.to_local()
    assert scale.shape == weight.to_local().shape and ((scale == 0) | (scale == 2)).all()

    torch.manual_seed(rank)  # ranks with different seeds: each draws its rows
    with torch.no_grad():
        weight.normal_()
    assert len(weight.detach().full_tensor().unique()) == 37 * 5
    with torch.inference_mode():
        torch.rand_like(weight)


def plain_rows(parameter: Tensor) -> Tensor:
    return parameter.detach().to_local()
