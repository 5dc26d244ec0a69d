"""Pretrain a GPT with layerzero in Megatron-LM's own loop, without changes to Megatron-LM.

    PYTHONPATH=Megatron-LM torchrun --nproc-per-node 8 examples/pretrain_megatron.py \\
        --layerzero-config layerzero.yaml ...

Megatron-LM is a checkout of core_v0.19.0 or core_v0.16.1. Replace the dots with flags of its pretrain_gpt.py.
"""

from functools import partial

import megatron.training
import pretrain_gpt
from megatron.core.enums import ModelType

import layerzero.megatron

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


def main() -> None:
    layerzero.megatron.install()
    pretrain_gpt.train_valid_test_datasets_provider.is_distributed = True
    if hasattr(pretrain_gpt, "pretrain_cfg_container_from_args"):
        train_configured()
    else:
        train_provided()


def train_configured() -> None:
    """Train like pretrain_gpt.py of core_v0.19.0."""
    arguments = pretrain_gpt.parse_and_validate_args(
        extra_args_provider=layerzero.megatron.add_arguments, args_defaults=DEFAULTS
    )
    model = pretrain_gpt.gpt_config_from_args(arguments)
    megatron.training.pretrain(
        pretrain_gpt.pretrain_cfg_container_from_args(arguments, model),
        pretrain_gpt.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
    )


def train_provided() -> None:
    """Train like pretrain_gpt.py of core_v0.16.1."""
    megatron.training.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder),
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        args_defaults=DEFAULTS,
        extra_args_provider=layerzero.megatron.add_arguments,
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
    )


if __name__ == "__main__":
    main()
