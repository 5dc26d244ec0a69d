"""Detection of optimizers that need full parameters; the user may override the result."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.optimizers.compatibility import kinds_that_need_full_params, state_after_a_step
from layerzero.optimizers.compatibility_trial import TrialError, find_owner_difference, find_row_difference, group_kind
from tests.support.models import GlobalScaling, LayerwiseScaling

CPU = torch.device("cpu")


class Scaled(Optimizer):
    """SGD whose update is multiplied by a factor of the subclass; all settings are attributes, as in many packages."""

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
            group["step"] = group.get("step", torch.zeros(())).add_(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factor = self.factor(parameter) if group["mixes"] else 1.0
                    parameter.sub_(parameter.grad * factor, alpha=group["lr"])

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]])


class Signs(Scaled):
    """Element-wise optimizer with its own attributes and a moment, like Lion."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            parameter.sub_(moment.lerp(parameter.grad, 0.1).sign(), alpha=self.param_groups[0]["lr"])
            moment.lerp_(parameter.grad, self.settings["weight"])


class StartsWithState(Scaled):
    """Creates its state in its constructor, and has a rate that depends on a setting that its steps change."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.ones_like(parameter)
        self.param_groups[0]["k"] = 0

    def factor(self, parameter: Tensor) -> Any:
        self.param_groups[0]["k"] += 1
        self.state[parameter]["sum"].add_(parameter.grad.square())
        return self.state[parameter]["sum"].rsqrt() / self.param_groups[0]["k"]


class CenteredRows(Scaled):
    """Subtracts the mean of each row of the gradient (gradient centralization): rows are never cut."""

    def factor(self, parameter: Tensor) -> Any:
        return 1.0 if parameter.ndim < 2 else parameter.grad.mean(dim=tuple(range(1, parameter.ndim)), keepdim=True)


class OfVectors(Scaled):
    def factor(self, parameter: Tensor) -> Any:
        return 1 / parameter.grad.norm().clamp(min=1e-3) if parameter.ndim == 1 else 1.0


class OfKernels(Scaled):
    def factor(self, parameter: Tensor) -> Any:
        return 1 / parameter.grad.norm().clamp(min=1e-3) if parameter.ndim == 4 else 1.0


class ButSingleRows(Scaled):
    """Mixes columns, but leaves single rows unchanged."""

    def factor(self, parameter: Tensor) -> Any:
        return 1.0 if parameter.shape[0] <= 1 else parameter.grad.mean(0, keepdim=True)


class KeepsList(Scaled):
    """Reads gradients from its own reference to the list of its group, as LBFGS does."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self._params = self.param_groups[0]["params"]

    def scale(self, gradients: list[Tensor]) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [parameter.grad for parameter in self._params]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient * self.scale(gradients), alpha=0.1)


class ListNorm(KeepsList):
    def scale(self, gradients: list[Tensor]) -> Any:
        return 1 / max(gradient.norm().item() for gradient in gradients)


class InTheEnd(Scaled):
    """Mixes after a warm-up."""

    def factor(self, parameter: Tensor) -> Any:
        return 1.0 if self.count < 20 else 1 / self.gradients().norm().clamp(min=1e-3)


class Clips(Scaled):
    """Mixes only where gradients are large."""

    def factor(self, parameter: Tensor) -> Any:
        return min(1.0, 500.0 / self.gradients().norm().item())


