"""layerzero.integrations.transformers compared with the Trainer's DistributedDataParallel on the same data."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

if any(find_spec(name) is None for name in ("transformers", "accelerate", "peft")):
    pytest.skip(
        "needs transformers, accelerate, peft: pip install --no-deps -r requirements-loops.txt", allow_module_level=True
    )

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.integrations.common import is_sharded
from layerzero.integrations.transformers import LayerZeroArguments, LayerZeroMixin, LayerZeroTrainer, from_pretrained
from layerzero.sharding.unit_selection import block_classes
from tests.support.loops import assert_like, forget_accelerators, on_launched_ranks
from tests.support.models import assert_same_bits, full_parameters

SETTINGS = {"zero3_size": 2}
SLOW = 300.0  # seconds, with a margin for a busy machine


def llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 24}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "use_cache": False, **settings}))


def text(size: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 24, (size, 8), generator=generator).tolist()
    return [{"input_ids": each, "labels": each} for each in tokens]


def arguments(folder: str | Path, kind: Any = TrainingArguments, **settings: Any) -> TrainingArguments:
    forget_accelerators()
    defaults = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "max_steps": 4}
    defaults |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    defaults |= {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 1.0, "seed": 3, "dataloader_pin_memory": False}
    return kind(output_dir=str(folder), **{**defaults, **settings})


def trainer(
    folder: str | Path, model: nn.Module | None = None, *, ours: bool = True, layerzero: Any = SETTINGS, **settings: Any
) -> Trainer:
    kind, own = (LayerZeroTrainer, {"layerzero": layerzero}) if ours else (Trainer, {})
    args = arguments(folder, **settings)
    model = llama() if model is None else model
    return kind(model, args, train_dataset=text(64), eval_dataset=text(10, seed=1), **own)


def logged(trained: Trainer, key: str = "loss") -> list[float]:
    return [float(entry[key]) for entry in trained.state.log_history if key in entry]


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"optim": "adamw_torch", "learning_rate": 0.01}], ids=str)
@on_launched_ranks(timeout=SLOW)
def test_losses_and_norms_are_those_of_ddp(rank: int, tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = trainer(tmp_path, ours=False, **settings)
    theirs.train()
    ours = trainer(tmp_path, **settings)
    ours.train()
    rtol = 2e-2 if "bf16" in settings else 1e-4
    assert_like(logged(ours), logged(theirs), rtol=rtol)
    assert_like(logged(ours, "grad_norm"), logged(theirs, "grad_norm"), rtol=rtol)
    traffic, handles = layerzero.traffic(ours.model), len(get_state(ours.model).handles)
    assert handles >= 3, "a layer is a unit"
    assert traffic.calls["hop2"] == handles * 4  # of 8 backwards
    assert_like([ours.evaluate()["eval_loss"]], [theirs.evaluate()["eval_loss"]], rtol=rtol)


@on_launched_ranks(timeout=SLOW)
def test_gradient_checkpointing_of_both_kinds(rank: int, tmp_path: Path) -> None:
    losses = []
    for reentrant in (None, False, True):
        settings = {} if reentrant is None else {"gradient_checkpointing": True}
        if reentrant is not None:
            settings["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
            settings["layerzero"] = {**SETTINGS, "reshard_after_forward": "step"}
        trained = trainer(tmp_path, **settings)
        trained.train()
        losses.append(logged(trained))
        if reentrant is not None:  # once in each of four steps
            assert layerzero.traffic(trained.model).calls["gather"] == 4 * len(get_state(trained.model).handles)
    assert_like(losses[1], losses[0])
    assert_like(losses[2], losses[0])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_launched_ranks(timeout=SLOW)
def test_a_resumed_run_is_the_uninterrupted_one(rank: int, tmp_path: Path, dtype: torch.dtype) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01}
    settings["save_total_limit"] = 2
    whole = trainer(tmp_path, llama().to(dtype), max_steps=6, **settings)
    whole.train()
    final = full_parameters(whole.model)
    kept = sorted(path.name for path in Path(tmp_path).iterdir())
    assert kept == ["checkpoint-4", "checkpoint-6"]
    assert {"layerzero", "model.safetensors", "scheduler.pt"} <= {p.name for p in Path(tmp_path, kept[0]).iterdir()}
    again = trainer(tmp_path, llama(seed=5).to(dtype), max_steps=6, **settings)
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-4")
    assert logged(again)[:] == logged(whole)
    for name, value in full_parameters(again.model).items():
        assert torch.equal(value, final[name]), name


@on_launched_ranks(timeout=SLOW)
def test_a_run_of_ddp_goes_on_here(rank: int, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01}
    theirs = trainer(tmp_path, ours=False, **settings)
    theirs.train()
    ours = trainer(tmp_path, llama(seed=5), **settings)
    ours.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    assert_like(logged(ours), logged(theirs), rtol=1e-4)


@on_launched_ranks(timeout=SLOW)
def test_a_saved_model_loads_with_from_pretrained(rank: int, tmp_path: Path) -> None:
    trained = trainer(tmp_path, llama(tie_word_embeddings=True))
    before = trained.evaluate()["eval_loss"]
    assert not is_sharded(trained.model), "an evaluation alone needs no shards"
    trained.train()
    assert is_sharded(trained.model)
    assert trained.evaluate()["eval_loss"] != before
    trained.save_model(f"{tmp_path}/out")
    state = layerzero.full_state_dict(trained.model, rank0_only=False)
    trained.accelerator.wait_for_everyone()
    loaded = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/out").state_dict()
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name


@on_launched_ranks(timeout=SLOW)
def test_the_best_model_is_loaded_at_the_end(rank: int, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"load_best_model_at_end": True, "save_total_limit": 1, "greater_is_better": True}
    trained = trainer(tmp_path, max_steps=6, **settings)
    trained.train()
    evaluated = logged(trained, "eval_loss")
    assert max(evaluated) != evaluated[-1], "the last is not the best"
    assert_like([trained.evaluate()["eval_loss"]], [max(evaluated)])
    best = Path(trained.state.best_model_checkpoint).name
    assert best in {path.name for path in Path(tmp_path).iterdir()}


def adapted(seed: int = 0) -> PeftModel:
    return get_peft_model(llama(seed), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def llama_of(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora" not in name}


@on_launched_ranks(timeout=SLOW)
def test_adapters_are_trained_saved_alone_and_resumed(rank: int, tmp_path: Path) -> None:
    settings = {"learning_rate": 2.0, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
    settings |= {"eval_steps": 2, "load_best_model_at_end": True}
    theirs = trainer(f"{tmp_path}/ddp", adapted(), ours=False, **settings)
    theirs.train()
    ours = trainer(tmp_path, adapted(), **settings)
    ours.train()
    assert_like(logged(ours), logged(theirs), rtol=1e-4)
    assert_like(logged(ours, "grad_norm"), logged(theirs, "grad_norm"), rtol=1e-4)
    assert {type(module).__name__ for unit in get_state(ours.model).units for module in unit.modules} >= {
        "LlamaDecoderLayer"
    }
    layerzero.traffic(ours.model, reset=True)
    ours.save_model(f"{tmp_path}/out")
    ours.accelerator.wait_for_everyone()
    files = {path.name: path.stat().st_size for path in Path(tmp_path, "out").iterdir()}
    assert "model.safetensors" not in files
    assert files["adapter_model.safetensors"] < 10_000
    sent = layerzero.traffic(ours.model).bytes
    assert sum(sent.values()) < 20_000, sent  # the frozen model, of 27,000 bytes, was not gathered
    loaded = PeftModel.from_pretrained(llama(), f"{tmp_path}/out").state_dict()
    for name, value in full_parameters(ours.model).items():
        assert torch.equal(loaded[name], value), name
    assert ours.evaluate()["eval_loss"] == min(logged(ours, "eval_loss")[:-1])
    model = adapted(seed=5)
    model.load_state_dict(llama_of(adapted()), strict=False)
    again = trainer(tmp_path, model, **settings)
    for _ in range(2):  # before and after it is sharded
        again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
        assert logged(again) == logged(ours)[:4]


@on_launched_ranks(timeout=SLOW)
def test_peft_loads_adapters_into_a_sharded_model(rank: int, tmp_path: Path) -> None:
    source = adapted(seed=3)
    source.load_state_dict(llama_of(adapted()), strict=False)
    if rank == 0:
        source.save_pretrained(tmp_path)
    torch.distributed.barrier()
    tokens = torch.arange(3, 11)[None]
    expected = source(input_ids=tokens).logits
    for size in (2, 4):
        model = layerzero.shard_model(adapted(), zero3_size=size, units="auto")
        assert not torch.allclose(model(input_ids=tokens).logits, expected, atol=1e-3)
        assert not model.load_adapter(tmp_path, "default", is_trainable=True).missing_keys
        assert_same_bits(model, source, "adapters")
        assert torch.equal(model(input_ids=tokens).logits, expected)
        # Other models beside it stay unsharded on every rank: for inference, not for training.
        model.load_adapter(tmp_path, "other")
        model.set_adapter("other", inference_mode=True)
        assert torch.equal(model(input_ids=tokens).logits, expected)
        model.set_requires_grad("other")
        with pytest.raises(RuntimeError, match=r"lora_A.other.weight'.* joined the model after shard_model"):
            model(input_ids=tokens)


@on_launched_ranks(timeout=SLOW)
def test_ranks_generate_texts_of_unequal_length(rank: int, tmp_path: Path) -> None:
    trained = trainer(tmp_path, layerzero={"zero3_size": 4})
    trained.train()
    alone = llama()
    alone.load_state_dict(layerzero.full_state_dict(trained.model, rank0_only=False))
    prompt = torch.tensor(text(4, seed=7)[rank]["input_ids"])[None, : 3 + rank]
    lengths = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "use_cache": True}
    got = trained.model.generate(prompt, synced_gpus=True, **lengths)
    assert torch.equal(got, alone.eval().generate(prompt, **lengths))


@on_launched_ranks(timeout=SLOW)
def test_an_encoder_decoder_model_generates(rank: int, tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 24}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=2)
    torch.manual_seed(0)
    whole = T5ForConditionalGeneration(config)
    if rank == 0:
        whole.save_pretrained(tmp_path)
    torch.distributed.barrier()
    trained = trainer(f"{tmp_path}/out", T5ForConditionalGeneration.from_pretrained(tmp_path), max_steps=1)
    trained.train()
    alone = T5ForConditionalGeneration(config)
    alone.load_state_dict(layerzero.full_state_dict(trained.model, rank0_only=False))
    prompt = torch.tensor(text(4, seed=7)[rank]["input_ids"])[None, : 3 + rank]
    lengths = {"max_new_tokens": 2 + 3 * rank, "min_new_tokens": 2 + 3 * rank, "num_beams": 1 + rank % 2}
    for model, expected in (
        (trained.model.eval(), alone.eval()),
        (from_pretrained(T5ForConditionalGeneration, tmp_path, zero3_size=2), whole.eval()),
    ):
        for _ in range(2):
            got = model.generate(prompt, synced_gpus=True, do_sample=False, **lengths)
            assert torch.equal(got, expected.generate(prompt, do_sample=False, **lengths))
    trained.model.train()
    loss = trained.model(input_ids=prompt, labels=prompt).loss
    loss.backward()
    assert_like([loss.item()], [alone.train()(input_ids=prompt, labels=prompt).loss.item()])


class Doubled(Trainer):
    """A third-party subclass of Trainer."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class Mixed(LayerZeroMixin, Doubled):
    pass


