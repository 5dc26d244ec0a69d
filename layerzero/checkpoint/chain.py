"""A chain of digests, by which a run that was resumed is proven equal to one that was not.

[Note: The same whatever the number of ranks]
A parameter's digest adds up over its elements, each counted by its place in the whole tensor. So every rank adds what
it holds, and the sum is that of the whole, however it is cut. What a rank alone has, its data and its random numbers,
is listed by rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero.checkpoint.files import CheckpointError
from layerzero.checkpoint.randomness import random_states
from layerzero.comm.texts import share_texts
from layerzero.engine.hooks import runtime_of
from layerzero.optimizers.sharded import ShardedOptimizer
from layerzero.reliability.bits import place_sum
from layerzero.reliability.numbers import few_names

__all__ = ["Chain"]

_START = "0" * 64


class Chain:
    """Digests of a run: at each link, of weights, optimizer state, the data since the last link, and random numbers.

    Each link holds the one before. Two runs whose links are equal had the same weights, state, random numbers, and data
    in the same order, at every link so far.

    Args:
        model: from :func:`layerzero.shard_model`.
        optimizers: from :func:`layerzero.shard_optimizer`.

    Example::

        chain = checkpoint.Chain(model, optimizer)
        if found := checkpoint.load_latest("runs/1", model, optimizer):
            chain.resume(found.extra["chain"])
        for step, indices in enumerate(batches):
            chain.saw(indices)
            train_on(indices)
            if step % 1000 == 999:
                checkpoint.save(f"runs/1/step-{step + 1}", model, optimizer, {"chain": chain.link(step + 1)})
    """

    def __init__(self, model: nn.Module, *optimizers: ShardedOptimizer) -> None:
        self._runtime = runtime_of(model)
        if not all(optimizer in self._runtime.optimizers for optimizer in optimizers):
            raise ValueError("an optimizer belongs to another model, or did not come from layerzero.shard_optimizer")
        self._optimizers = optimizers
        self._head = _START
        self._data = hashlib.sha256()

    def saw(self, *data: object) -> None:
        """This rank has trained on these: indices of samples, as numbers, tensors, and lists of them."""
        self._data.update(_text(data).encode())

    def link(self, step: int) -> dict[str, Any]:
        """The next link, the same on all ranks; for ``extra`` of a checkpoint. All ranks must call this."""
        state, random = self._weights(), self._of_ranks(_random_digest())
        data = self._of_ranks(self._data.hexdigest())
        self._data = hashlib.sha256()
        said = json.dumps([self._head, step, state, random, data], sort_keys=True)
        self._head = hashlib.sha256(said.encode()).hexdigest()
        return {"head": self._head, "step": step, "weights": state, "random": random, "data": data}

    def resume(self, link: dict[str, Any]) -> bool:
        """Go on from a link, once the checkpoint is loaded and the random numbers are set. All ranks must call this.

        Returns:
            False if another number of ranks made the link: then random numbers and data are each rank's anew.

        Raises:
            CheckpointError: what was loaded is not what was saved; says what.
        """
        now = self._weights()
        wrong = [name for name in dict.fromkeys([*link["weights"], *now]) if link["weights"].get(name) != now.get(name)]
        if wrong:
            raise CheckpointError(
                f"the run does not go on from what was saved at step {link['step']}: {few_names(wrong)}"
            )
        random = self._of_ranks(_random_digest())
        same_ranks = len(random) == len(link["random"])
        if same_ranks and random != link["random"]:
            ranks = [str(rank) for rank, (a, b) in enumerate(zip(random, link["random"], strict=True)) if a != b]
            raise CheckpointError(
                f"the run does not go on from what was saved at step {link['step']}: random numbers of the ranks "
                f"{', '.join(ranks)} are others; set them with checkpoint.set_random_states before"
            )
        self._head = link["head"]
        self._data = hashlib.sha256()
        return same_ranks

    @torch.no_grad()
    def _weights(self) -> dict[str, int]:
        """A sum for each parameter, and for all of its optimizer state."""
        runtime = self._runtime
        topology, members = runtime.topology, runtime.members
        sums = torch.zeros(2, len(members), dtype=torch.int64, device=topology.device)
        firsts, index_of = {}, {name: index for index, name in enumerate(members)}
        for name, member in members.items():
            row = member.master[:1].numel()
            firsts[name] = member.span.rows.start * row
            sums[0, index_of[name]] = place_sum(member.master, firsts[name]).to(topology.device)
        for optimizer in self._optimizers:
            for name, values in optimizer.state_by_name().items():
                if name in members:
                    owned = optimizer.is_owned(name)
                    member = members[name]
                    leads = owned or (bool(member.span.rows) and member.span.rows.start == 0)
                    for key, value in sorted(values.items()):
                        part = _sum_of(value, 0 if owned else firsts[name], is_rows=not owned, leads=leads)
                        sums[1, index_of[name]] += (part * _odd(key)).to(topology.device)
        runtime.everyone.reduce(sums, dist.ReduceOp.SUM)
        weights, state = sums.tolist()
        found = dict(zip(members, weights, strict=True))
        return found | {
            f"optimizer state of {name}": value for name, value in zip(members, state, strict=True) if value
        }

    def _of_ranks(self, text: str) -> list[str]:
        return share_texts(self._runtime.everyone.control, text)


def _sum_of(value: Any, first: int, *, is_rows: bool, leads: bool) -> Tensor:
    """What this rank adds for an entry of the state: its rows, or a number that one rank adds for all."""
    if isinstance(value, Tensor) and value.ndim and is_rows:
        return place_sum(value, first)
    if not leads:
        return torch.zeros((), dtype=torch.int64)
    if isinstance(value, Tensor):
        return place_sum(value, 0)
    if isinstance(value, (list, tuple)):
        items = [_sum_of(item, 0, is_rows=False, leads=True) * _odd(str(place)) for place, item in enumerate(value)]
        return torch.stack([item.cpu() for item in items] or [torch.zeros((), dtype=torch.int64)]).sum()
    return torch.tensor(_odd(repr(value)), dtype=torch.int64)


def _odd(text: str) -> int:
    """An odd number of 62 bits, of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2 | 1


def _random_digest() -> str:
    digest = hashlib.sha256()
    states = random_states(0, 0)["states"].value
    digest.update(_text([states[key] for key in sorted(states)]).encode())
    return digest.hexdigest()


def _text(value: object) -> str:
    """A text that only equal values have."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.detach().cpu().view(-1).tolist()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_text(item)}" for key, item in sorted(value.items())) + "}"
    if not isinstance(value, str | bytes) and isinstance(value, Iterable):
        return "[" + ",".join(map(_text, value)) + "]"
    return repr(value)
