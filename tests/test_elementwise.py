"""Whether an optimizer can work on rows is found out, without touching it; the user may know better."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.optimizers.elementwise import require_elementwise
from layerzero.optimizers.trial import difference
from tests.support.models import GlobalScaling, LayerwiseScaling

CPU = torch.device("cpu")


class Scaled(Optimizer):
    """SGD whose rate is multiplied by what a subclass says; all its settings are attributes, as in many packages."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, **settings: Any) -> None:
        self.settings = {"seen": [], **settings}  # torch's __getstate__ drops it
        self.count = 0
        super().__init__(params, {"lr": lr, "mixes": True})

    def factor(self, parameter: Tensor) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.settings["seen"].append(self.count)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factor = self.factor(parameter) if group["mixes"] else 1.0
                    parameter.sub_(parameter.grad * factor, alpha=group["lr"])

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]])


class Signs(Scaled):
    """As Lion: an element-wise optimizer with attributes of its own and a moment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            parameter.sub_(moment.lerp(parameter.grad, 0.1).sign(), alpha=self.param_groups[0]["lr"])
            moment.lerp_(parameter.grad, self.settings["weight"])


class CentredRows(Scaled):
    """Takes the mean out of each row of the gradient, as gradient centralisation does: rows are never cut."""

    def factor(self, parameter: Tensor) -> Any:
        return 1.0 if parameter.ndim < 2 else parameter.grad.mean(dim=tuple(range(1, parameter.ndim)), keepdim=True)


class OfVectors(Scaled):
    def factor(self, parameter: Tensor) -> Any:
        return 1 / parameter.grad.norm().clamp(min=1e-3) if parameter.ndim == 1 else 1.0


class OfKernels(Scaled):
    def factor(self, parameter: Tensor) -> Any:
        return 1 / parameter.grad.norm().clamp(min=1e-3) if parameter.ndim == 4 else 1.0


class ButSingleRows(Scaled):
    """Mixes columns, and single rows are as they are."""

    def factor(self, parameter: Tensor) -> Any:
        return 1.0 if parameter.shape[0] <= 1 else parameter.grad.mean(0, keepdim=True)


class InTheEnd(Scaled):
    """Mixes after a warm-up."""

    def factor(self, parameter: Tensor) -> Any:
        return 1.0 if self.count < 20 else 1 / self.gradients().norm().clamp(min=1e-3)


class Clips(Scaled):
    """Mixes only where gradients are large."""

    def factor(self, parameter: Tensor) -> Any:
        return min(1.0, 500.0 / self.gradients().norm().item())


class EstimatesRate(Scaled):
    """As the D-adaptation family in its first steps: keeps a sum over all parameters that does not act yet."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["distance"] = group.get("distance", 0.0) + self.gradients().abs().sum().item()
        super().step()


class KeepsNumber(Scaled):
    """The same by parameter, in a tensor of one element."""

    def factor(self, parameter: Tensor) -> Any:
        self.state[parameter]["norm"] = parameter.grad.norm().view(1)
        return 1.0


class NeedsRows(Scaled):
    def factor(self, parameter: Tensor) -> Any:
        parameter.grad.max()
        return 1.0


class Still(Scaled):
    def factor(self, parameter: Tensor) -> Any:
        return 0.0


class Draws(Scaled):
    def factor(self, parameter: Tensor) -> Any:
        return torch.rand_like(parameter)


class WithClosure(Scaled):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Prodigy(Scaled):
    """Only its name is known to be wrong."""


class OfProdigy(Prodigy):
    pass


def build(kind: Callable[..., Optimizer], **settings: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.parametrize("kind", [Scaled, CentredRows, Signs], ids=lambda kind: kind.__name__)
def test_an_element_wise_optimizer_with_attributes_of_its_own_is_accepted(kind: type[Scaled]) -> None:
    require_elementwise(build(kind, weight=0.2), CPU)


MIXES = {
    LayerwiseScaling: "matrix",
    GlobalScaling: "matrix",
    OfVectors: r"shape \[9\]",
    OfKernels: r"shape \[3, 2, 2, 2\]",
    ButSingleRows: "matrix",
    InTheEnd: "matrix",
    Clips: "matrix",
    EstimatesRate: "'distance' in parameter group 0 depends on which rows it sees",
    KeepsNumber: "'norm' in the state of parameter",
    Draws: "matrix",
    Prodigy: "estimates its rate",
    OfProdigy: "OfProdigy is not element-wise: it estimates its rate",
}


@pytest.mark.parametrize("kind", MIXES, ids=lambda kind: kind.__name__)
def test_an_optimizer_that_mixes_elements_somewhere_is_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=f"is not element-wise: .*{MIXES[kind]}|{MIXES[kind]}"):
        require_elementwise(build(kind), CPU)


