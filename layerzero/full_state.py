"""Gather full parameters in the masters' precision, to inspect, edit, save, load or evaluate them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from layerzero.comm.agreement import agreed, require_equal
from layerzero.comm.model_ranks import ModelRanks
from layerzero.dtensor.full_tensor import rows_of
from layerzero.dtensor.local_shard import find_local_shard, plain
from layerzero.dtensor.model_parallel_spec import local_part
from layerzero.dtensor.row_shard_spec import refuse_rank_local
from layerzero.engine.call_context import in_backward
from layerzero.engine.hooks import get_state, get_states, managed_params_in
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.model_status import ParamView, active_view
from layerzero.engine.module_buffers import in_original_dtype, original_dtypes
from layerzero.engine.state import LayerZeroState
from layerzero.utils.bit_sums import digest


class _Options(NamedTuple):
    """Keyword arguments of :func:`unsharded`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    @property
    def call(self) -> str:
        """The call in messages."""
        return f"unsharded({', '.join(f'{name}=True' for name, value in self._asdict().items() if value)})"


@contextmanager
def unsharded(
    module: nn.Module,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context manager that replaces sharded parameters with full, plain ``nn.Parameter``s in the masters' dtype.

    The context is the counterpart of FSDP1's ``summon_full_params``. All ranks must enter the context together, between
    passes. The context needs memory for the full parameters inside `module`. If the full model does not fit in memory,
    pass one unit at a time. Parameters are gathered one at a time. Parameters that are sharded by tensor or expert
    parallelism remain DTensors on the model-parallel mesh.

    A forward of `module` inside the context uses these parameters without communication, so a single rank may run it.
    The forward must run under ``torch.no_grad()``. Inputs that `mp_policy` would cast are cast to the masters' dtype
    instead. Outputs are not cast to a narrower dtype. The forward of a unit with sharded parameters raises an error.

    Args:
        module: a sharded model, a module inside it (a unit, a part of a unit, or a module that contains units), or a
            module that contains sharded models. A tied parameter is full in all modules that use it.
        writeback: write changes that are made inside the context to the masters. Every rank must make the same changes.
            With `rank0_only`, the first rank's changes are sent to the other ranks.
        rank0_only: unshard the parameters on the first rank only. On the other ranks they stay sharded.
        offload_to_cpu: copy the parameters, and the gradients of `with_grads`, to host memory, one at a time.
        with_grads: set the ``.grad`` of each parameter to its full gradient, averaged over the ranks, in the
            parameter's shape and dtype, or to None. With `writeback`, changes to ``.grad`` are also written back.

    Raises:
        TypeError, ValueError: no parameter inside `module` is sharded; or ranks pass different arguments; or
            `rank0_only` is set and model parallelism shards a parameter; or `offload_to_cpu` is set and a parameter is
            a DTensor on a device mesh; or `writeback` is set and ranks make different changes, which are then not
            written.
        RuntimeError: a parameter is already unsharded; or `with_grads` is set and gradients are not reduced yet.

    Example::

        with layerzero.unsharded(model.embed, writeback=True), torch.no_grad():
            model.embed.weight[pad_id].zero_()

        for block in model.blocks:  # needs memory for one block, on the first rank
            with layerzero.unsharded(block, rank0_only=True, offload_to_cpu=True, with_grads=True):
                if dist.get_rank() == 0:
                    print(block.mlp.weight.norm(), block.mlp.weight.grad.norm())
    """
    options = _Options(writeback, rank0_only, offload_to_cpu, with_grads)
    with ExitStack() as stack:
        for lz_state, members in managed_params_in(module).items():
            stack.enter_context(_unsharded(lz_state, module, members, options))
        yield


@contextmanager
def _unsharded(
    lz_state: LayerZeroState, module: nn.Module, members: Sequence[ManagedParam], options: _Options
) -> Iterator[None]:
    """Implement :func:`unsharded` for the parameters `members` of one model."""
    modules = set(module.modules())
    gradients = _check_ranks_and_get_gradients(lz_state, module, members, options)
    keeps = lz_state.ranks.is_first or not options.rank0_only
    buffers = [buffer for buffer in lz_state.cast_buffers if keeps and buffer.module() in modules]
    parameters: dict[ManagedParam, nn.Parameter] = {}
    for member in members:
        parameter = _full_parameter(member, member.master.detach(), options)
        if (gradient := gradients.get(member)) is not None:
            parameter.grad = _full_parameter(member, plain(gradient), options).detach()
        if keeps:
            parameters[member] = parameter
        del parameter  # frees its memory before the next parameter is gathered
    with _installed(lz_state, members, parameters), in_original_dtype(buffers):
        try:
            yield
        except Exception as error:
            if options.writeback and options.rank0_only:  # the other ranks wait for a broadcast from this rank
                require_equal(options.call, {}, ranks=lz_state.ranks.ranks, failure=error)
            raise
        if options.writeback:
            parameters = _agree_on_edits(lz_state, parameters, options)
    if options.writeback:
        _write_back(lz_state, members, parameters, options)


@contextmanager
def _installed(
    lz_state: LayerZeroState, members: Sequence[ManagedParam], parameters: Mapping[ManagedParam, nn.Parameter]
) -> Iterator[None]:
    """Context manager in which the modules have `parameters`, the full parameters of `members`.

    `parameters` is empty on ranks that keep the sharded parameters.
    """
    keeps = bool(parameters)
    _install_params(parameters)
    lz_state.status.unsharded |= dict.fromkeys(members, keeps)
    try:
        with active_view(lz_state.status.active_views, ParamView.UNSHARDED):
            yield
    finally:
        for member in members:
            del lz_state.status.unsharded[member]
        if keeps:
            _install_params({member: member.sharded for member in members})


def _check_ranks_and_get_gradients(
    lz_state: LayerZeroState, module: nn.Module, members: Sequence[ManagedParam], options: _Options
) -> dict[ManagedParam, Tensor]:
    """Check that all ranks enter the context for the same parameters, and return the sharded gradients.

    If ``options.with_grads`` is False, return an empty dict.
    """
    lz_state.scheduler.recover_interrupted_pass()
    subject, model_ranks = options.call, lz_state.ranks
    gradients: dict[ManagedParam, Tensor] = {}
    groups: dict[str, dict[str, object]] = {}
    path = next(
        (name for name, submodule in lz_state.model.named_modules() if submodule is module), type(module).__name__
    )
    fields = {"module": path, "parameters": len(members), **options._asdict()}
    with agreed("unsharded", fields, ranks=model_ranks.ranks, groups=groups):
        lz_state.refreshes.require_no_active_use("layerzero.unsharded")
        lz_state.status.refuse_inside(
            ParamView.FULL_PRECISION, what="layerzero.unsharded", why="which gathers parameters unit by unit"
        )
        if open_already := [member.name for member in members if member in lz_state.status.unsharded]:
            raise RuntimeError(
                f"layerzero.unsharded is already active for parameter {open_already[0]!r} ({len(open_already)} of "
                f"{len(members)}). Leave that context first, or nest contexts for modules that share no parameter"
            )
        if options.rank0_only:
            _refuse_parts(subject, members, model_ranks.size)
        if options.offload_to_cpu:
            _refuse_dtensors(subject, members)
        if options.with_grads:
            gradients = _final_gradients(lz_state, subject, members)
            groups |= _group_values(
                lz_state, members, lambda member: {" .grad": "present" if member in gradients else "None"}
            )
    return gradients


def _refuse_parts(subject: str, members: Sequence[ManagedParam], num_model_ranks: int) -> None:
    refuse_rank_local(subject, (member.spec for member in members), num_model_ranks)
    if cut := [m.name for m in members if m.spec.model_parallel is not None and m.spec.model_parallel.is_sharded]:
        raise ValueError(
            f"{subject}: parameter {cut[0]!r} ({len(cut)} like it) is sharded by tensor or expert parallelism, so the "
            "first rank has only a part of it. Leave rank0_only out, or use layerzero.full_state_dict(model)"
        )


def _refuse_dtensors(subject: str, members: Sequence[ManagedParam]) -> None:
    for member in members:
        model_parallel = member.spec.model_parallel
        if model_parallel is not None and model_parallel.is_dtensor and model_parallel.mesh.device_type != "cpu":
            raise ValueError(
                f"{subject}: parameter {member.name!r} is a DTensor on a mesh of {model_parallel.mesh.device_type} "
                "devices, so it cannot be in host memory. Leave offload_to_cpu out, or use "
                "layerzero.full_state_dict(model)"
            )


def _final_gradients(
    lz_state: LayerZeroState, subject: str, members: Sequence[ManagedParam]
) -> dict[ManagedParam, Tensor]:
    """Return the sharded ``.grad`` of the members that have a gradient."""
    lz_state.gradients.apply_user_grads()  # raises if a backward pass has failed
    final = {}
    for member in members:
        gradient = member.sharded.grad
        if gradient is None:
            continue
        local = find_local_shard(gradient)
        if local is not None and local.tracker.access_error is not None:
            raise RuntimeError(
                f"{subject}: the gradient of parameter {member.name!r} is not final: {local.tracker.access_error}"
            )
        final[member] = gradient
    return final


def _full_parameter(member: ManagedParam, rows: Tensor, options: _Options) -> nn.Parameter:
    """Gather a parameter or its gradient over the data-parallel ranks. It stays sharded along model-parallel axes."""
    with torch.no_grad():
        rows = member.spec.gather(rows)
        rows = rows.cpu() if options.offload_to_cpu else rows
    parameter = (
        nn.Parameter(rows) if member.spec.model_parallel is None else member.spec.model_parallel.to_module_param(rows)
    )
    parameter.requires_grad_(False)
    return parameter


def _write_back(
    lz_state: LayerZeroState,
    members: Sequence[ManagedParam],
    parameters: Mapping[ManagedParam, nn.Parameter],
    options: _Options,
) -> None:
    """Copy this rank's rows of the full parameters and gradients to the masters and the sharded gradients."""
    handles = [handle for handle in lz_state.handles if not set(members).isdisjoint(handle.members)]
    lz_state.refreshes.before_master_write(handles)
    for member in members:
        _write_rows(member, _full_value(lz_state, member, parameters.get(member), options))
    lz_state.refreshes.launch(handles)
    if not options.with_grads:
        return
    have_gradient = [member in parameters and parameters[member].grad is not None for member in members]
    if options.rank0_only:
        flags = torch.tensor(have_gradient, dtype=torch.uint8, device=lz_state.mesh_info.device)
        lz_state.ranks.broadcast(flags)
        have_gradient = flags.bool().tolist()
    for member, has_gradient in zip(members, have_gradient, strict=True):
        if not has_gradient:
            member.sharded.grad = None
            continue
        gradient = parameters[member].grad if member in parameters else None
        full = _full_value(lz_state, member, gradient, options)
        if member.sharded.grad is None:
            member.sharded.grad = torch.zeros_like(member.sharded.detach())
        with torch.no_grad():
            member.sharded.grad.to_local().copy_(rows_of(full, member.spec))  # type: ignore[attr-defined]


def _full_value(lz_state: LayerZeroState, member: ManagedParam, full: Tensor | None, options: _Options) -> Tensor:
    """Return a full parameter or gradient. With ``options.rank0_only``, only the first rank passes it to the others."""
    if not options.rank0_only:
        assert full is not None
        return full.detach()
    received = torch.empty(member.spec.full_shape, dtype=member.master.dtype, device=member.spec.mesh_info.device)
    if full is not None:
        received.copy_(full.detach())
    lz_state.ranks.broadcast(received)
    return received


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Context manager in which forward passes use the masters' precision, with parameters gathered unit by unit.

    Use this context to get the results of an fp32 evaluation in a single process. Unlike :func:`unsharded`, it does not
    need memory for the full model. The context is the counterpart of FSDP1's ``FSDP_USE_FULL_PREC_IN_EVAL``. Before its
    forward, each unit is gathered from the ZeRO-1 shards of all data-parallel ranks. The gather sends 4 bytes per fp32
    element, which :func:`traffic` counts as ``unshard``. The gathered weights are freed after the forward. `prefetch`
    units are gathered ahead. Units that already compute in the masters' dtype are gathered from their ZeRO-3 shards.

    Inputs that `mp_policy` would cast are cast to the dtype that the unit's parameters have in this context. Outputs
    are not cast to a narrower dtype. Buffers that `buffer_dtype` has cast have their original dtype, but their values
    stay rounded. Forward passes must run under ``torch.no_grad()``. All ranks must enter the context together, between
    passes. They must call the same units in the same order, even if they share memory. The context does not affect
    later training: its results are bitwise equal to those of training without the context.

    Args:
        model: a sharded model.

    Raises:
        ValueError: the class of a parameter has an all-gather extension.
        RuntimeError: the context is entered inside a backward pass, :func:`unsharded` or another ``full_precision`` of
            the same model; or a forward with gradients or a backward pass runs inside the context; or ranks call units
            in different orders.

    Example::

        model.eval()
        with layerzero.full_precision(model), torch.no_grad():
            loss = evaluate(model)
    """
    lz_state = get_state(model)
    with agreed("full_precision", {}, ranks=lz_state.ranks.ranks):
        _refuse_full_precision(lz_state)
    lz_state.scheduler.set_full_precision(True)
    try:
        with (
            active_view(lz_state.status.active_views, ParamView.FULL_PRECISION),
            in_original_dtype(lz_state.cast_buffers),
        ):
            yield
    finally:
        lz_state.scheduler.set_full_precision(False)


def _refuse_full_precision(lz_state: LayerZeroState) -> None:
    """Raise an error if this rank cannot enter :func:`full_precision`.

    Raises:
        RuntimeError: a backward pass is running, a weight stream is active, or a context of layerzero other than
            ``EMA.swapped`` is active.
        ValueError: a parameter has an all-gather extension.
    """
    lz_state.refreshes.require_no_active_use("layerzero.full_precision")
    lz_state.status.refuse_inside(ParamView.UNSHARDED, ParamView.FULL_PRECISION, what="layerzero.full_precision")
    if in_backward():
        raise RuntimeError(
            "layerzero.full_precision was called during a backward, which needs the gathered weights. Call it after "
            "the backward"
        )
    if extended := [handle.members[0].name for handle in lz_state.handles if handle.extension_memory is not None]:
        raise ValueError(
            f"layerzero.full_precision: parameter {extended[0]!r} ({len(extended)} like it) has an all-gather "
            "extension, which determines the precision of its gathers. Evaluate inside layerzero.unsharded(model), "
            "where parameters have the precision of the masters"
        )


def full_state_dict(
    model: nn.Module, *, cpu: bool = True, rank0_only: bool = True, trainable_only: bool = False
) -> dict[str, Tensor]:
    """Return the full state dict, with the same names, shapes and tied entries as the unsharded model's state dict.

    Parameters are gathered one at a time, in the masters' precision. All ranks must call this function. Buffers that
    `buffer_dtype` has cast have their original dtype and the cast values.

    Args:
        model: a sharded model, or a module that contains sharded models on the same ranks.
        cpu: copy the tensors to host memory.
        rank0_only: return the state dict on the first rank only, and ``{}`` on all other ranks.
        trainable_only: return only parameters that require gradients, such as adapters without their base model.
            Buffers are omitted.

    Raises:
        ValueError: `trainable_only` is set and different parameters are frozen on different ranks, or `model` contains
            sharded models on different ranks.
    """
    lz_states = get_states(model)
    model_ranks = _common_ranks(lz_states)
    by_parameter = {id(m.sharded): m for each in lz_states.values() for m in each.members.values()}
    refuse_rank_local("full_state_dict", (member.spec for member in by_parameter.values()), model_ranks.size)
    keeps = not rank0_only or model_ranks.is_first
    values = model.state_dict(keep_vars=True)
    if trainable_only:
        values = {name: v for name, v in values.items() if isinstance(v, nn.Parameter) and v.requires_grad}
        require_equal("full_state_dict(trainable_only=True)", {"trainable": sorted(values)}, ranks=model_ranks.ranks)
    dtypes = original_dtypes(buffer for each in lz_states.values() for buffer in each.cast_buffers)
    full_tensors: dict[int, Tensor] = {}  # by id of the sharded parameter, which may have several names
    state: dict[str, Tensor] = {}
    for name, value in values.items():
        member = by_parameter.get(id(value))
        if member is None:
            full = _copy_unmanaged(value, dtypes.get(id(value)), cpu=cpu, keeps=keeps)
        elif id(value) in full_tensors:
            full = full_tensors[id(value)]
        else:
            full = full_tensors[id(value)] = _gather_full(member, cpu=cpu, keeps=keeps)
        if keeps:
            state[name] = full
    return state


def _common_ranks(lz_states: Mapping[str, LayerZeroState]) -> ModelRanks:
    """Return the ranks of several models, by path. Raise ValueError if the models are on different ranks."""
    first, *others = (lz_state.ranks for lz_state in lz_states.values())
    if any(each.ranks != first.ranks for each in others):
        ranks = ", ".join(f"{path!r} on ranks {list(each.ranks.ranks)}" for path, each in lz_states.items())
        raise ValueError(
            f"full_state_dict: the module contains sharded models on different ranks: {ranks}. Call it for each of "
            "these models"
        )
    return first


def _gather_full(member: ManagedParam, *, cpu: bool, keeps: bool) -> Tensor:
    """Return a full parameter. If `keeps` is False, this rank only sends its part, and the result is empty."""
    gathered = member.spec.gather_full(member.master.detach())
    if not keeps:
        return gathered.new_empty(0)
    return gathered.cpu() if cpu else gathered


@torch.no_grad()
def _copy_unmanaged(value: Any, dtype: torch.dtype | None, *, cpu: bool, keeps: bool) -> Any:
    """Return a full copy of a value in a state dict that is not a sharded parameter.

    Args:
        dtype: original dtype of a buffer that `buffer_dtype` has cast, otherwise None.
        keeps: if False, the result is not used, and only values that need other ranks are copied.
    """
    if isinstance(value, DTensor):  # of another framework; all of its ranks call this function
        value = value.full_tensor()
    if not keeps or not isinstance(value, Tensor):
        return value
    copy = value.detach().to(value.dtype if dtype is None else dtype, copy=True)
    return copy.cpu() if cpu else copy


class IncompatibleKeys(NamedTuple):
    """Names that a load could not match, in the form that ``nn.Module.load_state_dict`` returns."""

    missing_keys: list[str]  # in the model, but not in the state dict
    unexpected_keys: list[str]  # in the state dict, but not in the model


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True
) -> IncompatibleKeys:
    """Load a state dict from :func:`full_state_dict`, or from the unsharded model's ``state_dict()``.

    All ranks must call this function. They load the first rank's state dict, so the other ranks may pass ``{}`` or
    None. Optimizer state is not changed. For a tied parameter, one of its names is sufficient.

    Args:
        model: a sharded model.
        state_dict: full tensors by name.
        strict: if True, raise an error for missing or unexpected names. Otherwise load the names that match.

    Returns:
        The missing and unexpected names, which are the same on all ranks.

    Raises:
        ValueError: shapes are wrong or, if `strict` is True, names are missing or unexpected. The message lists all
            problems, and the model is not changed. The other ranks raise RuntimeError with the same text.
    """
    lz_state = get_state(model)
    model_ranks = lz_state.ranks
    refuse_rank_local("load_full_state_dict", (member.spec for member in lz_state.members.values()), model_ranks.size)
    state = dict(state_dict or {}) if model_ranks.is_first else {}
    targets = model.state_dict(keep_vars=True)
    names_of: dict[int | str, list[str]] = {}  # by target; a tied parameter has several names
    for name, target in targets.items():
        names_of.setdefault(id(target) if isinstance(target, Tensor) else name, []).append(name)
    left_out = _agree_on_names(model_ranks, targets, names_of.values(), state, strict=strict)

    members = {id(member.sharded): member for member in lz_state.members.values()}
    lz_state.refreshes.before_master_write()
    for names in names_of.values():
        target = targets[names[0]]
        if isinstance(target, Tensor) and names[0] not in left_out.missing_keys:
            source = next((state[name] for name in reversed(names) if name in state), None)
            _load_from_first(model_ranks, target, members.get(id(target)), source)
    lz_state.refreshes.launch()
    return left_out


def _agree_on_names(
    model_ranks: ModelRanks,
    targets: Mapping[str, object],
    tied: Iterable[Sequence[str]],
    state: Mapping[str, Tensor],
    *,
    strict: bool,
) -> IncompatibleKeys:
    """Return the names that the first rank's `state` and the model do not share, on all ranks.

    Args:
        targets: entries of the model's state dict.
        tied: names of each of `targets`; one of them is sufficient.

    Raises:
        ValueError: see :func:`load_full_state_dict`. The other ranks raise RuntimeError.
    """
    missing = [name for names in tied if not state.keys() & set(names) for name in names]
    left_out = IncompatibleKeys(missing, [name for name in state if name not in targets])
    first = model_ranks.is_first
    with agreed("load_full_state_dict", {"strict": strict}, ranks=model_ranks.ranks):
        if first and (problems := [*(_key_problems(left_out) if strict else ()), *_shape_problems(targets, state)]):
            raise ValueError("load_full_state_dict: " + "; ".join(problems))
    if strict:
        return IncompatibleKeys([], [])
    names_of_first = model_ranks.all_gather_text(json.dumps(left_out) if first else "")[0]
    return IncompatibleKeys(*json.loads(names_of_first))


@torch.no_grad()
def _load_from_first(
    model_ranks: ModelRanks, target: Tensor, member: ManagedParam | None, source: Tensor | None
) -> None:
    """Copy the first rank's `source` to a sharded parameter, if `member` is given, or to another tensor."""
    dtype = target.dtype if member is None else member.master.dtype
    full = torch.empty(target.shape, dtype=dtype, device=model_ranks.mesh_info.device)
    if source is not None:
        full.copy_(source)
    model_ranks.broadcast(full)
    if member is not None:
        _write_rows(member, full)
    elif isinstance(target, DTensor):  # a DTensor of another framework
        target.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(full)


def _key_problems(left_out: IncompatibleKeys) -> list[str]:
    kinds = zip(("missing", "unexpected"), left_out, strict=True)
    return [f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds if names]


def _shape_problems(targets: Mapping[str, object], state: Mapping[str, object]) -> list[str]:
    problems = []
    for name in sorted(targets.keys() & state.keys()):
        target, value = targets[name], state[name]
        if isinstance(target, Tensor):
            actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if actual != list(target.shape):
                problems.append(f"{name}: expected shape {list(target.shape)}, got {actual}")
            elif isinstance(value, DTensor):
                problems.append(f"{name}: got a DTensor, of which this rank has a part; pass full tensors")
            elif isinstance(value, Tensor) and value.is_meta:
                problems.append(f"{name}: got a tensor on meta, which has no values; load it first")
    return problems


def _agree_on_edits(
    lz_state: LayerZeroState, parameters: Mapping[ManagedParam, nn.Parameter], options: _Options
) -> dict[ManagedParam, nn.Parameter]:
    """Return the parameters that the model has now. The user may have replaced some of `parameters`.

    Raise an error on all ranks if ranks with the same part of a parameter have made different changes, or if a rank has
    assigned a tensor of a different shape.
    """
    groups: dict[str, dict[str, object]] = {}
    with agreed(options.call, {}, ranks=lz_state.ranks.ranks, groups=groups):
        edited = {member: _current_param(member, parameter) for member, parameter in parameters.items()}
        if not options.rank0_only:
            groups |= _group_values(lz_state, edited, lambda member: _digests_of(edited[member], options))
    return edited


def _digests_of(parameter: nn.Parameter, options: _Options) -> dict[str, str]:
    digests = {"": digest(local_part(parameter))}
    if options.with_grads:
        digests[" .grad"] = "None" if parameter.grad is None else digest(local_part(parameter.grad))
    return digests


def _group_values(
    lz_state: LayerZeroState,
    members: Iterable[ManagedParam],
    values_of: Callable[[ManagedParam], Mapping[str, object]],
) -> dict[str, dict[str, object]]:
    """Return the argument `groups` of :func:`require_equal`, which compares values of each parameter.

    Parameters with the same mesh and the same model-parallel part form a group. `values_of` returns the values of a
    parameter, by suffix of its name.
    """
    meshes = list(dict.fromkeys(unit.mesh_info for unit in lz_state.units))
    groups: dict[str, dict[str, object]] = {}
    for member in members:
        mesh_info, model_parallel = member.spec.mesh_info, member.spec.model_parallel
        part = (
            mesh_info.ranks if model_parallel is None else (model_parallel.part_coordinates, model_parallel.placements)
        )
        values = {member.name + suffix: value for suffix, value in values_of(member).items()}
        groups.setdefault(f"{meshes.index(mesh_info)}: {part}", {}).update(values)
    return groups


def _install_params(parameters: Mapping[ManagedParam, nn.Parameter]) -> None:
    for member, parameter in parameters.items():
        for module_parameters, attribute in member.module_refs:
            module_parameters[attribute] = parameter


def _current_param(member: ManagedParam, unsharded_param: nn.Parameter) -> nn.Parameter:
    """Return `unsharded_param`, or the parameter that the user has assigned in its place."""
    tied = [parameters.get(attribute) for parameters, attribute in member.module_refs]
    replacements = {id(parameter): parameter for parameter in tied if parameter is not unsharded_param}
    if len(replacements) > 1:
        raise ValueError(
            f"{member.name!r} is tied in {len(tied)} places, which have different tensors inside unsharded. Change it "
            "in place, or assign the same parameter in all of these places"
        )
    parameter: nn.Parameter | None = next(iter(replacements.values()), unsharded_param)
    tensors = (None,) if parameter is None else tuple(t for t in (parameter, parameter.grad) if t is not None)
    for tensor in tensors:
        if tensor is None or tuple(tensor.shape) != member.spec.full_shape:
            shape = None if tensor is None else list(tensor.shape)
            raise ValueError(
                f"{member.name!r} must have its original shape {list(member.spec.full_shape)} inside unsharded, got "
                f"{shape}. Assign a tensor of that shape"
            )
    assert parameter is not None
    return parameter


@torch.no_grad()
def _write_rows(member: ManagedParam, full: Tensor) -> None:
    member.master.copy_(rows_of(full, member.spec))
