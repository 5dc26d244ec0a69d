"""Which optimizers can work on rows: element-wise ones. Known by name, found out by trial, or the user's word."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from layerzero.optimizers.trial import CouldNotTry, difference
from layerzero.optimizers.twin import inner_optimizers, twin_of, unhooked

__all__ = ["require_elementwise", "state_after_a_step"]

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
_MIXES = {
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it factors second moments over whole rows and columns",
    "Lamb": "it scales by norms of whole parameters",
    "LAMB": "it scales by norms of whole parameters",
    "LARS": "it scales by norms of whole parameters",
    "Shampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
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
    "ScalableShampoo": "it preconditions whole matrices",
    "SWATS": "it changes from Adam to SGD by what it finds in all parameters together",
    "AliG": "its rate is computed from the loss and the norm of all gradients",
    "SAM": "it climbs along the norm of all gradients between two backwards of one step",
}
# Nothing could make them work: the wrapper reduces the gradients once, and then has the optimizer step without closure.
_IMPOSSIBLE = {
    "LBFGS": "its search direction needs inner products over all parameters and repeated closures",
    "SparseAdam": "it needs sparse gradients",
}


def require_elementwise(optimizer: Optimizer, device: torch.device, elementwise: bool | None = None) -> None:
    """Raise unless the optimizer updates each element by itself, or the user says that it does.

    Each rank updates only its rows of a parameter, so an update that mixes elements would be silently another one.

    Args:
        optimizer: stays as it is.
        device: where it is tried out.
        elementwise: None: found out, by name or by trial; True: the user's word is taken; False: it is not.

    Raises:
        NotImplementedError: `elementwise` is False.
        ValueError: it is not element-wise, or could not be tried out.
    """
    name = type(optimizer).__name__
    instead = (
        "layerzero gives each rank only its rows of a parameter; use an element-wise optimizer such as SGD, Adam or "
        "AdamW, or step these parameters unsharded (ignored_params) in an optimizer of their own"
    )
    if elementwise is False:
        raise NotImplementedError(f"elementwise=False: {name} would need whole parameters. {instead}")
    if reason := _named(optimizer, _IMPOSSIBLE):
        raise ValueError(f"{name} is not element-wise: {reason}. {instead}")
    _require_reachable(optimizer, name)
    if elementwise or type(optimizer) in _ELEMENTWISE:
        return
    reason = _named(optimizer, _MIXES)
    try:
        reason = reason or difference(optimizer, device)
    except CouldNotTry as error:
        raise ValueError(
            f"{name} could not be tried out: {error}. If you know that it updates each element of a parameter by "
            "itself, and takes parameters without rows, say so: shard_optimizer(optimizer, model, elementwise=True). "
            f"Otherwise: {instead}"
        ) from error
    if reason is not None:
        raise ValueError(f"{name} is not element-wise: {reason}. {instead}")


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
    twin = twin_of(optimizer, [(group, [parameter])])
    unhooked(type(twin).step)(twin)
    return dict(twin.state[parameter]), twin.param_groups[0]
