"""Integrate layerzero with Megatron-LM's ``pretrain`` from the user's script, without changing Megatron's files.

[Note: Replaced names of Megatron-LM]
``pretrain`` has no hook for the wrapper around the model, the optimizer, or functions that read full weights.
Therefore these names in ``megatron.training.training``, and no others, are replaced:

- ``get_model``: the replacement calls the original to build the chunks, but wraps the chunks with layerzero instead of
  Megatron's wrapper.
- ``get_megatron_optimizer``: the replacement returns the :class:`ShardedMegatronOptimizer` of the chunks.
- ``calc_params_l2_norm``: the replacement counts each row once.
- ``check_param_hashes_across_dp_replicas``: the replacement compares the shards of the replicas.
- In 0.16, ``get_megatron_muon_optimizer``: as ``get_megatron_optimizer``, which 0.19 calls for all optimizers.
- In 0.16, ``finalize_model_grads``: the replacement is the function that :func:`layerzero.megatron.wrap` has set in the
  config, because the loop overwrites that config attribute with the function of this name.
- In 0.19, ``setup_model_and_optimizer``: the replacement checks flags and then calls the original. If a script passes a
  model configuration to ``pretrain``, ``megatron.training.models`` builds the model without ``get_model``. For such
  models, ``dist_utils._ddp_wrap``, which wraps the chunks, is also replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from layerzero.megatron.arguments import ParsedArguments, settings_from_arguments
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.default_units import add_named_modules, default_units, matching_names
from layerzero.megatron.megatron_optimizer import ShardedMegatronOptimizer
from layerzero.megatron.model_checks import params_norm, replicas_agree
from layerzero.megatron.parallel_groups import all_gather_object
from layerzero.megatron.versions import SUPPORTED, release, version, version_error
from layerzero.megatron.wrap import wrap


def install() -> None:
    """Make Megatron-LM's ``pretrain`` train with layerzero.

    Call this function in the pretraining script, before ``pretrain``.

    The Megatron-LM versions core_v0.16.1 and core_v0.19.0 are supported; see [Note: Replaced names of Megatron-LM]. A
    second call has no effect. If a flag is unsupported, ``pretrain`` raises an error on all ranks before it builds the
    model.

    Raises:
        ImportError: ``megatron.training`` cannot be imported. The megatron-core 0.16 package does not contain this
            module.
        RuntimeError: the version of Megatron-Core or ``megatron.training`` is not supported. The message names the
            installed version and the supported versions.

    Example::

        layerzero.megatron.install()
        pretrain(..., extra_args_provider=layerzero.megatron.add_arguments)  # 0.16; 0.19: parse_and_validate_args
    """
    if error := version_error():
        raise error
    from megatron.training import training  # noqa: PLC0415

    if isinstance(training.get_model, _GetModel):
        return
    own = ["finalize_model_grads", "get_megatron_muon_optimizer"]
    replaced = [*_REPLACED, *(own if release() < _BUILDERS else ["setup_model_and_optimizer"])]
    if missing := [name for name in replaced if not hasattr(training, name)]:
        raise RuntimeError(
            f"{training.__file__} has no {', '.join(missing)}, which layerzero replaces, so it does not belong to "
            f"megatron-core {version()}. Use Megatron-LM at {SUPPORTED[release()][1]}"
        )
    build = _GetModel(training.get_model, training)
    training.get_model = build
    training.get_megatron_optimizer = build.make_optimizer
    training.calc_params_l2_norm = params_norm
    training.check_param_hashes_across_dp_replicas = replicas_agree
    if release() < _BUILDERS:
        training.get_megatron_muon_optimizer = build.make_optimizer
    else:
        from megatron.training.models import dist_utils  # noqa: PLC0415

        training.setup_model_and_optimizer = build.checking_arguments_first(training.setup_model_and_optimizer)
        dist_utils._ddp_wrap = build.wrap_built


_REPLACED = ("get_model", "get_megatron_optimizer", "calc_params_l2_norm", "check_param_hashes_across_dp_replicas")
_BUILDERS = (0, 19)  # since this release, models are also built from a configuration


class _GetModel:
    """Replacement for Megatron-LM's ``get_model``."""

    def __init__(self, build: Callable[..., list[nn.Module]], training: Any) -> None:
        self._build = build
        self._training = training
        self._settings: ParsedArguments | None = None  # parsed from the command line, inside setup_model_and_optimizer
        self._ema_decay: float | None = None

    def __call__(
        self,
        model_provider_func: Callable[..., nn.Module],
        *args: Any,
        wrap_with_ddp: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        parsed = self._get_settings() if wrap_with_ddp else None
        chunks = self._build(model_provider_func, *args, wrap_with_ddp=False, **kwargs)
        return chunks if parsed is None else self._wrap(chunks, parsed)

    def checking_arguments_first(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for ``setup_model_and_optimizer`` that checks the flags before it builds the model."""

        @functools.wraps(setup)
        def check_then_setup(*args: Any, **kwargs: Any) -> Any:
            self._settings = None if self._training.get_args().skip_train else self._get_settings()
            try:
                return setup(*args, **kwargs)
            finally:
                self._settings = None

        return check_then_setup

    def wrap_built(self, model: list[nn.Module], *unused: Any, **unused_too: Any) -> list[Any]:
        """Wrap chunks with layerzero. This method replaces ``_ddp_wrap``, whose other arguments are ignored."""
        return self._wrap(model, self._get_settings())

    def _wrap(self, chunks: list[nn.Module], parsed: ParsedArguments) -> list[ShardedChunk]:
        from megatron.core import parallel_state  # noqa: PLC0415
        from megatron.core.utils import get_model_config  # noqa: PLC0415

        config = get_model_config(chunks[0])
        units: Any = None
        if parsed.units:
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            predicates = [default_units(chunk, pipeline_size=stages) for chunk in chunks]
            units = add_named_modules(predicates, parsed.units)
        self._ema_decay = parsed.ema_decay
        wrapped = wrap(chunks, config, units=units, **parsed.wrap)
        if release() < _BUILDERS:  # later loops keep config.finalize_model_grads_func
            self._training.finalize_model_grads = config.finalize_model_grads_func
        _require_all(parsed.units, wrapped)
        return wrapped

    def _get_settings(self) -> ParsedArguments:
        if self._settings is not None:
            return self._settings
        from megatron.core import parallel_state  # noqa: PLC0415

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return settings_from_arguments(self._training.get_args(), sorted(dist.get_process_group_ranks(group)))

    def make_optimizer(
        self, config: Any, model_chunks: list[Any], config_overrides: Any = None, **unused: Any
    ) -> ShardedMegatronOptimizer:
        """Create the optimizer of the chunks. This method replaces ``get_megatron_optimizer``.

        Other arguments are ignored.
        """
        return ShardedMegatronOptimizer(
            model_chunks, config, config_overrides=config_overrides, ema_decay=self._ema_decay
        )


def _require_all(units: tuple[str, ...], chunks: list[ShardedChunk]) -> None:
    """Raise ValueError on all ranks if a name in `units` matches no module on any stage."""
    modules = [named_module for chunk in chunks for named_module in chunk.named_modules()]
    own_names = {matched_name for name, module in modules for matched_name in matching_names(name, module, units)}
    matched = {
        matched_name for rank_names in all_gather_object(chunks[0].groups, own_names) for matched_name in rank_names
    }
    if lost := sorted(set(units) - matched):
        raise ValueError(
            f"units of --layerzero-config contains {', '.join(lost)}, but no module of the model has this name or class"
        )
