"""Make parameters that ``shard_model`` has replaced raise an error when they are used.

[Note: Stale parameters]
A list of parameters that was made before ``shard_model`` refers to the replaced objects. Clipping, freezing or
averaging them would not change the model. Therefore every use of a stale parameter raises an error. The object gets a
subclass of its own class, so that ``isinstance``, its id and hash, its weak references and the user's attributes remain
valid. Optimizers that were built before ``shard_model`` refer to stale parameters until ``shard_optimizer``, so
layerzero calls :func:`current` before it uses a parameter of an optimizer.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn

from torch import Tensor, nn

from layerzero.utils.torch_compat import tree_leaves

_READABLE = ("_is_param", "_fix_weakref")  # isinstance(p, nn.Parameter) and torch's weak dictionaries read these


class StaleParameter:
    """Base class of stale parameters; see [Note: Stale parameters]."""

    def __getattribute__(self, name: str) -> Any:
        # Methods of DTensor do not call __torch_function__.
        is_own = name.startswith("__") or name in _READABLE or name in self.__dict__
        if is_own or not hasattr(type(self), name):
            return super().__getattribute__(name)
        return _refuse_use(self)

    def __setattr__(self, name: str, value: object) -> None:
        _refuse_use(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        _refuse_use(next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StaleParameter)))

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse_use(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse_use(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"stale_parameter({self.__dict__['_stale'][0]!r}, replaced by shard_model)"

    __format__ = object.__format__
    __dir__ = object.__dir__


def _refuse_use(parameter: StaleParameter) -> NoReturn:
    raise RuntimeError(
        f"this object was parameter {parameter.__dict__['_stale'][0]!r} until shard_model replaced it, and the model "
        "no longer uses it. Take the parameter from model.parameters() again, after shard_model. A module that keeps "
        "parameters in a list or another object must read them as attributes (self.weight) in forward, or keep them in "
        "an nn.ParameterList"
    )


@functools.cache
def _stale_class(kind: Any) -> Any:
    return type(kind)(f"Stale{kind.__name__}", (StaleParameter, kind), {})


def make_stale(parameter: nn.Parameter, name: str, replacement: nn.Parameter) -> None:
    """Make every later use of `parameter` raise an error that names it.

    Args:
        name: fully qualified name of the parameter.
        replacement: sharded parameter, which :func:`current` returns instead of `parameter`.
    """
    vars(parameter)["_stale"] = name, weakref.ref(replacement)
    parameter.__class__ = _stale_class(type(parameter))


def current(parameter: Tensor) -> Tensor:
    """Return the sharded parameter that has replaced `parameter` if it is stale, otherwise `parameter` itself."""
    replacement: Tensor | None = vars(parameter)["_stale"][1]() if isinstance(parameter, StaleParameter) else None
    return parameter if replacement is None else replacement
