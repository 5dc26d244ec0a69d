"""Define `LayerZeroState`, the root state of one sharded model, to which the hooks on the model's modules refer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.observers import StepObserver
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

_T = TypeVar("_T", bound=StepObserver)


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
        self.parts = mesh_info.counters.parts
        self.observers = mesh_info.counters.observers  # includes objects that are not attached, such as update rules
        self.attached: list[StepObserver] = []  # closed with the model, the last one first
        self.on_close: list[Callable[[], object]] = []  # idempotent callbacks that end threads of the engine
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

    def attach(self, observer: _T) -> _T:
        """Attach `observer` until it is detached or the model is closed, which closes it. Return it."""
        observer.attached_to = weakref.ref(self)
        self.attached.append(observer)
        self.observers.add(observer)
        return observer

    def detach(self, observer: StepObserver) -> None:
        """Detach `observer`, if it is attached. It is not closed."""
        observer.attached_to = None
        self.attached = [each for each in self.attached if each is not observer]
        self.observers.remove(observer)

    def attached_of(self, kind: type[_T]) -> _T | None:
        """Return the attached object of class `kind`, or None."""
        return next((each for each in self.attached if isinstance(each, kind)), None)

    def close(self) -> None:
        """Finish background work and release all of the model's resources except its parameters.

        See [Note: Closed models] in hooks.py. If the process groups use a device backend such as NCCL, all ranks must
        call this method.
        """
        try:
            self.scheduler.recover_interrupted_pass()
            while self.attached:
                observer = self.attached[-1]
                self.detach(observer)
                observer.close()
            while self.on_close:
                self.on_close.pop()()
            self.parts.end_all()
        finally:
            self.gradients.close()
            for handle in self.handles:
                handle.close()
            for transport in self.transports:
                transport.close()
            self.mesh_info.groups.release()
            self.scheduler.close()
            super().close()
