"""A unit: a module whose parameters are gathered and freed together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from layerzero.handle import Handle, ShardState
from layerzero.member import Member

__all__ = ["Unit", "Use"]


class Use:
    """One call of a unit. It belongs to the graph of its forward, so that each graph finds its own way back."""

    __slots__ = ("_order", "_position", "around", "is_watched", "unit")

    def __init__(self, unit: Unit, around: tuple[Use, ...]) -> None:
        self.unit = unit
        self.around = around  # the uses that call this one, outermost first
        self.is_watched = False  # the gradients of its inputs will end its backward
        self._order: list[Use] = []  # all uses of the forward, by return
        self._position = 0

    def join(self, order: list[Use]) -> None:
        """Take the next place in the order of a forward."""
        self._order, self._position = order, len(order)
        order.append(self)

    @property
    def follower_ends_next(self) -> bool:
        """The use that returned next is in its backward, which ends where this one's begins, but the hook comes second.

        Until then it holds its full buffer.
        """
        if self._position + 1 >= len(self._order):
            return False
        follower = self._order[self._position + 1]
        return follower.is_watched and follower not in self.around and follower in follower.unit.in_backward

    def ended_handles(self) -> Iterator[Handle]:
        """Of the use that returned next, and of those around it, whose nodes autograd runs before any of this one's."""
        if self._position + 1 < len(self._order):
            follower = self._order[self._position + 1]
            for ended in (follower, *follower.around):
                if ended is not self and ended not in self.around:
                    yield from ended.unit.handles

    def before(self, count: int) -> Iterator[Use]:
        """The `count` uses that returned before this one, nearest first."""
        return reversed(self._order[max(0, self._position - count) : self._position])


class Unit:
    """The handles of one module, and which parameters the module shows.

    Between passes the module shows sharded parameters. It shows the gathered leaves while its forward runs, and while
    its backward does, for a checkpoint inside the module that computes again.
    """

    def __init__(self, name: str, module: nn.Module, handles: tuple[Handle, ...]) -> None:
        self.name = name
        self.module = module
        self.handles = handles
        self.running: list[Use] = []  # forwards of the module that are under way; several when it calls itself
        self.in_backward: set[Use] = set()  # uses whose backward has begun and not ended
        self._places = [
            (owner._parameters, attribute, member) for member in self.members() for owner, attribute in member.owners
        ]

    def members(self) -> Iterator[Member]:
        for handle in self.handles:
            yield from handle.members

    @property
    def label(self) -> str:
        """For traces and messages."""
        return self.name or "the root"

    @property
    def gathered(self) -> bool:
        return any(handle.state is not ShardState.SHARDED for handle in self.handles)

    @property
    def must_gather(self) -> bool:
        """A gather would send something."""
        return any(handle.gathers and handle.state is ShardState.SHARDED for handle in self.handles)

    @property
    def idle(self) -> bool:
        """No forward and no backward of it is under way."""
        return not self.running and not self.in_backward

    def gather(self) -> None:
        for handle in self.handles:
            handle.gather()

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()

    def reshard(self) -> None:
        for handle in self.handles:
            handle.reshard()

    def prefetch_accumulators(self) -> None:
        """Its gradients will arrive soon."""
        for handle in self.handles:
            if handle.flow is not None and handle.trainable:
                handle.flow.prefetch()

    def release(self) -> None:
        """Free the full buffer and show sharded parameters again."""
        self.show_sharded()
        self.reshard()

    def show_leaves(self) -> None:
        for parameters, attribute, member in self._places:
            shown = parameters.get(attribute)
            if shown is not member.parameter and shown is not member.leaf:
                raise RuntimeError(
                    f"parameter {member.name!r} was replaced in the sharded model, by an assignment, "
                    "load_state_dict(assign=True), functional_call or a parametrization; copy new values into the "
                    "parameter or use layerzero.load_full_state_dict, and make such changes of structure before "
                    "shard_model"
                )
            parameters[attribute] = member.leaf

    def show_sharded(self) -> None:
        for parameters, attribute, member in self._places:
            parameters[attribute] = member.parameter
