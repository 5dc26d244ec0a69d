"""Provide the optimizer state of owned parameters on every rank.

An owned parameter is updated in full by one rank, its owner, and only the owner stores the state. The owner sends a
description (shapes, dtypes and scalars) to all other ranks. From this description, the other ranks create sharded
tensors without local rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.extend import ModelRanks, sharded
from layerzero.muon.owner_step import OwnedParam


def add_remote_owner_state(
    state: Mapping[str, Any], owned: Sequence[OwnedParam], model_ranks: ModelRanks
) -> dict[str, Any]:
    """Return `state` with entries added for the parameters that other ranks own.

    Tensors in the added entries are sharded tensors without rows on this rank. Scalars have the owner's values.

    Args:
        state: this rank's state, by parameter name. Its tensors are sharded tensors.
        owned: all owned parameters of the optimizer.
        model_ranks: ranks that must call this function.

    Raises:
        TypeError: the state of an owned parameter has a value that cannot be sent. All ranks raise the error.
    """
    owned_by_key = {_owner_key(param): param for param in owned}
    own_state = {
        owner_key: state[param.member.name]
        for owner_key, param in owned_by_key.items()
        if param.is_owned_by_this_rank and param.member.name in state
    }
    text = json.dumps(
        {
            owner_key: _describe_state(owned_by_key[owner_key].member.name, values)
            for owner_key, values in own_state.items()
        }
    )
    states_by_key: dict[str, dict[str, Any]] = {}
    for message in model_ranks.all_gather_text(text):
        states_by_key |= json.loads(message)
    if problems := sorted(described["wrong"] for described in states_by_key.values() if "wrong" in described):
        raise TypeError(problems[0])
    complete = dict(state)
    for owner_key, param in owned_by_key.items():
        if owner_key in states_by_key and owner_key not in own_state:
            entries, device = states_by_key[owner_key].items(), model_ranks.mesh_info.device
            complete[param.member.name] = {key: _create_value(entry, param, device) for key, entry in entries}
    return {name: complete[name] for name in sorted(complete)}


def _owner_key(owned: OwnedParam) -> str:
    """Return a unique key for the combination of a parameter and its owner.

    The key contains the coordinates on the model-parallel axes along which parts are not joined, because each of these
    coordinates has a separate owner.
    """
    spec, axis = owned.member.spec, owned.owner.axis
    model_parallel = spec.model_parallel
    if model_parallel is None:
        return f"{spec.name} of {spec.mesh_info.ranks}"
    return (
        f"{spec.name} at {[model_parallel.coordinate_on(at) for at in range(model_parallel.mesh.ndim) if at != axis]}"
    )


def _describe_state(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {key: _describe_value(f"optimizer.state.{name}.{key}", value) for key, value in values.items()}
    except TypeError as error:
        return {"wrong": str(error)}


def _describe_value(path: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        if value.ndim and not isinstance(value, DTensor):
            raise TypeError(
                f"{path} has shape {list(value.shape)}, but its parameter is a stack whose matrices are on different "
                "ranks, so dim 0 of its state must be the number of matrices. Use an optimizer with such state, or an "
                "element-wise optimizer"
            )
        number = value.item() if value.ndim == 0 else None
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "number": number}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [_describe_value(f"{path}.{index}", item) for index, item in enumerate(value)]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _describe_value(f"{path}.{key}", item)] for key, item in value.items()]}
    raise TypeError(
        f"{path} is a {type(value).__name__}, but the owner of a full parameter can send only tensors, numbers and "
        "lists of them to the other ranks. Use an optimizer with such state, or an element-wise optimizer"
    )


def _create_value(entry: Mapping[str, Any], owned: OwnedParam, device: torch.device) -> Any:
    if "value" in entry:
        return entry["value"]
    for kind in (list, tuple):
        if kind.__name__ in entry:
            return kind(_create_value(item, owned, device) for item in entry[kind.__name__])
    if "dict" in entry:
        return {key: _create_value(item, owned, device) for key, item in entry["dict"]}
    dtype = getattr(torch, entry["dtype"])
    if not entry["shape"]:
        return torch.tensor(entry["number"], dtype=dtype)
    rows = torch.empty(0, *entry["shape"][1:], dtype=dtype, device=device)
    return sharded(rows, owned.state_spec(entry["shape"]))
