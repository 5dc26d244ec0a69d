"""Give types to functions of torch that have none."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from layerzero.utils.torch_compat import DTensorSpec

_Kind = TypeVar("_Kind", bound=DTensor)


def make_dtensor(kind: type[_Kind], local: Tensor, spec: DTensorSpec) -> _Kind:
    """Return a DTensor of class `kind` that does not require a gradient."""
    untyped: Any = kind
    made: _Kind = untyped(local, spec, requires_grad=False)
    return made


def apply_function(function: type[Function], *args: Any) -> Tensor:
    """Call an autograd function that returns one tensor."""
    untyped: Any = function
    result: Tensor = untyped.apply(*args)
    return result
