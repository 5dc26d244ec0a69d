"""Puts layerzero into Megatron-LM's training script, from the user's own script and without a change to its files.

[Note: What is replaced in Megatron-LM]
``pretrain`` takes a function that adds flags, and has no hook for the wrapper around the model, the optimizer, or what
reads whole weights. So these names of ``megatron.training.training`` are given other values, and nothing else is:

- ``get_model``: builds the chunks as it did, and wraps them with layerzero where it would have wrapped them;
- ``get_megatron_optimizer``: makes the optimizer that steps them;
- ``finalize_model_grads``: what :func:`layerzero.megatron.wrap` has set in the config, which the loop sets again;
- ``calc_params_l2_norm`` and ``check_param_hashes_across_dp_replicas``: count rows once, and compare replicas' shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.flags import Chosen, chosen_of
from layerzero.megatron.groups import tell_all
from layerzero.megatron.optimizer import ShardedMegatronOptimizer
from layerzero.megatron.units import default_units, named, with_named
from layerzero.megatron.weights import params_norm, replicas_agree
from layerzero.megatron.wrap import wrap

__all__ = ["install"]


def install() -> None:
    """Let Megatron-LM's ``pretrain`` train with layerzero. Call it in the pretraining script, before ``pretrain``.

    Written for ``megatron.training`` of Megatron-LM core_v0.16.1; see [Note: What is replaced in Megatron-LM]. Calling
    it twice changes nothing. Flags that cannot be had here are an error on all ranks, before there is a model.

    Raises:
        ImportError: there is no ``megatron.training``, which megatron-core's package does not have.
        RuntimeError: it is of another version, or was imported under another name.

    Example::

        layerzero.megatron.install()
        pretrain(..., extra_args_provider=layerzero.megatron.add_arguments)
    """
    from megatron.training import training  # noqa: PLC0415

    if isinstance(training.get_model, _GetModel):
        return
    if missing := [name for name in _REPLACED if not hasattr(training, name)]:
        raise RuntimeError(f"{training.__file__} has no {', '.join(missing)}: layerzero knows Megatron-LM core_v0.16.1")
    build = _GetModel(training.get_model, training)
    training.get_model = build
    training.get_megatron_optimizer = build.make_optimizer
    training.calc_params_l2_norm = params_norm
    training.check_param_hashes_across_dp_replicas = replicas_agree


_REPLACED = (
    "get_model",
    "get_megatron_optimizer",
    "finalize_model_grads",
    "calc_params_l2_norm",
    "check_param_hashes_across_dp_replicas",
)


class _GetModel:
    """In the place of ``get_model`` of Megatron-LM."""

    def __init__(self, build: Callable[..., list[nn.Module]], training: Any) -> None:
        self._build = build
        self._training = training
        self._ema_decay: float | None = None

    def __call__(
        self,
        model_provider_func: Callable[..., nn.Module],
        *args: Any,
        wrap_with_ddp: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        chosen = self._chosen() if wrap_with_ddp else None
        chunks = self._build(model_provider_func, *args, wrap_with_ddp=False, **kwargs)
        if chosen is None:
            return chunks
        from megatron.core import parallel_state  # noqa: PLC0415
        from megatron.core.utils import get_model_config  # noqa: PLC0415

        config = get_model_config(chunks[0])
        units: Any = None
        if chosen.units:
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            default = [default_units(chunk, pipeline_size=stages) for chunk in chunks]
            units = with_named(default, chosen.units)
        self._ema_decay = chosen.ema_decay
        wrapped = wrap(chunks, config, units=units, **chosen.wrap)
        self._training.finalize_model_grads = config.finalize_model_grads_func
        _require_all(chosen.units, wrapped)
        return wrapped

    def _chosen(self) -> Chosen:
        from megatron.core import parallel_state  # noqa: PLC0415

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return chosen_of(self._training.get_args(), sorted(dist.get_process_group_ranks(group)))

    def make_optimizer(
        self, config: Any, model_chunks: list[Any], config_overrides: Any = None, **unused: Any
    ) -> ShardedMegatronOptimizer:
        """In the place of ``get_megatron_optimizer``, whose further settings are of Megatron's groups."""
        return ShardedMegatronOptimizer(
            model_chunks, config, config_overrides=config_overrides, ema_decay=self._ema_decay
        )


def _require_all(units: tuple[str, ...], chunks: list[ShardedChunk]) -> None:
    """A stage need not have the modules that a file names, but one of them must."""
    modules = [entry for chunk in chunks for entry in chunk.named_modules()]
    here = {found for name, module in modules for found in named(name, module, units)}
    known = {found for told in tell_all(chunks[0].groups, here) for found in told}
    if lost := sorted(set(units) - known):
        raise ValueError(f"units of --layerzero-config names {', '.join(lost)}, of which there is nothing in the model")
