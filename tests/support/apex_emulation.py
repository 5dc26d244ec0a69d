"""Emulation of NVIDIA Apex's fused optimizers on the CPU, including the launches of its kernels.

It follows NVIDIA/apex at commit 6424da3 (``apex/optimizers``, ``csrc/multi_tensor_apply.cuh`` and the kernels beside
it): which tensors each launch contains, when a launch starts, which state is kept where, and the formulas. Elements
that are not launched are not computed. :func:`install` makes the classes importable from ``apex.optimizers``. Apex has
chunks of 65536 elements; CHUNK is small here, so that parameters of tests have several chunks.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK = 8  # elements
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # limit of one launch, by the number of lists
_MOST_CHUNKS = 320  # limit of one launch


def launch(kernel: Callable[..., None], lists: Sequence[Sequence[Tensor]]) -> None:
    """Call ``kernel(index, *pieces)`` for each chunk that Apex would launch.

    Args:
        kernel: takes the index of a tensor in its list, and a piece of that tensor of each list.
        lists: lists of equal length; tensors at the same index have equal numbers of elements.
    """
    first = lists[0]
    if not first:
        raise RuntimeError("tensor_lists[0].size() is not > 0")
    for tensors in zip(*lists, strict=True):
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise RuntimeError("A tensor was not contiguous.")
        if len({tensor.numel() for tensor in tensors}) > 1:
            raise RuntimeError("Size mismatch")
    pending: list[tuple[int, int]] = []
    tensors_in_launch = 0
    for index, tensor in enumerate(first):
        tensors_in_launch += 1
        if tensors_in_launch > _MOST_TENSORS[len(lists)]:
            raise AssertionError("Apex would write behind the end of its table of tensors")
        chunks = math.ceil(tensor.numel() / CHUNK)
        for chunk in range(chunks):
            pending.append((index, chunk))
            ends = chunk == chunks - 1
            is_full = len(pending) == _MOST_CHUNKS or (ends and tensors_in_launch == _MOST_TENSORS[len(lists)])
            if is_full or (ends and index == len(first) - 1):
                for at, piece in pending:
                    where = slice(piece * CHUNK, (piece + 1) * CHUNK)
                    kernel(at, *(each[at].view(-1)[where] for each in lists))
                pending.clear()
                tensors_in_launch = 0 if ends else 1


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor over the chunks that are launched."""
    sums = torch.zeros(len(tensors))

    def add(index: int, piece: Tensor) -> None:
        sums[index] += piece.float().square().sum()

    launch(add, [tensors])
    return sums.sqrt()


def _same_dtype(*tensors: Tensor) -> None:
    """Assert equal dtypes: kernels read all lists with the dtype of the first one."""
    assert len({tensor.dtype for tensor in tensors}) == 1, "Apex would misread memory"


