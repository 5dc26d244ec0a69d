"""Refuse flags of Megatron-LM, settings of a model and parameters that layerzero does not support."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from layerzero import Offload, PrecisionPolicy
from layerzero.extend import Accumulation, accumulates_full_gradients
from layerzero.megatron.default_units import is_expert_parallel, only_experts


class _Rule(NamedTuple):
    """Setting that is not supported.

    Attributes:
        name: attribute of Megatron's arguments, of its TransformerConfig, or of both. It may be missing.
        why: reason and remedy, as the rest of a sentence that begins with the setting.
        supported: values that are supported. If None, these are all values that are false.
    """

    name: str
    why: str
    supported: tuple[object, ...] | None = None

    def is_broken(self, holder: Any) -> bool:
        value = getattr(holder, self.name, None)
        return bool(value) if self.supported is None else value is not None and value not in self.supported


_LATE_GRADIENTS = "computes gradients after the backward of their layer; leave it out"
_ROUTER_BIAS = "updates a bias of the routers together with the gradients"
_TRANSFORMER_ENGINE = "stores the experts of a rank in one tensor of Transformer Engine; leave it out"
_SHARDS_WEIGHTS = (
    "shards the weights a second time, as does --tensor-parallel-num-weight-shards; leave it out, and use zero3_size"
)
_QUANTIZES = "would quantize gathered weights in each forward; leave it out"

# Settings of the model, which are both flags and attributes of TransformerConfig, though not in each release.
_MODEL = (
    _Rule("mtp_num_layers", "adds copies of the embeddings; leave it out"),
    _Rule("has_cond_embedder", "sums gradients over all pipeline stages; leave it out"),
    _Rule("defer_embedding_wgrad_compute", "computes gradients after the last backward; leave it out"),
    _Rule("delay_wgrad_compute", _LATE_GRADIENTS),
    _Rule("overlap_dispatch_backward_with_experts_wgrad", _LATE_GRADIENTS),
    _Rule("overlap_moe_expert_parallel_comm", "calls parts of layers separately; leave it out"),
    _Rule("moe_router_enable_expert_bias", f"{_ROUTER_BIAS}; leave it out"),
    _Rule("moe_expert_rank_capacity_factor", "repeats a step if experts get too many tokens; leave it out"),
    _Rule("moe_single_grouped_weight", _TRANSFORMER_ENGINE),
    _Rule("moe_single_grouped_bias", _TRANSFORMER_ENGINE),
    _Rule("flextron", "sums gradients of its routers over pipeline stages; leave it out"),
    _Rule("gtp_weight_remat_size", _SHARDS_WEIGHTS, (0, 1)),
    _Rule("expert_gtp_weight_remat_size", _SHARDS_WEIGHTS, (0, 1)),
    _Rule("fp8", _QUANTIZES),
    _Rule("fp4", _QUANTIZES),
    _Rule(
        "cuda_graph_impl",
        "records the addresses of weights, which layerzero frees and allocates again; use none",
        ("none",),
    ),
)

_WRAPPER = "shards the model as well; leave it out"
_FULL_WEIGHTS = "needs full weights, but a rank stores only some rows; leave it out"
_HOOKS = "searches the output layer inside Megatron's own wrapper; leave it out"

# Flags of Megatron-LM's training loop.
_LOOP = (
    _Rule("use_torch_fsdp2", _WRAPPER),
    _Rule("use_megatron_fsdp", _WRAPPER),
    _Rule("optimizer", "is not tested in Megatron's loop; use adam, sgd or muon", ("adam", "sgd", "muon", "dist_muon")),
    _Rule("ckpt_convert_format", "cannot store shards; convert without layerzero"),
    _Rule("non_persistent_ckpt_type", "stores the state of a node in a separate format; use global", ("global",)),
    _Rule("overlap_param_gather_with_optimizer_step", "configures Megatron's optimizer; leave it out"),
    _Rule("num_distributed_optimizer_instances", "is replaced by zero3_size of --layerzero-config; leave it out", (1,)),
    _Rule("optimizer_cpu_offload", "configures Megatron's optimizer; use the offloads of --layerzero-config"),
    _Rule("use_precision_aware_optimizer", "rounds optimizer states, which layerzero stores in fp32; leave it out"),
    _Rule("grad_reduce_in_bf16", "is replaced by reduce_dtype in mp_policy of --layerzero-config; leave it out"),
    _Rule(
        "ddp_reduce_scatter_with_fp32_accumulation",
        "is replaced by fp32_accumulation in mp_policy of --layerzero-config; leave it out",
    ),
    _Rule("check_for_large_grads", "reads buffers of Megatron's wrapper; leave it out"),
    _Rule("qk_clip", _FULL_WEIGHTS),
    _Rule("dump_param_to_param_group_map", "reads Megatron's optimizer; leave it out"),
    _Rule("moe_use_upcycling", "copies full weights; convert without layerzero first"),
    _Rule("perform_rl_step", _FULL_WEIGHTS),
    _Rule("save_wgrads_interval", "saves full gradients, but a rank stores only some rows; leave it out"),
    _Rule("save_params_interval", "reads full weights, but a rank stores only some rows; use --save-interval"),
    _Rule("logits_save_dir", _HOOKS),
    _Rule("logits_load_dir", _HOOKS),
    _Rule("optimizer_cuda_graph", "replays a step without its collectives; leave it out"),
)
_FLAG_NAMES = {"fp8": "fp8-format", "fp4": "fp4-format"}  # other flags have the names of their attributes


def refuse_flags(args: Any) -> None:
    """Raise ValueError if a flag of Megatron-LM is not supported. The message lists all such flags."""
    refused = [
        f"--{_FLAG_NAMES.get(rule.name, rule.name.replace('_', '-'))} {rule.why}"
        for rule in (*_LOOP, *_MODEL)
        if rule.is_broken(args)
    ]
    if args.save or args.load:
        if args.ckpt_format != "torch_dist":
            refused.append("--ckpt-format cannot store shards; use torch_dist")
        if args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
            refused.append(
                "--use-distributed-optimizer saves buffers that layerzero does not have; add "
                "--dist-ckpt-optim-fully-reshardable"
            )
        if args.optimizer == "dist_muon" or getattr(args, "use_layer_wise_distributed_optimizer", False):  # since 0.19
            refused.append(
                "--use-distributed-optimizer and dist_muon select another form of checkpoint for Muon, which layerzero "
                "does not have; use --optimizer muon alone, whose work and state layerzero shards anyway"
            )
    if _balances_quantiles(args):
        refused.append(f"--moe-router-load-balancing-type quantile_balancing {_ROUTER_BIAS}; use aux_loss or sinkhorn")
    if refused:
        raise ValueError(f"not supported with layerzero: {'; '.join(refused)}")


def refuse_model(module: nn.Module, config: Any) -> None:
    """Raise ValueError if a setting in a model's TransformerConfig, or a parameter of the model, is not supported."""
    for rule in _MODEL:
        if rule.is_broken(config):
            value = getattr(config, rule.name)
            raise ValueError(f"layerzero.megatron does not support config.{rule.name}={value!r}, which {rule.why}")
    if _balances_quantiles(config):
        raise ValueError(
            "layerzero.megatron does not support config.moe_router_load_balancing_type='quantile_balancing', which "
            f"{_ROUTER_BIAS}; use aux_loss or sinkhorn"
        )
    if getattr(config, "num_moe_experts", None):
        size, tensor_size = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
        if size not in (None, tensor_size):  # Megatron 0.16 does not mark such parameters, and their copies diverge
            raise ValueError(
                f"config.expert_tensor_parallel_size={size} is not supported, because experts would have other "
                f"data-parallel ranks than the other parameters. Use {tensor_size}, as tensor_model_parallel_size"
            )
    in_expert_modules = {id(p) for part in module.modules() if only_experts(part) for p in part.parameters()}
    for name, parameter in module.named_parameters():
        if is_expert_parallel(parameter) and id(parameter) not in in_expert_modules:
            raise ValueError(
                f"parameter {name!r} is expert parallel, but its module has parameters that are not. Put the experts "
                "into a separate module"
            )


