"""Compatibility trials that compare an optimizer's step on sharded or owned parameters with a step on full ones.

A copy of the optimizer steps small full parameters together. Then one copy per simulated rank steps only the rows or
parameters of that rank. In the first trial, a rank has several rows, one row or no rows of each parameter, as with
:func:`shard_model`. In the second trial, each full parameter has an owner rank, which steps the parameter separately.
The last rank owns no parameters.

The scale of the gradients varies by orders of magnitude. Some gradients are zero. The average direction of the
gradients is constant, so that an optimizer's estimates of a distance or a learning rate change during the trial.
Afterwards, the parameters and all scalars in the optimizer's state must agree. Scalars are compared because a scalar
that is computed from all elements differs between ranks long before the parameters differ.

[Note: Copies of optimizers]
torch's ``Optimizer.__getstate__`` returns only defaults, state and groups. ``copy.copy`` and ``copy.deepcopy`` drop all
other attributes, but most third-party optimizers have such attributes. Therefore the attributes are deep-copied one by
one. The memo dict of ``copy.deepcopy`` maps the original's parameters and state to the new ones, so that attributes
that refer to them are not copied again.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType, NoneType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.stale_parameter import current
from layerzero.optimizers.apex import apex_class, with_preparation
from layerzero.optimizers.placeholders import placeholder
from layerzero.optimizers.wrapped_optimizer import HOOKS, replace_params, unwrap_step
from layerzero.utils.add_ons import addon
from layerzero.utils.torch_compat import has_imported_dynamo, tree_leaves, tree_structure

_Turn = tuple[dict[str, Any], Tensor]  # (group of the optimizer, parameter to step with the group's settings)

_RANKS = 4
_STEPS = 24  # more than the warm-ups and intervals of common defaults
_SEED = 20
# Optimizers may factor moments from 16 or 128 elements per side, or quantize state in blocks from 4096 elements. This
# shape exceeds all of these, its size is a multiple of common blocks, and no cut between its rows is.
_LARGE = (256, 129)
# Maps the shape of each parameter to its row bounds for ranks 0 to 3. Some ranks get a single row or none.
_CUTS: dict[tuple[int, ...], tuple[int, ...]] = {
    (7, 6): (0, 3, 4, 4, 7),
    (9,): (0, 0, 4, 5, 9),
    (4, 3, 2): (0, 1, 1, 4, 4),
    (1, 5): (0, 0, 0, 1, 1),
    (3, 2, 2, 2): (0, 1, 2, 2, 3),
    (2, 4): (0, 0, 1, 2, 2),
    (): (0, 0, 1, 1, 1),
    _LARGE: (0, 61, 61, 245, 256),
}
_MOST_KINDS = 16  # maximum number of kinds of groups in a trial that are distinguished by attributes
_LEAST_RATE = 1e-3  # minimum learning rate; a schedule may start at 0, where parameters do not change
_SAVABLE = (Tensor, bool, int, float, str, NoneType, torch.dtype)  # types in state and settings, in any nesting
_Shapes = list[tuple[int, ...]]
_Groups = Sequence[
    tuple[Mapping[str, Any], Sequence[Tensor]]
]  # (group of the optimizer, parameters that replace its own)
_NOT_THE_USERS = {"gathered", "_is_param", "main_grad", "grad_added_to_main_grad"}  # attributes of sharded parameters
# Types of resources outside of the optimizer. A copy refers to the same objects as the original.
_SHARED = (ModuleType, dist.ProcessGroup, DeviceMesh, torch.Stream, torch.Event)


class TrialError(Exception):
    """Error that prevents a compatibility trial. The optimizer's compatibility remains unknown."""


class _SmallParam(NamedTuple):
    """Small parameter of a trial, or the rows of it that one simulated rank has."""

    group: int  # index of the parameter's group
    position: int  # position of the parameter in its group
    cuts: tuple[int, ...]  # row bounds
    start: Tensor
    gradients: list[Tensor]  # by step
    is_owned: bool = False  # False: each simulated rank steps its rows

    @property
    def owner(self) -> int:
        """Simulated rank that steps the parameter if it is owned. The last rank owns no parameters."""
        return self.position % (_RANKS - 1)

    def rows_of_rank(self, rank: int) -> _SmallParam:
        """Return the rows of one rank, or the parameter itself if it is owned."""
        if self.is_owned:
            return self
        start, *gradients = (
            (tensor if tensor.ndim else tensor.reshape(1))[self.cuts[rank] : self.cuts[rank + 1]]
            for tensor in (self.start, *self.gradients)
        )
        return self._replace(start=start, gradients=gradients)


