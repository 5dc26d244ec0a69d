"""Translate Megatron-LM's command-line flags into layerzero settings. Unsupported flags raise an error."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero import LayerZeroConfig, PrecisionPolicy
from layerzero.extend import addon, agreed
from layerzero.megatron.unsupported import refuse_flags, refuse_fusion

_log = logging.getLogger("layerzero")


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the ``--layerzero-*`` flags. Pass this function as `extra_args_provider` to Megatron-LM's ``pretrain``."""
    group = parser.add_argument_group("layerzero")
    group.add_argument("--layerzero-config", metavar="FILE", help="YAML with the settings of layerzero.LayerZeroConfig")
    group.add_argument(
        "--layerzero-expert-zero3-size", type=int, metavar="S", help="number of ranks over which experts are sharded"
    )
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
    fields: dict[str, object] = {}
    with agreed("layerzero.megatron.install", fields, ranks=range(dist.get_world_size())):
        refuse_flags(args)
        parsed = _translate_arguments(args, data_parallel)
        fields |= {name: repr(value) for name, value in parsed.wrap.items()}
        fields |= {"units": list(parsed.units), "--layerzero-ema-decay": parsed.ema_decay}
    args.overlap_param_gather = False  # otherwise Megatron's loop calls methods of its own wrapper
    return parsed


def _translate_arguments(args: Namespace, data_parallel: list[int]) -> ParsedArguments:
    if not hasattr(args, "layerzero_config"):
        raise ValueError(
            "the flags of layerzero are missing. Call pretrain(extra_args_provider=layerzero.megatron.add_arguments)"
        )
    config = LayerZeroConfig() if args.layerzero_config is None else LayerZeroConfig.from_yaml(args.layerzero_config)
    settings = config.arguments()
    units = settings.pop("units") or ()
    size = settings.pop("zero3_size")
    if size is None:
        size = _ranks_per_node(data_parallel)
    elif addon("yaml").has_names_of_mindspeed(args.layerzero_config):
        size = _zero3_size_without_tensor_parallel(size, args.tensor_model_parallel_size, len(data_parallel))
    expert_size = args.layerzero_expert_zero3_size
    refuse_fusion(args, max(size, expert_size or 1), **settings)
    settings["mp_policy"] = _policy(settings["mp_policy"], args)
    return ParsedArguments(
        {
            **settings,
            "zero3_size": size,
            "expert_zero3_size": expert_size,
            "align_grad_reduce": bool(args.overlap_grad_reduce and args.align_grad_reduce),
            "align_param_refresh": bool(args.overlap_param_gather and args.align_param_gather),
            "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad,
        },
        (units,) if isinstance(units, str) else tuple(units),
        args.layerzero_ema_decay,
    )


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


def _policy(policy: PrecisionPolicy, args: Namespace) -> PrecisionPolicy:
    """Return the policy to pass to :func:`wrap`, which chooses the fields of torch's policy if none of them is set.

    ``cast_forward_inputs`` is False because Megatron's ``Float16Module`` casts inputs and outputs.
    """
    if policy.torch_policy == MixedPrecisionPolicy():
        return policy
    if policy.param_dtype not in (None, args.params_dtype):
        raise ValueError(
            f"param_dtype in --layerzero-config is {policy.param_dtype}, but Megatron computes in {args.params_dtype}. "
            "Remove param_dtype, and set the compute dtype with --bf16 or --fp16"
        )
    return replace(policy, param_dtype=args.params_dtype, output_dtype=None, cast_forward_inputs=False)
