"""Whole parameters in full precision: to look at, to edit, to save and to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from layerzero.agreement import agree
from layerzero.collectives import Exchange, broadcast
from layerzero.hooks import runtime_of
from layerzero.member import Member
from layerzero.runtime import Runtime

__all__ = ["full_state_dict", "load_full_state_dict", "unsharded"]


@contextmanager
def unsharded(model: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Show whole parameters inside the context: plain ``nn.Parameter``s in the masters' precision, on every rank.

    Takes the memory of the whole model. Forwards inside raise.

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
    if runtime.shows_full:
        raise RuntimeError("layerzero.unsharded is already active for this model")
    runtime.complete_gradients()
    whole = {name: _whole(member) for name, member in runtime.members.items()}
    shown = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in whole.items()}
    _show(runtime, shown)
    runtime.shows_full = True
    try:
        yield
        if writeback:
            shown = {name: _edited(member) for name, member in runtime.members.items()}
            digests = {name: _digest(parameter) for name, parameter in shown.items()}
            agree("unsharded(writeback=True)", digests, ranks=runtime.topology.ranks)
    finally:
        runtime.shows_full = False
        _show(runtime, {name: member.parameter for name, member in runtime.members.items()})
    if writeback:
        for name, member in runtime.members.items():
            _write_rows(member, shown[name].detach())
        runtime.refreshes.launch()


def full_state_dict(model: nn.Module, *, cpu: bool = True, rank0_only: bool = True) -> dict[str, Tensor]:
    """The whole model's state, with the names, shapes and tied entries of the unsharded model's ``state_dict()``.

    One parameter after the other is gathered, in the masters' precision. All ranks must call this.

    Args:
        model: from :func:`layerzero.shard_model`.
        cpu: put the tensors into host memory.
        rank0_only: only the first data-parallel rank gets the state; the others get ``{}``.
    """
    runtime = runtime_of(model)
    keeps = not rank0_only or runtime.topology.control.rank == 0
    by_parameter = {id(member.parameter): member for member in runtime.members.values()}
    whole: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        member = by_parameter.get(id(value))
        if member is None:
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


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None) -> None:
    """Load what :func:`full_state_dict`, or the unsharded model's ``state_dict()``, returned.

    The first data-parallel rank's state is what all ranks get; the others may pass ``{}`` or None. All ranks must call
    this. Optimizer state is left alone.

    Raises:
        ValueError: missing or unexpected names, or wrong shapes; names all of them, and changes nothing.
            (RuntimeError with the same text on the other ranks.)
    """
    runtime = runtime_of(model)
    topology = runtime.topology
    first = topology.control.rank == 0
    state = dict(state_dict or {}) if first else {}
    targets = model.state_dict(keep_vars=True)
    problems = _mismatches(targets, state) if first else []
    failure = ValueError("load_full_state_dict: " + "; ".join(problems)) if problems else None
    agree("load_full_state_dict", {}, ranks=topology.ranks, failure=failure)

    members = {id(member.parameter): member for member in runtime.members.values()}
    with torch.no_grad():
        for name, target in targets.items():
            if not isinstance(target, Tensor):
                continue
            member = members.get(id(target))
            dtype = target.dtype if member is None else member.master.dtype
            whole = torch.empty(target.shape, dtype=dtype, device=topology.device)
            if first:
                whole.copy_(state[name])
            for lane in (topology.replica, topology.gather):
                if lane.size > 1 and whole.numel():
                    broadcast(lane, Exchange.BROADCAST, whole)
            if member is None:
                target.copy_(whole)
            else:
                _write_rows(member, whole)
    runtime.refreshes.launch()


def _mismatches(targets: Mapping[str, object], state: Mapping[str, object]) -> list[str]:
    problems = []
    for title, names in (("missing", targets.keys() - state.keys()), ("unexpected", state.keys() - targets.keys())):
        if names:
            problems.append(f"{title}: {', '.join(sorted(names))}")
    for name in sorted(targets.keys() & state.keys()):
        target, value = targets[name], state[name]
        if isinstance(target, Tensor):
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if found != list(target.shape):
                problems.append(f"{name}: expected shape {list(target.shape)}, got {found}")
    return problems


def _whole(member: Member) -> Tensor:
    with torch.no_grad():
        return member.span.gather(member.master.detach())


def _show(runtime: Runtime, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, member in runtime.members.items():
        for owner, attribute in member.owners:
            owner._parameters[attribute] = parameters[name]


def _edited(member: Member) -> nn.Parameter:
    """What the model holds in place of the member now; the user may have put another parameter there."""
    owner, attribute = member.owners[0]
    parameter = owner._parameters.get(attribute)
    if parameter is None or tuple(parameter.shape) != member.span.shape:
        found = None if parameter is None else list(parameter.shape)
        raise ValueError(f"{member.name!r} must keep its shape {list(member.span.shape)} inside unsharded, got {found}")
    return parameter


@torch.no_grad()
def _write_rows(member: Member, whole: Tensor) -> None:
    rows = member.span.rows
    member.master.copy_(whole[rows.start : rows.stop])


def _digest(parameter: Tensor) -> str:
    """Equal for equal bits, and almost surely different otherwise: a weighted sum modulo 2^64."""
    values = parameter.detach().contiguous().view(-1)
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) * 0x5851F42D4C957F2D + 1
    return f"{int((bits * weights).sum()):x}"
