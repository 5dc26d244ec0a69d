"""Sizes read from a config.json match the model that transformers builds from it."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install --no-deps -r requirements-loops.txt", allow_module_level=True)

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from layerzero.planning import read_config

LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GPT2 = {"n_layer": 2, "n_embd": 64, "vocab_size": 128, "n_head": 4, "n_positions": 32}
CASES = {
    "llama": LLAMA,
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": LLAMA,
    "mistral with heads of their own size": {**LLAMA, "head_dim": 32},
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 32},
    "gpt2": GPT2,
}


@pytest.mark.parametrize("case", CASES)
def test_a_config_of_hugging_face_is_read_as_transformers_reads_it(case: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[case.split(maxsplit=1)[0]](**CASES[case])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mine = read_config(tmp_path).build()
    theirs = Counter(tuple(parameter.shape) for parameter in model.parameters())
    assert Counter(tuple(parameter.shape) for parameter in mine.parameters()) == theirs
