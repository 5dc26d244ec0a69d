"""Map the parameters, buffers and optimizer state of a model to their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerzero.checkpoint.json_codec import MergeableValue
from layerzero.extend import LayerZeroState, LocalShard, original_dtypes, refuse_rank_local, strip_wrapper_names


@dataclass(frozen=True)
class RankLocalNames:
    """Names under which ranks have different parameters or values, such as expert parameters.

    Attributes:
        stored: function that maps a name to the unique name in the checkpoint, without the parts that wrappers add.
        is_rank_local: function that returns whether ranks have different parameters under a stored name.
        is_elsewhere: function that returns whether only other ranks have a parameter under a stored name.
        tells: whether this rank writes its unsharded values. If several ranks have equal values, only one of these
            ranks writes them.
    """

    stored: Callable[[str], str]
    is_rank_local: Callable[[str], bool]
    is_elsewhere: Callable[[str], bool]
    tells: bool

    @classmethod
    def nothing(cls) -> RankLocalNames:
        return cls(strip_wrapper_names, lambda name: False, lambda name: False, tells=True)

    def split_values(self, values: Mapping[str, Any]) -> MergeableValue:
        """Split `values`, keyed by stored name, into values common to all ranks and this rank's own values."""
        common = {name: value for name, value in values.items() if not self.is_rank_local(name)}
        return MergeableValue(common, {name: value for name, value in values.items() if self.is_rank_local(name)})

    def split_names(self, names: Iterable[str]) -> MergeableValue:
        name_list = list(names)
        return MergeableValue(
            [n for n in name_list if not self.is_rank_local(n)], [n for n in name_list if self.is_rank_local(n)]
        )


class StateNames:
    """Stored names, which are the names in a checkpoint: those in the ``state_dict()`` of the model without wrappers.

    Wrappers for compilation and activation checkpointing add a part to module names. This part is removed, as in
    torch's own checkpoints.

    Attributes:
        targets: by stored name, the parameters, persistent buffers, and modules with extra state.
        members: managed parameters, by stored name.
        dtypes: original dtypes of the buffers that `buffer_dtype` has cast, by stored name. The tensors in the files
            have these dtypes.
        odd: names in the state dict that belong to none of the entries above.
    """

    def __init__(self, lz_state: LayerZeroState, rank_local_names: RankLocalNames | None = None) -> None:
        self.rank_local_names = rank_local_names = rank_local_names or RankLocalNames.nothing()
        self.entries: dict[str, Any] = {}  # values to save, by stored name
        self.targets: dict[str, Tensor | nn.Module] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.odd: list[str] = []
        model = lz_state.model
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        # Modules are matched by order, because a wrapper may remove its own name from a state dict.
        owners = [module for _, module in model.named_modules(remove_duplicate=False) if _has_extra_state(module)]
        state = {rank_local_names.stored(name): value for name, value in model.state_dict(keep_vars=True).items()}
        extra_names = [name for name in state if name.endswith(_EXTRA)]
        owner_of = dict(zip(extra_names, owners, strict=True)) if len(extra_names) == len(owners) else {}
        first_name: dict[int, str] = {}
        dtypes, cast = original_dtypes(lz_state.cast_buffers), dict[int, Tensor]()  # by id, for tied buffers
        for name, value in state.items():
            target = owner_of.get(name) if name.endswith(_EXTRA) else tensors.get(id(value))
            if target is None:
                self.odd.append(name)
                continue
            if (dtype := dtypes.get(id(value))) is not None:
                self.dtypes[name] = dtype
                value = cast.setdefault(id(value), value.detach().to(dtype))  # noqa: PLW2901
            self.entries[name], self.targets[name] = value, target
            first_name.setdefault(id(target), name)
        self._stored: dict[str, str] = {}  # by the name of a parameter in the model
        for own_name, parameter in model.named_parameters(remove_duplicate=False):
            self._stored[own_name] = first_name.get(id(parameter), rank_local_names.stored(own_name))
        self.members = {self._stored[member.name]: member for member in lz_state.members.values()}
        specs = (member.spec for name, member in self.members.items() if not rank_local_names.is_rank_local(name))
        refuse_rank_local("layerzero.checkpoint", specs, lz_state.ranks.size)

    def of_rows(self, rows: LocalShard) -> str:
        """Return the stored name of the parameter to which the sharding of `rows` belongs.

        `rows` may also belong to another model with the same sharding.

        Raises:
            LookupError: the model has no such parameter.
        """
        spec, name = rows.spec, self._stored[rows.spec.name]
        own_spec = self.members[name].spec
        same_model = (
            spec.mesh_info.counters is own_spec.mesh_info.counters
        )  # state of this model may have another shape
        if not same_model and (spec.shape, spec.bounds, spec.mesh) != (own_spec.shape, own_spec.bounds, own_spec.mesh):
            raise LookupError(name)
        return name

    def to_stored(self, name: str) -> str:
        """Return the stored name of a parameter whose name in the optimizer is `name`."""
        return self._stored.get(name, name)


_EXTRA = "_extra_state"


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def rename_params(state_dict: Mapping[str, Any], rename: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state and the groups of an optimizer's state dict, with the parameters renamed."""
    state = {rename(name): values for name, values in state_dict["state"].items()}
    return state, [
        {**{key: _to_number(value) for key, value in group.items()}, "params": [rename(n) for n in group["params"]]}
        for group in state_dict["param_groups"]
    ]


def _to_number(value: Any) -> Any:
    """Return a hyperparameter. A 0-dim tensor is converted to a number."""
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
