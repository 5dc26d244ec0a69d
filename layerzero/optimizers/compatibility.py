"""Which optimizers can work on rows, and which on whole parameters. Known by name, found out, or the user's word.

An element-wise optimizer steps rows, wherever they are. One that mixes the elements of a parameter, but not those of
several, steps whole parameters, each on the rank that owns it. What mixes parameters can do neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from layerzero.optimizers.apex import apex_needs_whole, prepared, refuse_apex
from layerzero.optimizers.compatibility_trial import TrialError, difference, difference_of_owners, group_kind
from layerzero.optimizers.optimizer_copy import copy_optimizer, inner_optimizers, unhooked

__all__ = ["is_elementwise_by_name", "kinds_that_need_whole", "state_after_a_step"]

# Known to update each element by itself, whatever their settings. What is derived from them is tried out.
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
_DISTANCE = "it estimates its rate from all parameters together, which may need more steps to show than a trial has"
_LOSS = "it follows the loss, and each rank has a loss of its own"
# Known to mix the elements of a parameter: in few steps on small ones that may not show.
_MIXES_INSIDE = {"Adafactor", "AdaFactor", "FusedLAMB", "Lamb", "LAMB", "LARS", "Shampoo", "ScalableShampoo", "SOAP"}
# Of these, those that do nothing else.
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
    "SWATS": "it changes from Adam to SGD by what it finds in all parameters together",
    "AliG": "its rate is computed from the loss and the norm of all gradients",
    "SAM": "it climbs along the norm of all gradients between two backwards of one step",
}
# Nothing could make them work: the wrapper reduces the gradients once, and then has the optimizer step without closure.
_IMPOSSIBLE = {
    "LBFGS": "its search direction needs inner products over all parameters and repeated closures",
    "SparseAdam": "it needs sparse gradients",
}


def is_elementwise_by_name(optimizer: Optimizer) -> bool:
    """One of torch's own that update each element by itself; all that these keep, they keep by parameter."""
    return type(optimizer) in _ELEMENTWISE


def kinds_that_need_whole(optimizer: Optimizer, device: torch.device, elementwise: bool | None = None) -> set[str]:
    """Return the kinds of its groups whose parameters it must have whole; see ``group_kind`` in compatibility_trial.py.

    Each rank updates only its rows of a parameter, so an update that mixes elements would be silently another one.

    Args:
        optimizer: stays as it is.
        device: where it is tried out.
        elementwise: None: found out, by name or by trial. True: none do, is the user's word; False: all do.

    Raises:
        ValueError: it mixes parameters, or could not be tried out.
    """
    name = type(optimizer).__name__
    if reason := _named(optimizer, _IMPOSSIBLE):
        raise ValueError(f"{name} is not element-wise: {reason}. {_INSTEAD}")
    refuse_apex(optimizer)
    _require_reachable(optimizer, name)
    of_apex = apex_needs_whole(optimizer)
    if of_apex and elementwise:
        raise ValueError(
            f"{name} is not element-wise, although elementwise=True says so: it scales updates by norms of whole "
            "parameters, so that updates of rows would differ. Leave elementwise out"
        )
    if elementwise or (elementwise is None and (is_elementwise_by_name(optimizer) or of_apex is False)):
        return set()
    if elementwise is None and (reason := _named(optimizer, _MIXES_PARAMETERS)):
        raise ValueError(f"{name} is not element-wise: {reason}. {_INSTEAD}")
    kinds = {group_kind(group) for group in optimizer.param_groups}
    if elementwise is False or of_apex or type(optimizer) in _ONE_BY_ONE:
        return kinds
    on_rows: str | TrialError | None = None  # how its work on rows differs, where it has been tried
    alone: str | TrialError | None
    if not any(kind.__name__ in _MIXES_INSIDE for kind in type(optimizer).__mro__):
        on_rows = _tried(difference, optimizer, device)
        if on_rows is None:
            return set()
        if len(kinds) > 1:
            kinds = {kind for kind in kinds if _tried(difference, optimizer, device, kind) is not None} or kinds
    alone = _tried(difference_of_owners, optimizer, device, kinds)
    if alone is None:
        return kinds
    if isinstance(alone, TrialError) and not isinstance(on_rows, str):
        raise ValueError(
            f"{name} could not be tried out: {on_rows or alone}. If you know that it updates each element of a "
            "parameter by itself, say so: shard_optimizer(optimizer, model, elementwise=True); if it updates each "
            "parameter by itself: elementwise=False. Otherwise: " + _INSTEAD
        ) from alone
    mixes = f"{on_rows}; nor can each parameter be stepped by itself: {alone}" if on_rows else alone
    raise ValueError(f"{name} is not element-wise: {mixes}. {_INSTEAD}")


_INSTEAD = (
    "layerzero gives each rank its rows of a parameter, or one rank all of it. Use an element-wise optimizer such as "
    "SGD, Adam or AdamW, one that updates each matrix by itself, such as Muon, or step these parameters unsharded "
    "(ignored_params) in an optimizer of their own"
)


def _tried(experiment: Callable[..., str | None], *args: Any) -> str | TrialError | None:
    """What an experiment has found, or that it could not be made."""
    try:
        return experiment(*args)
    except TrialError as error:
        return error


def _named(optimizer: Optimizer, reasons: dict[str, str]) -> str | None:
    return next((reasons[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in reasons), None)


def _require_reachable(optimizer: Optimizer, name: str) -> None:
    closure = inspect.signature(unhooked(type(optimizer).step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name}.step needs a closure, which layerzero calls itself, once, before the optimizer steps without one. "
            "Use the variant that steps without"
        )
    if inner := inner_optimizers(optimizer):
        kind = type(inner[0]).__name__
        raise ValueError(
            f"{name} steps the parameters of another optimizer that it holds, whose groups layerzero cannot reach. Do "
            f"it the other way round: {name}(layerzero.shard_optimizer({kind}(...), model), ...), if that is "
            "how it takes an optimizer, or use one that has the parameters itself"
        )


def state_after_a_step(
    optimizer: Optimizer,
    group: dict[str, Any],
    device: torch.device,
    shape: tuple[int, ...] = (2, 3),
    *,
    gradient: float = 1.0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an optimizer keeps for a parameter of `group` once it has stepped it, and the group's settings then.

    Found by a step on a small parameter: what is of the parameter's shape has `shape` here, and equal values, those
    that ones become by a step with `gradient`.
    """
    parameter = torch.nn.Parameter(torch.ones(shape, device=device))
    parameter.grad = torch.full(shape, gradient, device=device)
    twin = copy_optimizer(optimizer, [(group, [parameter])])
    prepared(twin, partial(unhooked(type(twin).step), twin))()
    return dict(twin.state[parameter]), twin.param_groups[0]
