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

_KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2")


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
        print(sum(parameter.numel() for parameter in sizes.build().parameters()))
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
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide hidden={self.hidden}. Change one of them, or pass head_dim"
            )

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

    @property
    def _active_experts(self) -> int:
        return self.experts_per_token if self.experts else 1

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
        layers = (3 if self.gated else 2) * self.hidden * self.inner * self._active_experts
        return 2.0 * (projections + layers + self.hidden * self.experts) + 2.0 * sequence * self.queries

    def head_forward_flops_per_token(self) -> float:
        """Return the FLOPs per token in the forward pass of the head."""
        return 2.0 * self.vocab * self.hidden

    def block_activations(self) -> int:
        """Return the number of elements per token that a block saves for the backward pass.

        Attention is assumed to save no scores.
        """
        layers = (4 if self.gated else 2) * self._active_experts * self.inner
        return 6 * self.hidden + 2 * self.queries + 2 * self.keys + layers


class _Layer(nn.Module):
    """Layer with a weight of any shape and, unless `bias` is 0, a bias of `bias` elements."""

    def __init__(self, *shape: int, bias: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))
        self.bias = nn.Parameter(torch.empty(bias, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a layer built for a plan has no forward")


class TransformerBlock(nn.Module):
    """Transformer block without a forward method.

    The parameters are registered in the same order as in common implementations.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        hidden, inner, queries, keys = shape.hidden, shape.inner, shape.queries, shape.keys

        def linear(outputs: int, inputs: int, *, bias: bool = shape.biases) -> _Layer:
            sizes = (inputs, outputs) if shape.conv1d else (outputs, inputs)
            return _Layer(*sizes, bias=outputs * bias)

        def norm() -> _Layer:
            return _Layer(hidden, bias=hidden * shape.norm_biases)

        if shape.conv1d:
            self.norm1, self.qkv = norm(), linear(queries + 2 * keys, hidden)
        else:
            biases = shape.biases or shape.qkv_biases
            self.q, self.k, self.v = (linear(size, hidden, bias=biases) for size in (queries, keys, keys))
        self.o = linear(hidden, queries)
        if shape.head_norms:
            self.q_norm, self.k_norm = (_Layer(queries // shape.heads) for _ in range(2))
        if shape.conv1d:
            self.norm2 = norm()
        if shape.experts:
            self.router = linear(shape.experts, hidden)
            self.up = _Layer(shape.experts, (2 if shape.gated else 1) * inner, hidden)
            self.down = _Layer(shape.experts, hidden, inner)
        else:
            if shape.gated:
                self.gate = linear(inner, hidden)
            self.fc1, self.fc2 = linear(inner, hidden), linear(hidden, inner)
        if not shape.conv1d:
            self.norm1, self.norm2 = norm(), norm()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a block built for a plan has no forward")


class _Transformer(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embed = _Layer(shape.vocab, shape.hidden)
        if shape.positions:
            self.positions = _Layer(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.layers))
        self.norm = _Layer(shape.hidden, bias=shape.hidden * shape.norm_biases)
        if not shape.tied:
            self.head = _Layer(shape.vocab, shape.hidden)


def read_config(path: str | os.PathLike[str]) -> TransformerShape:
    """Read a transformer's shape from a Hugging Face ``config.json``, or from a folder that contains this file.

    The file must be local. The function downloads no files.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is invalid, its ``model_type`` is not supported, or a size is missing.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind not in _KNOWN:
        raise ValueError(
            f"{path}: model_type {kind!r} is not supported (supported: {', '.join(_KNOWN)}). Pass a function that "
            "builds the model, as module:function, or the sizes of the model"
        )
    try:
        return _shape_of_gpt2(content) if kind == "gpt2" else _shape_of_llama(content, kind)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}, which a config of {kind} must have") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _shape_of_llama(content: Mapping[str, Any], kind: str) -> TransformerShape:
    biases = {bool(content.get(name)) for name in ("attention_bias", "mlp_bias")}
    if len(biases) > 1:
        raise ValueError(
            "attention_bias and mlp_bias differ, which is not supported. Pass a function that builds the model, as "
            "module:function"
        )
    return TransformerShape(
        layers=content["num_hidden_layers"],
        hidden=content["hidden_size"],
        ffn=content["intermediate_size"],
        vocab=content["vocab_size"],
        heads=content["num_attention_heads"],
        kv_heads=content.get("num_key_value_heads") or 0,
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
