"""Describe the shapes of transformers for a plan, build them on meta, and compute their FLOPs and activations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TransformerBlock", "TransformerShape", "read_config"]

_LLAMAS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
_KNOWN = (*_LLAMAS, "gpt2")


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Shape of a decoder-only transformer.

    Attributes:
        layers: number of blocks.
        hidden: model dimension.
        ffn: inner dimension of the feed-forward layer. The value 0 means 4 * `hidden`.
        vocab: vocabulary size.
        heads: number of query heads.
        kv_heads: number of key and value heads. The value 0 means `heads`.
        head_dim: dimension of a head. The value 0 means `hidden` / `heads`.
        gated: whether the feed-forward layer has a gate, as in Llama.
        biases: whether all linear layers have biases.
        qkv_biases: whether the query, key and value projections have biases.
        head_norms: whether queries and keys are normalized, as in Qwen3.
        experts: number of experts per feed-forward layer, or 0 if the model has no experts.
        experts_per_token: number of experts that each token uses.
        tied: whether the head shares the weight of the embedding.
        positions: number of learned positions, or 0 if positions are not learned.
        norm_biases: whether norm layers have biases, as LayerNorm does.
        conv1d: whether linear weights have the shape [inputs, outputs], as in GPT-2.

    Example::

        sizes = TransformerShape(layers=32, hidden=4096, ffn=11008, vocab=32000, heads=32)
        print(sizes.numel)
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    biases: bool = False
    qkv_biases: bool = False
    head_norms: bool = False
    experts: int = 0
    experts_per_token: int = 2
    tied: bool = False
    positions: int = 0
    norm_biases: bool = False
    conv1d: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocab", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide hidden={self.hidden}. Change one of them, or pass head_dim to "
                "TransformerShape"
            )

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.build().parameters())

    @property
    def queries(self) -> int:
        """Number of elements in all queries of a token: heads times head dimension."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def keys(self) -> int:
        """Number of elements in all keys of a token. All values of a token have the same number of elements."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    def build(self) -> nn.Module:
        """Build the model on the meta device, with parameters but without a forward method."""
        return _Transformer(self)

    @property
    def units(self) -> list[type | str]:
        """Units of the built model: its blocks, and the embedding and the head if they are not tied."""
        return [TransformerBlock] if self.tied else [TransformerBlock, "embed", "head"]

    def block_forward_flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs per token in a block's forward pass, with causal attention over `sequence` tokens."""
        projections = self.hidden * (2 * self.queries + 2 * self.keys)
        layers = (3 if self.gated else 2) * self.hidden * self.inner
        active_experts = self.experts_per_token if self.experts else 1
        return (
            2.0 * (projections + active_experts * layers + self.hidden * self.experts) + 2.0 * sequence * self.queries
        )

    def head_forward_flops_per_token(self) -> float:
        """Return the FLOPs per token in the forward pass of the head."""
        return 2.0 * self.vocab * self.hidden

    def block_activations(self) -> int:
        """Return the number of elements per token that a block saves for the backward pass.

        Attention is assumed to save no scores.
        """
        active_experts = self.experts_per_token if self.experts else 1
        return (
            6 * self.hidden + 2 * self.queries + 2 * self.keys + (4 if self.gated else 2) * active_experts * self.inner
        )


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


class _Linear(nn.Module):
    def __init__(self, outputs: int, inputs: int, *, bias: bool, transposed: bool) -> None:
        super().__init__()
        self.weight = _parameter(*((inputs, outputs) if transposed else (outputs, inputs)))
        self.bias = _parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a layer built for a plan has no forward")


