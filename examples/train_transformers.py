"""Train a sharded Llama with Hugging Face's Trainer. Comments mark the differences from the plain Trainer.

torchrun --nproc-per-node 4 examples/train_transformers.py --output_dir out --use_cpu --zero3_size 2
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, TrainingArguments

from layerzero.integrations.transformers import LayerZeroArguments, LayerZeroTrainer  # not transformers' Trainer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def main(argv: list[str] | None = None, folder: str | None = None) -> list[float]:
    if folder is not None:
        argv = ["--output_dir", folder, "--use_cpu", "--zero3_size", "2", "--max_steps", "12", "--logging_steps", "1"]
        argv += ["--learning_rate", "5e-3", "--report_to", "none", "--save_steps", "12", "--disable_tqdm", "True"]
    parser = HfArgumentParser((TrainingArguments, LayerZeroArguments))  # --layerzero_config, --zero3_size
    args, layerzero_args = parser.parse_args_into_dataclasses(argv)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, vocab_size=256, use_cache=False))
    text = torch.tensor(list(b"to be or not to be, that is the question: " * 200)).unfold(0, 32, 7)
    data = [{"input_ids": ids, "labels": ids} for ids in text]
    trainer = LayerZeroTrainer(model, args, train_dataset=data, layerzero=layerzero_args)
    trainer.train()
    trainer.save_model()  # AutoModelForCausalLM.from_pretrained(args.output_dir)
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
