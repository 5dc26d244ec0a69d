"""The optimizer that Megatron's loop steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.dtensor.sharded_tensor import plain
from layerzero.engine.hooks import get_state
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.finite import refuse
from layerzero.megatron.param_groups import Condition, param_groups
from layerzero.megatron.weights import counts
from layerzero.optimizers.compatibility import kinds_that_need_whole
from layerzero.optimizers.ema import EMA
from layerzero.optimizers.kernels import adamw, sgd
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer, shard_optimizer
from layerzero.sharding.training_loop import refresh

__all__ = ["ShardedMegatronOptimizer"]


class ShardedMegatronOptimizer:
    """Steps sharded model chunks, with the methods and results of ``megatron.core.optimizer.MegatronOptimizer``.

    Args:
        model_chunks: from :func:`layerzero.megatron.wrap`.
        config: Megatron's OptimizerConfig. `optimizer` (``"adam"`` or ``"sgd"``) and its settings, `clip_grad`,
            `grad_norm_skip_threshold`, `log_num_zeros_in_grad`, `fp16` and its loss scale are applied; what says how
            Megatron shards and overlaps is not, as layerzero does that.
        no_weight_decay_cond: ``cond(name, parameter)``, of true shapes, for parameters without weight decay. None:
            biases and vectors, as in Megatron.
        scale_lr_cond: ``cond(name, parameter)`` for parameters whose learning rate is multiplied by `lr_mult`.
        config_overrides: Megatron's own, in place of `no_weight_decay_cond`: ``{ParamKey: {"wd_mult": ..., ...}}``.
        make_optimizer: makes the inner optimizer from parameter groups, in place of what `config` names.
        ema_decay: keep an average of the weights with this decay, which each step updates that is not skipped; it is in
            all checkpoints. None: there is none.

    Attributes:
        sharded: the ShardedOptimizer of each chunk that has trainable parameters; None for others.
        emas: the average of each chunk's weights; None where there is none.
        is_stub_optimizer: nothing on any rank of the model can be trained. A stage without trainable parameters still
            takes part in what all ranks must call, for which Megatron-LM asks this.
    """

    def __init__(
        self,
        model_chunks: Sequence[ShardedChunk],
        config: Any,
        *,
        no_weight_decay_cond: Condition | None = None,
        scale_lr_cond: Condition | None = None,
        lr_mult: float = 1.0,
        config_overrides: Mapping[Any, Mapping[str, Any]] | None = None,
        make_optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        ema_decay: float | None = None,
    ) -> None:
        if no_weight_decay_cond is not None and config_overrides is not None:
            raise ValueError("give either no_weight_decay_cond or config_overrides")
        if config.lr is None:
            raise ValueError("config.lr is None; give the OptimizerConfig a learning rate")
        self.config = config
        self.model_chunks = list(model_chunks)
        self.groups = self.model_chunks[0].groups
        self.sharded: list[ShardedOptimizer | None] = []
        for chunk in self.model_chunks:
            groups = param_groups(
                chunk,
                config,
                no_weight_decay_cond=no_weight_decay_cond,
                scale_lr_cond=scale_lr_cond,
                lr_mult=lr_mult,
                config_overrides=config_overrides,
            )
            inner = (make_optimizer or self._make)(groups) if groups else None
            if inner is not None and kinds_that_need_whole(inner, get_state(chunk).mesh_info.device):
                raise ValueError(
                    f"{type(inner).__name__} needs whole parameters, which is not supported inside Megatron: let "
                    "make_optimizer return an element-wise optimizer, such as layerzero.optimizers.adamw"
                )
            self.sharded.append(None if inner is None else shard_optimizer(inner, chunk))
        self.emas: list[EMA | None] = [
            None if ema_decay is None or sharded is None else EMA(chunk, ema_decay)
            for chunk, sharded in zip(self.model_chunks, self.sharded, strict=True)
        ]
        self._device = get_state(self.model_chunks[0]).mesh_info.device
        self.grad_scaler: Any = _grad_scaler(config)
        self._one = torch.ones(1, dtype=torch.float32, device=self._device)
        trains = torch.full_like(self._one, float(any(self.sharded)))
        if self._scale_adapts:
            for chunk in self.model_chunks:
                if chunk.own_gradients is not None:
                    chunk.own_gradients.stop()
                    chunk.own_gradients = None
        self.is_stub_optimizer = not self._over_model(trains, dist.ReduceOp.MAX).item()

    def _make(self, groups: list[dict[str, Any]]) -> Optimizer:
        config = self.config
        settings = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.optimizer == "sgd":
            return sgd(groups, **settings, momentum=config.sgd_momentum)
        if config.optimizer != "adam":
            raise ValueError(f"config.optimizer={config.optimizer!r}; use 'adam' or 'sgd', or give make_optimizer")
        betas = (config.adam_beta1, config.adam_beta2)
        if not config.decoupled_weight_decay:
            return torch.optim.Adam(groups, **settings, betas=betas, eps=config.adam_eps)
        return adamw(groups, **settings, betas=betas, eps=config.adam_eps)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all chunks; schedulers may change them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def _optimizers(self) -> list[ShardedOptimizer]:
        return [optimizer for optimizer in self.sharded if optimizer is not None]

    def get_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # Loss scale

    @property
    def _scale_adapts(self) -> bool:
        """An overflow is no failure: it skips the step, and the next loss scale is smaller."""
        return self.grad_scaler is not None and not self.config.loss_scale

    @property
    def _checks(self) -> bool:
        """A gradient that is not finite is an error."""
        return any(chunk.own_gradients is not None for chunk in self.model_chunks)

    def get_loss_scale(self) -> Tensor:
        """fp32, of one element."""
        scale: Tensor = self._one if self.grad_scaler is None else self.grad_scaler.scale
        return scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """For ``config.grad_scale_func``."""
        return self.get_loss_scale() * loss

    # One step

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)
        for chunk in self.model_chunks:
            if chunk.own_gradients is not None:
                chunk.own_gradients.forget()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Unscale, clip, update and launch the refresh. All ranks must call this.

        Returns:
            Whether weights were updated (not where a gradient overflowed on any rank of the model, nor where the norm
            is above `config.grad_norm_skip_threshold`), the norm of all gradients before clipping, and how many of
            them are zero (None unless `config.log_num_zeros_in_grad`).
        """
        if self.prepare_grads():
            return False, None, None
        norm = self.clip_grad_norm(self.config.clip_grad)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        if norm > getattr(self.config, "grad_norm_skip_threshold", math.inf):  # since Megatron-Core 0.19
            self._note_skipped()
            return False, norm, zeros
        return self.step_with_ready_grads(), norm, zeros

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Make gradients final and divide them by the loss scale; True if any rank of the model has met an overflow."""
        for chunk in self.model_chunks:
            chunk.finish_grad_sync()
        if self.grad_scaler is None:
            return False
        overflows = torch.zeros(1, dtype=torch.float32, device=self._device)
        gradients = [rows for chunk in self.model_chunks for rows in chunk.gradient_rows().values() if rows.numel()]
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflows, self.grad_scaler.inv_scale)
        self._over_model(overflows, dist.ReduceOp.MAX)
        overflow = bool(overflows.item() > 0)
        if overflow and self._checks:
            refuse(self.model_chunks, self.groups)
        self.grad_scaler.update(overflow)
        if overflow:
            self._note_skipped()
        return overflow

    def _note_skipped(self) -> None:
        for chunk in self.model_chunks:
            get_state(chunk).mesh_info.counters.steps["skipped"] += 1

    def step_with_ready_grads(self) -> bool:
        """Update and launch the refresh, with gradients as :meth:`prepare_grads` left them."""
        for optimizer in self._optimizers:
            optimizer.step()
        for ema in self.emas:
            if ema is not None:
                ema.update()
        return True

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale gradients down to a norm of `clip_grad`, if that is positive; return the norm before."""
        norm = self.get_grad_norm()
        factor = clip_grad / (norm + 1e-6) if clip_grad > 0 else 1.0
        if factor < 1.0 or math.isnan(factor):
            for chunk in self.model_chunks:
                chunk.scale_gradients(factor)
        return norm

    # Statistics: each element of the whole model counts once

    def get_grad_norm(self) -> float:
        """The 2-norm of the gradients of the whole model.

        Raises:
            RuntimeError: a gradient is not finite, with ``wrap(check_for_nan_in_grad=True)``; on all ranks.
        """
        counted, others = [_ZERO.to(self._device)], [_ZERO.to(self._device)]
        for parameter in self.get_parameters():
            if parameter.grad is not None and (rows := plain(parameter.grad)).numel():
                (counted if self._counts(parameter) else others).append(rows)
        squares, of_others = (
            torch.stack([n.float() for n in torch._foreach_norm(rows)]).square().sum() for rows in (counted, others)
        )
        suspect = ~torch.isfinite(squares + of_others)
        squares, suspects = self._over_model(torch.stack([squares, suspect.float()]), dist.ReduceOp.SUM).tolist()
        if suspects and self._checks:
            refuse(self.model_chunks, self.groups)
        return math.sqrt(squares)

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """This rank's rows of gradients that no other rank counts.

        Left out are copies of a word embedding on a further pipeline stage, and what all tensor ranks hold on all but
        the first of them.
        """
        return [plain(p.grad) for p in self.get_parameters() if p.grad is not None and self._counts(p)]

    def count_zeros(self) -> float:
        """Elements of the whole model whose gradient is zero."""
        zeros = torch.zeros((), dtype=torch.float32, device=self._device)
        for parameter in self.get_parameters():
            if self._counts(parameter):
                rows = plain(parameter.grad if parameter.grad is not None else parameter)
                used = 0 if parameter.grad is None else torch.count_nonzero(rows)
                zeros += rows.numel() - used
        return self._over_model(zeros, dist.ReduceOp.SUM).item()

    def _counts(self, parameter: Tensor) -> bool:
        return counts(parameter, self.groups)

    def _over_model(self, value: Tensor, op: Any) -> Tensor:
        """Reduce over the rows of data-parallel ranks, then over the parts of model-parallel ones."""
        for group in (self.groups.zero1, self.groups.model):
            dist.all_reduce(value, op=op, group=group)
        return value

    # States

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """After parameters were changed other than by a step. The masters are the parameters: nothing is copied.

        Args:
            state_dict: load the chunks from ``state_dict["model"]``, or ``["model0"]``, ``["model1"]``, ... first.
        """
        for index, chunk in enumerate(self.model_chunks):
            if state_dict is not None:
                name = "model" if len(self.model_chunks) == 1 else f"model{index}"
                if name not in state_dict:
                    raise ValueError(f"reload_model_params: the state dict has no {name!r} but {sorted(state_dict)}")
                chunk.load_state_dict(state_dict[name])
            refresh(chunk)

    def state_dict(self) -> dict[str, Any]:
        """State of each chunk's optimizer by parameter name, this rank's rows of it, and the loss scale."""
        state: dict[str, Any] = {"optimizer": [o and o.state_dict() for o in self.sharded]}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        if any(self.emas):
            state["ema"] = [ema and ema.state_dict() for ema in self.emas]
        return state

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Take what :meth:`state_dict` returned, on the same ranks with the same `zero3_size`; or what
        ``megatron.core.dist_checkpointing`` has loaded into :meth:`sharded_state_dict`, after the model's.
        """
        saved = state_dict.get("optimizer")
        if not isinstance(saved, list):
            from layerzero.megatron.sharded_optimizer_state import load_states  # noqa: PLC0415

            load_states(self._stepped(), state_dict)
            self.load_scale(state_dict.get(0, state_dict).get("grad_scaler"))
            return
        if len(saved) != len(self.sharded):
            raise ValueError(f"the state has {len(saved)} model chunks, the optimizer {len(self.sharded)}")
        for optimizer, values in zip(self.sharded, saved, strict=True):
            if optimizer is not None:
                optimizer.load_state_dict(values)
        self.load_scale(state_dict.get("grad_scaler"))
        for ema, average in zip(self.emas, state_dict.get("ema", []), strict=False):
            if ema is not None and average is not None:
                ema.load_state_dict(average)

    def load_scale(self, state: Mapping[str, Any] | None) -> None:
        """Take the loss scale out of a :meth:`state_dict`."""
        if self.grad_scaler is not None and state is not None:
            self.grad_scaler.load_state_dict(state)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """For ``megatron.core.dist_checkpointing``: this rank's rows of optimizer states and masters.

        The format is that of Megatron's own optimizers, the distributed one included: either loads what the other has
        saved, in any tensor, pipeline and data-parallel layout. All ranks must call this.

        Args:
            model_sharded_state_dict: what the chunks returned for the same `metadata`; not needed.
            is_loading: prepare memory for what is to be loaded, with Adam 12 N/D bytes; nothing is changed before
                :meth:`load_state_dict`.
            metadata: Megatron's. ``distrib_optim_sharding_type`` may be ``"fully_reshardable"``.

        Raises:
            ValueError: parameters have been stepped different numbers of times, or some never.
            NotImplementedError: the format has no place for some state; names it.
        """
        from layerzero.megatron.sharded_optimizer_state import chained_states, sharded_states  # noqa: PLC0415

        states = sharded_states if self.groups.expert_zero1 is None else chained_states
        return states(
            self._stepped(),
            is_loading=is_loading,
            metadata=metadata,
            grad_scaler=None if self.grad_scaler is None else self.grad_scaler.state_dict(),
            groups=self.groups,
        )

    def _stepped(self) -> list[Any]:
        from layerzero.megatron.sharded_optimizer_state import ChunkOptimizer  # noqa: PLC0415

        parts = zip(self.model_chunks, self.sharded, self.emas, strict=True)
        return [ChunkOptimizer(chunk, optimizer, ema) for chunk, optimizer, ema in parts if optimizer is not None]


_ZERO = torch.zeros(1)  # stands for no gradients at all


def _grad_scaler(config: Any) -> Any:
    """Megatron's own, for fp16 and for a constant loss scale; None otherwise."""
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
