"""Guard against silent data corruption. The guard detects and locates bits that flip between two steps.

[Note: State between steps]
Between two steps, layerzero does not write to masters and optimizer state. Between a backward pass and the step, only
the user writes to final gradients. A write through torch changes the tensor's version, and the parameter's mutation
tracker counts writes. Therefore, if the sum of a tensor's bits changes while the tensor's address, version and write
count do not, a bit has flipped.

[Note: Repeated steps]
Compute weights are computed from masters, and gradients are computed from compute weights and batches. If masters and
optimizer state are unchanged since the last step, a refused step can be repeated and then gives the correct result. If
values are wrong again after they were recomputed, their memory is probably defective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero import ShardedOptimizer
from layerzero.extend import LayerZeroState, LocalShard, local_rows, sum64
from layerzero.reliability.fingerprint import Corruption, compare_copies
from layerzero.reliability.nonfinite_guard import guarded_state

_LOG = logging.getLogger("layerzero")
_MADE_ANEW = ("compute weights", "gradient")  # kinds that can be recomputed from masters and batches
_REPEAT = "Masters and optimizer state are correct. Call recover() of the guard, and repeat the step"
_LOAD = "Load the last checkpoint, and check the memory of that machine"
_LOGGED = "The step continues with the wrong values, because the guard only logs. Load the last checkpoint"


class SilentDataCorruption(RuntimeError):
    """Error that all ranks raise before the next step if bits have flipped.

    Attributes:
        corruptions: corrupted elements, the same on all ranks.
        recoverable: True if the step can be repeated, because masters and optimizer state are correct and only the
            refused step used wrong values. In this case, call :meth:`CorruptionGuard.recover` and repeat the step.
    """

    def __init__(self, message: str, corruptions: tuple[Corruption, ...] = (), *, recoverable: bool = False) -> None:
        super().__init__(message)
        self.corruptions, self.recoverable = corruptions, recoverable


def guard_corruption(
    model: nn.Module, *optimizers: ShardedOptimizer, every: int = 100, on_found: Literal["raise", "log"] = "raise"
) -> CorruptionGuard:
    """Check for flipped bits before each `every`-th step. All ranks must call this function.

    Each check runs before the step updates any tensor. It compares the compute weights of all replicas with each other
    and with the masters (:func:`layerzero.fingerprint`). It also compares the bits of masters and optimizer state with
    those after the previous step, and the bits of gradients with those after the backward pass. Unchecked steps have no
    overhead.

    Args:
        model: model that :func:`layerzero.shard_model` returned.
        optimizers: all optimizers of the model, in the order in which their steps run.
        every: number of steps from one check to the next. If 1, every step is checked. If a bit flips in an unchecked
            step, the guard detects the flip only if copies still differ at the next check.
        on_found: if "raise", the guard raises :class:`SilentDataCorruption`. If "log", the guard logs the error and
            continues with the step.

    Returns:
        The guard. Its method :meth:`CorruptionGuard.recover` restores a correct state after an error.

    Example::

        guard = layerzero.guard_corruption(model, optimizer, every=100)
        ...
        try:
            optimizer.step()
        except layerzero.SilentDataCorruption:
            guard.recover()  # raises the error again if recovery is not possible
            ...  # the same batches again, forward and backward
            optimizer.step()
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a positive int, got {every!r}")
    if on_found not in ("raise", "log"):
        raise ValueError(f'on_found must be "raise" or "log", got {on_found!r}')
    return CorruptionGuard(guarded_state("guard_corruption", model, optimizers), optimizers, every, on_found == "raise")


class _TensorRecord(NamedTuple):
    """State of a tensor to which no code should write before the next check."""

    address: int
    version: int
    write_count: int  # of the mutation tracker of the tensor
    sum: Tensor  # 0-dim int64


def _gradient_record(gradient: Tensor) -> _TensorRecord:
    """Return the state of a final gradient.

    The version is always 0, because the mutation tracker of a gradient counts all writes.
    """
    local = gradient._local_tensor if isinstance(gradient, DTensor) else None
    write_count = local.tracker.write_count if isinstance(local, LocalShard) else 0
    tensor = local_rows(gradient)
    return _TensorRecord(tensor.data_ptr(), 0, write_count, sum64(tensor))


