"""Whole parameters in full precision: to look at, to edit, to save and to load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from layerzero.comm.agreement import agree
from layerzero.comm.collectives import Exchange, Lane, broadcast
from layerzero.engine.hooks import runtime_of
from layerzero.engine.member import Member
from layerzero.engine.runtime import Runtime
from layerzero.engine.view import View, viewing
from layerzero.tensors.digest import digest
from layerzero.tensors.faces import part_held
from layerzero.tensors.rows import refuse_apart
from layerzero.tensors.whole import rows_of

__all__ = ["IncompatibleKeys", "full_state_dict", "load_full_state_dict", "unsharded"]


@contextmanager
def unsharded(model: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Show whole parameters inside the context: plain ``nn.Parameter``s in the masters' precision, on every rank.

    Takes the memory of the whole model. Forwards inside compute with these parameters and exchange nothing, so that one
    rank alone may run them; they must be under ``torch.no_grad()``. Inputs that `mp_policy` would cast are cast to the
    masters' dtype.

    Args:
        model: from :func:`layerzero.shard_model`.
        writeback: keep changes made inside. Every rank must make the same ones.

    Raises:
        ValueError: `writeback`, and ranks made different changes; nothing is written then.

    Example::

        with layerzero.unsharded(model, writeback=True), torch.no_grad():
            model.embed.weight[pad_id].zero_()
    """
    runtime = runtime_of(model)
    runtime.refreshes.refuse_uses("layerzero.unsharded")
    if View.FULL in runtime.views:
        raise RuntimeError("layerzero.unsharded is already active for this model")
    runtime.complete_gradients()
    shown = {name: _unsharded(member) for name, member in runtime.members.items()}
    for parameter in shown.values():
        parameter.requires_grad_(False)
    _show(runtime, shown)
    try:
        with viewing(runtime.views, View.FULL):
            yield
            if writeback:
                shown = _agreed_edits(runtime)
    finally:
        _show(runtime, {name: member.parameter for name, member in runtime.members.items()})
    if writeback:
        runtime.refreshes.before_write()
        for name, member in runtime.members.items():
            _write_rows(member, shown[name].detach())
        runtime.refreshes.launch()


def full_state_dict(
    model: nn.Module, *, cpu: bool = True, rank0_only: bool = True, trainable_only: bool = False
) -> dict[str, Tensor]:
    """The whole model's state, with the names, shapes and tied entries of the unsharded model's ``state_dict()``.

    One parameter after the other is gathered, in the masters' precision. All ranks must call this.

    Args:
        model: from :func:`layerzero.shard_model`.
        cpu: put the tensors into host memory.
        rank0_only: only the first data-parallel rank gets the state; the others get ``{}``.
        trainable_only: only parameters that require gradients: adapters without what they adapt, and no buffers.

    Raises:
        ValueError: `trainable_only`, and ranks have frozen different parameters.
    """
    runtime = runtime_of(model)
    refuse_apart("full_state_dict", (member.span for member in runtime.members.values()), runtime.everyone.size)
    keeps = not rank0_only or runtime.everyone.is_first
    by_parameter = {id(member.parameter): member for member in runtime.members.values()}
    held = model.state_dict(keep_vars=True)
    if trainable_only:
        held = {name: value for name, value in held.items() if isinstance(value, nn.Parameter) and value.requires_grad}
        agree("full_state_dict(trainable_only=True)", {"trainable": sorted(held)}, ranks=runtime.everyone.ranks)
    whole: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in held.items():
        member = by_parameter.get(id(value))
        if member is None:
            if isinstance(value, DTensor):  # of another framework, all of whose ranks are here
                value = value.detach().full_tensor()  # type: ignore[attr-defined]  # noqa: PLW2901
            if keeps and isinstance(value, Tensor):
                copy = value.detach().clone()
                state[name] = copy.cpu() if cpu else copy
            elif keeps:
                state[name] = value
            continue
        if id(value) not in whole:
            gathered = _whole(member)
            whole[id(value)] = (gathered.cpu() if cpu else gathered) if keeps else gathered.new_empty(0)
            del gathered  # or it would be there while the next one is made
        if keeps:
            state[name] = whole[id(value)]
    return state


