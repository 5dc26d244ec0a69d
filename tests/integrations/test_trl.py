"""TRL's trainers with the mixin, compared with their DistributedDataParallel on the same text."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if any(find_spec(name) is None for name in ("trl", "transformers", "accelerate", "peft")):
    pytest.skip(
        "needs trl, transformers, peft: pip install --no-deps -r requirements-loops.txt", allow_module_level=True
    )

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.integrations.transformers import LayerZeroMixin
from tests.integrations.test_transformers import arguments, llama, logged
from tests.support.loops import assert_like, on_launched_ranks

SETTINGS = {"zero3_size": 2}
SENTENCE = "to be or not to be that is the question whether it is nobler in the mind to suffer slings and arrows of"
WORDS = [*dict.fromkeys(SENTENCE.split())]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


class Ours(LayerZeroMixin, SFTTrainer):
    pass


class Preferences(LayerZeroMixin, DPOTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*SPECIAL.values(), *WORDS])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


def text(size: int, seed: int = 0) -> list[str]:
    """Return sentences of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (size,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=generator)) for n in lengths]


def settings(folder: str, kind: Any = SFTConfig, **more: Any) -> Any:
    return arguments(
        folder, kind, **{"max_steps": 3, "bf16": False, "gradient_checkpointing": False, "max_length": 16, **more}
    )


def assert_as_ddp(ours: Any, theirs: Any) -> None:
    theirs.train()
    ours.train()
    assert_like(logged(ours), logged(theirs), rtol=1e-4)
    assert_like(logged(ours, "grad_norm"), logged(theirs, "grad_norm"), rtol=1e-4)
    lz_state = get_state(ours.model)
    assert len(lz_state.units) >= 3, "a layer is a unit"
    trained = sum(handle.trainable for handle in lz_state.handles)
    assert layerzero.traffic(ours.model).calls["hop2"] == trained * 3  # of 6 backwards


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"peft": True, "learning_rate": 2.0}], ids=str)
@on_launched_ranks(timeout=300)
def test_supervised_finetuning_is_that_of_ddp(rank: int, tmp_path: Path, more: dict[str, Any]) -> None:
    peft = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "down_proj"])} if more.pop("peft", 0) else {}
    data = Dataset.from_list([{"text": line} for line in text(48)])
    common = {"train_dataset": data, "processing_class": tokenizer(), **peft}
    theirs = SFTTrainer(llama(vocab_size=4 + len(WORDS)), args=settings(f"{tmp_path}/ddp", **more), **common)
    ours = Ours(llama(vocab_size=4 + len(WORDS)), args=settings(tmp_path, **more), layerzero=SETTINGS, **common)
    assert_as_ddp(ours, theirs)
    assert_like(logged(ours, "mean_token_accuracy"), logged(theirs, "mean_token_accuracy"), rtol=1e-4)
    ours.save_model(f"{tmp_path}/out")
    ours.accelerator.wait_for_everyone()
    if not peft:
        loaded = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/out").state_dict()
        for name, value in layerzero.full_state_dict(ours.model, rank0_only=False).items():
            assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "adapters"])
@on_launched_ranks(timeout=300)
def test_preferences_are_those_of_ddp(rank: int, tmp_path: Path, peft: bool) -> None:
    said, wanted, other = text(48), text(48, seed=1), text(48, seed=2)
    data = Dataset.from_list(
        [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in zip(said, wanted, other, strict=True)]
    )
    common: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer()}
    adapters = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=True)
    runs = []
    for kind, name, more in ((DPOTrainer, "ddp", {}), (Preferences, "ours", {"layerzero": SETTINGS})):
        args = settings(f"{tmp_path}/{name}", DPOConfig, learning_rate=2.0, beta=0.5)
        reference = (
            {"peft_config": adapters} if peft else {"ref_model": llama(vocab_size=4 + len(WORDS))}
        )  # stays unsharded
        torch.manual_seed(1)
        runs.append(kind(llama(vocab_size=4 + len(WORDS)), args=args, **common, **reference, **more))
    theirs, ours = runs
    assert_as_ddp(ours, theirs)
    for key in ("rewards/margins", "rewards/accuracies", "logps/chosen"):
        assert_like(logged(ours, key), logged(theirs, key), rtol=1e-3)
    assert len(set(logged(ours, "logps/chosen"))) == 3