def test_a_rate_of_zero_hides_nothing() -> None:
    for rate in (0.0, 1e-12):
        with pytest.raises(ValueError, match="matrix"):
            require_elementwise(build(GlobalScaling if rate else InTheEnd, **({} if rate else {"lr": rate})), CPU)
    optimizer = build(ButSingleRows)
    optimizer.param_groups[0]["lr"] = torch.zeros(())
    with pytest.raises(ValueError, match="matrix"):
        require_elementwise(optimizer, CPU)
    assert optimizer.param_groups[0]["lr"].item() == 0.0


def test_each_kind_of_group_is_tried() -> None:
    layers = [{"params": [nn.Parameter(torch.ones(3, 2))], "mixes": False, "lr": 0.1 / (k + 1)} for k in range(3)]
    require_elementwise(ButSingleRows(layers), CPU)
    with pytest.raises(ValueError, match="matrix"):
        require_elementwise(ButSingleRows([*layers, {"params": [nn.Parameter(torch.ones(3, 2))]}]), CPU)


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [(NeedsRows, "max"), (Still, "changed none"), (Signs, "KeyError: 'weight'")],
    ids=["needs rows", "still", "raises"],
)
def test_what_could_not_be_tried_is_told_apart_and_the_users_word_counts(kind: Any, theirs: str) -> None:
    optimizer = build(kind)
    with pytest.raises(ValueError, match=rf"could not be tried out.*{theirs}.*elementwise=True"):
        require_elementwise(optimizer, CPU)
    require_elementwise(optimizer, CPU, elementwise=True)


def test_what_cannot_be_copied_could_not_be_tried() -> None:
    with pytest.raises(ValueError, match=r"could not be tried out.*cannot pickle '_thread.lock'"):
        require_elementwise(build(Scaled, lock=threading.Lock()), CPU)


def test_the_users_word_is_not_asked_where_nothing_could_work() -> None:
    require_elementwise(build(LayerwiseScaling), CPU, elementwise=True)
    for kind, said in ((torch.optim.LBFGS, "inner products"), (WithClosure, "closure"), (Around, "holds")):
        with pytest.raises(ValueError, match=said):
            require_elementwise(build(kind), CPU, elementwise=True)
    for kind in (torch.optim.Adam, LayerwiseScaling):
        with pytest.raises(NotImplementedError, match="ignored_params"):
            require_elementwise(build(kind), CPU, elementwise=False)


class Around(Scaled):
    """An optimizer around an optimizer, as Lookahead."""

    def __init__(self, params: Iterable[Any]) -> None:
        params = list(params)
        super().__init__(params)
        self.fast = torch.optim.SGD(params)


def test_trying_an_optimizer_out_leaves_everything_as_it_was() -> None:
    optimizer = build(Scaled, table={"of": [torch.ones(2)]})
    parameters = optimizer.param_groups[0]["params"]
    before, random = [p.detach().clone() for p in parameters], torch.get_rng_state()
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the hooks are the user's"))
    optimizer.step = lambda *_: pytest.fail("bound to the original")  # as schedulers do
    require_elementwise(optimizer, CPU)
    assert (optimizer.count, optimizer.settings["seen"]) == (0, []) and not optimizer.state
    assert torch.equal(optimizer.settings["table"]["of"][0], torch.ones(2))
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(parameters, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"]
)
def test_torchs_own_optimizers_that_nobody_tries_out_would_pass(name: str) -> None:
    assert difference(build(getattr(torch.optim, name)), CPU) is None
    foreach = build(getattr(torch.optim, name), foreach=True)
    assert difference(foreach, CPU) is None
