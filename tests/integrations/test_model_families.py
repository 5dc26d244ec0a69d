"""Models of many families of transformers, compared with one process: losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install --no-deps -r requirements-loops.txt", allow_module_level=True)

import transformers

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.loops import launched
from tests.support.models import different, full_gradients
from tests.support.ranks import mesh_of, run_ranks

POLICIES = (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
Kinds = tuple[bool | None, ...]  # checkpointing, by step: none, or reentrant or not
ON_TWO_NODES = ("llama, tied", "qwen3_moe", "clip", "whisper")
VOCABULARY = 24
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**TEXT, **WIDTHS, "num_key_value_heads": 1, "max_position_embeddings": 32, "use_cache": False}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # dropout
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3}

# Family to model class and config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "llama, tied": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        {**TEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {**TEXT, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        | {"use_cache": False, "decoder_start_token_id": 0},
    ),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, **HEADS}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**DECODER, **HEADS, **EXPERTS, "num_experts": 4}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**DECODER, **HEADS, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3ForCausalLM", DECODER),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        }
        | {"moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
    "gpt_oss": ("GptOssForCausalLM", {**DECODER, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": (
        "MambaForCausalLM",
        {**TEXT, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False, "use_mambapy": False},
    ),
    "bert": ("BertForMaskedLM", {**TEXT, **WIDTHS, **STILL, "max_position_embeddings": 32}),
    "bart": (
        "BartForConditionalGeneration",
        {**TEXT, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
        | {"dropout": 0.0, "use_cache": False, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    ),
    "vit": ("ViTForImageClassification", {**WIDTHS, **STILL, **IMAGE, "num_labels": 3}),
    "clip": (
        "CLIPModel",
        {"projection_dim": 8, "vision_config": {**WIDTHS, **IMAGE}}
        | {"text_config": {**TEXT, **WIDTHS, "max_position_embeddings": 32, "eos_token_id": VOCABULARY - 1}},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**TEXT, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 4}
        | {"max_source_positions": 8, "max_target_positions": 16, "decoder_start_token_id": 1, "use_cache": False}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            **TEXT,
            **WIDTHS,
            "conv_dim": [8, 8],
            "conv_stride": [2, 2],
            "conv_kernel": [3, 3],
            "num_feat_extract_layers": 2,
        }
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "layerdrop": 0.0}
        | {"attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
        | {"apply_spec_augment": False, "ctc_loss_reduction": "mean"},
    ),
}


def build(family: str) -> nn.Module:
    kind, settings = FAMILIES[family]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model: nn.Module = model_class(model_class.config_class(**settings))
    return model.train()


def batch(family: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    if family == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
            "labels": torch.randint(0, 3, (2,), generator=generator),
        }
    if family == "clip":
        return {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
            "input_ids": tokens,
            "return_loss": True,
        }
    if family == "whisper":
        return {"input_features": torch.randn(2, 4, 16, generator=generator), "labels": tokens}
    if family == "wav2vec2":
        return {"input_values": torch.randn(2, 64, generator=generator), "labels": tokens[:, :3]}
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def alone(family: str, dtype: torch.dtype, kinds: Kinds, world: int) -> Iterator[tuple[list[float], dict[str, Tensor]]]:
    """Return losses of the ranks' batches and gradients by step, from one process with weights in `dtype`."""
    masters, model = build(family), build(family)
    optimizer = optimizer_of(masters)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for step, reentrant in enumerate(kinds):
        checkpoint(model, reentrant)
        for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
            parameter.data.copy_(master.detach())
        losses, gradients = [], []
        for rank in range(world):
            loss = model(**cast(batch(family, 10 * step + rank), dtype)).loss
            loss.backward()
            losses.append(loss.item())
            gradients.append({n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
        while len(gradients) > 1:  # ranks of a node first
            gradients = [added(*pair) for pair in zip(gradients[::2], gradients[1::2], strict=True)]
        whole = {name: value / world for name, value in gradients[0].items()}
        for name, master in masters.named_parameters():
            master.grad = whole.get(name)
        yield losses, whole
        optimizer.step()


def added(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}


def checkpoint(model: nn.Module, reentrant: bool | None) -> None:
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def _family(rank: int, family: str) -> None:
    kinds = (None, False, True)
    with launched():
        for policy in POLICIES:
            model, dtype = build(family), policy.param_dtype or torch.float32
            assert model.supports_gradient_checkpointing
            if family == "mamba":  # its layers exchange fp32 activations
                policy = replace(policy, cast_forward_inputs=False)  # noqa: PLW2901
            layerzero.shard_model(model, mesh=mesh_of(2), units="auto", mp_policy=policy)
            assert len(get_state(model).units) > 2
            optimizer = layerzero.shard_optimizer(optimizer_of(model), model)
            expected = alone(family, dtype, kinds, dist.get_world_size())
            for step, (reentrant, (losses, gradients)) in enumerate(zip(kinds, expected, strict=True)):
                case = f"{family}, {dtype}, step {step}, reentrant={reentrant}"
                checkpoint(model, reentrant)
                loss = model(**batch(family, 10 * step + rank)).loss
                loss.backward()
                assert loss.item() == losses[rank], case
                assert not (wrong := different(full_gradients(model), gradients)), f"{case}: {wrong}"
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.sample(9)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_is_trained_with_the_bits_of_one_process(family: str) -> None:
    run_ranks(_family, family, world_size=4 if family in ON_TWO_NODES else 2)
