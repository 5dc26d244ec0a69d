"""Exponential moving average of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero.extend import (
    FlatLayout,
    Handle,
    LocalShard,
    ManagedParam,
    ParamView,
    active_view,
    get_state,
    local_rows,
    rows_of,
    sharded,
    shorten_names,
    torch_compat,
)


class EMA:
    """Exponential moving average of a model's trainable parameters, sharded like the masters.

    The first call to :meth:`update` copies the parameters. Each later call computes
    ``average = decay * average + (1 - decay) * parameter``, as ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)`` does (Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv:1703.01780). The
    averages have the shapes and the dtype (fp32) of this rank's masters, and updates run no collectives. Buffers and
    frozen or ignored parameters are not averaged. Evaluation uses their current values. A parameter that is unfrozen
    later is added at the next update.

    Call :meth:`update` after ``optimizer.step()``. If a ``GradScaler`` skips the step, an update averages the unchanged
    parameters again. To avoid such updates, compare ``scaler.get_scale()`` before and after ``scaler.update()``. If the
    step was skipped, the scale has decreased on all ranks.

    Args:
        model: a sharded model.
        decay: weight of the old average, from 0 to 1.

    Attributes:
        n_averaged: number of updates so far, as a 0-dim int64 tensor on the CPU.

    Raises:
        TypeError, ValueError: `model` is not sharded or has no trainable sharded parameters, or `decay` is not in
            [0, 1].

    Example::

        ema = layerzero.EMA(model, decay=0.999)
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        with ema.swapped(), torch.no_grad():
            evaluate(model)
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} is not in the range [0, 1]. Use a value such as 0.999")
        self.decay = decay
        self.n_averaged = torch.zeros((), dtype=torch.int64)
        self._lz_state = get_state(model)
        self._handles: list[Handle] = []
        self._layouts: list[FlatLayout] = []  # by handle: layout of the handle when it was added
        self._averages: list[Tensor] = []  # by handle: 1-D [L], master dtype
        self._rows: dict[str, tuple[ManagedParam, Tensor]] = {}  # by name: (parameter, this rank's rows of the average)
        self._add_missing_averages()
        if not self._handles:
            raise ValueError(
                "the model has no trainable sharded parameters to average. Unfreeze the parameters before you create "
                "the EMA"
            )

    def _add_missing_averages(self) -> None:
        """Add an average for each trainable parameter that has none, starting from the parameter's current value."""
        if any(handle.layout is not layout for handle, layout in zip(self._handles, self._layouts, strict=True)):
            raise RuntimeError(
                "shard_optimizer moved rows to the owners of full parameters after this EMA was created, so its "
                "averages no longer match the masters. Create the EMA after shard_optimizer"
            )
        for handle in self._lz_state.handles:
            if handle.trainable and handle not in self._handles:
                average = handle.weights.master.clone()
                self._handles.append(handle)
                self._layouts.append(handle.layout)
                self._averages.append(average)
                for member in handle.members:
                    self._rows[member.name] = (member, average[member.shard_slice].view(member.master.shape))

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current parameters, without communication.

        Raises:
            RuntimeError: the method is called inside :meth:`swapped`.
        """
        self._lz_state.status.refuse_inside(
            ParamView.EMA, what="EMA.update()", why="where the masters are the averages"
        )
        self._add_missing_averages()
        masters = [handle.weights.master for handle in self._handles]
        if self.n_averaged == 0:
            torch_compat.foreach_copy_(self._averages, masters)
        else:
            torch_compat.foreach_lerp_(self._averages, masters, 1 - self.decay)
        self.n_averaged += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context manager that replaces the model's weights with the averages.

        On exit, the context manager restores the weights exactly.

        All ranks must enter and exit the context together, because entry and exit refresh the compute weights of all
        replicas. The context needs memory for another copy of this rank's masters. Enter the context between a backward
        pass and the next forward pass, because the context invalidates existing autograd graphs. Writes to parameters
        inside the context are undone.

        Raises:
            RuntimeError: the context is entered inside another `swapped` or inside :func:`layerzero.unsharded`.
                ``optimizer.step()`` also raises inside the context, because the update would be lost.

        Example::

            with ema.swapped():
                torch.save(layerzero.full_state_dict(model), "averaged.pt")
        """
        self._add_missing_averages()
        lz_state = self._lz_state
        lz_state.status.refuse_inside(ParamView.UNSHARDED, ParamView.EMA, what="EMA.swapped()")
        masters = [handle.weights.master.clone() for handle in self._handles]
        try:
            with active_view(lz_state.status.active_views, ParamView.EMA):
                self._write_masters(self._averages)
                yield
        finally:
            self._write_masters(masters)

    @torch.no_grad()
    def _write_masters(self, values: list[Tensor]) -> None:
        self._lz_state.refreshes.before_master_write(self._handles)
        for handle, value in zip(self._handles, values, strict=True):
            handle.weights.master.copy_(value)
        self._lz_state.refreshes.launch(self._handles)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter name.

        Returns:
            ``{"averages": {name: tensor}, "n_averaged": tensor}``. The averages are sharded tensors with the
            parameters' shapes and the masters' dtype. They share memory with the EMA. Therefore
            ``torch.distributed.checkpoint`` can save them and load them in place, even from a checkpoint with a
            different sharding.
        """
        self._add_missing_averages()
        held = [(name, *self._rows[name]) for name in self._lz_state.members if name in self._rows]  # same on all ranks
        averages = {name: sharded(rows, member.spec) for name, member, rows in held}
        return {"averages": averages, "n_averaged": self.n_averaged}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. The averages may also be full plain tensors.

        Raises:
            ValueError: names are missing or unexpected, a shape is wrong, or a tensor is sharded differently. The
                averages are not changed in these cases.
        """
        self._add_missing_averages()
        loaded = state_dict["averages"]
        if loaded.keys() != self._rows.keys():
            differing = {"missing": self._rows.keys() - loaded.keys(), "unexpected": loaded.keys() - self._rows.keys()}
            listed = "; ".join(f"{kind}: {shorten_names(names)}" for kind, names in differing.items() if names)
            raise ValueError(
                f"the averages do not match the model: {listed}. Load the averages of a model with the same parameters"
            )
        cut = {name: own_rows(member, loaded[name], "average") for name, (member, _) in self._rows.items()}
        for name, (_, rows) in self._rows.items():
            rows.copy_(cut[name])
        self.n_averaged.fill_(int(state_dict["n_averaged"]))


def own_rows(member: ManagedParam, value: Tensor, what: str) -> Tensor:
    """Return this rank's rows of `value`, which is either a full tensor or a tensor sharded like the parameter.

    Args:
        what: name of the value, for messages.
    """
    if tuple(value.shape) != member.spec.full_shape:
        shapes = f"{list(value.shape)}, but the parameter has shape {list(member.spec.full_shape)}"
        raise ValueError(
            f"the {what} of {member.name!r} has shape {shapes}. Load the {what} of a model with equal shapes"
        )
    if not isinstance(value, DTensor):
        return rows_of(value, member.spec)
    local = value._local_tensor
    if not isinstance(local, LocalShard) or not local.spec.same_sharding(member.spec):
        raise ValueError(
            f"the {what} of {member.name!r} is not sharded like the parameter. Load it through a checkpoint"
        )
    return local_rows(value)
