"""Convert optimizer state to this rank's rows, and compare group settings."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.dtensor.full_tensor import rows_of
from layerzero.dtensor.local_shard import find_local_shard, plain
from layerzero.dtensor.sharded_tensor import sharded
from layerzero.engine.managed_param import ManagedParam
from layerzero.optimizers.update_rule import FullParam
from layerzero.utils.torch_compat import tree_leaves, tree_map, tree_structure

Holder = (
    ManagedParam | FullParam | None
)  # ManagedParam: each rank has the state of its rows. FullParam: the owner has all state. None: not sharded


def to_public_value(value: Any, holder: Holder) -> Any:
    """Convert an entry of a parameter's state to its public form: tensors of local rows become sharded tensors."""

    def convert(leaf: Any) -> Any:
        if holder is None or not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or not leaf.ndim:
            return leaf
        if isinstance(holder, FullParam):
            shape = holder.global_state_shape(leaf.shape)
            return leaf if shape is None else sharded(leaf, holder.state_spec(shape))
        return sharded(leaf, holder.spec) if leaf.shape == holder.master.shape else leaf

    return tree_map(convert, value)


def to_stored_value(key: str, value: Any, holder: Holder) -> Any:
    """Convert a value that the user assigns to the stored form, the inverse of :func:`to_public_value`.

    Tensors that are sharded, or have the parameter's global shape, become local rows, or the full tensor on an owner.
    On other ranks than the owner, the result is in public form. If nothing is converted, return `value` itself.
    """

    def convert(leaf: Any) -> Any:
        if holder is None or not isinstance(leaf, Tensor):
            return leaf
        if not isinstance(holder, FullParam):
            is_global = isinstance(leaf, DTensor) or (leaf.ndim and tuple(leaf.shape) == holder.spec.full_shape)
            return _rows_of_rank(key, leaf, holder, copy=False) if is_global else leaf
        full = _full_on_owner(key, leaf, holder, copy=False)
        is_stored = holder.is_owned_by_this_rank or not leaf.ndim
        return full if is_stored else sharded(full[:0], holder.state_spec(leaf.shape))

    stored = tree_map(convert, value)
    return value if all(map(operator.is_, tree_leaves(stored), tree_leaves(value))) else stored


IMPLEMENTATION_SETTINGS = (
    "foreach",
    "fused",
    "capturable",
    "is_expert_parallel",
)  # group settings that do not change the results


def to_comparable(value: Any) -> Any:
    """Return a group setting with floats for numbers, for comparison between ranks.

    The result is None if a comparison needs a device synchronization, or if there is none for this type.
    """
    if isinstance(value, (list, tuple)):
        return None if any(isinstance(each, Tensor) for each in value) else list(map(to_comparable, value))
    if isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, (bool, str)):
        return value
    return float(value) if isinstance(value, (int, float)) else None


def shorten_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


def load_setting(current: Any, saved: Any) -> Any:
    """Return the value that a hyperparameter has after a load.

    If the current value is a 0-dim tensor, it is updated in place, because compiled steps and graphs refer to it.
    """
    if isinstance(current, Tensor) and current.ndim == 0:
        return current.fill_(saved) if not isinstance(saved, Tensor) else current.copy_(saved)
    return saved.clone() if isinstance(saved, Tensor) else saved


def to_device_of(value: Any, master: Tensor) -> Any:
    return value.to(master.device) if isinstance(value, Tensor) else value


def as_one_row(values: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a 0-dim parameter with its per-element tensors reshaped to [1]. Step counts stay 0-dim.

    Args:
        values: state of the parameter. All of its tensors may be 0-dim.
        example: state that an optimizer has for a 1-dim parameter. Only per-element tensors have a dim.
    """

    def convert(value: Any, leaf: Any) -> Any:
        is_row = isinstance(leaf, Tensor) and leaf.ndim and type(value) is Tensor and value.ndim == 0
        return value.reshape(1) if is_row else value

    known = {
        key for key in values.keys() & example.keys() if tree_structure(values[key]) == tree_structure(example[key])
    }
    return {key: tree_map(convert, value, example[key]) if key in known else value for key, value in values.items()}


def shard_state(values: Mapping[str, Any], holder: Holder, *, copy: bool = True) -> dict[str, Any]:
    """Return a parameter's state, with each tensor of the parameter's shape replaced by this rank's rows.

    For an owned parameter, return full tensors on the owner and an empty dict on other ranks. If `copy` is False, the
    result may share memory with `values`.
    """
    if holder is None:
        return dict(values)

    def convert(key: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(holder, FullParam):
            full = _full_on_owner(key, leaf, holder, copy=copy)
            return full if key == "step" else to_device_of(full, holder.member.master)  # as torch's load_state_dict
        return _rows_of_rank(key, leaf, holder, copy=copy)

    state = {key: tree_map(partial(convert, key), value) for key, value in values.items()}
    return {} if isinstance(holder, FullParam) and not holder.is_owned_by_this_rank else state


def _full_on_owner(key: str, value: Tensor, owned: FullParam, *, copy: bool) -> Tensor:
    device = owned.member.master.device
    if value.ndim == 0:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.clone() if copy else value
    local = find_local_shard(value)
    if local is not None and local.spec.same_sharding(owned.state_spec(value.shape)):
        return plain(value).to(device, copy=copy)
    full = value.full_tensor() if isinstance(value, DTensor) else value
    model_parallel = owned.state_spec(value.shape).model_parallel
    return (full if model_parallel is None else full[model_parallel.global_slices]).to(device).clone()


def _rows_of_rank(key: str, value: Tensor, member: ManagedParam, *, copy: bool) -> Tensor:
    if value.ndim == 0 and not isinstance(value, DTensor):
        return value.clone() if copy else value
    if isinstance(value, DTensor) and (local := find_local_shard(value)) is not None:
        if not local.spec.same_sharding(member.spec):
            raise ValueError(
                f"state {key!r} of {member.name!r} is not sharded like the parameter. Load it through a checkpoint"
            )
        return plain(value).to(member.master.device, copy=copy)
    try:
        return rows_of(value, member.spec).to(member.master.device).clone()
    except ValueError as error:
        raise ValueError(f"state {key!r}: {error}") from error
