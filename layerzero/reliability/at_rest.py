"""Bits that change while nobody writes them: noticed between two steps, and located.

[Note: At rest]
Between two steps nobody writes masters and moments; between a backward and the step nobody but the user writes the
final gradients. Who writes by torch changes the version of the tensor, who edits a parameter is seen by its watch. So
where the memory, the version and the edits are the same, and the sum is not, a bit has flipped by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero.engine.hooks import runtime_of
from layerzero.engine.runtime import Runtime
from layerzero.optimizers.sharded import ShardedOptimizer
from layerzero.reliability.bits import sum64
from layerzero.reliability.fingerprint import Corruption, compare
from layerzero.tensors.sharded import LocalRows, plain

__all__ = ["BitGuard", "SilentCorruption", "guard_bits"]

_LOG = logging.getLogger("layerzero")


class SilentCorruption(RuntimeError):
    """Raised on all ranks, before the next step.

    Attributes:
        corruptions: what was found, the same on all ranks.
    """

    def __init__(self, corruptions: tuple[Corruption, ...]) -> None:
        super().__init__(
            "layerzero: bits have changed by themselves: " + "; ".join(map(str, corruptions)) + ". Load the last "
            "checkpoint, and look at the memory of that machine"
        )
        self.corruptions = corruptions


def guard_bits(
    model: nn.Module, *optimizers: ShardedOptimizer, every: int = 100, on_found: Literal["raise", "log"] = "raise"
) -> BitGuard:
    """From here on, look for flipped bits in every `every`-th step.

    Before that step updates anything, all replicas' compute weights are compared with each other and with the masters
    (:func:`layerzero.fingerprint`), masters and optimizer state with what the step before has left, and gradients with
    what the backward has left. All ranks must call this. Steps in between cost nothing.

    Args:
        model: from :func:`layerzero.shard_model`.
        optimizers: all of the model's, in the order in which they step.
        every: steps. What flips in a step that is not looked at is noticed only where it stays visible: 1 notices all.
        on_found: "log" goes on.

    Example::

        layerzero.guard_bits(model, optimizer, every=100)
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a positive int, got {every!r}")
    if on_found not in ("raise", "log"):
        raise ValueError(f'on_found must be "raise" or "log", got {on_found!r}')
    if not optimizers or not all(isinstance(optimizer, ShardedOptimizer) for optimizer in optimizers):
        raise TypeError("guard_bits takes optimizers from layerzero.shard_optimizer")
    runtime = runtime_of(model)
    if not all(optimizer in runtime.optimizers for optimizer in optimizers):
        raise ValueError("an optimizer belongs to another model")
    return BitGuard(runtime, optimizers, every, on_found == "raise")


class _Resting(NamedTuple):
    """A tensor that nobody should write, as it was."""

    address: int
    version: int
    edits: int
    sum: Tensor


def _graded(gradient: Tensor) -> _Resting:
    """A final gradient, of which everybody who writes it tells its watch."""
    rows = gradient._local_tensor if isinstance(gradient, DTensor) else None
    edits = rows.watch.edits if isinstance(rows, LocalRows) and rows.watch is not None else 0
    tensor = plain(gradient)
    return _Resting(tensor.data_ptr(), 0, edits, sum64(tensor))


def _listen(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """To each final gradient."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class BitGuard:
    """Made by :func:`guard_bits`.

    Attributes:
        looked: how often so far.
        found: everything that was found.
    """

    def __init__(self, runtime: Runtime, optimizers: tuple[ShardedOptimizer, ...], every: int, raises: bool) -> None:
        self.looked = 0
        self.found: list[Corruption] = []
        self._runtime = runtime
        self._optimizers = optimizers
        self._every = every
        self._raises = raises
        self._steps = 0
        self._resting: dict[tuple[str, str], _Resting] = {}  # by kind and parameter
        self._handle_of = {member.name: handle for handle in runtime.handles for member in handle.members}
        members = runtime.members.values()
        self._hooks: list[Any] = [
            optimizers[0].register_step_pre_hook(self._before_step),
            optimizers[-1].register_step_post_hook(self._after_step),
            *(_listen(member.parameter, self._on_gradient(member.name)) for member in members),
        ]

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def _is_due(self) -> bool:
        """The next step is looked at."""
        return (self._steps + 1) % self._every == 0

    def _on_gradient(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if self._is_due and parameter.grad is not None:
                self._resting["gradient", name] = _graded(parameter.grad)

        return note

    def _before_step(self, *_: object) -> None:
        if self._is_due:
            self.looked += 1
            result = compare(self._runtime, self._changed())
            self.found += result.corruptions
            if result.corruptions and self._raises:
                self._resting.clear()
                raise SilentCorruption(result.corruptions)
            if result.corruptions and dist.get_rank() == self._runtime.everyone.ranks[0]:
                _LOG.error("%s", SilentCorruption(result.corruptions))
        self._steps += 1
        self._resting.clear()

    def _after_step(self, *_: object) -> None:
        if self._is_due:
            for (kind, name), tensor in self._tensors():
                self._resting[kind, name] = self._at_rest(tensor, name)

    def _tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Masters and optimizer state of this rank."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name in optimizer.parameter_names(group):
                    if name in self._runtime.members:
                        yield ("masters", name), self._runtime.members[name].master
            for name, values in optimizer.state_by_name().items():
                for key, value in values.items():
                    if isinstance(value, Tensor) and value.numel() and type(value) in (Tensor, nn.Parameter):
                        yield (f"optimizer state {key!r}", name), value

    def _at_rest(self, tensor: Tensor, name: str) -> _Resting:
        handle = self._handle_of.get(name)
        edits = 0 if handle is None else handle.watch.edits
        return _Resting(tensor.data_ptr(), tensor._version, edits, sum64(tensor))

    def _changed(self) -> list[Corruption]:
        """What is not as it was, though nobody has written it."""
        before, found = self._resting, []
        now = {key: self._at_rest(tensor, key[1]) for key, tensor in self._tensors() if key in before}
        for key in before:
            if key[0] == "gradient" and (gradient := self._gradient(key[1])) is not None:
                now[key] = _graded(gradient)
        same = [key for key, is_now in now.items() if is_now[:3] == before[key][:3]]
        if not same:
            return []
        wrong = torch.stack([(before[key].sum != now[key].sum).to("cpu", non_blocking=False) for key in same]).tolist()
        for (kind, name), is_wrong in zip(same, wrong, strict=True):
            if is_wrong and not (kind == "gradient" and now[kind, name].sum == 0):  # zero_grad(set_to_none=False)
                handle = self._handle_of.get(name)
                said = "its sum has changed, and nobody has written it"
                found.append(Corruption(kind, (dist.get_rank(),), handle.name if handle else "ignored", name, said))
        return found

    def _gradient(self, name: str) -> Tensor | None:
        """None while it is not final: another backward has begun to add to it, inside no_sync."""
        gradient = self._runtime.members[name].parameter.grad
        rows = gradient._local_tensor if isinstance(gradient, DTensor) else None
        if not isinstance(rows, LocalRows) or rows.watch is None or rows.watch.forbidden is not None:
            return None
        return gradient