class _Outcome(NamedTuple):
    parameters: list[Tensor]
    numbers: dict[str, float]  # scalars in the optimizer, by a description of their location
    states: list[Any]  # by parameter


def find_row_difference(optimizer: Optimizer, device: torch.device, kind: str | None = None) -> str | None:
    """Describe how the optimizer's step on rows differs from its step on full parameters, or return None if they agree.

    The optimizer, its parameters and torch's random number generators are not changed.

    Args:
        kind: kind of the groups in the trial. If `kind` is None, the trial has groups of all kinds.

    Raises:
        TrialError: copying the optimizer or stepping the copy failed.
    """
    groups = [group for group in _one_group_per_kind(optimizer) if kind in (None, group_kind(group))]
    if not groups:
        return None
    small = _make_params(device, _small_shapes(optimizer, groups))
    difference = _try_ranks(optimizer, device, groups, small)
    if difference is not None:
        return difference
    return _try_ranks(optimizer, device, groups, _make_params(device, [[_LARGE]] * len(groups), _STEPS // 2))


def find_owner_difference(optimizer: Optimizer, device: torch.device, full_param_kinds: Set[str]) -> str | None:
    """Describe how the step differs if owner ranks update the parameters, or return None if the results agree.

    Args:
        full_param_kinds: kinds of groups whose parameters have owners. Other parameters are split into rows.

    Raises:
        TrialError: copying the optimizer or stepping the copy failed, even with parameters that have the same number
            of dims as the optimizer's parameters.
    """
    groups = _one_group_per_kind(optimizer)
    small, fitting = _small_shapes(optimizer, groups), _small_shapes(optimizer, groups, only_fitting=True)

    def difference(shapes: Sequence[_Shapes]) -> str | None:
        parameters = [
            each._replace(is_owned=group_kind(groups[each.group]) in full_param_kinds)
            for each in _make_params(device, shapes)
        ]
        return _try_ranks(optimizer, device, groups, parameters)

    try:
        return difference(small)
    except TrialError:
        if fitting == small:
            raise
    return difference(fitting)


def _try_ranks(
    optimizer: Optimizer, device: torch.device, groups: Sequence[dict[str, Any]], parameters: Sequence[_SmallParam]
) -> str | None:
    """Describe how steps of the simulated ranks differ from steps on full parameters, or return None if they agree."""
    with _isolated(device):
        full = _run_full(optimizer, groups, parameters)
        try:
            parts = [[each.rows_of_rank(rank) for each in parameters] for rank in range(_RANKS)]
            ranks = [_run_steps(optimizer, groups, part, rank) for rank, part in enumerate(parts)]
        except Exception as error:
            text = f"it stepped small parameters, but not the parts of simulated ranks: {type(error).__name__}: {error}"
            raise TrialError(text) from error
    difference = _compare(full, ranks, parameters)
    if difference is not None or any(each.is_owned for each in parameters):
        return difference
    return _unsavable(full, parameters, rows=True)


def find_unsavable_state(optimizer: Optimizer, device: torch.device) -> str | None:
    """Describe a setting or an entry in the state that a checkpoint cannot contain, or return None if there is none.

    Raises:
        TrialError: copying the optimizer or stepping the copy failed.
    """
    groups = _one_group_per_kind(optimizer)
    shapes = _small_shapes(optimizer, groups, only_fitting=True)
    small = _make_params(device, shapes)
    large = _make_params(device, [[_LARGE] if (7, 6) in each else each for each in shapes], steps=2)
    with _isolated(device):
        full, full_large = _run_full(optimizer, groups, small), _run_full(optimizer, groups, large)
        try:
            resumed = _run_full(optimizer, groups, small, resumes_at=_STEPS // 2).parameters
        except TrialError:
            resumed = [torch.empty(0)] * len(small)
    problem = _unsavable(full, small, groups) or _unsavable(full_large, large)
    if problem is None and not all(map(torch.equal, full.parameters, resumed)):
        return "a copy with the same state and settings continues differently, so there is state in its attributes"
    return problem


def _unsavable(
    full: _Outcome, parameters: Sequence[_SmallParam], groups: Iterable[Mapping[str, Any]] = (), *, rows: bool = False
) -> str | None:
    """Describe an entry in a parameter's state or in `groups` that a checkpoint cannot contain, or return None.

    If `rows` is True, tensors must have the parameter's shape or no dims, because each rank stores only its rows.
    """
    shapes = [each.start.shape for each in parameters]
    tables = [(f"the state of a parameter of shape {list(s)}", s, t) for s, t in zip(shapes, full.states, strict=True)]
    tables += [("a parameter group", torch.Size(), {**group, "params": None}) for group in groups]
    for location, shape, values in tables:
        for key, value in values.items():
            for leaf in tree_leaves(value, is_leaf=lambda each: type(each) not in (list, tuple, dict)):
                kind = type(leaf)
                if kind not in _SAVABLE and kind.__module__ != "numpy":
                    return f"{key!r} in {location} contains a {kind.__name__}"
                if rows and isinstance(leaf, Tensor) and leaf.ndim and leaf.shape != shape:
                    return f"{key!r} in {location} has shape {list(leaf.shape)}"
    return None


def steps_matrices_separately(optimizer: Optimizer, device: torch.device, dims: int) -> bool:
    """Return whether the optimizer updates each matrix in a stack separately.

    The trial steps the two halves of a stack separately and compares the results with those of a step on the full
    stack. The state of the stack must equal the concatenated states of its halves. The optimizer must also be able to
    step an empty stack, because a rank may have no matrices of a small stack. If the trial fails, return False.

    Args:
        dims: number of dims of the stack.
    """
    groups = _one_group_per_kind(optimizer)
    shapes = [shape for shape in _CUTS if len(shape) == dims]
    if not shapes or apex_class(optimizer) is not None:  # see [Note: Parameters without rows]
        return False
    stacks = [
        stack._replace(cuts=(0, len(stack.start) // 2, len(stack.start), len(stack.start)))
        for stack in _make_params(device, [shapes] * len(groups))
    ]
    with _isolated(device):
        try:
            full = _run_full(optimizer, groups, stacks)
            parts = [[stack.rows_of_rank(part) for stack in stacks] for part in range(3)]
            *halves, _ = [_run_steps(optimizer, groups, part, replaces_empty=False) for part in parts]
            if _compare(full, halves, stacks) is not None:
                return False
            return all(map(_equals_halves, full.states, *(half.states for half in halves)))
        except Exception:
            return False


def _equals_halves(stack: Any, *halves: Any) -> bool:
    """Return whether a stack's state equals the concatenated states of its halves, up to rounding."""
    if any(tree_structure(half) != tree_structure(stack) for half in halves):
        return False
    for whole, *parts in zip(tree_leaves(stack), *map(tree_leaves, halves), strict=True):
        if isinstance(whole, Tensor) and whole.ndim:
            joined = torch.cat([torch.as_tensor(part) for part in parts])
            if joined.shape != whole.shape or not torch.allclose(joined, whole, rtol=1e-3, atol=1e-6):
                return False
        elif isinstance(whole, (int, float, Tensor)):
            if not all(math.isclose(whole, part, rel_tol=1e-4, abs_tol=1e-12) for part in parts):
                return False
        elif any(part != whole for part in parts):
            return False
    return True


def _run_full(optimizer: Optimizer, groups: Sequence[dict[str, Any]], *args: Any, **options: Any) -> _Outcome:
    try:
        return _run_steps(optimizer, groups, *args, **options)
    except Exception as error:
        raise TrialError(f"stepping small parameters raised {type(error).__name__}: {error}") from error


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Context manager that restores random number generators, and disables ``torch.compile``.

    ``torch.compile`` would compile kernels for each small shape. A process that has not imported ``torch._dynamo`` does
    not compile.
    """
    eager = torch.compiler.set_stance("force_eager") if has_imported_dynamo() else nullcontext()
    devices = [] if device.type == "cpu" else [device]
    with eager, torch.random.fork_rng(devices, device_type=device.type):
        yield


def _seed_generators(device: torch.device) -> None:
    """Seed the generators of `device` and the CPU. ``torch.manual_seed`` would also seed devices initialized later."""
    torch.default_generator.manual_seed(_SEED)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(_SEED)


def _small_shapes(
    optimizer: Optimizer, groups: Iterable[Mapping[str, Any]], *, only_fitting: bool = False
) -> list[_Shapes]:
    """Return the shapes of small parameters for each group in a trial.

    There is a shape without dims only if the optimizer has such a parameter in a group of this kind, because many
    optimizers fail on it. If `only_fitting` is True, this applies to any number of dims, unless no shape would be left.
    """
    ndims = {(group_kind(group), current(p).ndim) for group in optimizer.param_groups for p in group["params"]}
    with_dims = [shape for shape in _CUTS if shape and shape != _LARGE]
    fitting = [[each for each in (*with_dims, ()) if (group_kind(group), len(each)) in ndims] for group in groups]
    if only_fitting:
        return [shapes or with_dims for shapes in fitting]
    return [[*with_dims, ()] if () in shapes else with_dims for shapes in fitting]


def _make_params(device: torch.device, shapes: Sequence[_Shapes], steps: int = _STEPS) -> list[_SmallParam]:
    """Return parameters with these shapes, by group, and their gradients: a constant direction and noise."""
    parameters = []
    for group, group_shapes in enumerate(shapes):
        generator = torch.Generator().manual_seed(_SEED)
        start, pull, *noise = (
            [torch.randn(shape, generator=generator) for shape in group_shapes] for _ in range(steps + 2)
        )
        for position, shape in enumerate(group_shapes):
            gradients = []
            for step in range(steps):
                varying = noise[step][position] * 0.1
                gradient = (pull[position] + varying) * 10.0 ** ((step * 5) % 7 - 4)
                if step % 6 == 3:
                    gradient = gradient * (varying > 0)
                if (step + position) % 8 == 4:
                    gradient = torch.zeros_like(gradient)
                gradients.append(gradient.to(device))
            parameters.append(_SmallParam(group, position, _CUTS[shape], start[position].to(device), gradients))
    return parameters


def _one_group_per_kind(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return one parameter group of each kind; see :func:`group_kind`.

    Optimizers often have one group per layer, and these groups differ only in their learning rates. A group whose
    parameters have different attributes is split, because an optimizer may choose its update by an attribute.
    """
    for by_value in ((bool, str), (bool,), ()):  # strings may be different for each parameter, as names are
        kinds: dict[tuple[str, str], dict[str, Any]] = {}
        for group in optimizer.param_groups:
            kind = group_kind(group)
            for parameter in group["params"]:
                key = kind, _attribute_kind(parameter, by_value)
                kinds.setdefault(key, {**group, "params": []})["params"].append(parameter)
        if len(kinds) <= _MOST_KINDS:
            break
    return list(kinds.values())


def _attribute_kind(parameter: Tensor, by_value: tuple[type, ...]) -> str:
    attributes = user_attributes(current(parameter)).items()
    return repr(
        sorted((name, repr(value if isinstance(value, by_value) else type(value))) for name, value in attributes)
    )


def group_kind(group: Mapping[str, Any]) -> str:
    """Return a string that identifies the settings of a parameter group.

    For the learning rate, the string contains only its type. For the weight decay, it contains only whether it is zero.
    """
    settings = {
        key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr", "step")
    }
    rate, decay = settings.pop("lr", None), settings.pop("weight_decay", None)
    return repr((sorted(settings.items()), bool(decay), type(rate)))


def _run_steps(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]],
    small: Sequence[_SmallParam],
    rank: int | None = None,
    *,
    replaces_empty: bool = True,
    resumes_at: int | None = None,
) -> _Outcome:
    """Step small parameters with a copy of the optimizer.

    Args:
        rank: simulated rank. It steps owned parameters only if it owns them, half of them one by one. If it is None,
            all parameters are stepped together.
        replaces_empty: if True, step placeholders instead of parameters without rows; see [Note: Parameters without
            rows].
        resumes_at: number of steps after which another copy continues with the state and the settings of the first one.
    """
    _seed_generators(small[0].start.device)
    parameters = [
        torch.nn.Parameter(start.clone() if start.numel() or not replaces_empty else placeholder(start))
        for start in (each.start for each in small)
    ]
    optimizer_copy, step = _copy_for_trial(optimizer, groups, parameters, small)
    for number in range(len(small[0].gradients)):
        if number == resumes_at:
            # New parameters, because the old ones may have attributes that a checkpoint does not contain.
            former, old = optimizer_copy, parameters
            parameters = [torch.nn.Parameter(parameter.detach()) for parameter in old]
            optimizer_copy, step = _copy_for_trial(optimizer, groups, parameters, small)
            _load_from(former, optimizer_copy, dict(zip(old, parameters, strict=True)))
        _set_gradients(parameters, [each.gradients[number] for each in small])
        if rank is not None and any(each.is_owned for each in small):
            turns = _defer_owned_turns(optimizer_copy, parameters, small, rank)
            addon("muon").step_param_by_param(optimizer_copy, step, turns)
        else:
            step()
    states = [optimizer_copy.state.get(parameter, {}) for parameter in parameters]
    trained = [
        parameter.detach() if each.start.numel() else each.start
        for parameter, each in zip(parameters, small, strict=True)
    ]
    return _Outcome(trained, _numbers(optimizer_copy, parameters, small), states)


def _load_from(former: Optimizer, optimizer_copy: Optimizer, new_of: Mapping[Any, Tensor]) -> None:
    """Load the state and the settings of another copy. `new_of` maps its parameters to those of `optimizer_copy`."""
    optimizer_copy.state.update({new_of.get(key, key): value for key, value in former.state.items()})
    for group, saved in zip(optimizer_copy.param_groups, former.param_groups, strict=True):
        group.update({**saved, "params": group["params"]})


def _set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        is_placeholder = parameter.shape != gradient.shape
        parameter.grad = torch.zeros_like(parameter) if is_placeholder else gradient.clone()


def _copy_for_trial(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]],
    parameters: Sequence[Tensor],
    small: Sequence[_SmallParam],
) -> tuple[Optimizer, Callable[[], Any]]:
    """Return a copy of the optimizer in training mode, and a function that steps it."""
    pairs: list[tuple[dict[str, Any], list[Tensor]]] = [(group, []) for group in groups]
    for parameter, each in zip(parameters, small, strict=True):
        pairs[each.group][1].append(parameter)
    optimizer_copy = copy_optimizer(optimizer, pairs)
    for group in optimizer_copy.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.clamp_(min=_LEAST_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(float(rate), _LEAST_RATE)
    if callable(begin := getattr(optimizer_copy, "train", None)):  # schedule-free optimizers must be in training mode
        begin()
    return optimizer_copy, step_of_copy(optimizer_copy)


def _defer_owned_turns(
    optimizer_copy: Optimizer, parameters: Sequence[Tensor], small: Sequence[_SmallParam], rank: int
) -> Iterable[_Turn]:
    """Remove the gradients of parameters that other ranks own, and of half of the parameters that `rank` owns.

    Returns:
        Turns that step this half of the parameters one by one, with the removed gradients.
    """
    later: list[tuple[dict[str, Any], Tensor, Tensor | None]] = []
    for parameter, each in zip(parameters, small, strict=True):
        is_later = each.position // (_RANKS - 1) % 2 == 0
        if each.is_owned and each.owner == rank and is_later:
            later.append((optimizer_copy.param_groups[each.group], parameter, parameter.grad))
        if each.is_owned and (is_later or each.owner != rank):
            parameter.grad = None

    def turns() -> Iterator[_Turn]:
        for group, parameter, gradient in later:
            parameter.grad = gradient
            yield group, parameter
            parameter.grad = None

    return turns()


def _numbers(optimizer_copy: Optimizer, parameters: Sequence[Tensor], small: Sequence[_SmallParam]) -> dict[str, float]:
    """Return the scalars in a copy's attributes, groups and state, by a description of their location."""
    shared = {key: value for key, value in optimizer_copy.state.items() if not isinstance(key, Tensor)}
    tables: list[tuple[str, Mapping[Any, Any], torch.Size | None]]
    tables = [("an attribute", vars(optimizer_copy), None), ("the shared state", shared, None)]
    tables += [(f"parameter group {number}", group, None) for number, group in enumerate(optimizer_copy.param_groups)]
    for parameter, each in zip(parameters, small, strict=True):
        values = optimizer_copy.state.get(parameter)
        if isinstance(values, Mapping) and each.start.numel():
            location = f"the state of parameter {each.position} of group {each.group}"
            tables.append((location, values, parameter.shape))
    numbers = {}
    for location, table, shape in tables:
        for key, value in table.items():
            is_scalar = isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1
            if isinstance(value, float) or (is_scalar and value.shape != shape):
                numbers[f"{key!r} in {location}"] = float(value)
    return numbers


def _compare(full: _Outcome, ranks: Sequence[_Outcome], small: Sequence[_SmallParam]) -> str | None:
    """Describe how the results of simulated ranks differ from those of full parameters, or return None."""
    has_changed = False
    for index, (each, parameter) in enumerate(zip(small, full.parameters, strict=True)):
        parts = [rank.parameters[index] for rank in ranks]
        joined = parts[each.owner] if each.is_owned else torch.cat(parts)
        if not (parameter.isfinite().all() and joined.isfinite().all()):
            raise TrialError("stepping small parameters made them NaN or infinite")
        change = (parameter - each.start).abs()
        has_changed = has_changed or bool(change.any())
        # The tolerance is relative to the element's change, plus the fp32 rounding error of one addition per step.
        allowed = 5e-4 * change + 1e-4 * change.mean() + _STEPS * 2.0**-24 * parameter.abs()
        if bool(((parameter - joined).abs() > allowed).any()):
            kind = f"a {'matrix' if parameter.ndim == 2 else 'parameter'} of shape {list(parameter.shape)}"
            way = "stepped without the other parameters" if each.is_owned else "split into rows"
            return f"{kind} got different updates when it was {way}"
    difference = _number_difference(full, ranks, noun="parameters" if any(each.is_owned for each in small) else "rows")
    if difference is None and not has_changed:
        raise TrialError(f"{_STEPS} steps on small parameters did not change them")
    return difference


def _number_difference(full: _Outcome, ranks: Sequence[_Outcome], *, noun: str) -> str | None:
    """Describe a scalar that differs between `full` and a rank, or return None."""
    for name, value in full.numbers.items():
        for rank_value in (rank.numbers.get(name, value) for rank in ranks):
            both_nan = math.isnan(value) and math.isnan(rank_value)
            if not (both_nan or math.isclose(value, rank_value, rel_tol=1e-4, abs_tol=1e-12)):
                return f"{name} depends on the {noun} that are stepped ({value:.6g} for all, {rank_value:.6g} for some)"
    return None


def step_of_copy(optimizer_copy: Optimizer) -> Callable[[], Any]:
    """Return a function that steps a copy of an optimizer without torch's global hooks."""
    return with_preparation(optimizer_copy, partial(unwrap_step(type(optimizer_copy).step), optimizer_copy))


def copy_optimizer(optimizer: Optimizer, groups: _Groups) -> Optimizer:
    """Return a copy of the optimizer that has the same class, attributes and settings but steps other parameters.

    References to parameters in attributes become references to the new parameters, if possible with the same number of
    dims. A new parameter gets the attributes of an old one.

    If a parameter in a group has state, all parameters in the copied group get similar state, because some optimizers
    create state in their constructor.

    Args:
        optimizer: the original, which is not changed.
        groups: pairs of a group of the optimizer, including ``"params"``, and the parameters that replace the group's
            parameters.

    Raises:
        Exception: an attribute cannot be copied. The error comes from the attribute's copy method.
    """
    all_parameters = [old for group in optimizer.param_groups for old in group["params"]]
    for settings, parameters in groups:
        _copy_user_attributes(settings["params"] or all_parameters, parameters)
    memo = _memo_of_parameters(optimizer, groups)
    ids = {id(old): memo[id(old)] for old in all_parameters}
    memo[id(optimizer.state)] = _copy_state(optimizer, groups)
    memo[id(optimizer.param_groups)] = [
        {key: list(parameters) if key == "params" else _copy_value(value, memo) for key, value in settings.items()}
        for settings, parameters in groups
    ]
    memo[id(optimizer)] = optimizer_copy = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key in HOOKS:
            vars(optimizer_copy)[key] = OrderedDict()
        elif key != "step":  # a scheduler may have replaced `step` with a function that is bound to the original
            vars(optimizer_copy)[key] = _copy_value(value, memo)
    for settings in (vars(optimizer_copy), *optimizer_copy.param_groups):
        replace_params(settings, lambda reference: ids.get(reference) if isinstance(reference, int) else None)
    return optimizer_copy


def _copy_user_attributes(old_parameters: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Give each new parameter the attributes of an old one, if possible of one with the same number of dims."""
    examples = {_row_ndim(old): current(old) for old in reversed(old_parameters)}
    for parameter in parameters:
        example = examples.get(_row_ndim(parameter), next(iter(examples.values())))
        for name, value in user_attributes(example).items():
            new_value = _convert_value(value, example, parameter) if isinstance(value, Tensor) else value
            vars(parameter)[name] = new_value


def _memo_of_parameters(optimizer: Optimizer, groups: _Groups) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` that maps old parameters, and the groups' lists of them, to new ones."""
    memo: dict[int, Any] = {}
    for settings, parameters in groups:
        old_parameters = settings["params"]
        for index, old in enumerate(old_parameters):
            alike = [parameter for parameter in parameters if _row_ndim(parameter) == _row_ndim(old)] or parameters
            memo[id(old)] = alike[index % len(alike)]
        memo[id(old_parameters)] = list(parameters)
        # `old_parameters` may be a part of a group's list. An attribute may refer to that list, as in LBFGS.
        ids_of_old = set(map(id, old_parameters))
        for group in optimizer.param_groups:
            if group["params"] is not old_parameters and not ids_of_old.isdisjoint(map(id, group["params"])):
                memo.setdefault(id(group["params"]), []).extend(parameters)
    # Other attributes may also refer to parameters. These references must not become copies of the parameters.
    others = [old for group in optimizer.param_groups for old in group["params"]]
    for old in (*others, *(key for key in optimizer.state if isinstance(key, Tensor))):
        memo.setdefault(id(old), groups[0][1][0])
    return memo


def _copy_state(optimizer: Optimizer, groups: _Groups) -> defaultdict[Any, Any]:
    """Return state for new parameters that is similar to the state of old ones, and a copy of other state."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({key: copy.deepcopy(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    for settings, parameters in groups:
        with_state = next((old for old in settings["params"] if optimizer.state.get(old)), None)
        if with_state is not None:
            values = optimizer.state[with_state].items()
            for parameter in parameters:
                state[parameter] = {key: _convert_value(value, with_state, parameter) for key, value in values}
    return state


def _row_ndim(parameter: Tensor) -> int:
    """Return the number of dims of a parameter. A parameter without dims has one, because it is stored as one row."""
    return max(current(parameter).ndim, 1)


def user_attributes(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that the user has set on a parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in _NOT_THE_USERS}


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, Tensor) and not value.is_leaf:
        value = value.detach()
    return copy.deepcopy(value, memo)


def _convert_value(value: Any, old: Tensor, parameter: Tensor) -> Any:
    """Convert a state value of the parameter `old` to a state value for `parameter`.

    A tensor with the shape of `old` becomes a tensor with the shape of `parameter`, filled with the first element of
    `value`. Other values are copied.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value, old = plain(value.detach()), current(old)
    if value.ndim and value.shape in (old.shape, plain(old).shape):
        first_element = value.flatten()[:1]
        return torch.full_like(parameter, float(first_element) if first_element.numel() else 0.0, dtype=value.dtype)
    return value.clone()
