"""Only element-wise optimizers can work on rows: this checks that one is."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from layerzero.sharded_tensor import plain

__all__ = ["require_elementwise", "state_after_a_step"]

_REASONS = {
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it factors second moments over whole rows and columns",
    "LBFGS": "its search direction needs inner products over all parameters and repeated closures",
    "SparseAdam": "it needs sparse gradients",
    "Lamb": "it scales by norms of whole parameters",
    "LARS": "it scales by norms of whole parameters",
    "Shampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
}


def require_elementwise(optimizer: Optimizer, device: torch.device) -> None:
    """Raise ValueError unless the optimizer updates each element by itself.

    Each rank updates only its rows of a parameter, so an update that mixes elements would be silently another one.
    The optimizer is tried out: two steps on a small matrix must equal two steps on its rows, each half by itself.
    """
    name = type(optimizer).__name__
    reason = _REASONS.get(name)
    if reason is None:
        reason = _try_out(optimizer, device)
    if reason is not None:
        raise ValueError(
            f"{name} is not element-wise: {reason}. layerzero gives each rank only its rows of a parameter; use an "
            "element-wise optimizer such as SGD, Adam or AdamW, or step these parameters unsharded (ignored_params)"
        )


def _try_out(optimizer: Optimizer, device: torch.device) -> str | None:
    for group in optimizer.param_groups:
        whole = torch.linspace(-1.0, 2.0, 20, device=device).view(5, 4)
        gradients = [torch.linspace(3.0, -1.0, 20, device=device).view(5, 4).sin(), whole.cos()]
        try:
            together, first, second = whole.clone(), whole[:2].clone(), whole[2:].clone()
            _run(optimizer, group, together, gradients)
            # As two ranks would: neither sees the other's rows.
            _run(optimizer, group, first, [g[:2] for g in gradients])
            _run(optimizer, group, second, [g[2:] for g in gradients])
        except Exception as error:
            return f"trying it on a small matrix failed with {type(error).__name__}: {error}"
        if not torch.allclose(together, torch.cat([first, second]), rtol=1e-5, atol=1e-7):
            return "a matrix and the same matrix cut into rows got different updates"
    return None


def state_after_a_step(
    optimizer: Optimizer, group: dict[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an optimizer keeps for a parameter of `group` once it has stepped it, and the group's settings then.

    Found by a step on a small matrix: what is of the parameter's shape is ``[2, 3]`` here, with any values.
    """
    parameter = torch.ones(2, 3, device=device)
    twin = _run(optimizer, group, parameter, [torch.ones(2, 3, device=device)])
    return dict(twin.state[parameter]), twin.param_groups[0]


def _run(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, gradients: list[Tensor]) -> Optimizer:
    """Step `parameter` as a member of `group`, once with each gradient; the optimizer itself stays as it is."""
    twin = copy.copy(optimizer)
    # NVIDIA Apex counts steps in a tensor of the group.
    settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    twin.param_groups = [{**settings, "params": [parameter]}]
    twin.state = defaultdict(dict)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    if state := next((optimizer.state[p] for p in group["params"] if optimizer.state.get(p)), None):
        # some optimizers make their state when they are built
        twin.state[parameter] = {key: _like(value, parameter) for key, value in state.items()}
    for gradient in gradients:
        parameter.grad = gradient.clone()
        # The class's step: a scheduler may have replaced the instance's, bound to the original.
        type(optimizer).step(twin)
    return twin


def _like(value: Any, parameter: Tensor) -> Any:
    """A parameter's state, for another parameter: a tensor of its shape, or a copy of what has no dims."""
    if isinstance(value, Tensor) and value.ndim:
        first = plain(value.detach()).flatten()[:1]
        return torch.full_like(parameter, float(first) if first.numel() else 0.0)
    return copy.deepcopy(value)
