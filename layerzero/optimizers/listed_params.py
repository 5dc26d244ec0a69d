"""Represent each parameter of an optimizer once: as groups list it between steps, and as the optimizer steps it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from layerzero.dtensor.stale_parameter import current
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.state import LayerZeroState


@dataclass(frozen=True, eq=False)
class ListedParam:
    """Parameter of an optimizer.

    Attributes:
        parameter: entry in the group between steps.
        master: entry in the group during a step, and key of the inner optimizer's state.
        name: name in the model.
        member: the managed parameter, or None if the parameter is not sharded.
    """

    parameter: Tensor
    master: Tensor
    name: str
    member: ManagedParam | None


class ListedParams:
    """Parameters of an optimizer.

    Attributes:
        groups: parameters by group.
    """

    def __init__(self, lz_state: LayerZeroState) -> None:
        self._lz_state = lz_state
        self.groups: list[list[ListedParam]] = []
        self._by_id: dict[int, ListedParam] = {}

    def __iter__(self) -> Iterator[ListedParam]:
        return chain.from_iterable(self.groups)

    def get(self, parameter: object) -> ListedParam | None:
        """Return the entry of a parameter or a master, or None if it is not in the optimizer."""
        return self._by_id.get(id(parameter))

    @property
    def managed(self) -> list[ManagedParam]:
        """Sharded parameters."""
        return [each.member for each in self if each.member is not None]

    def create(self, parameters: Iterable[Tensor]) -> list[ListedParam]:
        """Return entries for parameters, which may have been read from the model before or after it was sharded.

        Raises:
            ValueError: a parameter is not in the model, or a sharded parameter is already in the optimizer.
        """
        created = set[int]()
        entries = []
        for parameter in map(current, parameters):
            entry = self._create(parameter)
            if entry.member is not None and (id(parameter) in created or id(parameter) in self._by_id):
                raise ValueError(f"parameter {entry.name!r} appears twice in the optimizer. Remove one of the entries")
            created.add(id(parameter))
            entries.append(entry)
        return entries

    def add_group(self, entries: list[ListedParam]) -> None:
        self.groups.append(entries)
        self._by_id |= {key: each for each in entries for key in (id(each.parameter), id(each.master))}

    def require_unedited(self, groups: Sequence[Mapping[str, Any]], inner: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError if parameter groups were changed without using the wrapper.

        Args:
            groups: parameter groups of the wrapper.
            inner: parameter groups of the inner optimizer, which must be the same list.
        """
        now = [list(map(id, group["params"])) for group in groups]
        known = [[id(each.parameter) for each in group] for group in self.groups]
        if groups is inner and now == known:
            return
        changed = next((index for index, pair in enumerate(zip(now, known, strict=False)) if pair[0] != pair[1]), None)
        edited = "the groups" if changed is None else f"the parameters of group {changed}"
        raise RuntimeError(
            f"{edited} in param_groups were edited, but layerzero cannot apply edits of param_groups after "
            "shard_optimizer. Undo the edit. To add parameters, call optimizer.add_param_group(...). To stop training "
            "some parameters, call parameter.requires_grad_(False) on all ranks. Otherwise build a new optimizer and "
            "call shard_optimizer on it"
        )

    def _create(self, parameter: Tensor) -> ListedParam:
        member = self._lz_state.parameters.managed_param(parameter)
        if member is not None:
            member.master_param.requires_grad_(member.sharded.requires_grad)
            return ListedParam(parameter, member.master_param, member.name, member)
        named = self._lz_state.model.named_parameters()
        name = next((name for name, candidate in named if candidate is parameter), None)
        if name is None or not self._lz_state.parameters.is_ignored(parameter):
            raise ValueError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that was not in the model when it "
                "was sharded. Build the optimizer from model.parameters() of the sharded model, and add modules "
                "before shard_model"
            )
        return ListedParam(parameter, parameter, name, None)