@on_launched_ranks(timeout=SLOW)
def test_a_mixin_for_other_trainers_and_arguments_on_the_command_line(rank: int, tmp_path: Path) -> None:
    config = Path(tmp_path, "layerzero.json")
    if rank == 0:
        config.write_text(json.dumps({"accumulation": "full"}))  # JSON is YAML
    torch.distributed.barrier()
    parser = HfArgumentParser((LayerZeroArguments,))
    (parsed,) = parser.parse_args_into_dataclasses(["--layerzero_config", str(config), "--zero3_size", "2"])
    trained = Mixed(llama(), arguments(tmp_path), train_dataset=text(64), layerzero=parsed)
    trained.train()
    plain = trainer(tmp_path)
    plain.train()
    assert_like(logged(trained)[:1], [2 * loss for loss in logged(plain)[:1]])
    handles = len(get_state(trained.model).handles)
    assert layerzero.traffic(trained.model).calls["hop1"] == handles * 4  # "full": once a step
    with pytest.raises(ValueError, match="unknown settings zero3size"):
        LayerZeroTrainer(llama(), arguments(tmp_path), layerzero={"zero3size": 2})
    with pytest.raises(ValueError, match="dynamo_backend: Accelerate would"):
        trainer(tmp_path, torch_compile=True)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from transformers, whose older names PEFT uses
def test_units_of_a_model_are_its_layers() -> None:
    assert block_classes(llama()) == block_classes(adapted()) == {"LlamaDecoderLayer"}
    assert block_classes(nn.Linear(2, 2)) == set()