class _Norm(nn.Module):
    def __init__(self, size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.bias = _parameter(size) if bias else None


class TransformerBlock(nn.Module):
    """Transformer block without a forward method.

    The parameters are registered in the same order as in common implementations.
    """

    def __init__(self, sizes: TransformerShape) -> None:
        super().__init__()
        hidden, inner, transposed = sizes.hidden, sizes.inner, sizes.conv1d

        def linear(outputs: int, inputs: int, *, bias: bool = sizes.biases) -> _Linear:
            return _Linear(outputs, inputs, bias=bias, transposed=transposed)

        if transposed:
            self.norm1 = _Norm(hidden, bias=sizes.norm_biases)
            self.qkv = linear(sizes.queries + 2 * sizes.keys, hidden)
        else:
            qkv = sizes.biases or sizes.qkv_biases
            self.q = linear(sizes.queries, hidden, bias=qkv)
            self.k = linear(sizes.keys, hidden, bias=qkv)
            self.v = linear(sizes.keys, hidden, bias=qkv)
        self.o = linear(hidden, sizes.queries)
        if sizes.head_norms:
            size = sizes.queries // sizes.heads
            self.q_norm, self.k_norm = _Norm(size, bias=False), _Norm(size, bias=False)
        if transposed:
            self.norm2 = _Norm(hidden, bias=sizes.norm_biases)
        if sizes.experts:
            self.router = linear(sizes.experts, hidden)
            self.up = _parameter(sizes.experts, (2 if sizes.gated else 1) * inner, hidden)
            self.down = _parameter(sizes.experts, hidden, inner)
        else:
            if sizes.gated:
                self.gate = linear(inner, hidden)
            self.fc1 = linear(inner, hidden)
            self.fc2 = linear(hidden, inner)
        if not transposed:
            self.norm1, self.norm2 = (_Norm(hidden, bias=sizes.norm_biases) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a block built for a plan has no forward")


class _Transformer(nn.Module):
    def __init__(self, sizes: TransformerShape) -> None:
        super().__init__()
        self.embed = _Linear(sizes.vocab, sizes.hidden, bias=False, transposed=False)
        if sizes.positions:
            self.positions = _Linear(sizes.positions, sizes.hidden, bias=False, transposed=False)
        self.blocks = nn.ModuleList(TransformerBlock(sizes) for _ in range(sizes.layers))
        self.norm = _Norm(sizes.hidden, bias=sizes.norm_biases)
        if not sizes.tied:
            self.head = _Linear(sizes.vocab, sizes.hidden, bias=False, transposed=False)


def read_config(path: str | os.PathLike[str]) -> TransformerShape:
    """Read a transformer's shape from a Hugging Face ``config.json``, or from a folder that contains this file.

    The file must be local. The function downloads no files.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is invalid, its ``model_type`` is not supported, or a size is missing.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist. Pass the path of a Hugging Face config.json, or of a folder that contains one"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(content).__name__}")
    kind = content.get("model_type")
    if kind not in _KNOWN:
        raise ValueError(
            f"{path}: model_type {kind!r} is not supported (supported: {', '.join(_KNOWN)}). Pass a function that "
            "builds the model, as module:function, or the sizes of the model"
        )
    try:
        return _shape_of_gpt2(content) if kind == "gpt2" else _shape_of_llama(content, kind)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}, which a config of {kind} must have") from None


def _shape_of_llama(content: Mapping[str, Any], kind: str) -> TransformerShape:
    biases = {bool(content.get(name)) for name in ("attention_bias", "mlp_bias")}
    if len(biases) > 1:
        raise ValueError(
            "attention_bias and mlp_bias differ, which is not supported. Pass a function that builds the model, as "
            "module:function"
        )
    hidden, heads = content["hidden_size"], content["num_attention_heads"]
    if not content.get("head_dim") and heads > 0 and hidden % heads:
        raise ValueError(
            f"num_attention_heads={heads} does not divide hidden_size={hidden}. Add head_dim to the config"
        )
    return TransformerShape(
        layers=content["num_hidden_layers"],
        hidden=hidden,
        ffn=content["intermediate_size"],
        vocab=content["vocab_size"],
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        head_dim=content.get("head_dim") or 0,
        biases=biases.pop(),
        qkv_biases=kind == "qwen2",
        head_norms=kind == "qwen3",
        experts=content["num_local_experts"] if kind == "mixtral" else 0,
        experts_per_token=content.get("num_experts_per_tok", 2),
        tied=bool(content.get("tie_word_embeddings", False)),
    )


def _shape_of_gpt2(content: Mapping[str, Any]) -> TransformerShape:
    return TransformerShape(
        layers=content["n_layer"],
        hidden=content["n_embd"],
        ffn=content.get("n_inner") or 0,
        vocab=content["vocab_size"],
        heads=content["n_head"],
        positions=content["n_positions"],
        gated=False,
        biases=True,
        norm_biases=True,
        conv1d=True,
        tied=bool(content.get("tie_word_embeddings", True)),
    )
