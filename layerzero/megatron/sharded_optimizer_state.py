"""Create and load the sharded state dict of an optimizer, in the formats of Megatron's own optimizers.

[Note: Formats of the optimizer state]
- If all weights are in fp32: ``{"state", "param_groups"}``. The weights are the masters.
- If some weights have 16 bits: ``{"optimizer": {"state", "param_groups"}, "grad_scaler"}``, with the masters under
  ``fp32_param``.
- If ``metadata["distrib_optim_sharding_type"] == "fully_reshardable"``: like the second format, but with all masters
  under ``param``.

With expert parallelism, Megatron chains two optimizers, and the second optimizer updates the experts. With Muon, one or
two more optimizers update the parameters that are not matrices. The state dict is then ``{0: ..., 1: ...}``, and each
value has one of these formats.

In all formats, a tensor's key is ``optimizer.state.<kind of state>.<parameter's key>``, and all parameters share one
step count. The EMA of the weights is stored under ``ema``, a key that Megatron's optimizers do not load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from layerzero import EMA, ShardedOptimizer
from layerzero.extend import (
    ManagedParam,
    RowShardedTensor,
    RowShardSpec,
    get_state,
    local_rows,
    state_after_a_step,
)
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.muon import is_matrix_group
from layerzero.megatron.parallel_groups import NOT_FOUND, ProcessGroups, raising_on_all_ranks
from layerzero.megatron.sharded_model_state import GlobalParam, global_params

_RESHARDABLE = "fully_reshardable"
_TENSORS = "param_state"  # key of the tensors, by chunk and parameter name
_MASTERS = ("param", "fp32_param")
_AVERAGE = "ema"
_IDENTITY = param_group_identifier_keys  # keys that identify a parameter group; they differ between releases


class ChunkOptimizer(NamedTuple):
    """Model chunk with its optimizer and its EMA. `experts` and `matrices` select some of the parameter groups."""

    chunk: ShardedChunk
    optimizer: ShardedOptimizer
    ema: EMA | None = None
    experts: bool | None = None  # True: only expert-parallel parameter groups; False: only the others; None: all groups
    matrices: bool | None = None  # True: only groups that Muon updates; False: only the others; None: all groups

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [
            group
            for group in self.optimizer.param_groups
            if self.experts in (None, group.get("is_expert_parallel", False))
            and self.matrices in (None, is_matrix_group(group))
        ]

    def members(self, group: Mapping[str, Any]) -> Iterator[ManagedParam]:
        """Yield the managed parameters in one of the optimizer's parameter groups."""
        lz_state = get_state(self.chunk)
        for parameter, name in zip(group["params"], self.optimizer.parameter_names(group), strict=True):
            member = lz_state.parameters.managed_param(parameter)
            if member is None:
                raise NotImplementedError(
                    f"the optimizer steps {name!r}, which is not sharded. Use layerzero.megatron.save and load"
                )
            yield member


class _CommonState(NamedTuple):
    """Unsharded optimizer state: the parameter groups, the distinct step counts, and whether masters are stored.

    Masters are stored if the compute dtype of any parameter differs from the dtype of its master.
    """

    groups: list[dict[str, Any]]
    steps: set[float]
    stores_masters: bool


# Saving, and allocating memory for a load