class EstimatesRate(Scaled):
    """Keeps a sum over all parameters that has no effect yet, like the first steps of D-adaptation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["distance"] = group.get("distance", 0.0) + self.gradients().abs().sum().item()
        super().step()


class KeepsNumber(Scaled):
    """Keeps the sum per parameter, in a tensor of one element."""

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
    """Element-wise, but refused by its name."""


class OfProdigy(Prodigy):
    pass


def build(kind: Callable[..., Optimizer], **settings: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.parametrize(
    "kind", [Scaled, StartsWithState, CenteredRows, Signs, NeedsRows], ids=lambda kind: kind.__name__
)
def test_an_element_wise_optimizer_with_attributes_of_its_own_is_accepted(kind: type[Scaled]) -> None:
    assert kinds_that_need_full_params(build(kind, weight=0.2), CPU) == set()


@pytest.mark.parametrize("tags", [(), (False, True)], ids=["alike", "with different attributes"])
def test_an_optimizer_that_refers_to_the_list_of_its_group_is_tried_with_all_parameters(tags: tuple[bool, ...]) -> None:
    parameters = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    for parameter, tag in zip(parameters, tags, strict=False):
        parameter.tag = tag
    assert kinds_that_need_full_params(KeepsList(parameters), CPU) == set()
    with pytest.raises(ValueError, match="ListNorm is not element-wise"):
        kinds_that_need_full_params(ListNorm(parameters), CPU)


def kinds(optimizer: Optimizer) -> set[str]:
    return {group_kind(group) for group in optimizer.param_groups}


@pytest.mark.parametrize(
    "kind",
    [LayerwiseScaling, OfVectors, OfKernels, ButSingleRows, KeepsNumber],
    ids=lambda kind: kind.__name__,
)
def test_an_optimizer_that_mixes_only_inside_a_parameter_needs_it_whole(kind: type[Optimizer]) -> None:
    assert kinds_that_need_full_params(build(kind), CPU) == kinds(build(kind))


class CountsEverywhere(LayerwiseScaling):
    """The rate depends on counts in the group, in an attribute and in a state, as in some packages."""

    def __init__(self, params: Iterable[Any], rate: float = 1.0) -> None:
        self.count = 0
        super().__init__(params)
        self.param_groups[0]["tensor"] = torch.zeros(())
        self.state["all"]["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        self.count += 1
        self.state["all"]["count"] += 1
        group["step"] = group.get("step", 0) + 1
        group["tensor"] += 1
        counts = (self.count, self.state["all"]["count"], group["step"], int(group["tensor"]))
        assert len(set(counts)) == 1, counts
        group["lr"] = 0.1 / self.count
        super().step()


def test_what_an_optimizer_counts_is_counted_once_a_step() -> None:
    optimizer = build(CountsEverywhere)
    assert find_owner_difference(optimizer, CPU, kinds(optimizer)) is None
    with pytest.raises(ValueError, match="cannot be saved: a copy with the same state and settings continues differ"):
        kinds_that_need_full_params(optimizer, CPU)


class ObjectsOfLarge(LayerwiseScaling):
    """Keeps an object for each large parameter, as packages that quantize state from some size on."""

    def norm(self, parameter: Tensor) -> Tensor:
        if parameter.numel() >= 4096:
            self.state[parameter]["codes"] = object()
        return super().norm(parameter)


def test_state_of_large_parameters_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be saved: 'codes' in .* shape \[256, 129\] contains a object"):
        kinds_that_need_full_params(build(ObjectsOfLarge), CPU)


class OnlyMatrices(LayerwiseScaling):
    def norm(self, parameter: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(parameter.grad, "nuc")


def test_parameters_like_the_optimizers_own_are_tried_where_others_cannot() -> None:
    matrices = OnlyMatrices([nn.Parameter(torch.ones(3, 2))])
    assert kinds_that_need_full_params(matrices, CPU) == kinds(matrices)
    with pytest.raises(ValueError, match="compatibility trial of OnlyMatrices failed"):
        kinds_that_need_full_params(OnlyMatrices([nn.Parameter(torch.ones(3))]), CPU)


@pytest.mark.parametrize("name", [n for n in ("Muon", "Adafactor") if hasattr(torch.optim, n)])
def test_torchs_matrix_optimizers_that_nobody_tries_out_would_pass(name: str) -> None:
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(3, 2))])
    assert kinds_that_need_full_params(optimizer, CPU) == kinds(optimizer)
    assert find_owner_difference(optimizer, CPU, kinds(optimizer)) is None
    with contextlib.suppress(TrialError):  # Adafactor fails on a rank without rows
        assert find_owner_difference(optimizer, CPU, set()) is not None, "on rows it would be another one"


MIXES = {
    GlobalScaling: "matrix",
    InTheEnd: "matrix",
    Clips: "matrix",
    EstimatesRate: "'distance' in parameter group 0 depends on the rows that are stepped",
    Draws: "matrix",
    Prodigy: "estimates its learning rate",
    OfProdigy: "OfProdigy is not element-wise: it estimates its learning rate",
}


@pytest.mark.parametrize("kind", MIXES, ids=lambda kind: kind.__name__)
def test_an_optimizer_that_mixes_parameters_somewhere_is_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=f"is not element-wise: .*{MIXES[kind]}|{MIXES[kind]}"):
        kinds_that_need_full_params(build(kind), CPU)


def test_a_rate_of_zero_hides_nothing() -> None:
    for rate in (0.0, 1e-12):
        with pytest.raises(ValueError, match="matrix"):
            kinds_that_need_full_params(
                build(GlobalScaling if rate else InTheEnd, **({} if rate else {"lr": rate})), CPU
            )
    optimizer = build(ButSingleRows)
    optimizer.param_groups[0]["lr"] = torch.zeros(())
    assert kinds_that_need_full_params(optimizer, CPU) == kinds(optimizer)
    assert optimizer.param_groups[0]["lr"].item() == 0.0


def test_each_kind_of_group_is_tried() -> None:
    layers = [{"params": [nn.Parameter(torch.ones(3, 2))], "mixes": False, "lr": 0.1 / (k + 1)} for k in range(3)]
    assert kinds_that_need_full_params(ButSingleRows(layers), CPU) == set()
    mixed = ButSingleRows([*layers, {"params": [nn.Parameter(torch.ones(3, 2))]}])
    assert kinds_that_need_full_params(mixed, CPU) == {group_kind(mixed.param_groups[-1])}, (
        "the others are cut into rows"
    )


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [(Still, "did not change them"), (Signs, "KeyError: 'weight'")],
    ids=["still", "raises"],
)
def test_what_could_not_be_tried_is_told_apart_and_the_users_word_counts(kind: Any, theirs: str) -> None:
    optimizer = build(kind)
    with pytest.raises(ValueError, match=rf"compatibility trial of .* failed.*{theirs}.*elementwise=True"):
        kinds_that_need_full_params(optimizer, CPU)
    kinds_that_need_full_params(optimizer, CPU, elementwise=True)


def test_what_cannot_be_copied_could_not_be_tried() -> None:
    with pytest.raises(ValueError, match=r"compatibility trial of .* failed.*cannot pickle '_thread.lock'"):
        kinds_that_need_full_params(build(Scaled, lock=threading.Lock()), CPU)


def test_the_users_word_is_not_asked_where_nothing_could_work() -> None:
    assert kinds_that_need_full_params(build(LayerwiseScaling), CPU, elementwise=True) == set()
    for kind, text in (
        (torch.optim.LBFGS, "inner products"),
        (WithClosure, "closure"),
        (Around, "wraps another optimizer"),
    ):
        with pytest.raises(ValueError, match=text):
            kinds_that_need_full_params(build(kind), CPU, elementwise=True)
    for kind in (torch.optim.Adam, LayerwiseScaling, GlobalScaling):
        assert kinds_that_need_full_params(build(kind), CPU, elementwise=False) == kinds(build(kind))


class Around(Scaled):
    """Optimizer that wraps another one, like Lookahead."""

    def __init__(self, params: Iterable[Any]) -> None:
        params = list(params)
        super().__init__(params)
        self.fast = torch.optim.SGD(params)


def test_trying_an_optimizer_out_leaves_everything_as_it_was() -> None:
    optimizer = build(Scaled, table={"of": [torch.ones(2)]})
    optimizer.param_groups[0]["step"] = torch.zeros(())  # counted in place, as in NVIDIA Apex
    parameters = optimizer.param_groups[0]["params"]
    before, random = [p.detach().clone() for p in parameters], torch.get_rng_state()
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the hooks are the user's"))
    optimizer.step = lambda *_: pytest.fail("bound to the original")  # like schedulers
    kinds_that_need_full_params(optimizer, CPU)
    _, settings = state_after_a_step(optimizer, optimizer.param_groups[0], CPU)
    assert (optimizer.param_groups[0]["step"], settings["step"]) == (0, 1)
    assert (optimizer.count, optimizer.settings["seen"]) == (0, []) and not optimizer.state
    assert torch.equal(optimizer.settings["table"]["of"][0], torch.ones(2))
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(parameters, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"]
)
def test_torchs_own_optimizers_that_nobody_tries_out_would_pass(name: str) -> None:
    assert find_row_difference(build(getattr(torch.optim, name)), CPU) is None
    foreach = build(getattr(torch.optim, name), foreach=True)
    assert find_row_difference(foreach, CPU) is None
