"""Update the masters in parts, so that the refresh of one part overlaps with the update of the next part.

[Note: Pipelined step]
The refresh of a handle needs only the masters of this handle. Therefore masters are updated a few handles at a time, in
the order in which the next forward needs the weights. The refresh of each part is launched right after the part's
update. Only the update of the first part does not overlap with a refresh. The overlap matters most if
`Offload.optimizer` is True, because the host then updates the masters. There are only a few parts, because each part
needs one optimizer call on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from layerzero.engine.handle import Handle
from layerzero.engine.state import LayerZeroState
from layerzero.engine.weight_refresh import RefreshRound
from layerzero.optimizers.compatibility import is_elementwise_by_name
from layerzero.optimizers.update_rule import UpdateRule
from layerzero.optimizers.wrapped_optimizer import has_step_of_its_own

_MOST = 8  # maximum number of parts; the first update, about an eighth of the work, does not overlap with a refresh


def update_params(
    inner: Optimizer,
    update_rule: UpdateRule,
    lz_state: LayerZeroState,
    refresh: RefreshRound | None,
    take_step: Callable[[], Any],
) -> None:
    """Step `inner` once, in parts if possible, and launch the refresh of each part after its update.

    Args:
        inner: optimizer whose groups list masters.
        refresh: round in which the refreshes of handles are launched, or None if refreshes are launched later.
        take_step: function that steps `inner`.
    """
    has_transfers = lz_state.config.offload.optimizer or any(
        handle.mesh_info.replicas > 1 for handle in lz_state.handles
    )
    with lz_state.parts.during("update", "optimizer"):
        if refresh is None or not has_transfers or update_rule.owned or not _can_step_in_parts(inner):
            update_rule.step(take_step)
        else:
            _step_in_parts(inner, lz_state.handles, refresh, take_step)


def _can_step_in_parts(inner: Optimizer) -> bool:
    """Return whether the optimizer stores all state by parameter and has neither a custom ``step`` nor post-hooks.

    Step post-hooks would run after some refreshes have already been launched.
    """
    has_hooks = bool(inner._optimizer_step_post_hooks)
    return is_elementwise_by_name(inner) and not has_step_of_its_own(inner) and not has_hooks


def _step_in_parts(
    inner: Optimizer, handles: Sequence[Handle], refresh: RefreshRound, take_step: Callable[[], Any]
) -> None:
    parts = _split_handles(handles)
    part_of = {id(each.master_param): n for n, part in enumerate(parts) for handle in part for each in handle.members}
    groups = inner.param_groups
    params_by_group = [group["params"] for group in groups]
    chosen: list[list[list[Tensor]]] = [[[] for _ in groups] for _ in parts]
    for index, masters in enumerate(params_by_group):
        for master in masters:
            # Parameters that are not sharded belong to the last part.
            chosen[part_of.get(id(master), -1)][index].append(master)
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
        for group, masters in zip(groups, params_by_group, strict=True):
            group["params"] = masters


def _split_handles(handles: Sequence[Handle]) -> list[list[Handle]]:
    """Split the handles into consecutive parts with about the same number of elements."""
    total = sum(handle.layout.numel for handle in handles)
    parts: list[list[Handle]] = []
    assigned = 0
    for handle in handles:
        if len(parts) <= assigned * _MOST // max(total, 1):
            parts.append([])
        parts[-1].append(handle)
        assigned += handle.layout.numel
    return parts