def chained_states(
    pairs: Sequence[ChunkOptimizer], *, with_muon: bool, metadata: Mapping[str, Any] | None, **how: Any
) -> dict[Any, Any]:
    """Return the :func:`sharded_states` of Megatron's chained optimizers: of Muon and AdamW, each also for experts.

    On a stage without experts of a kind, the chain has no optimizer for them. If only one optimizer remains, return its
    state. All ranks must call this function.
    """
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # noqa: PLC0415

    if with_muon and (metadata or {}).get("distrib_optim_sharding_type") is not None:
        raise NotImplementedError(
            "distrib_optim_sharding_type is not supported with Muon. Remove it from the metadata (in Megatron-LM: "
            "--use-distributed-optimizer)"
        )
    parts = (None,) if how["groups"].expert_zero1 is None else (False, True)
    states = []
    for matrices, experts in product((True, False) if with_muon else (None,), parts):
        of_kind = [pair._replace(matrices=matrices, experts=experts) for pair in pairs]
        state = sharded_states(of_kind, metadata=metadata, **how)
        if not experts or any(pair.groups for pair in of_kind):
            states.append(state)
    if len(states) == 1:
        return states[0]
    if not (metadata or {}).get("chained_optim_avoid_prefix", False):
        for index, state in enumerate(states):
            add_prefix_for_sharding(state, f"chained_{index}.")
    return dict(enumerate(states))


def sharded_states(
    pairs: Sequence[ChunkOptimizer],
    *,
    is_loading: bool,
    metadata: Mapping[str, Any] | None,
    grad_scaler: Mapping[str, Any] | None,
    groups: ProcessGroups,
) -> dict[str, Any]:
    """Return the ``sharded_state_dict`` of the optimizer. If a rank fails, all ranks raise an error.

    All ranks must call this function.
    """
    kind = (metadata or {}).get("distrib_optim_sharding_type")
    tensors: dict[str, Any] = {}
    steps: set[float] = set()
    with raising_on_all_ranks("the optimizer's sharded_state_dict", groups):
        if kind not in (None, _RESHARDABLE):
            raise NotImplementedError(
                f"distrib_optim_sharding_type={kind!r} stores buffers of Megatron's distributed optimizer, which "
                f"layerzero does not have. Use {_RESHARDABLE!r}"
            )
        # With owners, this is a collective. It comes before anything that may fail on only some ranks.
        states = [pair.optimizer.state_dict_by_name()["state"] for pair in pairs]
        for index, (pair, state) in enumerate(zip(pairs, states, strict=True)):
            tensors |= _sharded_entries(pair, index, metadata, kind, state, steps, is_loading=is_loading)
        members = [member for pair in pairs for member in get_state(pair.chunk).members.values()]
        common = _CommonState(
            _merge_groups([pair.groups for pair in pairs]), steps, any(map(_master_dtype_differs, members))
        )
    averaged = next((int(pair.ema.n_averaged) for pair in pairs if pair.ema is not None), None)
    common = _merge_over_ranks(common, groups.model)
    state = _format_state(common, kind, tensors, averaged)
    if "optimizer" in state and grad_scaler is not None:
        state["grad_scaler"] = dict(grad_scaler)
    return state


def _format_state(
    common: _CommonState, kind: str | None, tensors: dict[str, Any], averaged: int | None
) -> dict[str, Any]:
    """Return the state dict without loss scale; see [Note: Formats of the optimizer state]."""
    inner: dict[str, Any] = {"param_groups": common.groups, "state": {}}
    for step in common.steps:  # at most one
        inner["state"] = {"common_step": torch.tensor(step)}
        inner["param_groups"] = [{**group, "step": int(step)} for group in common.groups]
    of_members: dict[str, Any] = {_TENSORS: tensors} if tensors else {}
    if averaged is not None:
        of_members[_AVERAGE] = {"n_averaged": averaged}
    if kind is not None:
        return {"optimizer": inner, **of_members, "param_state_sharding_type": kind}
    return {"optimizer": inner, **of_members} if common.stores_masters else {**inner, **of_members}


