"""Translate Megatron-LM's command-line flags into layerzero settings. Unsupported flags raise an error."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.comm.agreement import require_equal
from layerzero.config import LayerZeroConfig
from layerzero.config.yaml_file import has_names_of_mindspeed
from layerzero.device.accelerator import default_device_type
from layerzero.engine.reduction_spec import accumulates_full_gradients
from layerzero.sharding.launchers import connections_warning

__all__ = ["ParsedArguments", "add_arguments", "settings_from_arguments"]

_log = logging.getLogger("layerzero")


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the ``--layerzero-*`` flags. Pass this function as `extra_args_provider` to Megatron-LM's ``pretrain``."""
    group = parser.add_argument_group("layerzero")
    group.add_argument("--layerzero-config", metavar="FILE", help="YAML with the settings of layerzero.LayerZeroConfig")
    group.add_argument(
        "--layerzero-ema-decay", type=float, metavar="DECAY", help="compute an average of the weights for checkpoints"
    )
    return parser


class ParsedArguments(NamedTuple):
    """layerzero settings parsed from a command line.

    Attributes:
        wrap: keyword arguments for :func:`layerzero.megatron.wrap`.
        units: names of modules or classes that are units in addition to the default units.
        ema_decay: decay of the exponential moving average (EMA) of the weights. If None, no average is computed.
    """

    wrap: dict[str, Any]
    units: tuple[str, ...]
    ema_decay: float | None


def settings_from_arguments(args: Namespace, data_parallel: list[int]) -> ParsedArguments:
    """Return the layerzero settings for Megatron's arguments. If a rank fails, all ranks raise an error.

    All ranks must call this function.

    Args:
        args: Megatron's validated arguments. This function sets ``args.overlap_param_gather`` to False, because
            Megatron's loop would otherwise call methods of Megatron's own wrapper.
        data_parallel: global ranks of this rank's data-parallel group, including context-parallel ranks.

    Raises:
        ValueError: a flag or setting is not supported. The message names the flag, the reason and an alternative.
    """
    failure: Exception | None = None
    parsed = ParsedArguments({}, (), None)
    try:
        _refuse_unsupported(args)
        parsed = _translate_arguments(args, data_parallel)
    except Exception as error:  # the error is sent to the other ranks, and then raised here
        failure = error
    fields: dict[str, object] = {name: repr(value) for name, value in parsed.wrap.items()}
    fields |= {"units": list(parsed.units), "--layerzero-ema-decay": parsed.ema_decay}
    require_equal("layerzero.megatron.install", fields, ranks=range(dist.get_world_size()), failure=failure)
    if dist.get_rank() == 0 and (warning := _connections_warning(args)):
        _log.warning("%s", warning)
    args.overlap_param_gather = False  # otherwise Megatron's loop calls methods of its own wrapper
    return parsed


def _translate_arguments(args: Namespace, data_parallel: list[int]) -> ParsedArguments:
    if not hasattr(args, "layerzero_config"):
        raise ValueError(
            "the flags of layerzero are missing. Call pretrain(extra_args_provider=layerzero.megatron.add_arguments)"
        )
    config = LayerZeroConfig() if args.layerzero_config is None else LayerZeroConfig.from_yaml(args.layerzero_config)
    settings = config.arguments()
    if settings.pop("gradient_divide_factor") is not None:
        raise ValueError(
            "gradient_divide_factor in --layerzero-config is not supported, because --calculate-per-token-loss "
            "determines it. Remove the setting"
        )
    units = settings.pop("units") or ()
    size = settings.pop("zero3_size")
    if size is None:
        size = _ranks_per_node(data_parallel)
    elif has_names_of_mindspeed(args.layerzero_config):
        size = _zero3_size_without_tensor_parallel(size, args.tensor_model_parallel_size, len(data_parallel))
    if args.gradient_accumulation_fusion and not accumulates_full_gradients(settings["accumulation"], size):
        raise ValueError(
            "gradient accumulation fusion, which is on by default, adds to full gradients between micro-batches. Add "
            "--no-gradient-accumulation-fusion, or set accumulation: full in --layerzero-config"
        )
    if args.gradient_accumulation_fusion and settings["accumulation_dtype"] is not None:
        raise ValueError(
            "gradient accumulation fusion, which is on by default, adds to fp32 gradients, but accumulation_dtype in "
            "--layerzero-config is bf16. Add --no-gradient-accumulation-fusion, or remove accumulation_dtype"
        )
    policy = _policy(settings.pop("mp_policy"), args)
    if policy is not None:
        settings["mp_policy"] = policy
    return ParsedArguments(
        {
            **settings,
            "zero3_size": size,
            "align_grad_reduce": bool(args.overlap_grad_reduce and args.align_grad_reduce),
            "align_param_refresh": bool(args.overlap_param_gather and args.align_param_gather),
            "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad,
        },
        (units,) if isinstance(units, str) else tuple(units),
        args.layerzero_ema_decay,
    )