def _location(corruption: Corruption) -> tuple[str, tuple[int, ...], str]:
    return corruption.kind, corruption.ranks, corruption.parameter


class CorruptionGuard:
    """Guard against flipped bits. Created by :func:`guard_corruption`.

    Attributes:
        checks: number of checks so far.
        found: all corruptions found so far.
    """

    def __init__(
        self, lz_state: LayerZeroState, optimizers: tuple[ShardedOptimizer, ...], every: int, raises: bool
    ) -> None:
        self.checks = 0
        self.found: list[Corruption] = []
        self._lz_state = lz_state
        self._optimizers = optimizers
        self._every = every
        self._raises = raises
        self._steps = 0
        self._recorded: dict[tuple[str, str], _TensorRecord] = {}  # by kind and parameter
        self._refused: SilentDataCorruption | None = None  # error of the last step, if it was refused
        self._recomputed: set[tuple[str, tuple[int, ...], str]] = set()  # values recomputed for the repeated step
        self._handle_of = {member.name: handle for handle in lz_state.handles for member in handle.members}
        self._hooks: list[Any] = [
            optimizers[0].register_step_pre_hook(self._before_step),
            optimizers[-1].register_step_post_hook(self._after_step),
        ]
        self._hooked_names: set[str] = set()  # names of parameters with a gradient hook
        self._hook_new_parameters()

    def close(self) -> None:
        """Remove the guard. Later steps are not checked."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def recover(self) -> None:
        """Recompute compute weights from masters and clear gradients. All ranks must call this method.

        Call this method after :class:`SilentDataCorruption`, then repeat the step with the same batches. The repeated
        step gives the correct bits if the loop draws no random numbers and the forward passes change no buffers.

        Raises:
            SilentDataCorruption: masters or optimizer state are wrong; weights that steps do not write may have been
                wrong in earlier steps; or compute weights are wrong again, which suggests defective memory.
            RuntimeError: no step was refused, because the guard found no corruption or only logs errors.
        """
        refused = self._refused
        if refused is None:
            raise RuntimeError(
                "layerzero: recover() has no effect, because no step was refused. Call it only after "
                "SilentDataCorruption"
            )
        if not refused.recoverable:
            raise refused
        for optimizer in self._lz_state.optimizers:
            optimizer.zero_grad()
        for member in self._lz_state.members.values():
            member.sharded.grad = None
        self._lz_state.refreshes.launch()
        self._recomputed |= {_location(corruption) for corruption in refused.corruptions}
        self._refused = self._check()
        if self._refused is not None:
            raise self._refused
        if dist.get_rank() == self._lz_state.ranks.ranks[0]:
            names = ", ".join(dict.fromkeys(repr(corruption.parameter) for corruption in refused.corruptions))
            _LOG.warning("layerzero: flipped bits in %s were recomputed; repeat the step", names)

    def _hook_new_parameters(self) -> None:
        """Register gradient hooks on parameters that became trainable. Frozen parameters cannot have such hooks."""
        for name, member in self._lz_state.members.items():
            if member.sharded.requires_grad and name not in self._hooked_names:
                register: Any = member.sharded.register_post_accumulate_grad_hook  # called when the gradient is final
                self._hooks.append(register(partial(self._record_gradient, name)))
                self._hooked_names.add(name)

    @property
    def _is_due(self) -> bool:
        """True if the next step is checked."""
        return (self._steps + 1) % self._every == 0

    def _record_gradient(self, name: str, parameter: Tensor) -> None:
        if self._is_due and parameter.grad is not None:
            self._recorded["gradient", name] = _gradient_record(parameter.grad)

    def _before_step(self, *_: object) -> None:
        if self._is_due:
            self.checks += 1
            error = self._check()
            self._refused = error if self._raises else None
            if self._refused is not None:
                raise self._refused
            self._recomputed.clear()
            if error is not None and dist.get_rank() == self._lz_state.ranks.ranks[0]:
                _LOG.error("%s", error)
        self._steps += 1
        self._recorded.clear()

    def _check(self) -> SilentDataCorruption | None:
        unchanged = self._compare_recorded()
        masters_unchanged = {
            name: is_unchanged for (kind, name), is_unchanged in unchanged.items() if kind == "masters"
        }
        own = [self._corruption(*key) for key, is_unchanged in unchanged.items() if not is_unchanged]
        corruptions = compare_copies(self._lz_state, own, masters_unchanged).corruptions
        self.found += corruptions
        if not corruptions:
            return None
        is_repeated = any(_location(corruption) in self._recomputed for corruption in corruptions)
        problem = "bits have changed without a write"
        if is_repeated:
            problem = "bits are wrong again after they were recomputed, which suggests defective memory"
        # Steps refresh only handles that they may update. Other weights may have been wrong before the last step.
        never_updated = {handle.name for handle in self._lz_state.handles if not handle.may_be_updated}
        recoverable = False
        if not self._raises:
            advice = _LOGGED
        elif self._every > 1 and any(e.kind == "compute weights" and e.handle in never_updated for e in corruptions):
            advice = (
                f"Steps do not write these weights, so they may have been wrong for {self._every} steps. Load an "
                "earlier checkpoint, and check the memory of that machine"
            )
        else:
            recoverable = not is_repeated and all(e.kind in _MADE_ANEW for e in corruptions)
            advice = _REPEAT if recoverable else _LOAD
        message = f"layerzero: {problem}: {'; '.join(map(str, corruptions))}. {advice}"
        return SilentDataCorruption(message, corruptions, recoverable=recoverable)

    def _after_step(self, *_: object) -> None:
        if self._is_due:
            self._hook_new_parameters()
            for (kind, name), tensor in self._tensors():
                self._recorded[kind, name] = self._tensor_record(tensor, name)

    def _tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield ``((kind, parameter name), tensor)`` for this rank's masters and optimizer state."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name in optimizer.parameter_names(group):
                    if name in self._lz_state.members:
                        yield ("masters", name), self._lz_state.members[name].master
            for name, values in optimizer.state_by_name().items():
                for key, value in values.items():
                    if isinstance(value, Tensor) and value.numel() and type(value) in (Tensor, nn.Parameter):
                        yield (f"optimizer state {key!r}", name), value

    def _tensor_record(self, tensor: Tensor, name: str) -> _TensorRecord:
        handle = self._handle_of.get(name)
        write_count = 0 if handle is None else handle.tracker.write_count
        return _TensorRecord(tensor.data_ptr(), tensor._version, write_count, sum64(tensor))

    def _compare_recorded(self) -> dict[tuple[str, str], bool]:
        """Return whether the bits of each recorded tensor are unchanged, by kind and parameter name.

        Tensors to which code has written since they were recorded are omitted.
        """
        recorded = self._recorded
        current = {key: self._tensor_record(tensor, key[1]) for key, tensor in self._tensors() if key in recorded}
        for key in recorded:
            if key[0] == "gradient" and (gradient := self._final_gradient(key[1])) is not None:
                current[key] = _gradient_record(gradient)
        unwritten = [key for key, bits in current.items() if bits[:3] == recorded[key][:3]]
        if not unwritten:
            return {}
        differs = torch.stack(
            [(recorded[key].sum != current[key].sum).to("cpu", non_blocking=False) for key in unwritten]
        ).tolist()
        # zero_grad(set_to_none=False) sets gradients to zero, which is not a corruption.
        return {
            key: not is_different or bool(key[0] == "gradient" and current[key].sum == 0)
            for key, is_different in zip(unwritten, differs, strict=True)
        }

    def _corruption(self, kind: str, name: str) -> Corruption:
        """Return the corruption of a tensor of this rank whose bits have changed without a write."""
        handle = self._handle_of.get(name)
        detail = "the sum of its bits has changed without a write"
        return Corruption(kind, (dist.get_rank(),), handle.name if handle else "ignored", name, detail)

    def _final_gradient(self, name: str) -> Tensor | None:
        """Return the final gradient of a parameter.

        The result is None if the gradient is not final, for instance after a later backward pass inside ``no_sync``.
        """
        gradient = self._lz_state.members[name].sharded.grad
        local = gradient._local_tensor if isinstance(gradient, DTensor) else None
        if not isinstance(local, LocalShard) or local.tracker.access_error is not None:
            return None
        return gradient
