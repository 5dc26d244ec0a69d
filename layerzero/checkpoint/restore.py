"""Plan a load and commit it. All checks precede the first read, and all first reads precede the first write.

[Note: Checks before changes]
A load compares every name, shape and dtype with the table in the checkpoint. Then each rank reads every byte that it
needs and verifies the checksums. Values that need new memory are kept. All other values are read through a small buffer
and discarded. The load changes the model and the optimizer only after these reads succeed on all ranks. Masters and
optimizer state with existing memory are then read and verified a second time. This second read writes directly into
that memory and most likely reads from the page cache. Reading into new memory first would be slower than the second
read and would need as much extra memory as the state.

The second read of a file may still fail although the first read succeeded. The changes then cannot be undone. The load
raises an error on all ranks, and the model and the optimizer cannot be used until a load succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from layerzero import ShardedOptimizer
from layerzero.checkpoint.contents import CheckpointContents
from layerzero.checkpoint.json_codec import (
    StoredRef,
    StoredTensor,
    fill_refs,
    flatten_subclass,
    has_inner_tensors,
    is_subclass_entry,
    refs_in,
)
from layerzero.checkpoint.safetensors_files import same_columns
from layerzero.checkpoint.state_names import RankLocalNames, StateNames
from layerzero.extend import (
    LayerZeroState,
    ManagedParam,
    RowShardSpec,
    local_rows,
    rows_of,
    sharded,
    state_after_a_step,
)

NO_OPTIMIZER_STATE = "missing: the optimizer state"

_LISTED, _EXAMPLES = 12, 3  # a summary lists up to 12 problems; if there are more, it lists 3 of each kind
_KINDS = ("missing", "unexpected", "unexpected in the optimizer", "")  # first words of problems; "" for other problems


class RestorePlan:
    """Changes that loading a checkpoint makes, determined before any tensor is read.

    Args:
        rank: rank of this process if the same number of ranks saved the checkpoint, otherwise None.
        twice: whether the source can be read a second time, into memory of the model and the optimizer.
        rank_local_names: names under which other ranks have different parameters. The checkpoint contains the
            parameters of all ranks.

    Attributes:
        problems: descriptions of the entries that do not match, one line each. These entries are skipped.
        only_optimizer_differs: whether the model matches and the optimizer does not.
        tensors: by key, tensors to be read, sharded or full. All tensors except those in `in_place` use new CPU memory.
        in_place: keys of tensors that use memory of the model or the optimizer. These tensors are written only after
            all checks.
    """

    def __init__(
        self,
        lz_state: LayerZeroState,
        optimizer: ShardedOptimizer | None,
        contents: CheckpointContents,
        *,
        rank: int | None,
        twice: bool = False,
        rank_local_names: RankLocalNames | None = None,
    ) -> None:
        self.problems: list[str] = []
        self._differ, self._count = 0, 0  # number of tensors without a match, and total number of tensors
        self.tensors: dict[str, Tensor] = {}
        self._lz_state = lz_state
        self._optimizer = optimizer
        self._stored = contents.tensors
        self._names = StateNames(lz_state, rank_local_names)
        self._uses: dict[str, list[RowShardSpec | None]] = {}  # by key: sharding of each use; None: full
        self._destinations: dict[str, Tensor] = {}  # by key: memory on this rank into which the rows are loaded
        self._targets: dict[int, tuple[str, str, Tensor | ManagedParam]] = {}  # by id of a target: name, key, target
        self._tied_pairs: list[tuple[str, str, str, str]] = []  # pairs tied here, stored apart: names and keys
        self._module_states: list[tuple[nn.Module, Any]] = []
        self._optimizer_state: dict[Any, Any] = {}  # by the optimizer's own names, and shared state
        self._group_settings: list[dict[str, Any]] | None = None  # one dict per parameter group; None: not stored
        values = contents.values(rank)
        self._plan_model(values["model"])
        matching_model = not self.problems
        if optimizer is not None:
            self._plan_optimizer(optimizer, values["optimizer"])
        self.only_optimizer_differs = matching_model and bool(self.problems)
        self._extra = values["extra"]
        for ref in refs_in(self._extra):
            self._plan_extra(ref)
        self.in_place = self._in_place_keys() if twice else frozenset()
        for key, specs in self._uses.items():
            self.tensors[key] = self._target_tensor(key, specs)

    def summary(self) -> str:
        """Return a message that lists the problems.

        If there are more than 12 problems, the message has only a count and examples of each kind.
        """
        if len(self.problems) <= _LISTED:
            return "; ".join(self.problems)
        by_kind: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        for problem in self.problems:
            kind, _, name = problem.partition(": ")
            is_known_kind = kind in _KINDS
            by_kind[kind if is_known_kind else ""].append(name if is_known_kind else problem)
        lines = [f"{self._differ} of {self._count} tensors of the model do not match"] if self._differ else []
        for kind, entries in by_kind.items():
            if entries:
                more = f" and {len(entries) - _EXAMPLES} more" if len(entries) > _EXAMPLES else ""
                examples = (", " if kind else "; ").join(entries[:_EXAMPLES])
                lines.append(f"{kind}: {examples}{more}" if kind else f"{examples}{more}")
        return "; ".join(lines)

    def _plan_model(self, stored: Mapping[str, Any]) -> None:
        self.problems += [f"{name} is added by a state_dict() hook and cannot be loaded" for name in self._names.odd]
        by_target: dict[int, list[str]] = {}
        for name, target in self._names.targets.items():
            by_target.setdefault(id(target), []).append(name)
        self._count = len(by_target)
        for names in by_target.values():
            stored_names = [name for name in names if name in stored]
            target, num_problems = self._names.targets[names[0]], len(self.problems)
            if not stored_names:
                self.problems.append(f"missing: {' = '.join(names)}")
            elif isinstance(target, Tensor) and has_inner_tensors(target):
                self._plan_subclass_tensor(stored_names, target, stored)
            elif isinstance(target, Tensor):
                self._plan_tensor(stored_names, target, stored)
            else:
                self._module_states.append((target, stored[stored_names[0]]))
                self._request_all(stored[stored_names[0]])
            self._differ += len(self.problems) > num_problems
        unexpected = sorted(stored.keys() - self._names.targets.keys())
        self.problems += [
            f"unexpected: {name}" for name in unexpected if not self._names.rank_local_names.is_elsewhere(name)
        ]

    def _plan_subclass_tensor(self, names: list[str], target: Tensor, stored: Mapping[str, Any]) -> None:
        """Plan the load of all inner tensors of an unsharded subclass tensor. If any does not match, plan none."""
        name, entry = names[0], stored[names[0]]
        if (flattened := flatten_subclass(name, target)) is None:
            self.problems.append(
                f"{name}: a {type(target).__name__}, a tensor subclass, does not expose the plain tensors to load. "
                "Create the tensor as before the save, and load the other tensors with strict=False"
            )
            return
        description, parts = flattened
        if not is_subclass_entry(entry) or entry["of"] != description or entry["tensors"].keys() != parts.keys():
            saved_kind = entry["of"] if is_subclass_entry(entry) else "another kind of entry"
            self.problems.append(
                f"{name}: expected {description} of {sorted(parts)}, but the checkpoint has {saved_kind}"
            )
            return
        if differing := [other for other in names if stored[other] != entry]:
            self.problems.append(f"{name} and {differing[0]} are one parameter here, but two in the checkpoint")
            return
        problems = {
            part: self._mismatch(entry["tensors"][part], tensor.shape, tensor.dtype) for part, tensor in parts.items()
        }
        self.problems += [f"{part} of {name}: {problem}" for part, problem in problems.items() if problem]
        if not any(problems.values()):
            for part, tensor in parts.items():
                self._read_into(f"{part} of {name}", entry["tensors"][part].key, tensor)

    def _plan_tensor(self, names: list[str], target: Tensor, stored: Mapping[str, Any]) -> None:
        member = self._names.members.get(names[0]) or self._lz_state.parameters.managed_param(target)
        dtype = self._names.dtypes.get(names[0], target.dtype) if member is None else member.master.dtype
        for name in names:
            if problem := self._mismatch(stored[name], target.shape, dtype):
                self.problems.append(f"{name}: {problem}")
            else:
                self._read_into(name, stored[name].key, target if member is None else member)

    def _read_into(self, name: str, key: str, target: Tensor | ManagedParam) -> None:
        first_name, first_key, _ = self._targets.setdefault(id(target), (name, key, target))
        if first_key != key:
            self._tied_pairs.append((first_name, first_key, name, key))
        elif first_name != name:
            return
        if isinstance(target, ManagedParam):
            self._request(key, target.spec, target.master)
        else:
            self._request(key)

    def _plan_optimizer(self, optimizer: ShardedOptimizer, stored: Mapping[str, Any] | None) -> None:
        if stored is None:
            self.problems.append(NO_OPTIMIZER_STATE)
            return
        if (kind := stored.get("class")) not in (None, own := type(optimizer.inner).__name__):
            text = f"the checkpoint has the state of {kind}, but the optimizer is {own}"
            self.problems.insert(0, text)  # so that the summary does not omit it
            return
        groups = optimizer.param_groups
        own_names = {self._names.to_stored(name): name for group in groups for name in optimizer.parameter_names(group)}
        saved_groups = [
            {**group, "params": [own_names.get(name, name) for name in group["params"]]}
            for group in stored.get("param_groups", ())
        ]
        self._group_settings = [self._plan_group(optimizer, number, saved_groups) for number in range(len(groups))]
        self._optimizer_state = dict(stored.get("shared_state", {}))
        self._request_all([self._group_settings, self._optimizer_state])
        current_state = optimizer.state_by_name()
        for name, values in stored.get("state", {}).items():
            if name in own_names:
                own_name = own_names[name]
                self._plan_state(optimizer, name, own_name, values, current_state.get(own_name, {}))
            elif not self._names.rank_local_names.is_elsewhere(name):
                self.problems.append(f"unexpected in the optimizer: {name}")

    def _plan_group(
        self, optimizer: ShardedOptimizer, number: int, saved_groups: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the saved settings of a parameter group whose kind of value fits."""
        group, saved = optimizer.param_groups[number], dict[str, Any]()
        try:
            saved = optimizer.saved_group(group, saved_groups)
        except ValueError as error:
            self.problems.append(str(error))
        problems = {key: _kind_mismatch(group.get(key), value) for key, value in saved.items()}
        where = f"parameter group {number} in the optimizer"
        self.problems += [f"{key} of {where}: {problem}" for key, problem in problems.items() if problem]
        return {key: value for key, value in saved.items() if not problems[key]}

    def _plan_state(
        self,
        optimizer: ShardedOptimizer,
        name: str,
        own_name: str,
        values: Mapping[str, Any],
        current: Mapping[str, Any],
    ) -> None:
        """Plan the load of the optimizer state of one parameter. If any entry does not match, plan none.

        Args:
            name, own_name: name of the parameter in the checkpoint, and in the optimizer.
            current: state that the optimizer has for the parameter.
        """
        member = self._names.members.get(name)
        shape = self._names.entries[name].shape if member is None else torch.Size(member.spec.full_shape)
        is_owned = optimizer.owned(own_name) is not None  # state of an owned parameter may have any shape
        problems = self._state_problems(values, current, shape, is_owned=is_owned)
        mismatches = [f"{state_key} of {name} in the optimizer: {problem}" for state_key, problem in problems.items()]
        self.problems += mismatches
        if mismatches:
            return
        for state_key, value in values.items():
            for ref in refs_in(value):
                memory = current.get(state_key) if ref is value else None
                self._request(ref.key, optimizer.spec_of_state(own_name, ref.shape), memory)
        self._optimizer_state[own_name] = values

    def _state_problems(
        self, values: Mapping[str, Any], current: Mapping[str, Any], shape: torch.Size, *, is_owned: bool
    ) -> dict[str, str]:
        """Return the reason why each entry of an optimizer state does not match a parameter of this shape."""
        problems = {}
        for state_key, saved in values.items():
            for ref in refs_in(saved):
                if ref.shape and not is_owned and (problem := self._mismatch(ref, shape, ref.dtype)):
                    problems[state_key] = problem
            if shape and saved is not None and _has_dims(current.get(state_key)) and not _has_dims(saved):
                kind = _kind(saved)
                problems[state_key] = f"expected a tensor of the parameter's shape, but the checkpoint has {kind}"
        return problems

    def _plan_extra(self, ref: StoredRef) -> None:
        if ref.like is None:
            self._request(ref.key)
            return
        if self._names.rank_local_names.is_elsewhere(ref.like):
            return
        member = self._names.members.get(ref.like)
        if member is None or member.spec.full_shape != tuple(ref.shape):
            self.problems.append(f"{ref.key} has the sharding of {ref.like}, which is not in the model with this shape")
        else:
            self._request(ref.key, member.spec)

    def _request_all(self, values: Any) -> None:
        for ref in refs_in(values):
            self._request(ref.key)

    def _request(self, key: str, spec: RowShardSpec | None = None, memory: Any = None) -> None:
        """Record that this rank needs the stored tensor `key`.

        Args:
            spec: sharding of the rows that this rank needs. If None, this rank needs the full tensor.
            memory: existing memory into which the rows can be loaded.
        """
        self._uses.setdefault(key, []).append(spec)
        if spec is not None and isinstance(memory, Tensor):
            self._destinations[key] = memory

    def _in_place_keys(self) -> frozenset[str]:
        """Return the keys of the tensors that can be read in place.

        A tensor can be read in place if the plan uses it once and the stored bytes can be read into its memory without
        conversion. The result is empty if two such tensors overlap in memory. Tied parameters that are stored apart are
        compared first.
        """
        tied = {key for pair in self._tied_pairs for key in pair[1::2]}
        address_ranges: list[tuple[int, int, str]] = []  # start address, end address and key
        for key, memory in self._destinations.items():
            (spec, *others), stored = self._uses[key], self._stored[key]
            if spec is not None and not others and key not in tied and _can_read_into(memory, spec, stored):
                address_ranges.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes, key))
        address_ranges.sort()
        disjoint = all(first[1] <= second[0] for first, second in pairwise(address_ranges))
        return frozenset(key for _, _, key in address_ranges) if disjoint else frozenset()

    def _target_tensor(self, key: str, specs: list[RowShardSpec | None]) -> Tensor:
        """Return the destination of `key`: sharded if all uses have the same sharding, otherwise a full tensor."""
        stored, first = self._stored[key], specs[0]
        if first is None or not all(spec is not None and spec.same_sharding(first) for spec in specs):
            return torch.empty(stored.shape, dtype=stored.dtype)
        if key in self.in_place:
            return sharded(self._destinations[key].detach(), first)
        rows = torch.empty(len(first.rows), *first.shape[1:], dtype=stored.dtype)
        return sharded(rows, first)

    def _mismatch(self, ref: Any, shape: torch.Size, dtype: torch.dtype) -> str | None:
        """Return the reason why a load cannot copy a stored tensor to this shape and dtype, or None if it can.

        The shapes must be equal. The dtypes must be equal, or a lossless floating-point promotion such as bf16 to fp32.
        """
        if not isinstance(ref, StoredRef):
            return "expected a tensor"
        if ref.shape != shape:
            return f"expected shape {list(shape)}, but the checkpoint has {list(ref.shape)}"
        floating = ref.dtype.is_floating_point and dtype.is_floating_point
        if ref.dtype == dtype or (floating and torch.promote_types(ref.dtype, dtype) == dtype):
            return None  # bf16 to fp32 is exact
        return f"expected {dtype}, but the checkpoint has {ref.dtype}"

    def tied_weight_problems(self) -> list[str]:
        """Return descriptions of tied parameters that are stored twice with different values."""
        return [
            f"{first} and {second} are one parameter here, but have different values in the checkpoint"
            for first, first_key, second, second_key in self._tied_pairs
            if not _equal(local_rows(self.tensors[first_key]), local_rows(self.tensors[second_key]))
        ]

    def restore_extra_states(self) -> Any:
        """Restore extra states of modules, wait for pending refreshes, and return ``extra``."""
        extra = self._filled(self._extra)
        for module, state in self._module_states:
            module.set_extra_state(self._filled(state))  # user code may raise; no tensor has been changed yet
        self._lz_state.refreshes.before_master_write()
        return extra

    def _filled(self, values: Any) -> Any:
        """Return decoded values with the tensors that were read; None for those that do not match or are elsewhere."""
        return fill_refs(values, self.tensors.get)

    @torch.no_grad()
    def commit(self) -> None:
        """Write all tensors that were not read in place, and the optimizer state. All ranks must call this method."""
        for key in self.in_place:
            increment_version(self._destinations[key])  # autograd graphs that saved this tensor become invalid
        for _, key, target in self._targets.values():
            if key not in self.in_place:
                tensor = self.tensors[key]
                if isinstance(target, ManagedParam):
                    target.master.copy_(
                        local_rows(tensor) if isinstance(tensor, DTensor) else rows_of(tensor, target.spec)
                    )
                else:
                    target.copy_(local_rows(tensor))
        self._lz_state.refreshes.launch()
        if self._optimizer is not None and self._group_settings is not None:
            self._commit_optimizer(self._optimizer, self._group_settings)

    def _commit_optimizer(self, optimizer: ShardedOptimizer, settings: list[dict[str, Any]]) -> None:
        groups = [
            {**group, **self._filled(group_settings), "params": optimizer.parameter_names(group)}
            for group, group_settings in zip(optimizer.param_groups, settings, strict=True)
        ]
        loaded = self._filled(self._optimizer_state)
        for group in groups:
            self._convert_numbers(optimizer, group, [loaded[name] for name in group["params"] if name in loaded])
        kept = optimizer.state_dict_by_name()["state"] if self.problems else {}  # strict=False keeps other entries
        optimizer.adopt_state_dict({"state": kept | loaded, "param_groups": groups})

    def _convert_numbers(
        self, optimizer: ShardedOptimizer, group: Mapping[str, Any], states: list[dict[str, Any]]
    ) -> None:
        """Convert numbers in loaded `states` to tensors where the optimizer stores tensors.

        Other versions of an optimizer may have stored its step count as a number. A step would not advance such a
        count.
        """
        if not any(isinstance(value, (int, float)) for state in states for value in state.values()):
            return
        device, example = self._lz_state.mesh_info.device, dict[str, Any]()
        with (
            suppress(Exception),  # the copy of an optimizer may fail to step; it then keeps the numbers
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        ):
            example, _ = state_after_a_step(optimizer.inner, {**group, "params": []}, device)
        for state in states:
            for key, value in state.items():
                if isinstance(value, (int, float)) and isinstance(example.get(key), Tensor):
                    state[key] = torch.full_like(example[key], value)