def _connections_warning(args: Namespace) -> str | None:
    """Return a warning if CUDA_DEVICE_MAX_CONNECTIONS serializes streams, otherwise None.

    The warning also states whether `args` enable tensor or context parallelism, which may need this value.
    """
    warning = connections_warning(default_device_type())
    if warning is None:
        return None
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
    }
    asking = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    if not asking:
        return f"{warning}. These flags enable neither. Unset the variable"
    return f"{warning}. These flags have {' and '.join(asking)}"


def _ranks_per_node(data_parallel: list[int]) -> int:
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local_world_size.isdigit() or int(local_world_size) == 0:
        raise ValueError(
            "the number of ranks per node is unknown, because LOCAL_WORLD_SIZE is not set. Start with torchrun, or set "
            "zero3_size in --layerzero-config"
        )
    own_node = dist.get_rank() // int(local_world_size)
    return sum(rank // int(local_world_size) == own_node for rank in data_parallel)


def _zero3_size_without_tensor_parallel(size: int, tensor: int, data_parallel: int) -> int:
    """Convert MindSpeed's `zero3_size` to layerzero's `zero3_size`, which does not count tensor-parallel ranks.

    The result is at most the data-parallel size.
    """
    if size % tensor:
        raise ValueError(
            f"zero3_size={size} is not a multiple of the tensor-parallel size {tensor}. In a file with MindSpeed's "
            "names, zero3_size includes tensor-parallel ranks. Use a multiple"
        )
    zero3_size = min(size // tensor, data_parallel)
    if zero3_size != size and dist.get_rank() == 0:
        _log.warning(
            "zero3_size=%d in a file with MindSpeed's names includes tensor-parallel ranks. With %d tensor-parallel "
            "and %d data-parallel ranks, layerzero uses zero3_size=%d",
            *(size, tensor, data_parallel, zero3_size),
        )
    return zero3_size


def _policy(policy: Any, args: Namespace) -> MixedPrecisionPolicy | None:
    """Return the policy to pass to :func:`wrap`. If the user set no policy, return None; `wrap` then chooses one.

    ``cast_forward_inputs`` is False because Megatron's ``Float16Module`` casts inputs and outputs.
    """
    if policy == MixedPrecisionPolicy():
        return None
    if policy.param_dtype not in (None, args.params_dtype):
        raise ValueError(
            f"param_dtype in --layerzero-config is {policy.param_dtype}, but Megatron computes in {args.params_dtype}. "
            "Remove param_dtype, and set the compute dtype with --bf16 or --fp16"
        )
    return MixedPrecisionPolicy(args.params_dtype, policy.reduce_dtype, cast_forward_inputs=False)


# Unsupported flags


class _Rule(NamedTuple):
    asks: Callable[[Namespace], Any]
    why: str


def _value_of(name: str) -> Callable[[Namespace], Any]:
    return lambda args: getattr(args, name, None)


def _saves_or_loads(args: Namespace) -> bool:
    return bool(args.save or args.load)


_WRAPPER = "shards the model as well; leave it out"
_HOOKS = "searches the output layer inside Megatron's own wrapper; leave it out"
_REMAT = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
_OFFLOAD = "configures Megatron's optimizer; use offload_optimizer and offload_grads of --layerzero-config"
_RULES: dict[str, _Rule] = {
    "--use-torch-fsdp2": _Rule(_value_of("use_torch_fsdp2"), _WRAPPER),
    "--use-megatron-fsdp": _Rule(_value_of("use_megatron_fsdp"), _WRAPPER),
    "--optimizer": _Rule(
        lambda args: args.optimizer not in ("adam", "sgd"),
        "is not tested in Megatron's loop; use adam or sgd",
    ),
    "--use-distributed-optimizer": _Rule(
        lambda args: (
            _saves_or_loads(args) and args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable
        ),
        "saves buffers that layerzero does not have; add --dist-ckpt-optim-fully-reshardable",
    ),
    "--ckpt-format": _Rule(
        lambda args: _saves_or_loads(args) and args.ckpt_format != "torch_dist", "cannot store shards; use torch_dist"
    ),
    "--ckpt-convert-format": _Rule(_value_of("ckpt_convert_format"), "cannot store shards; convert without layerzero"),
    "--non-persistent-ckpt-type": _Rule(
        lambda args: args.non_persistent_ckpt_type in ("local", "in_memory"),
        "stores the state of a node in a separate format; use global",
    ),
    "--overlap-param-gather-with-optimizer-step": _Rule(
        _value_of("overlap_param_gather_with_optimizer_step"), "configures Megatron's optimizer; leave it out"
    ),
    "--num-distributed-optimizer-instances": _Rule(
        lambda args: args.num_distributed_optimizer_instances > 1,
        "is replaced by zero3_size of --layerzero-config; leave it out",
    ),
    "--optimizer-cpu-offload": _Rule(_value_of("optimizer_cpu_offload"), _OFFLOAD),
    "--use-precision-aware-optimizer": _Rule(
        _value_of("use_precision_aware_optimizer"),
        "rounds optimizer states, which layerzero stores in fp32; leave it out",
    ),
    "--grad-reduce-in-bf16": _Rule(
        _value_of("grad_reduce_in_bf16"),
        "is replaced by reduce_dtype and replica_reduce_dtype of --layerzero-config; leave it out",
    ),
    "--ddp-reduce-scatter-with-fp32-accumulation": _Rule(
        _value_of("ddp_reduce_scatter_with_fp32_accumulation"),
        "is replaced by reduce_scatter_with_fp32_accumulation of --layerzero-config; leave it out",
    ),
    "--check-for-large-grads": _Rule(
        _value_of("check_for_large_grads"), "reads buffers of Megatron's wrapper; leave it out"
    ),
    "--qk-clip": _Rule(_value_of("qk_clip"), "scales full weights after the step; leave it out"),
    "--dump-param-to-param-group-map": _Rule(
        _value_of("dump_param_to_param_group_map"), "reads Megatron's optimizer; leave it out"
    ),
    "--moe-use-upcycling": _Rule(
        _value_of("moe_use_upcycling"), "copies full weights; convert without layerzero first"
    ),
    "--perform-rl-step": _Rule(_value_of("perform_rl_step"), "swaps full weights; leave it out"),
    "--mtp-num-layers": _Rule(_value_of("mtp_num_layers"), "adds copies of the embeddings; leave it out"),
    "--moe-router-enable-expert-bias": _Rule(
        _value_of("moe_router_enable_expert_bias"), "updates a bias together with the gradients; leave it out"
    ),
    "--delay-wgrad-compute": _Rule(
        _value_of("delay_wgrad_compute"), "computes gradients after a layer's backward; leave it out"
    ),
    "--defer-embedding-wgrad-compute": _Rule(
        _value_of("defer_embedding_wgrad_compute"), "computes gradients after the last backward; leave it out"
    ),
    "--overlap-moe-expert-parallel-comm": _Rule(
        _value_of("overlap_moe_expert_parallel_comm"), "calls parts of layers separately; leave it out"
    ),
    "--gtp-weight-remat-size": _Rule(
        lambda args: max(getattr(args, name, 1) or 1 for name in _REMAT) > 1,
        "shards the weights a second time, as do its expert counterpart and --tensor-parallel-num-weight-shards; leave "
        "it out, and use zero3_size of --layerzero-config",
    ),
    "--moe-expert-rank-capacity-factor": _Rule(
        _value_of("moe_expert_rank_capacity_factor"), "repeats a step if experts get too many tokens; leave it out"
    ),
    "--moe-router-load-balancing-type quantile_balancing": _Rule(
        lambda args: "quantile_balancing" in (getattr(args, "moe_router_load_balancing_type", None) or ()),
        "updates a bias of the routers together with the gradients; use aux_loss or sinkhorn",
    ),
    "--optimizer-cuda-graph": _Rule(
        _value_of("optimizer_cuda_graph"), "replays a step without its collectives; leave it out"
    ),
    "--save-params-interval": _Rule(
        _value_of("save_params_interval"), "reads full weights, but a rank stores only some rows; use --save-interval"
    ),
    "--logits-save-dir": _Rule(_value_of("logits_save_dir"), _HOOKS),
    "--logits-load-dir": _Rule(_value_of("logits_load_dir"), _HOOKS),
    "--fp8-format": _Rule(_value_of("fp8"), "would quantize gathered weights in each forward; leave it out"),
    "--fp4-format": _Rule(_value_of("fp4"), "would quantize gathered weights in each forward; leave it out"),
    "--cuda-graph-impl": _Rule(
        lambda args: args.cuda_graph_impl != "none",
        "records the addresses of weights, which layerzero frees and allocates again; use none",
    ),
}


def _refuse_unsupported(args: Namespace) -> None:
    refusals = [f"{flag} {rule.why}" for flag, rule in _RULES.items() if rule.asks(args)]
    if refusals:
        raise ValueError(f"not supported with layerzero: {'; '.join(refusals)}")
