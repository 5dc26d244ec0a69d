"""Define `LayerZeroState`, the root state of one sharded model, to which the hooks on the model's modules refer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.transport.base import Transport
from layerzero.config import LayerZeroConfig
from layerzero.engine.gradient_reducer import GradientReducer
from layerzero.engine.managed_param import ParamRegistry
from layerzero.engine.model_status import Closable, ModelStatus
from layerzero.engine.module_checks import StructureCheck
from layerzero.engine.passes import GatheredUse
from layerzero.engine.resources import ModelPools
from layerzero.engine.scheduler import Scheduler
from layerzero.engine.unit import Unit
from layerzero.engine.weight_refresh import WeightRefresher

__all__ = ["LayerZeroState"]


class ModelExtension(Protocol):
    """Protocol for objects that other subpackages attach to a model."""

    def close(self) -> None:
        """Finish the object's work and release its resources."""


_T = TypeVar("_T", bound=ModelExtension)


class LayerZeroState(Closable):
    """Root state of one sharded model, owned by the hooks of the root module; see :mod:`layerzero.engine.hooks`.

    The state builds and owns the scheduler, the gradient reducer and the weight refresher.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],  # the root must be first
        config: LayerZeroConfig,
        model_ranks: ModelRanks,
        pools: ModelPools,
        transports: Iterable[Transport],  # transport of each mesh, beginning with the root's mesh
        ignored: Sequence[nn.Parameter],
    ) -> None:
        self._model = weakref.ref(model)  # see [Note: References between model and state] in hooks.py
        self.units = tuple(units)
        self.handles = tuple(handle for unit in units for handle in unit.handles)
        self.transports = tuple(transports)
        self.cast_buffers = tuple(each for unit in units for each in unit.cast_buffers)
        self.config = config
        self.ranks = model_ranks
        self.mesh_info = mesh_info = model_ranks.mesh_info
        self.pools = pools
        self.observer = mesh_info.counters.observer
        self._extensions: dict[type[ModelExtension], Any] = {}  # by class; see extension()
        # Bytes that objects of other subpackages keep on this rank, by kind of memory; see layerzero.memory.
        self.kept_bytes: dict[str, Callable[[], int]] = {}
        self.on_close: list[Callable[[], object]] = []  # idempotent callbacks that end snapshots, watchdogs, etc.
        members_by_id = {id(m.sharded): m for handle in self.handles for m in handle.members}
        # By name, in the order of the model. The order of the handles may differ between ranks.
        self.members = {m.name: m for parameter in model.parameters() if (m := members_by_id.get(id(parameter)))}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # from shard_optimizer
        self.parameters = ParamRegistry(self.members, ignored)
        self.status = ModelStatus(StructureCheck(model, self.members.values()))
        uses: list[GatheredUse] = []
        enclosing = {
            handle: [outer for each in unit.enclosing for outer in each.handles]
            for unit in self.units
            for handle in unit.handles
        }
        self.gradients = GradientReducer(self.handles, model_ranks, enclosing)
        self.refreshes = WeightRefresher(self.handles, model_ranks, uses, self.transports)
        self.scheduler = Scheduler(
            self.units, config, mesh_info, pools, self.gradients, self.refreshes, uses, self.status
        )

    @property
    def model(self) -> nn.Module:
        """The sharded model. Raises RuntimeError if the model was garbage collected."""
        if (model := self._model()) is None:
            raise RuntimeError(
                "the sharded model was garbage collected because nothing referred to it. Keep a reference to the model "
                "that you passed to shard_model"
            )
        return model

    def extension(self, kind: type[_T], make: Callable[[], _T]) -> _T:
        """Return this model's object of class `kind`, which belongs to another subpackage.

        The first call creates the object with `make`. When the model is closed, the object is closed and released.
        """
        if kind not in self._extensions:
            self._extensions[kind] = make()
        found: _T = self._extensions[kind]
        return found

    def close(self) -> None:
        """Finish background work and release all of the model's resources except its parameters.

        See [Note: Closed models] in hooks.py. If the process groups use a device backend such as NCCL, all ranks must
        call this method.
        """
        try:
            self.scheduler.recover_interrupted_pass()
            for extension in self._extensions.values():
                extension.close()
            while self.on_close:
                self.on_close.pop()()
            self.observer.end_all()
        finally:
            self.gradients.close()
            for handle in self.handles:
                handle.close()
            for transport in self.transports:
                transport.close()
            for optimizer in self.optimizers:
                optimizer.on_layout_change()  # type: ignore[attr-defined]
            self.mesh_info.groups.release()
            self.scheduler.close()
            super().close()