def _sharded_entries(
    pair: ChunkOptimizer,
    index: int,
    metadata: Any,
    kind: str | None,
    state: Mapping[str, Any],
    steps: set[float],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the entries for each parameter's optimizer `state`, EMA and master, and add step counts to `steps`.

    The keys combine the chunk's index and the parameter's name.
    """
    members = get_state(pair.chunk).members.values()
    _, described = global_params(pair.chunk.module, members, metadata)
    described_in_full: Mapping[str, GlobalParam] = {}
    if pair.optimizer.has_owners:
        _, described_in_full = global_params(pair.chunk.module, members, metadata, of_all_ranks=True)
    _refuse_shared_state(pair)
    averages = {} if pair.ema is None else pair.ema.state_dict()["averages"]
    result: dict[str, Any] = {}
    for group in pair.groups:
        example_state = state_after_a_step(pair.optimizer.inner, group, _device(pair))[0]
        if not is_loading and group.get("step") is not None:
            steps.add(float(group["step"]))
        for member in pair.members(group):
            param, spec = described[member.name], pair.optimizer.spec_of_state(member.name, member.spec.shape)
            assert spec is not None
            param_of_state = param
            if pair.optimizer.owned(member.name) is not None:  # all rows of the state are on the owner
                param_of_state = described_in_full[member.name] if spec.rows else replace(param, pieces=())
            values = _state_rows(member, spec, state, example_state, steps, is_loading=is_loading)
            entries = {
                key: param_of_state.entry(value, prefix=f"optimizer.state.{key}.", spec=spec)
                for key, value in values.items()
            }
            rows = _other_rows(member, averages, kind)
            if is_loading:
                rows = {key: torch.empty_like(member.master) for key in rows}
            entries |= {key: param.entry(value, prefix=f"optimizer.state.{key}.") for key, value in rows.items()}
            if entries:  # an empty dict would count as common state, which must not differ between ranks
                result[_state_key(index, member)] = entries
    return result


def _refuse_shared_state(pair: ChunkOptimizer) -> None:
    if shared := pair.optimizer.shared_state():
        raise NotImplementedError(
            f"the optimizer has state under {next(iter(shared))!r}, which is no parameter, so Megatron's format cannot "
            "store it. Use layerzero.megatron.save and load"
        )


def _other_rows(member: ManagedParam, averages: Mapping[str, Tensor], kind: str | None) -> dict[str, Tensor]:
    """Return the rows of a parameter's average and master, if the format stores them."""
    rows: dict[str, Tensor] = {}
    if member.name in averages:
        rows[_AVERAGE] = local_rows(averages[member.name])
    if kind is not None or _master_dtype_differs(member):
        rows["fp32_param" if kind is None else "param"] = member.master
    return rows


def _state_rows(
    member: ManagedParam,
    spec: RowShardSpec,
    states: Mapping[str, Any],
    example_state: Mapping[str, Any],
    steps: set[float],
    *,
    is_loading: bool,
) -> dict[str, Tensor]:
    """Return the rows of each tensor of a parameter's optimizer state, and add its step count to `steps`.

    Args:
        spec: sharding of the tensors. All their rows are on the owner if the parameter has one.
    """
    dtypes = {key: value.dtype for key, value in example_state.items() if isinstance(value, Tensor) and value.ndim}
    has_no_step = bool(example_state) and not states  # or all steps were skipped after overflows
    if is_loading or has_no_step:  # separate memory, so that a failed load changes nothing
        if not is_loading:
            steps.add(0.0)
        shape = (len(spec.rows), *spec.shape[1:])
        return {key: member.master.new_zeros(shape, dtype=dtype) for key, dtype in dtypes.items()}
    # Some optimizers store no state, such as SGD without momentum.
    state = states.get(member.name, None if example_state else {})
    if state is None:
        raise ValueError(
            f"{member.name!r} has not been stepped yet, but Megatron's format has one step count for all parameters. "
            "Save after all parameters have been stepped, or use layerzero.megatron.save"
        )
    rows = {}
    for key, value in state.items():
        if key == "step":
            steps.add(float(value))
        elif isinstance(value, RowShardedTensor) and value.shape == spec.shape:
            rows[key] = local_rows(value)
        elif value is not None:
            raise NotImplementedError(
                f"optimizer state {key!r} of {member.name!r} does not have the parameter's shape, so Megatron's format "
                "cannot store it. Use layerzero.megatron.save and load"
            )
    return rows


def _merge_groups(lists: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups of several chunks or stages, without `params` and `step`.

    Groups with the same identity become one entry.

    Raises:
        ValueError: groups with the same identity have different settings.
    """
    groups_by_identity: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in (group for groups in lists for group in groups):
        settings = {key: _to_number(value) for key, value in group.items() if key not in ("params", "step")}
        if groups_by_identity.setdefault(_group_identity(group), settings) != settings:
            raise ValueError(
                f"two parameter groups with equal {', '.join(_IDENTITY)} have different settings, but Megatron's "
                "format identifies groups only by these values. Use layerzero.megatron.save and load"
            )
    return list(groups_by_identity.values())


def _merge_over_ranks(common: _CommonState, group: dist.ProcessGroup) -> _CommonState:
    """Return the merged unsharded state of all ranks in `group`. The result is the same on all ranks.

    Raises:
        ValueError: parameters have different step counts.
    """
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, common, group=group)
    steps = {step for rank_common in gathered for step in rank_common.steps}
    if len(steps) > 1:
        raise ValueError(
            f"parameters have been stepped {', '.join(f'{step:g}' for step in sorted(steps))} times, but Megatron's "
            "format has one step count for all parameters. Use layerzero.megatron.save and load"
        )
    return _CommonState(
        _merge_groups([rank_common.groups for rank_common in gathered]),
        steps,
        any(rank_common.stores_masters for rank_common in gathered),
    )


# Restoring loaded state


@torch.no_grad()
def load_states(pairs: Sequence[ChunkOptimizer], state: Mapping[Any, Any]) -> None:
    """Load the result of ``megatron.core.dist_checkpointing.load`` into masters, optimizers and EMAs.

    All checks run before any tensor is changed.
    """
    parts = [state[index] for index in sorted(state)] if 0 in state else [state]  # of chained optimizers, or of one
    inner = [part.get("optimizer", part) for part in parts]
    saved = [group for each in inner for group in each["param_groups"]]
    tensors = {name: values for part in parts for name, values in part.get(_TENSORS, {}).items()}
    step = _common_step(inner)
    plans = []
    for index, pair in enumerate(pairs):
        values = _found_values(pair, index, tensors)
        groups = [_loaded_group(pair, group, saved, step, values) for group in pair.optimizer.param_groups]
        plans.append((pair, values, groups))
    for pair, values, groups in plans:
        _load_average(pair.ema, values, parts[0].get(_AVERAGE, {}))
        for member in _all_members(pair):
            for key in _MASTERS:
                if (master := values[member.name].pop(key, None)) is not None:
                    member.sharded.copy_(master)
        stepped = values if step != 0 else {}  # Megatron's format stores zeros before the first step
        pair.optimizer.adopt_state_dict({"state": stepped, "param_groups": groups})


def _load_average(ema: EMA | None, values: Mapping[str, dict[str, Any]], average_state: Mapping[str, Any]) -> None:
    """Load the EMA, and remove the averages from `values`.

    If the checkpoint lacks an average, reset the EMA. The next update of the EMA then copies the weights.
    """
    averages = {name: value.pop(_AVERAGE, None) for name, value in values.items()}
    if ema is None:
        return
    rows = {name: local_rows(average) for name, average in ema.state_dict()["averages"].items()}
    if any(averages[name] is None for name in rows):
        ema.n_averaged.zero_()
        return
    for name, average in rows.items():
        average.copy_(local_rows(averages[name]))
    ema.n_averaged.fill_(int(average_state.get("n_averaged", 1)))


def _found_values(pair: ChunkOptimizer, index: int, tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the loaded tensors of each parameter, by parameter name and kind of state."""
    found = {}
    for member in _all_members(pair):
        values = tensors.get(_state_key(index, member), {})
        values = {key: value for key, value in values.items() if key != _AVERAGE or value is not NOT_FOUND}
        if missing := sorted(key for key, value in values.items() if value is NOT_FOUND):
            raise ValueError(
                f"the checkpoint has no {', '.join(missing)} of {member.name!r}. Load it without the optimizer"
            )
        found[member.name] = values
    return found


def _loaded_group(
    pair: ChunkOptimizer,
    group: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]],
    step: float | None,
    values: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return a parameter group with the settings of the checkpoint, and add the step count to `values`.

    Raises:
        ValueError: the settings of the checkpoint need state that `values` lacks, such as momentum buffers. State may
            be missing if the optimizer was built with settings for which it does not store this state.
    """
    settings = _saved_settings(group, saved)
    names = pair.optimizer.parameter_names(group)
    example_state, counting = state_after_a_step(pair.optimizer.inner, {**group, **settings}, _device(pair))
    tensors = {key for key, value in example_state.items() if isinstance(value, Tensor) and value.ndim}
    for name in names:
        if missing := sorted(tensors - values[name].keys()):
            changed = {key: value for key, value in settings.items() if group[key] != value}
            raise ValueError(
                f"the settings of the checkpoint need {', '.join(missing)} of {name!r}, which the optimizer does not "
                f"store with its current settings. Build the optimizer with the settings of the checkpoint: {changed}"
            )
        if step is not None and "step" in example_state:
            values[name]["step"] = _convert_step(example_state["step"], step)
    loaded = {**group, **settings, "params": names}
    if step is not None and "step" in counting:
        loaded["step"] = _convert_step(counting["step"], step)
    return loaded


def _common_step(inner: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the step count in the states of one or several chained optimizers; None if they have none."""
    counts = {float(group["step"]) for each in inner for group in each["param_groups"] if group.get("step") is not None}
    common = [each.get("state", {}).get("common_step") for each in inner]
    counts |= {float(count) for count in common if count is not None}
    if len(counts) > 1:
        raise ValueError(
            f"the parameter groups of the checkpoint have different step counts, {sorted(counts)}, but layerzero needs "
            "one step count"
        )
    return next(iter(counts), None)


def _saved_settings(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the saved settings for `group`, taken from the saved group with the same identity."""
    matching = [
        {key: value for key, value in other.items() if key in group and key not in ("params", "step", *_HOW)}
        for other in saved
        if _group_identity(other) == _group_identity(group)
    ]
    identity = ", ".join(f"{key}={group.get(key)!r}" for key in _IDENTITY)
    if not matching:
        raise ValueError(f"the checkpoint has no parameter group with {identity}. Build the optimizer as for the save")
    if any(settings != matching[0] for settings in matching):
        raise ValueError(
            f"the checkpoint has parameter groups with {identity}, but different settings. Load only the model"
        )
    return matching[0]


_HOW = ("foreach", "fused", "capturable")  # settings that select an implementation; a load does not change them


def _convert_step(example: Any, step: float) -> Any:
    """Return `step` converted to the type of `example`, which is a tensor or a number."""
    return torch.full_like(example, step) if isinstance(example, Tensor) else type(example)(step)


# Helpers for saving and loading


def _all_members(pair: ChunkOptimizer) -> Iterator[ManagedParam]:
    return (member for group in pair.optimizer.param_groups for member in pair.members(group))


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _state_key(index: int, member: ManagedParam) -> str:
    return f"{index}.{member.name}"


def _group_identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    # In Megatron-Core 0.16, groups of Muon and of AdamW differ in no key of _IDENTITY.
    return (is_matrix_group(group), *(group.get(key) for key in _IDENTITY))


def _master_dtype_differs(member: ManagedParam) -> bool:
    return member.gathered.dtype != member.master.dtype


def _device(pair: ChunkOptimizer) -> torch.device:
    return get_state(pair.chunk).mesh_info.device
