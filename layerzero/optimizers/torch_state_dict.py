"""Convert optimizer state dicts between parameter names and numbers, and create initial states.

[Note: torch's get_state_dict]
``torch.distributed.checkpoint.state_dict`` reads ``optimizer.state_dict()`` and replaces the numbers of parameters with
names. If ``optimizer.state`` is false, torch first steps the optimizer with zero gradients and a zero learning rate, to
create tensors that a load can fill. Such a step would increment step counts and decay momentum buffers. Therefore
``optimizer.state`` is always true, and the numbered state dict contains an initial state for parameters that the
optimizer has not stepped yet. The initial state is created for each call and is not stored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.optimizers.compatibility import state_after_a_step
from layerzero.optimizers.optimizer_state import shorten_names

__all__ = ["first_state", "first_states", "strip_wrapper_names", "to_numbered", "to_optimizer_names"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_BEFORE_A_STEP = {"step": 0.0, "mu_product": 1.0}  # initial values of scalars that each step increments or multiplies


def first_state(inner: Optimizer, group: Mapping[str, Any], master: Tensor) -> dict[str, Any]:
    """Return the initial state of a parameter that `inner` has not stepped yet."""
    return next(first_states(inner, group, [master]))


def first_states(inner: Optimizer, group: Mapping[str, Any], masters: Iterable[Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the initial state of each of a group's masters. Two trial steps per device are enough for all masters."""
    # Pass the group without its parameters, because their state would be copied. Also pass it without weight decay,
    # because SGD's weight decay would add a part of the parameter to the momentum.
    settings = {**group, "params": [], **({"weight_decay": 0.0} if "weight_decay" in group else {})}
    trials: dict[torch.device, list[dict[str, Any]]] = {}
    for master in masters:
        device = master.device
        if device not in trials:
            steps = (state_after_a_step(inner, settings, device, gradient=0.0, value=value) for value in (0.0, 1.0))
            trials[device] = [state for state, _ in steps]
        of_zeros, of_ones = trials[device]
        yield {key: _initial_value(key, value, of_ones.get(key), master) for key, value in of_zeros.items()}


def _initial_value(key: str, value: Any, of_ones: Any, master: Tensor) -> Any:
    """Infer the initial value of a state entry from its values after steps on parameters of zeros and of ones."""
    if isinstance(value, Tensor) and value.ndim:
        dtype = master.dtype if value.dtype is torch.float32 else value.dtype  # the trial's parameter was fp32
        start = float(value.flatten()[0])
        if float(of_ones.flatten()[0]) - start == 1.0:  # a copy of the parameter, as in schedule-free optimizers
            return master.detach().to(dtype, copy=True)
        return torch.full_like(master, start, dtype=dtype, requires_grad=False)
    if key not in _BEFORE_A_STEP:
        return copy.deepcopy(value)  # each parameter has its own tensor, because torch.distributed.checkpoint writes it
    initial = _BEFORE_A_STEP[key]
    return torch.full_like(value, initial) if isinstance(value, Tensor) else type(value)(initial)


def to_numbered(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict with named parameters to the numbered form of ``torch.optim``.

    Raises:
        ValueError: the optimizer has state under a key that is the number of a parameter.
    """
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in state_dict["param_groups"]]
    if any(key in number.values() for key in state_dict["state"].keys() - number.keys()):
        raise ValueError(
            "the optimizer has state under a key that is not a parameter but equals the number of a parameter. Use "
            "optimizer.state_dict_by_name(), or change the key"
        )
    return {
        "state": {number.get(key, key): values for key, values in state_dict["state"].items()},
        "param_groups": groups,
    }


def to_optimizer_names(
    state_dict: Mapping[str, Any],
    own: Sequence[Sequence[str]],
    model: nn.Module,
    given: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a state dict in which each parameter has the name that the optimizer uses.

    Args:
        state_dict: state dict keyed by position or by any name of a parameter in the model, with or without the
            prefixes of wrappers. Numbered groups that all have ``"param_names"`` are matched by these names. Other
            numbered groups must have the same order and sizes as the optimizer's groups, as for an unsharded optimizer.
        own: names that the optimizer uses, by group.
        given: mapping from a name that the user passed to the optimizer to the name that the optimizer uses. It applies
            to ``"param_names"`` only.

    Raises:
        ValueError: the state dict is numbered, and its names or group sizes differ from those of the optimizer.
    """
    groups = state_dict["param_groups"]
    rename: dict[Any, str] = _aliases(model, {name for names in own for name in names})
    if any(isinstance(key, int) for group in groups for key in group["params"]):
        rename = _names_of_numbers(groups, own, {**rename, **(given or {})})
    return {
        **state_dict,
        "state": {rename.get(key, key): values for key, values in state_dict.get("state", {}).items()},
        "param_groups": [{**group, "params": [rename.get(key, key) for key in group["params"]]} for group in groups],
    }


def _names_of_numbers(
    groups: Sequence[Mapping[str, Any]], own_names: Sequence[Sequence[str]], aliases: Mapping[str, str]
) -> dict[Any, str]:
    """Map each parameter number in `groups` to the name that the optimizer uses for that parameter."""
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        pairs = (zip(group["params"], group["param_names"], strict=True) for group in groups)
        names = {number: name for group in pairs for number, name in group}
        if unknown := sorted({name for name in names.values() if name not in aliases}):
            raise ValueError(
                f"the param_names in the state contain {shorten_names(unknown)}, which the optimizer does not have. "
                "Load the state of an optimizer with the same parameters. To load by number, remove param_names from "
                "the groups of the state"
            )
        return {number: aliases[name] for number, name in names.items()}
    saved_sizes, own_sizes = [len(group["params"]) for group in groups], [len(names) for names in own_names]
    if saved_sizes != own_sizes:
        raise ValueError(
            f"the state identifies parameters by number, but its groups have {saved_sizes} parameters and those of the "
            f"optimizer have {own_sizes}. Use the same groups, or load a state whose groups have param_names"
        )
    numbers = (number for group in groups for number in group["params"])
    return dict(zip(numbers, (name for names in own_names for name in names), strict=True))


def _aliases(model: nn.Module, own: Iterable[str]) -> dict[str, str]:
    """Return a dict that maps each name of a model parameter to the parameter's name in `own`."""
    own_names = set(own)
    names_of: dict[int, list[str]] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        own_name = next((name for name in names if name in own_names), None)
        if own_name is not None:
            aliases |= {alias: own_name for name in names for alias in (name, strip_wrapper_names(name))}
    return aliases


def strip_wrapper_names(name: str) -> str:
    """Return a name without the parts that wrappers for compilation and activation checkpointing add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