def _has_dims(value: Any) -> bool:
    return isinstance(value, (Tensor, StoredRef)) and len(value.shape) > 0


def _kind(value: Any) -> str:
    if isinstance(value, (Tensor, StoredRef)):
        return "a number" if value.shape.numel() == 1 else "a tensor"
    if isinstance(value, (bool, int, float)):
        return "a number"
    return "a list of values" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"


def _kind_mismatch(current: Any, saved: Any) -> str | None:
    """Return a description of the mismatch between the kinds of two settings; None if they match or one is None."""
    if current is None or saved is None or _kind(current) == _kind(saved):
        return None
    text = f"shape {list(saved.shape)}" if isinstance(saved, StoredRef) else repr(saved)
    return f"expected {_kind(current)}, but the checkpoint has {_kind(saved)}: {text[:60]}{'...' * (len(text) > 60)}"


def _can_read_into(memory: Tensor, spec: RowShardSpec, stored: StoredTensor) -> bool:
    return (
        type(memory) in (Tensor, nn.Parameter)
        and memory.layout is torch.strided
        and memory.dtype == stored.dtype
        and memory.shape == (len(spec.rows), *spec.shape[1:])
        and all(same_columns(spec.global_slices, offsets, sizes) for _, offsets, sizes in stored.chunks)
        and memory.is_contiguous()
        and not (memory.is_meta or memory.is_conj() or memory.is_neg() or memory.is_inference())
    )


def _equal(first: Tensor, second: Tensor) -> bool:
    dtype = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.to(dtype), second.to(dtype))