class _Fused(Optimizer):
    """Common base class of the optimizers."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    SETTINGS: ClassVar[dict[str, Any]] = {}  # defaults of the settings of groups
    FLAGS: ClassVar[dict[str, bool]] = {}  # defaults of the settings that are attributes

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        for name, default in self.FLAGS.items():
            setattr(self, name, settings.pop(name, default))
        assert settings.keys() <= self.SETTINGS.keys(), settings
        super().__init__(params, self.SETTINGS | settings)
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def by_dtype(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return the parameters with a gradient, one list per dtype and launch; raise for unsupported dtypes."""
        used = [parameter for parameter in parameters if parameter.grad is not None]
        if not all(parameter.dtype in self.dtypes for parameter in used):
            raise RuntimeError(f"{type(self).__name__} only support fp16 and fp32.")
        lists = [[parameter for parameter in used if parameter.dtype == dtype] for dtype in self.dtypes]
        return [each for each in lists if each]

    def count(self, group: dict[str, Any]) -> int:
        group["step"] = group.get("step", 0) + 1
        return group["step"]

    def kept(self, parameters: Sequence[Tensor], *names: str, dtype: torch.dtype | None = None) -> list[list[Tensor]]:
        """Return the state of the parameters, one list per name; missing state is initialized with zeros."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update({n: torch.zeros_like(parameter.data, dtype=dtype) for n in names})
        return [[self.state[parameter][name] for parameter in parameters] for name in names]


class FusedAdam(_Fused):
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    SETTINGS: ClassVar = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    FLAGS: ClassVar = {"adam_w_mode": True, "capturable": False, "master_weights": False}

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        # Apex makes these lists for the groups that exist at this time, not for later ones.
        self.param_groups_master = [
            {"params": [p.detach().clone().float() if self.master_weights else None for p in group["params"]]}
            for group in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=False):
            if not group["params"]:
                continue
            count = self.count(group)
            parameters = [parameter for parameter, _ in zip(group["params"], masters["params"], strict=False)]
            for launched in self.by_dtype(parameters):
                self._launch(group, count, launched)

    def _launch(self, group: dict[str, Any], count: int, parameters: list[Tensor]) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        corrected = group["bias_correction"]
        to_first, to_second = (1 - beta**count if corrected else 1.0 for beta in (beta1, beta2))

        def update(_: int, gradient: Tensor, parameter: Tensor, first: Tensor, second: Tensor) -> None:
            _same_dtype(gradient, parameter)
            weight, slope = parameter.float(), gradient.float()
            if not self.adam_w_mode:
                slope = slope + decay * weight
            first.copy_(beta1 * first + (1 - beta1) * slope)
            second.copy_(beta2 * second + (1 - beta2) * slope * slope)
            change = (first / to_first) / ((second / to_second).sqrt() + group["eps"])
            if self.adam_w_mode:
                change = change + decay * weight
            parameter.copy_(weight - lr * change)

        moments = self.kept(parameters, "exp_avg", "exp_avg_sq", dtype=torch.float32)
        launch(update, [[p.grad for p in parameters], parameters, *moments])


class FusedSGD(_Fused):
    SETTINGS: ClassVar = {"lr": None, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}
    FLAGS: ClassVar = {"wd_after_momentum": False}

    def step_group(self, group: dict[str, Any]) -> None:
        for dtype in self.dtypes:  # parameters of other dtypes are not updated
            launched = [p for p in group["params"] if p.grad is not None and p.dtype == dtype]
            if launched:
                self._launch(group, launched)

    def _launch(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        momenta, are_new = [], True
        for parameter in parameters:
            are_new = "momentum_buffer" not in self.state[parameter]  # the last parameter decides for all
            momenta.append(self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data)))
        momentum, decay = group["momentum"], group["weight_decay"]

        def update(_: int, gradient: Tensor, parameter: Tensor, kept: Tensor) -> None:
            _same_dtype(gradient, parameter)
            slope, weight = gradient.float(), parameter.float()
            if not self.wd_after_momentum:
                slope = slope + decay * weight
            if momentum:
                new = slope if are_new else kept.float() * momentum + (1 - group["dampening"]) * slope
                kept.copy_(new)
                slope = slope + momentum * new if group["nesterov"] else new
            if self.wd_after_momentum:
                slope = slope + decay * weight
            parameter.copy_(weight - group["lr"] * slope)

        launch(update, [[p.grad for p in parameters], parameters, momenta])


class FusedAdagrad(_Fused):
    SETTINGS: ClassVar = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}
    FLAGS: ClassVar = {"adagrad_w_mode": False}

    def step_group(self, group: dict[str, Any]) -> None:
        def update(_: int, gradient: Tensor, parameter: Tensor, total: Tensor) -> None:
            weight, slope = parameter.float(), gradient.float()
            if not self.adagrad_w_mode:
                slope = slope + group["weight_decay"] * weight
            total.copy_(total.float() + slope * slope)
            change = slope / (total.float().sqrt() + group["eps"])
            if self.adagrad_w_mode:
                change = change + group["weight_decay"] * weight
            parameter.copy_(weight - group["lr"] * change)

        for parameters in self.by_dtype(group["params"]):
            launch(update, [[p.grad for p in parameters], parameters, *self.kept(parameters, "sum")])


class FusedLAMB(_Fused):
    """LAMB without a limit on the norm of all gradients, because layerzero refuses other limits."""

    SETTINGS: ClassVar = FusedAdam.SETTINGS | {
        "eps": 1e-6,
        "weight_decay": 0.01,
        "grad_averaging": True,
        "max_grad_norm": 1.0,
    }
    FLAGS: ClassVar = {"adam_w_mode": True, "use_nvlamb": False}

    def step_group(self, group: dict[str, Any]) -> None:
        count = self.count(group)
        for launched in self.by_dtype(group["params"]):
            self._launch(group, count, launched)

    def _launch(self, group: dict[str, Any], count: int, parameters: list[Tensor]) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        to_first, to_second = (1 - b**count if group["bias_correction"] else 1.0 for b in (beta1, beta2))
        weight_of_new = 1 - beta1 if group["grad_averaging"] else 1.0
        gradients = [parameter.grad for parameter in parameters]
        weights = _norms(parameters)

        def direction(_: int, gradient: Tensor, parameter: Tensor, first: Tensor, second: Tensor) -> None:
            slope = gradient.float()
            if not self.adam_w_mode:
                slope = slope + decay * parameter.float()
            first.copy_(first * beta1 + weight_of_new * slope)
            second.copy_(second * beta2 + (1 - beta2) * slope * slope)
            change = (first / to_first) / ((second / to_second).sqrt() + group["eps"])
            gradient.copy_(change + decay * parameter.float() if self.adam_w_mode else change)

        launch(direction, [gradients, parameters, *self.kept(parameters, "exp_avg", "exp_avg_sq")])
        changes = _norms(gradients)  # the gradients have been overwritten by the updates

        def update(index: int, change: Tensor, parameter: Tensor) -> None:
            rate = group["lr"]
            if (self.use_nvlamb or decay) and weights[index] and changes[index]:
                rate *= float(weights[index] / changes[index])
            parameter.copy_(parameter.float() - rate * change.float())

        launch(update, [gradients, parameters])


class FusedNovoGrad(FusedAdagrad):
    """Class that layerzero refuses by its name."""


class FusedMixedPrecisionLamb(FusedLAMB):
    """Class that layerzero refuses by its name."""


class DistributedFusedAdam(FusedAdam):
    """Class that layerzero refuses by its module."""


_PACKAGE = (FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD)
for _kind in _PACKAGE:
    _kind.__module__ = f"apex.optimizers.{_kind.__name__.lower()}"
DistributedFusedAdam.__module__ = "apex.contrib.optimizers.distributed_fused_adam"


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the package from ``sys.modules``; `monkeypatch` undoes this, so that no test leaves a package behind."""
    for name in ("apex", "apex.optimizers", "amp_C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``amp_C`` and ``apex.optimizers`` importable, with these classes."""
    uninstall(monkeypatch)
    package = ModuleType("apex.optimizers")
    for kind in _PACKAGE:
        setattr(package, kind.__name__, kind)
    for module in (ModuleType("amp_C"), ModuleType("apex"), package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
