"""Stand-in for the package emerging_optimizers, whose classes Megatron's Muon is derived from, if it is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer


class OrthogonalizedOptimizer(Optimizer):
    """Momentum, decoupled weight decay, and an update that a derived class orthogonalizes."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float, **how: Any) -> None:
        self.scaled_orthogonalize_fn = how["scaled_orthogonalize_fn"]
        self.with_nesterov = how.get("nesterov", how.get("use_nesterov"))
        assert how["weight_decay_method"] == "decoupled"
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for p in group["params"]:
            if not self.state[p] and not (skip_non_grad_params and p.grad is None):
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.data)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._init_group(group)
            for p in (p for p in group["params"] if p.grad is not None):
                assert p.ndim == 2
                p.mul_(1 - group["lr"] * group["weight_decay"])
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]) if self.with_nesterov else momentum
                p.sub_(group["lr"] * self.orthogonalize(p, update))  # type: ignore[attr-defined]


def newton_schulz_tp(x: Tensor, steps: int, coefficient_type: str, partition_dim: int | None, **how: Any) -> Tensor:
    """Return an approximation of the nearest semi-orthogonal matrix."""
    assert partition_dim is None
    y = x.mT if len(x) > x.shape[1] else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
    return y.mT if len(x) > x.shape[1] else y


def get_muon_scale_factor(size_out: int, size_in: int, mode: str) -> float:
    return {"spectral": max(size_out, size_in), "shape_scaling": max(1, size_out / size_in)}[mode] ** 0.5


def install() -> None:
    if "emerging_optimizers" in sys.modules or find_spec("emerging_optimizers") is not None:
        return
    orthogonalized = {"AdaptiveMuon": type("AdaptiveMuon", (OrthogonalizedOptimizer,), {})}
    for name, content in {
        "": {"registry": ModuleType("registry")},
        ".orthogonalized_optimizers": orthogonalized | globals(),
        ".orthogonalized_optimizers.muon_utils": {"NSCoeffT": Literal["quintic"], **globals()},
        ".scalar_optimizers": {"Lion": None},
        ".soap": {"SOAP": None},
    }.items():
        module = sys.modules[f"emerging_optimizers{name}"] = ModuleType(f"emerging_optimizers{name}")
        vars(module).update({key: value for key, value in content.items() if not key.startswith("__")})
        module.__path__ = []
    sys.modules["emerging_optimizers"].registry.get_optimizer_name_list = list  # type: ignore[attr-defined]
