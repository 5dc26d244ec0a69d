"""Train a sharded Llama with TRL's SFTTrainer. Comments mark the differences from plain TRL.

torchrun --nproc-per-node 4 examples/train_trl.py
"""

from __future__ import annotations

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from layerzero.integrations.transformers import LayerZeroMixin

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SENTENCE = "to be or not to be, that is the question: "


class Trainer(LayerZeroMixin, SFTTrainer):  # the mixin must precede TRL's class
    pass


def main(folder: str = "out") -> list[float]:
    letters = {"</s>": 0, **{letter: i + 1 for i, letter in enumerate(sorted(set(SENTENCE)))}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [])), eos_token="</s>")
    data = Dataset.from_list([{"text": (SENTENCE * 2)[i % 40 :][:40]} for i in range(400)])
    args = SFTConfig(folder, max_steps=12, learning_rate=5e-3, logging_steps=1, save_steps=12, bf16=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=len(letters), use_cache=False))
    settings = {"zero3_size": 2}  # or a YAML file
    trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer, layerzero=settings)
    trainer.train()
    trainer.save_model()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
