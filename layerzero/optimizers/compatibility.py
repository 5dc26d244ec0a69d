"""Classify optimizers by their compatibility with sharding: element-wise, parameter by parameter, or unsupported.

An element-wise optimizer updates each rank's rows. An optimizer that mixes the elements of one parameter updates full
parameters, each on its owner rank. An optimizer that mixes several parameters is not supported. The `elementwise`
argument, tables of known classes or a compatibility trial determine the category of an optimizer. The categories of
NVIDIA Apex's optimizers are in apex.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from layerzero.optimizers.apex import apex_needs_full_params, require_supported_apex
from layerzero.optimizers.compatibility_trial import (
    TrialError,
    copy_optimizer,
    find_owner_difference,
    find_row_difference,
    find_unsavable_state,
    group_kind,
    step_of_copy,
)
from layerzero.optimizers.wrapped_optimizer import unwrap_step
from layerzero.utils.torch_compat import tree_leaves

# These are element-wise with any settings. Derived classes go through the compatibility trial.
_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
_DISTANCE = "it estimates its learning rate from all parameters together, which a short trial may not detect"
_LOSS = "it adapts to the loss, and each rank has a different loss"
# These mix the elements of a parameter. A short trial on small parameters might not detect this mixing.
_MIXES_INSIDE = {"Adafactor", "AdaFactor", "FusedLAMB", "Lamb", "LAMB", "LARS", "Shampoo", "ScalableShampoo", "SOAP"}
# These mix the elements of a parameter but not several parameters, so they need no trial.
_ONE_BY_ONE = {getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name)}
_MIXES_PARAMETERS = {
    "DAdaptAdaGrad": _DISTANCE,
    "DAdaptAdam": _DISTANCE,
    "DAdaptAdan": _DISTANCE,
    "DAdaptAdanIP": _DISTANCE,
    "DAdaptLion": _DISTANCE,
    "DAdaptSGD": _DISTANCE,
    "DoG": _DISTANCE,
    "LDoG": _DISTANCE,
    "DoWG": _DISTANCE,
    "Prodigy": _DISTANCE,
    "ProdigyPlusScheduleFree": _DISTANCE,
    "EmoFact": _LOSS,
    "EmoLynx": _LOSS,
    "EmoNavi": _LOSS,
    "SWATS": "it decides from all parameters together when to switch from Adam to SGD",
    "AliG": "it computes its learning rate from the loss and the norm of all gradients",
    "SAM": "it perturbs the parameters by the norm of all gradients between two backwards of one step",
}
# These are never supported, because the wrapper reduces gradients once per step and then steps the optimizer without a
# closure.
_IMPOSSIBLE = {
    "LBFGS": "its search direction needs inner products over all parameters and repeated closures",
    "SparseAdam": "it needs sparse gradients",
}


def is_elementwise_by_name(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's class is in the allowlist of torch's element-wise optimizers.

    Optimizers in the allowlist store all of their state by parameter.
    """
    return type(optimizer) in _ELEMENTWISE


def kinds_that_need_full_params(
    optimizer: Optimizer, device: torch.device, elementwise: bool | None = None
) -> set[str]:
    """Return the kinds of parameter groups that need full parameters; see ``group_kind`` in compatibility_trial.py.

    Optimizers that mix the elements of a parameter need full parameters. On the rows of one rank, they would compute
    wrong updates without an error.

    Args:
        optimizer: the optimizer to classify. It is not changed.
        device: device of the compatibility trial.
        elementwise: if True, return no kinds. If False, return all kinds. If None, decide by class name or by a trial.

    Raises:
        ValueError: the optimizer cannot run on shards, `elementwise` is wrong, or it is None and the optimizer mixes
            parameters or the trial failed.
    """
    name = type(optimizer).__name__
    if reason := _reason_for_class(optimizer, _IMPOSSIBLE):
        raise ValueError(f"{name} is not element-wise: {reason}. {_INSTEAD}")
    require_supported_apex(optimizer)
    _refuse_closure_or_wrapper(optimizer, name)
    of_apex = apex_needs_full_params(optimizer)
    if of_apex and elementwise:
        raise ValueError(
            f"{name} is not element-wise, so elementwise=True is wrong: it scales updates by the norms of full "
            "parameters, so updates of rows would differ. Leave elementwise out"
        )
    if elementwise or (elementwise is None and (is_elementwise_by_name(optimizer) or of_apex is False)):
        return set()
    if elementwise is None and (reason := _reason_for_class(optimizer, _MIXES_PARAMETERS)):
        raise ValueError(f"{name} is not element-wise: {reason}. {_INSTEAD}")
    kinds = {group_kind(group) for group in optimizer.param_groups}
    if elementwise is False or of_apex or type(optimizer) in _ONE_BY_ONE:
        return kinds
    return _kinds_by_trial(optimizer, device, kinds)