class IncompatibleKeys(NamedTuple):
    """What a load left out; as torch's ``nn.Module.load_state_dict`` returns it."""

    missing_keys: list[str]  # that the model has
    unexpected_keys: list[str]  # that it has not


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True
) -> IncompatibleKeys:
    """Load what :func:`full_state_dict`, or the unsharded model's ``state_dict()``, returned.

    The first data-parallel rank's state is what all ranks get; the others may pass ``{}`` or None. All ranks must call
    this. Optimizer state is left alone. Of a tied parameter, one name is enough.

    Args:
        strict: missing or unexpected names are an error; otherwise what fits is loaded.

    Returns:
        The names that were missing and unexpected, the same on all ranks.

    Raises:
        ValueError: missing or unexpected names, or wrong shapes; names all of them, and changes nothing.
            (RuntimeError with the same text on the other ranks.)
    """
    runtime = runtime_of(model)
    everyone = runtime.everyone
    refuse_apart("load_full_state_dict", (member.span for member in runtime.members.values()), everyone.size)
    first = everyone.is_first
    state = dict(state_dict or {}) if first else {}
    targets = model.state_dict(keep_vars=True)
    names_of: dict[int | str, list[str]] = {}  # by target; several where tied
    for name, target in targets.items():
        names_of.setdefault(id(target) if isinstance(target, Tensor) else name, []).append(name)
    missing = [n for names in names_of.values() if not state.keys() & set(names) for n in names]
    left_out = IncompatibleKeys(missing, [name for name in state if name not in targets])
    failure = None
    if first and (problems := [*(_incompatible(left_out) if strict else ()), *_misshapen(targets, state)]):
        failure = ValueError("load_full_state_dict: " + "; ".join(problems))
    agree("load_full_state_dict", {"strict": strict}, ranks=everyone.ranks, failure=failure)
    left_out = IncompatibleKeys([], []) if strict else IncompatibleKeys(*_of_first_rank(left_out, everyone.control))
    skipped = set(left_out.missing_keys)

    members = {id(member.parameter): member for member in runtime.members.values()}
    runtime.refreshes.before_write()
    with torch.no_grad():
        for names in names_of.values():
            target = targets[names[0]]
            if not isinstance(target, Tensor) or names[0] in skipped:
                continue
            member = members.get(id(target))
            dtype = target.dtype if member is None else member.master.dtype
            whole = torch.empty(target.shape, dtype=dtype, device=everyone.topology.device)
            if first:
                whole.copy_(next(state[name] for name in reversed(names) if name in state))
            everyone.broadcast(whole)
            if member is None and isinstance(target, DTensor):  # of another framework
                target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
            elif member is None:
                target.copy_(whole)
            else:
                _write_rows(member, whole)
    runtime.refreshes.launch()
    return left_out


def _incompatible(left_out: IncompatibleKeys) -> list[str]:
    kinds = zip(("missing", "unexpected"), left_out, strict=True)
    return [f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds if names]


def _misshapen(targets: Mapping[str, object], state: Mapping[str, object]) -> list[str]:
    problems = []
    for name in sorted(targets.keys() & state.keys()):
        target, value = targets[name], state[name]
        if isinstance(target, Tensor):
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if found != list(target.shape):
                problems.append(f"{name}: expected shape {list(target.shape)}, got {found}")
    return problems


def _of_first_rank(left_out: IncompatibleKeys, control: Lane) -> list[list[str]]:
    """What only the first rank knows."""
    if control.size == 1:
        return list(left_out)
    text = json.dumps(left_out).encode()
    length = torch.tensor([len(text)])
    broadcast(control, Exchange.AGREE, length)
    spelled = torch.tensor(list(text) if control.rank == 0 else [0] * int(length), dtype=torch.uint8)
    broadcast(control, Exchange.AGREE, spelled)
    lists: list[list[str]] = json.loads(bytes(spelled.tolist()))
    return lists


def _whole(member: Member) -> Tensor:
    with torch.no_grad():
        return member.span.gather_whole(member.master.detach())


def _agreed_edits(runtime: Runtime) -> dict[str, nn.Parameter]:
    """What the model holds now, by name of the member.

    Raises on all ranks where some that have the same part of a parameter have made different changes, or one has put
    there what does not fit.
    """
    shown: dict[str, nn.Parameter] = {}
    failure: Exception | None = None
    try:
        shown = {name: _edited(member) for name, member in runtime.members.items()}
    except ValueError as error:
        failure = error
    meshes = list(dict.fromkeys(unit.topology for unit in runtime.units))
    groups: dict[str, dict[str, str]] = {}  # by which part it is, of what the ranks of a mesh share
    for name, parameter in shown.items():
        member = runtime.members[name]
        topology, face = member.span.topology, member.span.face
        part = topology.ranks if face is None else (face.place, face.placements)
        groups.setdefault(f"{meshes.index(topology)}: {part}", {})[name] = digest(part_held(parameter))
    agree("unsharded(writeback=True)", {}, ranks=runtime.everyone.ranks, failure=failure, groups=groups)
    return shown


def _unsharded(member: Member) -> nn.Parameter:
    """The parameter as the module knows it: whole, but for what further axes have cut."""
    with torch.no_grad():
        rows = member.span.gather(member.master.detach())
    return nn.Parameter(rows) if member.span.face is None else member.span.face.dress(rows)


def _show(runtime: Runtime, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, member in runtime.members.items():
        for held, attribute in member.places:
            held[attribute] = parameters[name]


def _edited(member: Member) -> nn.Parameter:
    """What the model holds in place of the member now; the user may have put another parameter there."""
    held, attribute = member.places[0]
    parameter: nn.Parameter | None = held.get(attribute)
    if parameter is None or tuple(parameter.shape) != member.span.true_shape:
        found = None if parameter is None else list(parameter.shape)
        raise ValueError(
            f"{member.name!r} must keep its shape {list(member.span.true_shape)} inside unsharded, got {found}"
        )
    return parameter


@torch.no_grad()
def _write_rows(member: Member, whole: Tensor) -> None:
    member.master.copy_(rows_of(whole, member.span))
