"""Provide an optimizer for sharded model chunks that has the interface of ``MegatronOptimizer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero import EMA, ShardedOptimizer, refresh, shard_optimizer
from layerzero.extend import get_state, local_rows, torch_compat
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.model_checks import is_counted, reduce_over_model, refuse_nonfinite, sum_of_squares
from layerzero.megatron.muon import is_muon, muon_and_adamw, refuse_muon, split_groups
from layerzero.optimizers import adamw, sgd


class ShardedMegatronOptimizer:
    """Optimizer of sharded model chunks with the interface of ``megatron.core.optimizer.MegatronOptimizer``.

    Args:
        model_chunks: chunks that :func:`layerzero.megatron.wrap` returned.
        config: Megatron's OptimizerConfig. This class uses `optimizer` (``"adam"``, ``"sgd"`` or ``"muon"``) and the
            settings of that optimizer, `clip_grad`, `grad_norm_skip_threshold`, `log_num_zeros_in_grad`, and `fp16`
            with its loss scale. Settings for Megatron's sharding and overlap are ignored.
        config_overrides: Megatron's ``{ParamKey: {"wd_mult": ..., "lr_mult": ..., ...}}``. The keys see parameters with
            their global shapes. The default is Megatron's: biases and 1-D parameters have no weight decay.
        make_optimizer: function that creates the inner optimizer from parameter groups. It replaces the optimizer that
            `config` names.
        ema_decay: decay of an exponential moving average (EMA) of the weights. Each step that is not skipped updates
            the average, and all checkpoints contain the average. If None, there is no average.

    Attributes:
        sharded: ShardedOptimizer of each chunk; None for chunks without trainable parameters.
        emas: EMA of each chunk; None for chunks without an EMA.
        is_stub_optimizer: True if no rank of the model has trainable parameters. Megatron-LM reads this attribute. If
            only some stages have trainable parameters, the attribute is False on all stages, because all ranks must
            take part in the collectives of a step.

    Raises:
        ValueError: `config` lacks a learning rate or names an unsupported optimizer; `config_overrides` gives a
            parameter two values for one setting, or another optimizer.
    """

    def __init__(
        self,
        model_chunks: Sequence[ShardedChunk],
        config: Any,
        *,
        config_overrides: Mapping[Any, Mapping[str, Any]] | None = None,
        make_optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        ema_decay: float | None = None,
    ) -> None:
        if config.lr is None:
            raise ValueError("config.lr is None. Set a learning rate in the OptimizerConfig")
        self.config = config
        self.model_chunks = list(model_chunks)
        self.groups = self.model_chunks[0].groups
        self.sharded: list[ShardedOptimizer | None] = []
        self._with_muon = make_optimizer is None and is_muon(config)
        if self._with_muon:
            refuse_muon(config, self.groups.tensor.size())
        for chunk in self.model_chunks:
            groups = _param_groups(chunk, config, config_overrides)
            inner = self._create_inner(chunk, groups, make_optimizer) if groups else None
            self.sharded.append(None if inner is None else shard_optimizer(inner, chunk))
        self.emas: list[EMA | None] = [
            None if ema_decay is None or sharded is None else EMA(chunk, ema_decay)
            for chunk, sharded in zip(self.model_chunks, self.sharded, strict=True)
        ]
        self._device = get_state(self.model_chunks[0]).mesh_info.device
        self.grad_scaler: Any = _create_grad_scaler(config)
        self._one = torch.ones(1, dtype=torch.float32, device=self._device)
        trains = torch.full_like(self._one, float(any(self.sharded)))
        if self._scale_adapts:
            for chunk in self.model_chunks:
                if chunk.own_gradients is not None:
                    chunk.own_gradients.stop()
                    chunk.own_gradients = None
        self.is_stub_optimizer = not reduce_over_model(trains, self.groups, dist.ReduceOp.MAX).item()

    def _create_inner(
        self,
        chunk: ShardedChunk,
        groups: list[dict[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None,
    ) -> Optimizer:
        if self._with_muon:
            return muon_and_adamw(chunk, split_groups(groups), self.config)
        return (make_optimizer or self._create_default_optimizer)(groups)

    def _create_default_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        config = self.config
        settings = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.optimizer == "sgd":
            return sgd(groups, **settings, momentum=config.sgd_momentum)
        if config.optimizer != "adam":
            raise ValueError(
                f"config.optimizer={config.optimizer!r} is not supported. Use 'adam', 'sgd' or 'muon', or pass "
                "make_optimizer"
            )
        betas = (config.adam_beta1, config.adam_beta2)
        if not config.decoupled_weight_decay:
            return torch.optim.Adam(groups, **settings, betas=betas, eps=config.adam_eps)
        return adamw(groups, **settings, betas=betas, eps=config.adam_eps)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all chunks. Schedulers may modify the groups."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def _optimizers(self) -> list[ShardedOptimizer]:
        return [optimizer for optimizer in self.sharded if optimizer is not None]

    def get_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # Loss scale

    @property
    def _scale_adapts(self) -> bool:
        """True if the loss scale is dynamic. A step with an overflow is then skipped, and no error is raised."""
        return self.grad_scaler is not None and not self.config.loss_scale

    @property
    def _checks_gradients(self) -> bool:
        """True if a NaN or infinite gradient raises an error."""
        return any(chunk.own_gradients is not None for chunk in self.model_chunks)

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale as an fp32 tensor of shape [1]."""
        scale: Tensor = self._one if self.grad_scaler is None else self.grad_scaler.scale
        return scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale. Use this method as ``config.grad_scale_func``."""
        return self.get_loss_scale() * loss

    # One step

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)
        for chunk in self.model_chunks:
            if chunk.own_gradients is not None:
                chunk.own_gradients.clear_record()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Unscale and clip gradients, update the masters and launch the refresh. All ranks must call this method.

        Returns:
            ``(updated, norm, zeros)``. `updated` is False if a gradient overflowed on any rank of the model, or if the
            norm is above `config.grad_norm_skip_threshold`. `norm` is the gradient norm before clipping, or None after
            an overflow. `zeros` is the number of gradient elements that are zero. It is None after an overflow, or if
            `config.log_num_zeros_in_grad` is off.

        Raises:
            RuntimeError: a gradient is NaN or infinite, and ``wrap(check_for_nan_in_grad=True)`` was used. All ranks
                raise this error.
        """
        if self.prepare_grads():
            return False, None, None
        norm = self.clip_grad_norm(self.config.clip_grad)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        if norm > getattr(self.config, "grad_norm_skip_threshold", math.inf):  # since Megatron-Core 0.19
            return False, norm, zeros
        return self.step_with_ready_grads(), norm, zeros

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Complete the gradient reduction and divide gradients by the loss scale.

        Returns:
            True if a gradient overflowed on any rank of the model.
        """
        for chunk in self.model_chunks:
            chunk.finish_grad_sync()
        if self.grad_scaler is None:
            return False
        overflows = torch.zeros(1, dtype=torch.float32, device=self._device)
        gradients = [rows for chunk in self.model_chunks for rows in chunk.gradient_rows().values() if rows.numel()]
        if gradients:
            torch_compat.amp_unscale(gradients, overflows, self.grad_scaler.inv_scale)
        reduce_over_model(overflows, self.groups, dist.ReduceOp.MAX)
        overflow = bool(overflows.item() > 0)
        if overflow and self._checks_gradients:
            refuse_nonfinite(self.model_chunks, self.groups)
        self.grad_scaler.update(overflow)
        return overflow

    def step_with_ready_grads(self) -> bool:
        """Step the optimizers, update the EMAs, and return True. Call :meth:`prepare_grads` first."""
        for optimizer in self._optimizers:
            optimizer.step()
        for ema in self.emas:
            if ema is not None:
                ema.update()
        return True

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip the gradients to a norm of `clip_grad` and return the norm before clipping.

        Gradients are not clipped if `clip_grad` is zero or negative.
        """
        norm = self.get_grad_norm()
        factor = clip_grad / (norm + 1e-6) if clip_grad > 0 else 1.0
        if factor < 1.0 or math.isnan(factor):
            for chunk in self.model_chunks:
                chunk.scale_gradients(factor)
                get_state(chunk).gradients.scale_residuals(torch.tensor(factor))
        return norm

    # Statistics, in which each element of the full model counts once

    def get_grad_norm(self) -> float:
        """Return the 2-norm of the gradients of the full model.

        Raises:
            RuntimeError: a gradient is NaN or infinite, and ``wrap(check_for_nan_in_grad=True)`` was used. All ranks
                raise this error.
        """
        counted: list[Tensor] = []
        uncounted: list[Tensor] = []
        for parameter in self.get_parameters():
            if parameter.grad is not None:
                (counted if is_counted(parameter, self.groups) else uncounted).append(local_rows(parameter.grad))
        squares = sum_of_squares(counted, self._device)
        suspect = ~torch.isfinite(squares + sum_of_squares(uncounted, self._device))
        squares, suspects = reduce_over_model(torch.stack([squares, suspect.float()]), self.groups).tolist()
        if suspects and self._checks_gradients:
            refuse_nonfinite(self.model_chunks, self.groups)
        return math.sqrt(squares)

    def count_zeros(self) -> float:
        """Return the number of parameter elements in the full model whose gradient is zero or missing."""
        zeros = torch.zeros((), dtype=torch.float32, device=self._device)
        for parameter in self.get_parameters():
            if is_counted(parameter, self.groups):
                rows = local_rows(parameter.grad if parameter.grad is not None else parameter)
                used = 0 if parameter.grad is None else torch.count_nonzero(rows)
                zeros += rows.numel() - used
        return reduce_over_model(zeros, self.groups).item()

    # State dicts

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Refresh the compute weights after parameters were changed outside a step.

        No values need to be copied to separate masters, because the chunks' parameters are the masters.

        Args:
            state_dict: if given, first load the chunk from ``state_dict["model"]``, or several chunks from
                ``state_dict["model0"]``, ``state_dict["model1"]``, ...

        Raises:
            ValueError: `state_dict` lacks one of these keys.
        """
        for index, chunk in enumerate(self.model_chunks):
            if state_dict is not None:
                name = "model" if len(self.model_chunks) == 1 else f"model{index}"
                if name not in state_dict:
                    raise ValueError(
                        f"reload_model_params: the state dict has no key {name!r}. Its keys are {sorted(state_dict)}"
                    )
                chunk.load_state_dict(state_dict[name])
            refresh(chunk)

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Load the optimizer state. Load the model first.

        Args:
            state_dict: result of ``megatron.core.dist_checkpointing.load`` with :meth:`sharded_state_dict`.

        Raises:
            ValueError: the state does not match the optimizer.
        """
        from layerzero.megatron.sharded_optimizer_state import load_states  # noqa: PLC0415

        load_states(self._chunk_optimizers(), state_dict)
        self.load_scale(state_dict.get(0, state_dict).get("grad_scaler"))

    def load_scale(self, state: Mapping[str, Any] | None) -> None:
        """Load the loss scale from the entry ``"grad_scaler"`` of a checkpoint."""
        if self.grad_scaler is not None and state is not None:
            self.grad_scaler.load_state_dict(state)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Return this rank's rows of optimizer state and masters, for ``megatron.core.dist_checkpointing``.

        Megatron's own optimizers, including the distributed optimizer, use the same format. Megatron can load a
        checkpoint of layerzero in any tensor, pipeline and data-parallel layout, and vice versa. All ranks must call
        this method.

        Args:
            model_sharded_state_dict: unused. Megatron passes the sharded state dict of the chunks.
            is_loading: if True, allocate separate memory for the load, so that the optimizer does not change before
                :meth:`load_state_dict`. With Adam, this memory takes 12 N/D bytes for N parameters on D ranks.
            metadata: Megatron's metadata. ``distrib_optim_sharding_type`` may be ``"fully_reshardable"``.

        Raises:
            ValueError: some parameters have not been updated yet, or step counts differ between parameters.
            NotImplementedError: the format cannot represent some state; the message names this state.
        """
        from layerzero.megatron.sharded_optimizer_state import chained_states  # noqa: PLC0415

        return chained_states(
            self._chunk_optimizers(),
            is_loading=is_loading,
            with_muon=self._with_muon,
            metadata=metadata,
            grad_scaler=None if self.grad_scaler is None else self.grad_scaler.state_dict(),
            groups=self.groups,
        )

    def _chunk_optimizers(self) -> list[Any]:
        from layerzero.megatron.sharded_optimizer_state import ChunkOptimizer  # noqa: PLC0415

        parts = zip(self.model_chunks, self.sharded, self.emas, strict=True)
        return [ChunkOptimizer(chunk, optimizer, ema) for chunk, optimizer, ema in parts if optimizer is not None]


def _param_groups(
    chunk: ShardedChunk, config: Any, config_overrides: Mapping[Any, Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return Megatron's parameter groups of a chunk, without empty groups. All ranks must call this function."""
    from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides  # noqa: PLC0415

    if config_overrides is None:
        config_overrides = get_standard_config_overrides(config)
    groups = [group for group in _get_param_groups([chunk], config, config_overrides) if group["params"]]
    for group in groups:
        if (optimizer := group.pop("optimizer", config.optimizer)) != config.optimizer:
            raise ValueError(
                f"config_overrides sets the optimizer of {len(group['params'])} parameters to {optimizer!r}, but "
                f"config.optimizer is {config.optimizer!r}. layerzero.megatron steps all parameters with one "
                "optimizer. Remove the optimizer from config_overrides"
            )
        # Megatron's scheduler sets these values from its first step on.
        group["lr"] = group["max_lr"] * group["lr_mult"]
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return groups


def _create_grad_scaler(config: Any) -> Any:
    """Return Megatron's own grad scaler if `config` uses fp16 or a constant loss scale, otherwise None."""
    if not config.loss_scale and not config.fp16:
        return None
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler  # noqa: PLC0415

    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
