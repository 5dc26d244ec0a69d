"""Convert optimizer state dicts between parameter names and numbers, and support torch's functions for them.

[Note: torch's get_state_dict]
If ``optimizer.state`` is false, ``torch.distributed.checkpoint.state_dict`` and torchtitan assign zero gradients, set
the learning rates to 0 and call ``optimizer.step()``, to create tensors that a load can fill. The step would increment
step counts, and momentum buffers of zeros differ from missing ones. Therefore a sharded optimizer recognizes this step
(:func:`creates_state_only`) and stores no state. It creates tensors from :func:`new_state`, which the next call of
``state_dict()`` returns. Each tensor knows whether it has been written to. A load skips parameters whose tensors have
not been written to, and reading such a tensor emits a warning, because only torch's functions can do that: they save or
copy the state.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.comm.model_ranks import ModelRanks
from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.gradient_reducer import GradientReducer
from layerzero.optimizers.optimizer_state import Holder, shorten_names, to_comparable, to_public_value
from layerzero.utils.torch_compat import tree_leaves, tree_map

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
STATE_IS_LOST = (
    "the loaded optimizer state has no entry for the frozen parameters {names}. If they were trained before they were "
    "frozen, torch.distributed.checkpoint.state_dict has dropped their state. In this case, load with "
    "layerzero.checkpoint.load or load_dcp"
)
NOT_STEPPED = (
    "the optimizer has not stepped, so torch.distributed.checkpoint.state_dict has created its state, which is now "
    "saved or copied. A load would take it for the state after a step. Use layerzero.checkpoint.save, or "
    "optimizer.state_dict_by_name(), which has no state before the first step"
)


def creates_state_only(optimizer: Optimizer, gradients: GradientReducer, model_ranks: ModelRanks) -> bool:
    """Return whether a step would only create state: there is none, and learning rates and gradients are zero.

    All ranks must call this function. See [Note: torch's get_state_dict].
    """
    groups = optimizer.param_groups
    if any(to_comparable(group["lr"]) != 0 for group in groups if "lr" in group) or optimizer.state:
        return False
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if any(p.grad is None or gradients.is_published(p.grad) for p in parameters):
        return False
    zero = not any(plain(p.grad).any() for p in parameters)
    return all(json.loads(text) for text in model_ranks.all_gather_text(json.dumps(zero)))


def example_shape(ndim: int) -> tuple[int, ...]:
    """Return the shape of the small parameter whose state is an example for parameters with `ndim` dims."""
    return (2, *[3] * (ndim - 1))


def new_state(
    example: Mapping[str, Any], master: Tensor, holder: Holder, on_read: Callable[[], object]
) -> dict[str, Any]:
    """Return state that a load can fill, in its public form. Its keys, shapes and dtypes are those of a stepped state.

    Args:
        example: state after one step of an fp32 parameter of shape :func:`example_shape`.
        on_read: function that is called when a tensor is read to which no load has written.
    """

    def new_value(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != example_shape(master.ndim):
            return copy.deepcopy(value)  # torch.distributed.checkpoint writes to the scalars
        dtype = master.dtype if value.dtype is torch.float32 else value.dtype
        tensor = to_public_value(torch.zeros_like(master, dtype=dtype, requires_grad=False), holder)
        if isinstance(tensor, RowShardedTensor):
            tensor._local_tensor.tracker.on_read = on_read
        return tensor

    return {key: tree_map(new_value, value) for key, value in example.items()}


def is_unwritten(values: Mapping[str, Any]) -> bool:
    """Return whether `values` is state from :func:`new_state`, and no load has written to its sharded tensors."""
    tensors = [value for value in tree_leaves(dict(values)) if isinstance(value, RowShardedTensor)]
    return bool(tensors) and all(tensor._local_tensor.tracker.on_read is not None for tensor in tensors)


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
    given: Mapping[str, str],
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
        rename = _names_of_numbers(groups, own, {**rename, **given})
    return {
        **state_dict,
        "state": {rename.get(key, key): values for key, values in state_dict.get("state", {}).items()},
        "param_groups": [{**group, "params": [rename.get(key, key) for key in group["params"]]} for group in groups],
    }


def _names_of_numbers(
    groups: Sequence[Mapping[str, Any]], own_names: Sequence[Sequence[str]], aliases: Mapping[str, str]
) -> dict[Any, str]:
    """Map each parameter number in `groups` to the name that the optimizer uses for that parameter."""
    numbers = [number for group in groups for number in group["params"]]
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        names = [name for group in groups for name in group.get("param_names") or ()]
        if unknown := set(names) - aliases.keys():
            raise ValueError(
                f"the param_names in the state contain {shorten_names(unknown)}, which the optimizer does not have. "
                "Load the state of an optimizer with the same parameters. To load by number, remove param_names from "
                "the groups of the state"
            )
        return {number: aliases[name] for number, name in zip(numbers, names, strict=True)}
    saved_sizes, own_sizes = [len(group["params"]) for group in groups], [len(names) for names in own_names]
    if saved_sizes != own_sizes:
        raise ValueError(
            f"the state identifies parameters by number, but its groups have {saved_sizes} parameters and those of the "
            f"optimizer have {own_sizes}. Use the same groups, or load a state whose groups have param_names"
        )
    return dict(zip(numbers, chain.from_iterable(own_names), strict=True))


def _aliases(model: nn.Module, own: Container[str]) -> dict[str, str]:
    """Return a dict that maps each name of a model parameter to the parameter's name in `own`."""
    named = list(model.named_parameters(remove_duplicate=False))
    own_name = {id(parameter): name for name, parameter in named if name in own}
    return {
        alias: own_name[id(parameter)]
        for name, parameter in named
        if id(parameter) in own_name
        for alias in (name, strip_wrapper_names(name))
    }


def strip_wrapper_names(name: str) -> str:
    """Return a name without the parts that wrappers for compilation and activation checkpointing add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
