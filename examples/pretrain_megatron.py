"""Pretrain a GPT in Megatron-LM's own loop with layerzero, and not a line of Megatron-LM changed.

    PYTHONPATH=Megatron-LM torchrun --nproc-per-node 8 examples/pretrain_megatron.py \\
        --layerzero-config layerzero.yaml ...

where Megatron-LM is a checkout at core_v0.16.1, and the dots are the flags that its pretrain_gpt.py takes.
"""

from functools import partial

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain

import layerzero.megatron


def main() -> None:
    layerzero.megatron.install()
    pretrain_gpt.train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder),
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=layerzero.megatron.add_arguments,
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
    )


if __name__ == "__main__":
    main()