def _balances_quantiles(holder: Any) -> bool:
    return "quantile_balancing" in (getattr(holder, "moe_router_load_balancing_type", None) or ())


def refuse_fusion(
    config: Any,
    zero3_size: int,
    *,
    accumulation: Accumulation,
    mp_policy: object = None,
    offload: Any = None,
    **unused: object,
) -> None:
    """Raise ValueError if Megatron's gradient accumulation fusion is on, and other settings do not allow it.

    Args:
        config: TransformerConfig, or Megatron-LM's arguments, where the fusion is on by default.
        zero3_size: size of the ZeRO-3 groups.
        accumulation, mp_policy, offload: as in :func:`layerzero.shard_model`.
        unused: other settings of :func:`layerzero.shard_model`.
    """
    if not getattr(config, "gradient_accumulation_fusion", False):
        return
    reason = None
    if not callable(accumulation) and not accumulates_full_gradients(accumulation, zero3_size):
        reason = (
            'adds to full gradients between micro-batches. Use accumulation="full", or "sharded" with zero3_size=1, or'
        )
    elif isinstance(mp_policy, PrecisionPolicy) and mp_policy.accumulation_dtype is not None:
        reason = (
            "and accumulation_dtype exclude each other, because the fusion adds to main_grad in fp32, and the last "
            "micro-batch is not added to the accumulator. Remove accumulation_dtype, or"
        )
    elif Offload.of(offload).grads:
        reason = (
            "and Offload(grads=True) exclude each other, because the fusion uses main_grad from the forward to the "
            "backward, and offloading may move it. Remove grads, or"
        )
    if reason is not None:
        raise ValueError(
            f"gradient_accumulation_fusion {reason} disable the fusion (in Megatron-LM: "
            "--no-gradient-accumulation-fusion)"
        )
