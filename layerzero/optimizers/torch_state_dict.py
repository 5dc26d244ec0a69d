"""Optimizer state in the form that ``torch.distributed.checkpoint.state_dict`` expects.

[Note: torch's get_state_dict]
torch's ``get_state_dict`` and ``set_state_dict`` expect parameters to be numbered in the order of the groups, and
replace the numbers by names. If an optimizer has no state, these functions step it once with zero gradients and a zero
learning rate, to create tensors to load into. Such a step would increment step counts. Therefore, if these functions
are among the callers, state dicts are numbered, and parameters without state get an initial state. The initial state is
created for the call and is not stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.optimizers.compatibility import state_after_a_step

if TYPE_CHECKING:
    from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["asked_by_torch", "by_own_names", "first_state", "numbered"]

_CALLER = "torch.distributed.checkpoint.state_dict"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_BEFORE_A_STEP = {"step": 0.0, "mu_product": 1.0}  # initial values of scalars that each step increments or multiplies


def asked_by_torch() -> bool:
    """Return whether ``torch.distributed.checkpoint.state_dict`` is among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CALLER:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def first_state(inner: Optimizer, group: Mapping[str, Any], master: Tensor) -> dict[str, Any]:
    """Return the initial state of a parameter that `inner` has not stepped yet."""
    # Pass the group without its parameters, because their state would be copied.
    found, _ = state_after_a_step(inner, {**group, "params": []}, master.device, gradient=0.0)
    return {key: _begun(key, value, master) for key, value in found.items()}


def _begun(key: str, value: Any, master: Tensor) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        dtype = master.dtype if value.dtype is torch.float32 else value.dtype  # the trial's parameter was fp32
        return torch.full_like(master, float(value.flatten()[0]), dtype=dtype, requires_grad=False)
    if key not in _BEFORE_A_STEP:
        return value
    start = _BEFORE_A_STEP[key]
    return torch.full_like(value, start) if isinstance(value, Tensor) else type(value)(start)


def numbered(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict with named parameters to the numbered form of ``torch.optim``."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in state_dict["param_groups"]]
    return {"state": {number[name]: values for name, values in state_dict["state"].items()}, "param_groups": groups}


def by_own_names(state_dict: Mapping[str, Any], optimizer: ShardedOptimizer, model: nn.Module) -> dict[str, Any]:
    """Return a state dict in which each parameter has the name that `optimizer` uses.

    Args:
        state_dict: state dict keyed by any name of a parameter in the model, with or without the prefixes of wrappers,
            or by number, as for an unsharded optimizer.

    Raises:
        ValueError: the state dict is numbered, and its group sizes differ from those of the optimizer.
    """
    groups = state_dict["param_groups"]
    own = [optimizer.parameter_names(group) for group in optimizer.param_groups]
    rename: dict[Any, str] = {}
    if any(isinstance(key, int) for group in groups for key in group["params"]):
        theirs, ours = [len(group["params"]) for group in groups], [len(names) for names in own]
        if theirs != ours:
            raise ValueError(
                f"the state identifies parameters by number, but its groups have {theirs} parameters and those of the "
                f"optimizer have {ours}. Save states by name"
            )
        numbers = (number for group in groups for number in group["params"])
        rename = dict(zip(numbers, (name for names in own for name in names), strict=True))
    else:
        rename = _aliases(model, {name for names in own for name in names})
    return {
        **state_dict,
        "state": {rename.get(key, key): values for key, values in state_dict.get("state", {}).items()},
        "param_groups": [{**group, "params": [rename.get(key, key) for key in group["params"]]} for group in groups],
    }


def _aliases(model: nn.Module, own: Iterable[str]) -> dict[str, str]:
    """Return a dict that maps every name of a model parameter to its name in `own`."""
    known = set(own)
    names_of: dict[int, list[str]] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        found = next((name for name in names if name in known), None)
        if found is not None:
            aliases |= {alias: found for name in names for alias in (name, _without_wrappers(name))}
    return aliases


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