def _kinds_by_trial(optimizer: Optimizer, device: torch.device, kinds: set[str]) -> set[str]:
    """Return those of `kinds` that need full parameters, according to trials."""
    name = type(optimizer).__name__
    on_rows: str | TrialError | None = None  # result of the trial on rows, if one was made
    alone: str | TrialError | None
    if not any(kind.__name__ in _MIXES_INSIDE for kind in type(optimizer).__mro__):
        on_rows = _run_trial(find_row_difference, optimizer, device)
        if on_rows is None:
            kinds = set()
        elif len(kinds) > 1:
            kinds = {
                kind for kind in kinds if _run_trial(find_row_difference, optimizer, device, kind) is not None
            } or kinds
    alone = _run_trial(find_owner_difference, optimizer, device, frozenset(kinds)) if kinds else None
    if alone is None:
        if problem := _run_trial(find_unsavable_state, optimizer, device):
            raise ValueError(f"{name} cannot be saved: {problem}. {_INSTEAD_OF_UNSAVABLE}")
        return kinds
    if isinstance(alone, TrialError) and not isinstance(on_rows, str):
        raise ValueError(
            f"the compatibility trial of {name} failed: {on_rows or alone}. If it updates each element of a parameter "
            "independently, call shard_optimizer(optimizer, model, elementwise=True). If it updates each parameter "
            "independently, pass elementwise=False. Otherwise: " + _INSTEAD
        ) from alone
    mixes = f"{on_rows}. It cannot step each parameter separately either: {alone}" if on_rows else alone
    raise ValueError(f"{name} is not element-wise: {mixes}. {_INSTEAD}")


_INSTEAD = (
    "Under layerzero, each rank updates its rows of a parameter, or one rank updates all rows. Use an element-wise "
    "optimizer such as SGD, Adam or AdamW, or an optimizer that updates each matrix separately, such as Muon. Or leave "
    "these parameters unsharded (ignored_params), and update them with a separate optimizer"
)
_INSTEAD_OF_UNSAVABLE = (
    "Checkpoints contain only settings and state that consist of tensors, numbers and strings, in lists, tuples and "
    "dicts. Use another optimizer. To train without checkpoints, pass elementwise=False, or True if it updates each "
    "element independently"
)


def _run_trial(experiment: Callable[..., str | None], *args: Any) -> str | TrialError | None:
    """Return the result of a trial, or the error that prevented the trial."""
    try:
        return experiment(*args)
    except TrialError as error:
        return error


def _reason_for_class(optimizer: Optimizer, reasons: dict[str, str]) -> str | None:
    return next((reasons[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in reasons), None)


def _refuse_closure_or_wrapper(optimizer: Optimizer, name: str) -> None:
    closure = inspect.signature(unwrap_step(type(optimizer).step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name}.step needs a closure, but layerzero calls the closure once and then steps the optimizer without "
            "it. Use an optimizer whose step needs no closure"
        )
    inner = [each for each in tree_leaves(vars(optimizer)) if isinstance(each, Optimizer) and each is not optimizer]
    if inner:
        kind = type(inner[0]).__name__
        raise ValueError(
            f"{name} wraps another optimizer, whose parameter groups layerzero cannot access. Shard the wrapped "
            f"optimizer, if the wrapper accepts one: {name}(layerzero.shard_optimizer({kind}(...), model), ...). "
            "Otherwise use an optimizer that has the parameters in its own groups"
        )


def state_after_a_step(
    optimizer: Optimizer,
    group: dict[str, Any],
    device: torch.device,
    shape: tuple[int, ...] = (2, 3),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a parameter in `group` after one step, and the group's settings after that step.

    A copy of the optimizer steps a parameter of ones of shape `shape` with a gradient of ones. State tensors with the
    parameter's shape have shape `shape`.
    """
    parameter = torch.nn.Parameter(torch.ones(shape, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer_copy = copy_optimizer(optimizer, [(group, [parameter])])
    step_of_copy(optimizer_copy)()
    return dict(optimizer_copy.state[parameter]), optimizer_copy.param_groups[0]
