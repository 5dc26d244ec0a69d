"""The update of the masters in parts, so that the weights of one part travel while the next one is updated.

[Note: A step as a pipeline]
The refresh of a handle needs its own masters and no others. So masters are updated in the order in which the next
forward wants the weights, some handles at a time, and the refresh of each part is launched behind its update: what an
optimizer takes stands before the first part's refresh alone. With `offload_optimizer`, where the host updates, that is
most of it. Each part is a call of the optimizer, which takes time of the host; a few parts are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from layerzero.engine.handle import Handle
from layerzero.engine.runtime import LayerZeroState
from layerzero.engine.weight_refresh import RefreshRound
from layerzero.optimizers.compatibility import is_elementwise_by_name
from layerzero.optimizers.param_owners import OwnerTable

__all__ = ["update"]

_MOST = 8  # parts: the first one's update, which nothing hides, is about an eighth


def update(
    inner: Optimizer,
    ownership: OwnerTable,
    names: Mapping[int, str],
    runtime: LayerZeroState,
    refresh: RefreshRound | None,
    take_step: Callable[[], Any],
) -> None:
    """Step `inner` once, and launch the refresh of what is updated before the rest.

    Args:
        inner: its groups list masters.
        names: of the masters' parameters, by the masters' ids.
        refresh: None if it comes later.
        take_step: steps `inner`.
    """
    travels = runtime.config.offload_optimizer or any(handle.topology.replicas > 1 for handle in runtime.handles)
    with runtime.observer.during("update", "optimizer"):
        if refresh is None or not travels or ownership.owned or not _can_step_in_parts(inner):
            ownership.step(take_step)
        else:
            _step_in_parts(inner, names, runtime.handles, refresh, take_step)


def _can_step_in_parts(inner: Optimizer) -> bool:
    """All that the optimizer keeps, it keeps by parameter, and nobody looks at all parameters before the refresh."""
    step = vars(inner).get("step")
    is_own = step is None or hasattr(step, "_wrapped_by_lr_sched")
    return is_own and is_elementwise_by_name(inner) and not inner._optimizer_step_post_hooks


def _step_in_parts(
    inner: Optimizer,
    names: Mapping[int, str],
    handles: Sequence[Handle],
    refresh: RefreshRound,
    take_step: Callable[[], Any],
) -> None:
    parts = _cut(handles)
    number_of = {member.name: n for n, part in enumerate(parts) for handle in part for member in handle.members}
    groups = inner.param_groups
    listed = [group["params"] for group in groups]
    chosen: list[list[list[Tensor]]] = [[[] for _ in groups] for _ in parts]
    for index, masters in enumerate(listed):
        for master in masters:
            # What is not sharded comes last.
            chosen[number_of.get(names.get(id(master), ""), -1)][index].append(master)
    try:
        for part, by_group in zip(parts, chosen, strict=True):
            present = [(group, masters) for group, masters in zip(groups, by_group, strict=True) if masters]
            inner.param_groups = [group for group, _ in present]
            for group, masters in present:
                group["params"] = masters
            if present:
                take_step()
            refresh.launch(part)
    finally:
        inner.param_groups = groups
        for group, masters in zip(groups, listed, strict=True):
            group["params"] = masters


def _cut(handles: Sequence[Handle]) -> list[list[Handle]]:
    """Neighbours together, about as many elements in each part."""
    total = sum(handle.layout.numel for handle in handles)
    parts: list[list[Handle]] = []
    seen = 0
    for handle in handles:
        if len(parts) <= seen * _MOST // max(total, 1):
            parts.append([])
        parts[-1].append(handle)
        seen += handle.layout.numel
    return parts
