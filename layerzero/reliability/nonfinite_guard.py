"""Skip steps with non-finite gradients, or raise an error, consistently on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero import ShardedOptimizer
from layerzero.extend import (
    LayerZeroState,
    RowShardedTensor,
    StepObserver,
    any_not_finite,
    format_first_names,
    get_state,
    local_rows,
    nonfinite_names,
    plain_access,
)
from layerzero.reliability.local_gradient_check import LocalGradientCheck, nonfinite_text

_LOG = logging.getLogger("layerzero")


class NonFiniteGradients(RuntimeError):
    """Error that all ranks raise before any parameter is updated, because gradients are not finite.

    The message names the parameters, unless they belong to ranks of `extra_groups`. It also names ranks and handles if
    a rank's own gradients were not finite and `locate` is True.
    """


def guard_steps(
    model: nn.Module,
    *optimizers: ShardedOptimizer,
    nonfinite: Literal["skip", "raise"] = "skip",
    skips: int = 10,
    locate: bool = True,
    extra_groups: Sequence[dist.ProcessGroup] = (),
) -> StepGuard:
    """Make ``step()`` skip the update or raise an error if any rank has a NaN or infinite gradient.

    All ranks must call this function. Each step then reads this rank's final gradients once and waits for an all-reduce
    of one number. If `locate` is True, each reduction also reads the gradients that it sends. A loss scaler runs its
    own check first. If that check fails, the loss scaler skips the step itself.

    Args:
        model: model that :func:`layerzero.shard_model` returned.
        optimizers: all optimizers of the model, which :func:`layerzero.shard_optimizer` returned. If one optimizer
            skips a step, all of them skip it.
        nonfinite: if "skip", a step with non-finite gradients leaves parameters and optimizer state unchanged and logs
            the affected parameters. It raises an error if more than `skips` consecutive steps would be skipped. If
            "raise", the first step with a non-finite gradient raises an error.
        skips: number of consecutive steps that may be skipped.
        locate: whether to check each rank's own gradients as well, so that the message names the ranks that produced
            the non-finite gradients.
        extra_groups: process groups that include ranks with other parts of the model, as with tensor or pipeline
            parallelism. These ranks skip the same steps.

    Returns:
        The guard, which counts the skipped steps.

    Example::

        guard = layerzero.guard_steps(model, optimizer, skips=5)
        ...
        optimizer.step()  # may skip
        print(guard.skipped)
    """
    if nonfinite not in ("skip", "raise"):
        raise ValueError(f'nonfinite must be "skip" or "raise", got {nonfinite!r}')
    if not isinstance(skips, int) or skips < 1:
        raise ValueError(f"skips must be a positive int, got {skips!r}")
    lz_state = guarded_state("guard_steps", model, optimizers)
    guarded = [optimizer for each in lz_state.attached if isinstance(each, StepGuard) for optimizer in each.optimizers]
    if any(optimizer is other for optimizer in optimizers for other in guarded):
        raise ValueError("an optimizer already has a guard. Call close() of that guard first")
    max_refusals = 1 if nonfinite == "raise" else skips + 1
    return lz_state.attach(StepGuard(lz_state, optimizers, max_refusals, locate, tuple(extra_groups)))


def guarded_state(what: str, model: nn.Module, optimizers: Sequence[ShardedOptimizer]) -> LayerZeroState:
    """Return the state of `model`. Raise TypeError or ValueError if `optimizers` are not its optimizers."""
    if not optimizers or not all(isinstance(optimizer, ShardedOptimizer) for optimizer in optimizers):
        raise TypeError(f"{what} requires the optimizers that layerzero.shard_optimizer returned. Pass at least one")
    lz_state: LayerZeroState = get_state(model)
    if not all(optimizer in lz_state.optimizers for optimizer in optimizers):
        raise ValueError("an optimizer belongs to another model. Create a guard for each model")
    return lz_state


class StepGuard(StepObserver):
    """Guard against non-finite gradients. Created by :func:`guard_steps`.

    Attributes:
        optimizers: the guarded optimizers.
        skipped: number of skipped steps. A step that several optimizers skip together counts once.
        in_a_row: number of steps skipped since the last update by the first optimizer.
        found: description of the most recent non-finite gradients; empty if all gradients were finite.
    """

    def __init__(
        self,
        lz_state: LayerZeroState,
        optimizers: tuple[ShardedOptimizer, ...],
        max_refusals: int,
        locate: bool,
        extra_groups: tuple[dist.ProcessGroup, ...],
    ) -> None:
        self.skipped = 0
        self.in_a_row = 0
        self.found = ""
        self.optimizers = optimizers
        self._max_refusals = max_refusals  # number of consecutive refused steps at which an error is raised
        self._model_ranks = lz_state.ranks
        # Optimizers checked in this round; each steps once per forward pass.
        self._checked_optimizers: list[Optimizer] = []
        self._refusing = False  # an optimizer has skipped its step in this round
        self._extra_groups = extra_groups
        self._own = LocalGradientCheck(lz_state.handles) if locate else None
        self._members = tuple(lz_state.members.values())
        self._lazy_grad = lz_state.gradients.lazy_grad
        self._hook = lz_state.model.register_forward_pre_hook(self._begin_round)

    def close(self) -> None:
        """Remove the guard. Later steps are not checked."""
        self.detach()
        self._hook.remove()
        if self._own is not None:
            self._own.stop()

    def _begin_round(self, *_: object) -> None:
        """Begin a new round before a training forward pass. In a round, each optimizer steps at most once.

        If no parameter has a gradient, also clear the record of non-finite gradients. For example, a loss scaler may
        have skipped the step without calling this guard.
        """
        if torch.is_grad_enabled():
            self._checked_optimizers.clear()
        if self._own is not None:
            self._lazy_grad.resolve()
            with plain_access():
                if all(member.sharded.grad is None for member in self._members):
                    self._own.clear_record()

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer may step, because all gradients on all ranks are finite.

        After one optimizer has skipped its step, the other optimizers skip theirs until the next forward pass, without
        another check. All ranks must call this method.
        """
        if not any(optimizer is guarded for guarded in self.optimizers):
            return True
        if not self._checked_optimizers or any(optimizer is other for other in self._checked_optimizers):
            self._checked_optimizers, self._refusing = [], False
        self._checked_optimizers.append(optimizer)
        if self._refusing:
            return False
        gradients = self._gradients()
        bad = any_not_finite(gradients, self._model_ranks.mesh_info.device).to(torch.int32)
        self._model_ranks.all_reduce(bad, dist.ReduceOp.MAX)
        for group in self._extra_groups:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group)
        is_first = optimizer is self.optimizers[0]
        if not bad.item():
            self.in_a_row = 0 if is_first else self.in_a_row
            if self._own is not None and optimizer is self.optimizers[-1]:
                self._own.clear_record()
            return True
        self._refusing = True
        self._record_skipped_step(gradients)
        return False

    def _gradients(self) -> dict[str, Tensor]:
        """Return this rank's rows of the final gradients of all guarded optimizers, keyed by parameter name."""
        return {
            name: local_rows(parameter.grad) if isinstance(parameter, RowShardedTensor) else parameter.grad
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for name, parameter in zip(optimizer.parameter_names(group), group["params"], strict=True)
            if parameter.grad is not None
        }

    def _record_skipped_step(self, gradients: dict[str, Tensor]) -> None:
        """Count a skipped step, and log a message or raise an error. All ranks of the model must call this method."""
        rank = dist.get_rank()
        final = list(dict.fromkeys(self._gather_texts(nonfinite_names(gradients))))
        own_messages = (
            [] if self._own is None else [f"rank {rank}: {text}" for text in self._own.nonfinite_messages(set(final))]
        )
        messages = self._gather_texts(own_messages)
        if not final:
            self.found = "in another part of the model, on ranks of extra_groups"
        elif self._own is None or self._model_ranks.size == 1:
            self.found = format_first_names(final)
        else:
            self.found = nonfinite_text(messages, final)
        if self._own is not None:
            self._own.clear_record()
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self._max_refusals:
            times = f", {self.in_a_row} times in a row" if self.in_a_row > 1 else ""
            raise NonFiniteGradients(
                f"layerzero: gradients are not finite{times}, and no parameter has been updated: {self.found}. Call "
                "zero_grad() to skip this batch. If the error recurs, load the last checkpoint"
            )
        if rank == self._model_ranks.ranks[0]:
            _LOG.warning("layerzero: a step is skipped, because gradients are not finite: %s", self.found)

    def _gather_texts(self, texts: list[str]) -> list[str]:
        return [
            text for message in self._model_ranks.all_gather_text(json.dumps(texts)) for text in json.loads(message)
        ]
