"""Build Megatron's Muon for the matrices of a chunk, with AdamW for its other parameters, as one optimizer.

Megatron's ``TensorParallelMuon`` needs each matrix in full. Therefore ``shard_optimizer`` gives each matrix an owner.
The tensors that the optimizer steps have the attributes of the parameters, such as ``is_qkv``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.versions import release

_ALIASES = {"momentum_beta": "momentum", "mode": "tp_mode"}  # names of arguments in Megatron-Core 0.16
_REGISTRY = (0, 19)  # since this release, Muon is in emerging_optimizers.py, and parameter groups name their optimizer


def is_muon(config: Any) -> bool:
    """Return whether an OptimizerConfig selects Muon. Each matrix has an owner anyway, so ``dist_muon`` is the same."""
    return config.optimizer in ("muon", "dist_muon")


def refuse_muon(config: Any, tensor_size: int) -> None:
    """Raise ValueError if a setting of `config` is not supported with Muon."""
    reason = None
    if config.fp16:
        reason = "fp16, as in Megatron. Use bf16"
    elif config.muon_tp_mode != "blockwise" and tensor_size > 1:
        reason = f"muon_tp_mode={config.muon_tp_mode!r} with tensor parallelism. Use 'blockwise', Megatron's default"
    elif (scalar := getattr(config, "muon_scalar_optimizer", "adam")) != "adam":
        reason = f"muon_scalar_optimizer={scalar!r}. Use 'adam'"
    if reason is not None:
        raise ValueError(f"layerzero.megatron does not support optimizer={config.optimizer!r} with {reason}")


def split_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Megatron's parameter groups, split into groups of matrices and groups of other parameters.

    As in Megatron, matrices are parameters with two dims, except word embeddings and output layers. A group of other
    parameters has the betas of AdamW from its construction on, which :func:`is_matrix_group` looks for.
    """
    result: list[dict[str, Any]] = []
    for group in groups:
        for of_matrices in (True, False):
            params = [p for p in group["params"] if _is_matrix(p) == of_matrices]
            named = {} if of_matrices or release() < _REGISTRY else {"optimizer": "adam"}
            if params:
                result.append({**group, **named, "params": params, "of_matrices": of_matrices})
    return result


def is_matrix_group(group: Any) -> bool:
    """Return whether Muon updates a parameter group. Megatron's groups of AdamW have `betas`, those of Muon do not."""
    return "betas" not in group


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False)


def muon_and_adamw(chunk: ShardedChunk, groups: list[dict[str, Any]], config: Any) -> Optimizer:
    """Return the optimizer of a chunk.

    Args:
        groups: parameter groups that :func:`split_groups` returned.
        config: Megatron's OptimizerConfig, which determines all settings.

    Raises:
        ImportError: the package emerging_optimizers, which Megatron's Muon needs, is missing.
    """
    if release() < _REGISTRY:
        from megatron.core.optimizer import muon as module  # noqa: PLC0415
    else:
        from megatron.core.optimizer import emerging_optimizers as module  # noqa: PLC0415
    if not module.HAVE_EMERGING_OPTIMIZERS:
        raise ImportError(
            f"optimizer={config.optimizer!r} needs the package emerging_optimizers, as in Megatron. Install it from "
            "https://github.com/NVIDIA-NeMo/Emerging-Optimizers"
        )
    muon: Any = module.TensorParallelMuon

    class MuonAndAdamW(muon):  # type: ignore[misc]
        """Megatron's Muon, with AdamW for groups that have `betas`."""

        param_groups: list[dict[str, Any]]

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            groups = self.param_groups
            try:
                self.param_groups = [group for group in groups if is_matrix_group(group)]
                super().step()
            finally:
                self.param_groups = groups
            for group in groups:
                if not is_matrix_group(group):
                    _step_adamw(group, self.state, config.decoupled_weight_decay)

    sizes = _mark_qkv(chunk)
    settings = _settings(muon, config)
    settings |= {"is_qkv_fn": lambda p: getattr(p, "is_qkv", False) and p.shape[0] % sum(sizes) == 0}
    optimizer = MuonAndAdamW(groups, **settings, qkv_split_shapes=sizes)
    of_muon = optimizer.defaults.keys() - {"lr", "weight_decay"}
    for group in optimizer.param_groups:
        if not group.pop("of_matrices"):
            for name in of_muon:
                del group[name]
            group |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    for name in of_muon:  # all groups have their own settings, and shard_optimizer would add the defaults
        del optimizer.defaults[name]
    return optimizer


def _settings(muon: type, config: Any) -> dict[str, Any]:
    """Return the settings of Muon in an OptimizerConfig: attribute ``muon_NAME`` or ``NAME`` for argument NAME.

    The tensor-parallel mode is always ``blockwise``, which communicates nothing.
    """
    settings = {}
    for name in inspect.signature(muon.__init__).parameters.keys() - {"self", "params"}:  # type: ignore[misc]
        own_name = _ALIASES.get(name, name)
        for attribute in (f"muon_{own_name}", own_name):
            if hasattr(config, attribute):
                settings[name] = "blockwise" if own_name == "tp_mode" else getattr(config, attribute)
                break
    return settings


def _mark_qkv(chunk: ShardedChunk) -> list[int]:
    """Mark weights of attention that combine query, key and value, and return the rows of each in a query group."""
    config = chunk.config
    query = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gates = 2 if getattr(config, "attention_output_gate", False) else 1
    sizes = [query] * gates + [config.kv_channels] * 2
    for name, parameter in chunk.named_parameters():
        if "linear_qkv.weight" in name and parameter.ndim == 2 and parameter.shape[0] % sum(sizes) == 0:
            parameter.is_qkv = True  # type: ignore[attr-defined]
    return sizes


def _step_adamw(group: dict[str, Any], states: Any, decoupled_weight_decay: bool) -> None:
    """Step the parameters of a group that have a gradient, as torch's Adam or AdamW does."""
    parameters = [p for p in group["params"] if p.grad is not None]
    for p in parameters:
        if not states[p]:
            states[p] |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    adam(
        parameters,
        [p.grad for p in parameters],
        [states[p]["exp_avg"] for p in parameters],
        [states[p]["exp_avg_sq"] for p in parameters],
        [],
        [states[p]["step"] for p in parameters],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        decoupled_weight_decay=decoupled_weight_decay,
    )
