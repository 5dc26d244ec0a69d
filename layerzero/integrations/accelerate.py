"""Accelerate: an ``Accelerator`` that shards the models and optimizers that it prepares.

Accelerate selects its plugins with an enum that cannot be extended. Therefore this module subclasses ``Accelerator``
and overrides documented methods. It does not change Accelerate's classes. ``save_state`` and ``load_state`` have no
hook for optimizers, so :meth:`_hide_sharded` hides sharded models and optimizers from both methods.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DynamoBackend
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero import ShardedOptimizer, checkpoint, clip_grad_norm_, full_state_dict, no_sync, shard_optimizer
from layerzero.extend import Units, current, get_state
from layerzero.integrations.common import is_sharded, merge_settings, model_of, shard

__all__ = ["CONFIG_VARIABLE", "LayerZeroAccelerator", "LayerZeroPlugin"]

CONFIG_VARIABLE = "ACCELERATE_LAYERZERO_CONFIG"
_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class LayerZeroPlugin:
    """Settings that :class:`LayerZeroAccelerator` uses to shard models.

    Args:
        zero3_size: number of ranks over which the compute weights are sharded. The default is the number of ranks per
            node.
        units: as for :func:`layerzero.shard_model`. The default is the classes in the model's ``_no_split_modules``, if
            any.
        mp_policy: mixed-precision policy. The default is to compute in Accelerate's `mixed_precision` dtype and reduce
            gradients in fp32.
        config_file: YAML file with these or other settings; see :meth:`layerzero.LayerZeroConfig.from_yaml`. The
            default is the path in the environment variable ``ACCELERATE_LAYERZERO_CONFIG``, if the variable is set.
        settings: other arguments of :func:`layerzero.shard_model`, with the names and values used in a settings file.

    Example::

        plugin = LayerZeroPlugin(zero3_size=8, settings={"accumulation": "full"})
        accelerator = LayerZeroAccelerator(layerzero_plugin=plugin, mixed_precision="bf16")
    """

    def __init__(
        self,
        *,
        zero3_size: int | None = None,
        units: Units = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        config_file: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        file = config_file or os.environ.get(CONFIG_VARIABLE)
        self.settings = merge_settings(file, settings, zero3_size=zero3_size, units=units, mp_policy=mp_policy)


class LayerZeroAccelerator(Accelerator):
    """Accelerate's ``Accelerator`` with models sharded by layerzero instead of wrapped in ``DistributedDataParallel``.

    Args:
        layerzero_plugin: layerzero settings. The default is ``LayerZeroPlugin()``.
        args, kwargs: as for ``accelerate.Accelerator``.

    Raises:
        ValueError: a setting is not supported, or makes Accelerate shard, wrap or compile models. The message names the
            setting.

    Example::

        accelerator = LayerZeroAccelerator(layerzero_plugin=LayerZeroPlugin(zero3_size=8))
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    """

    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def __init__(self, *args: Any, layerzero_plugin: LayerZeroPlugin | None = None, **kwargs: Any) -> None:
        self.layerzero_plugin = layerzero_plugin if layerzero_plugin is not None else LayerZeroPlugin()
        super().__init__(*args, **kwargs)
        self._require_nothing_else()

    def _require_nothing_else(self) -> None:
        plugins = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
        names = [name for name in plugins if getattr(self.state, name, None)]
        names += ["parallelism_config"] if self.parallelism_config else []
        names += ["dynamo_backend"] if self.state.dynamo_plugin.backend != DynamoBackend.NO else []
        handler = self.ddp_handler or DistributedDataParallelKwargs()
        names += ["comm_hook"] if handler.comm_hook != DDPCommunicationHookType.NO else []
        names += ["mixed_precision='fp8'"] if self.mixed_precision == "fp8" else []
        if names:
            raise ValueError(
                f"{', '.join(names)}: Accelerate would shard, wrap or compile the model that layerzero shards. Leave "
                "it out, also in the configuration of `accelerate launch`. Compile units with torch.compile before "
                "prepare"
            )
        if self.mixed_precision == "fp16" and not self.native_amp:
            raise ValueError(
                f"mixed_precision='fp16' is not supported on {self.device}, because Accelerate does not scale the loss "
                "there. Use 'bf16' or 'no'"
            )

    # Models, optimizers and schedulers may be prepared in any order, in one call to prepare or several

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard the model in place. If `evaluation_mode` is True, the model is not sharded."""
        if not evaluation_mode:
            shard(model, self.layerzero_plugin.settings, _DTYPES[self.mixed_precision])
        if is_sharded(model):
            device_placement, evaluation_mode = False, True
        # Accelerate does everything except wrapping: autocast, outputs in fp32, the list of models.
        model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        self._shard_optimizers()
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap the optimizer.

        The optimizer is sharded immediately if its model is already prepared. Otherwise, it is sharded when its model
        is prepared.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        self._shard_optimizers()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap the scheduler.

        If this accelerator prepared the scheduler's optimizer, only that optimizer determines when the scheduler steps.
        """
        prepared = super().prepare_scheduler(scheduler)
        stepped = getattr(scheduler, "optimizer", None)
        stepped_optimizers = [
            wrapped for wrapped in self._optimizers if stepped in (wrapped, getattr(wrapped.optimizer, "inner", None))
        ]
        prepared.optimizers = stepped_optimizers or prepared.optimizers
        return prepared

    def _shard_optimizers(self) -> None:
        for prepared in self._optimizers:
            if isinstance(prepared.optimizer, ShardedOptimizer):
                continue
            if (model := model_of(prepared, self._models)) is not None:
                sharded = shard_optimizer(prepared.optimizer, model)
                prepared.__init__(
                    sharded, device_placement=False, scaler=prepared.scaler
                )  # in place, because the user may already have a reference to it

    @property
    def _sharded_models(self) -> list[nn.Module]:
        return [model for model in self._models if is_sharded(model)]

    # The loop

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context manager that disables gradient reduction across replicas in the backward; used by ``accumulate``."""
        with no_sync(model) if is_sharded(model) else super().no_sync(model):
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Same as Accelerate's `join_uneven_inputs`, which sharded models do not support.

        Their collectives need all ranks, including ranks that have no more data.

        Raises:
            ValueError: a model in `joinables` is sharded.
        """
        if any(is_sharded(each) for each in joinables):
            raise ValueError(
                "join_uneven_inputs does not support sharded models. Use even_batches=True, which repeats samples"
            )
        with super().join_uneven_inputs(joinables, even_batches=even_batches):
            yield

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of the gradients over all ranks to `max_norm`, and return the norm before clipping.

        If `parameters` are exactly the parameters of a sharded model, the method calls
        :func:`layerzero.clip_grad_norm_`.
        """
        clipped = [current(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)]
        for model in self._sharded_models:
            if {id(p) for p in clipped} == {id(member.sharded) for member in get_state(model).members.values()}:
                self.unscale_gradients()
                return clip_grad_norm_(model, max_norm, norm_type)
        norm = super().clip_grad_norm_(clipped, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    # State dicts

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict of a model. All ranks must call this method.

        For a sharded model, the first rank returns full tensors, and the other ranks return ``{}``.
        """
        return full_state_dict(model) if is_sharded(model) else super().get_state_dict(model, unwrap=unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save the state like Accelerate, but save sharded models and optimizers as layerzero checkpoints.

        The layerzero checkpoints are in the same folder. Each rank writes its own rows into these checkpoints, and any
        number of ranks can load them.

        Raises:
            ValueError: a sharded model has more than one optimizer.
        """
        save = partial(checkpoint.save, overwrite=True)
        with self._hide_sharded("_save_model_state_pre_hook", save):
            return super().save_state(output_dir, safe_serialization=safe_serialization, **kwargs)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load a folder that :meth:`save_state` wrote."""
        with self._hide_sharded("_load_model_state_pre_hook", checkpoint.load):
            super().load_state(input_dir, load_kwargs, **kwargs)

    def _own_checkpoints(self) -> list[tuple[str, nn.Module, ShardedOptimizer | None]]:
        """Return the folder name, the model and the optimizer, if any, of each layerzero checkpoint."""
        checkpoints: list[tuple[str, nn.Module, ShardedOptimizer | None]] = []
        for i, model in enumerate(self._sharded_models):
            own = [
                wrapped.optimizer for wrapped in self._optimizers if wrapped.optimizer in get_state(model).optimizers
            ]
            if len(own) > 1:
                raise ValueError(
                    f"a sharded model has {len(own)} optimizers, but save_state and load_state support one. Save with "
                    "layerzero.checkpoint.save"
                )
            checkpoints.append((f"layerzero_{i}", model, own[0] if own else None))
        return checkpoints

    @contextmanager
    def _hide_sharded(self, hooks: str, act: Callable[..., Any]) -> Iterator[None]:
        """Context manager that hides sharded models and optimizers from Accelerate and saves or loads them with `act`.

        The user's hooks still receive all models.

        Args:
            hooks: name of the attribute with the registered hooks. Inside the context, a single hook replaces the
                user's hooks. It calls the user's hooks, then `act`. A hook is necessary because Accelerate passes the
                folder only to hooks.
            act: ``act(path, model, optimizer)`` saves or loads one layerzero checkpoint.
        """
        models, optimizers, registered, checkpoints = (
            self._models,
            self._optimizers,
            getattr(self, hooks),
            self._own_checkpoints(),
        )

        def hook(*args: Any) -> None:  # (models, weights, folder) of a save, (models, folder) of a load
            hook_models, *_, folder = args
            visible = list(models)
            for each in registered.values():
                each(visible, *args[1:])
            # The user's hooks may have removed models.
            hook_models[:] = [model for model in hook_models if any(model is other for other in visible)]
            for name, model, optimizer in checkpoints:
                act(Path(folder) / name, model, optimizer)

        setattr(self, hooks, OrderedDict({0: hook}))
        self._models = [model for model in models if not is_sharded(model)]
        self._optimizers = [each for each in optimizers if not isinstance(each.optimizer, ShardedOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            setattr(self, hooks, registered)
