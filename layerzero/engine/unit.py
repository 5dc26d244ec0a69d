"""A unit: a module whose parameters are gathered and freed together."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from layerzero.engine.handle import Handle, ShardState
from layerzero.engine.member import Member
from layerzero.engine.structure import replaced

__all__ = ["Unit"]


class Unit:
    """The handles of one module, and which parameters the module shows.

    Between passes the module shows sharded parameters. It shows the gathered leaves while its forward runs, and while
    its backward does, for a checkpoint inside the module that computes again.
    """

    def __init__(self, name: str, module: nn.Module, handles: tuple[Handle, ...]) -> None:
        self.name = name
        self._module = weakref.ref(module)  # see [Note: Who keeps whom]
        self.handles = handles
        self._places = [
            (parameters, attribute, member) for member in self.members() for parameters, attribute in member.places
        ]

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

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

    def gather(self) -> None:
        """Launch the gathers of what is not there or on its way."""
        for handle in self.handles:
            if handle.state is ShardState.SHARDED:
                handle.gather()

    def reshard(self) -> None:
        for handle in self.handles:
            handle.reshard()

    def prefetch_accumulators(self) -> None:
        """Its gradients will arrive soon."""
        for handle in self.handles:
            if handle.gradients is not None and handle.trainable:
                handle.gradients.prefetch()

    def release(self) -> None:
        """Free the full buffer and show sharded parameters again."""
        self.show_sharded()
        self.reshard()

    def show_leaves(self) -> None:
        for parameters, attribute, member in self._places:
            shown = parameters.get(attribute)
            if shown is not member.parameter and shown is not member.leaf:
                raise replaced(member)
            parameters[attribute] = member.leaf

    def show_sharded(self) -> None:
        for parameters, attribute, member in self._places:
            parameters[attribute] = member.parameter
