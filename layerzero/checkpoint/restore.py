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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.contents_checks import StoredTensor
from layerzero.checkpoint.dcp_storage import CheckpointContents
from layerzero.checkpoint.json_codec import Decoder, references
from layerzero.checkpoint.optimizer_compat import GroupCompatibility, key_of, match_state_type
from layerzero.checkpoint.safetensors_reader import same_columns
from layerzero.checkpoint.state_names import RankLocalNames, StateNames
from layerzero.checkpoint.subclass_tensors import flatten_subclass, has_inner_tensors, is_subclass_entry
from layerzero.dtensor.full_tensor import rows_of
from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.sharded_tensor import sharded
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["NO_OPTIMIZER_STATE", "RestorePlan"]

NO_OPTIMIZER_STATE = "missing: the optimizer state"

_LISTED, _EXAMPLES = 12, 3  # a summary lists up to 12 problems; if there are more, it lists 3 of each kind
_KINDS = ("missing", "unexpected", "unexpected in the optimizer", "")  # first words of problems; "" for other problems


@dataclass(frozen=True)
class _ReadTarget:
    """Destination of a stored tensor."""

    key: str
    target: Tensor | ManagedParam


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
        self._document = contents.document
        self._stored = contents.tensors
        self._names = StateNames(lz_state, rank_local_names)
        self._decoder = Decoder(self._loaded_tensor, rank)
        self._rank = rank
        self._read_targets: list[_ReadTarget] = []
        self._uses: dict[str, list[RowShardSpec | None]] = {}  # by key: sharding of each use; None: full
        self._destinations: dict[str, Tensor] = {}  # by key: memory on this rank into which the rows are loaded
        self._tied_pairs: list[tuple[str, str, str, str]] = []  # pairs tied here, stored apart: names and keys
        self._parts: dict[int, tuple[str, str]] = {}  # by id of an inner tensor of a subclass: name and key
        self._states: list[tuple[nn.Module, Any]] = []  # extra states, encoded
        self._optimizer_state: dict[str, Any] = {}  # by the optimizer's own names
        self._shared_state: dict[str, Any] = {}  # optimizer state under keys that are not parameters, encoded
        self._kept: dict[str, Mapping[str, Any]] = {}  # by the same names: examples of the optimizer state, if known
        self._group_settings: list[dict[str, Any]] | None = None  # one dict per parameter group; None: not stored
        self._plan_model(contents.document["model"])
        matching_model = not self.problems
        if optimizer is not None:
            self._plan_optimizer(optimizer, contents.document["optimizer"])
        self.only_optimizer_differs = matching_model and bool(self.problems)
        for reference in references(contents.document["extra"], rank=rank):
            self._plan_extra(reference)
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
                self._states.append((target, stored[stored_names[0]]))
                for reference in references(stored[stored_names[0]], rank=self._rank):
                    self._request_tensor(str(key_of(reference)), None)
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
        keys = {part: key_of(reference) for part, reference in entry["tensors"].items()}
        problems = {
            part: "expected a tensor"
            if key is None
            else _mismatch(self._stored[key], parts[part].shape, parts[part].dtype)
            for part, key in keys.items()
        }
        if mismatches := [f"{part} of {name}: {problem}" for part, problem in problems.items() if problem]:
            self.problems += mismatches
            return
        for part, key in keys.items():
            self._request_tensor(str(key), None)
            self._read_targets.append(_ReadTarget(str(key), parts[part]))
            first, first_key = self._parts.setdefault(id(parts[part]), (f"{part} of {name}", str(key)))
            if first_key != key:
                self._tied_pairs.append((first, first_key, f"{part} of {name}", str(key)))

    def _plan_tensor(self, names: list[str], target: Tensor, stored: Mapping[str, Any]) -> None:
        member = self._names.members.get(names[0]) or self._lz_state.parameters.managed_param(target)
        dtype = self._names.dtypes.get(names[0], target.dtype) if member is None else member.master.dtype
        keys: dict[str, str] = {}  # by key: first name that has this key
        for name in names:
            key = key_of(stored[name])
            if key is None:
                self.problems.append(f"{name}: expected a tensor")
            elif problem := _mismatch(self._stored[key], target.shape, dtype):
                self.problems.append(f"{name}: {problem}")
            else:
                keys.setdefault(key, name)
        for index, (key, name) in enumerate(keys.items()):
            memory = member.master if member is not None and len(keys) == 1 else None
            self._request_tensor(key, None if member is None else member.spec, memory)
            if index == 0:
                self._read_targets.append(_ReadTarget(key, target if member is None else member))
                first = (name, key)
            else:
                self._tied_pairs.append((*first, name, key))

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
        self._shared_state = stored.get("shared_state", {})
        for reference in references([stored.get("param_groups"), self._shared_state], rank=self._rank):
            self._request_tensor(str(key_of(reference)), None)
        checks = [self._check_group(optimizer, number, saved_groups) for number in range(len(groups))]
        check_of = {
            name: check
            for check, group in zip(checks, groups, strict=True)
            for name in optimizer.parameter_names(group)
        }
        state: dict[str, Any] = {}
        current_state = optimizer.state_by_name()
        for name, values in stored.get("state", {}).items():
            if self._names.rank_local_names.is_elsewhere(name):
                continue
            if name not in own_names:
                self.problems.append(f"unexpected in the optimizer: {name}")
                continue
            member = self._names.members.get(name)
            shape = self._names.entries[name].shape if member is None else torch.Size(member.spec.full_shape)
            keys = {
                state_key: [str(key_of(reference)) for reference in references(value, rank=self._rank)]
                for state_key, value in values.items()
            }
            mismatches = [
                f"{state_key} of {name} in the optimizer: {problem}"
                for state_key, tensor_keys in keys.items()
                for key in tensor_keys
                if self._stored[key].shape
                and optimizer.owned(own_names[name]) is None  # state of an owned parameter may have any shape
                and (problem := _mismatch(self._stored[key], shape, self._stored[key].dtype))
            ]
            state_problems = check_of[own_names[name]].state_problems(values, len(shape))
            mismatches += [
                f"{state_key} of {name} in the optimizer: {problem}" for state_key, problem in state_problems
            ]
            self.problems += mismatches
            if not mismatches:
                for state_key, tensor_keys in keys.items():
                    is_nested = key_of(values[state_key]) is None
                    memory = None if is_nested else current_state.get(own_names[name], {}).get(state_key)
                    for key in tensor_keys:
                        spec = optimizer.spec_of_state(own_names[name], self._stored[key].shape)
                        self._request_tensor(key, spec, memory)
                state[own_names[name]] = values
                self._kept[own_names[name]] = check_of[own_names[name]].example_state(len(shape)) or {}
        self._group_settings = [check.settings for check in checks]
        self._optimizer_state = state

    def _check_group(
        self, optimizer: ShardedOptimizer, number: int, saved_groups: list[dict[str, Any]]
    ) -> GroupCompatibility:
        group, saved = optimizer.param_groups[number], {}
        try:
            saved = optimizer.saved_group(group, saved_groups)
        except ValueError as error:
            self.problems.append(str(error))
        check = GroupCompatibility(
            optimizer.inner,
            group,
            saved,
            self._stored,
            device=self._lz_state.mesh_info.device,
            what=f"parameter group {number} in the optimizer",
        )
        self.problems += check.problems
        return check

    def _plan_extra(self, reference: Mapping[str, str]) -> None:
        key, like = str(key_of(reference)), reference.get("like")
        if like is not None and self._names.rank_local_names.is_elsewhere(like):
            return
        stored = self._stored[key]
        member = None if like is None else self._names.members.get(like)
        if like is not None and (member is None or member.spec.full_shape != stored.shape):
            self.problems.append(f"{key} has the sharding of {like}, which is not in the model with this shape")
        else:
            self._request_tensor(key, None if member is None else member.spec)

    def _request_tensor(self, key: str, spec: RowShardSpec | None, memory: Tensor | None = None) -> None:
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
        conversion. The result is empty if two such tensors overlap in memory.
        """
        address_ranges: list[tuple[int, int, str]] = []  # start address, end address and key
        for key, memory in self._destinations.items():
            (spec, *others), stored = self._uses[key], self._stored[key]
            if spec is not None and not others and _can_read_into(memory, spec, stored):
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
            return sharded(self._destinations[key].detach(), first, MutationTracker())
        rows = torch.empty(len(first.rows), *first.shape[1:], dtype=stored.dtype)
        return sharded(rows, first, MutationTracker())

    def _loaded_tensor(self, key: str) -> Any:
        """Return the tensor that was read for `key`; None if the tensor does not match or belongs to other ranks."""
        return self.tensors.get(key)

    def _own_rows(self, key: str, target: Tensor | ManagedParam) -> Tensor:
        """Return the values that were read for `target` as a plain tensor.

        If `target` is sharded, return this rank's rows.
        """
        tensor = self.tensors[key]
        if isinstance(target, ManagedParam) and not isinstance(tensor, DTensor):
            return rows_of(tensor, target.spec)
        return plain(tensor)

    def tied_weight_problems(self) -> list[str]:
        """Return descriptions of tied parameters that are stored twice with different values."""
        return [
            f"{first} and {second} are one parameter here, but have different values in the checkpoint"
            for first, first_key, second, second_key in self._tied_pairs
            if not _equal(plain(self.tensors[first_key]), plain(self.tensors[second_key]))
        ]

    def restore_extra_states(self) -> Any:
        """Restore extra states of modules, wait for pending refreshes, and return ``extra``."""
        extra = self._decoder.decode(self._document["extra"])
        for module, state in self._states:
            module.set_extra_state(self._decoder.decode(state))  # user code may raise; no tensor has been changed yet
        self._lz_state.refreshes.before_master_write()
        return extra

    @torch.no_grad()
    def commit(self) -> None:
        """Write all tensors that were not read in place, and the optimizer state. All ranks must call this method."""
        for key in self.in_place:
            increment_version(self._destinations[key])  # autograd graphs that saved this tensor become invalid
        for read_target in self._read_targets:
            if read_target.key not in self.in_place:
                target = (
                    read_target.target.master if isinstance(read_target.target, ManagedParam) else read_target.target
                )
                target.copy_(self._own_rows(read_target.key, read_target.target))
        self._lz_state.refreshes.launch()
        if self._optimizer is not None and self._group_settings is not None:
            self._commit_optimizer(self._optimizer, self._group_settings)

    def _commit_optimizer(self, optimizer: ShardedOptimizer, settings: list[dict[str, Any]]) -> None:
        groups = [
            {**group, **self._decoder.decode(group_settings), "params": optimizer.parameter_names(group)}
            for group, group_settings in zip(optimizer.param_groups, settings, strict=True)
        ]
        state = (
            optimizer.state_dict_by_name()["state"] if self.problems else {}
        )  # strict=False keeps entries without a match
        for name, values in self._optimizer_state.items():
            examples, loaded = self._kept[name], self._decoder.decode(values)
            state[name] = {
                state_key: match_state_type(value, examples.get(state_key)) for state_key, value in loaded.items()
            }
        state |= self._decoder.decode(self._shared_state)
        optimizer.adopt_state_dict({"state": state, "param_groups": groups})


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


def _mismatch(stored: StoredTensor, shape: torch.Size, dtype: torch.dtype) -> str | None:
    """Return the reason why a load cannot copy a stored tensor to this shape and dtype, or None if it can.

    The shapes must be equal. The dtypes must be equal, or a lossless floating-point promotion such as bf16 to fp32.
    """
    if stored.shape != tuple(shape):
        return f"expected shape {list(shape)}, but the checkpoint has {list(stored.shape)}"
    if stored.dtype == dtype:
        return None
    floating = stored.dtype.is_floating_point and dtype.is_floating_point
    if floating and torch.promote_types(stored.dtype, dtype) == dtype:
        return None  # bf16 to fp32 is exact
    return f"expected {dtype}, but the checkpoint has {stored.dtype}"
