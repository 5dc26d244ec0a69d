"""A small decoder-only GPT over bytes.

The vocabulary is the 256 byte values, so no tokenizer is needed. `Block` is the unit, whose parameters
are gathered, used and freed together. The other parameters (embeddings, last norm and head) belong to the root.
This file does not depend on sharding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    width: int = 192
    heads: int = 3
    context: int = 128  # longest sequence, in tokens
    vocab_size: int = 256
    tied_head: bool = True  # the head reuses the embedding matrix

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; every head needs the same size"
            )


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width] -> [batch, length, width]
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, length, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Transformer layer with pre-norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        # Positions are learned instead of rotary, because a table of angles as input of each block would be cast
        # to the compute dtype together with the block's other inputs.
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._init_weights()
        if config.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:  # int64 [batch, length] -> logits [batch, length, vocab]
        length = ids.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens are longer than context={self.config.context}; crop the input")
        x = self.embed(ids) + self.position(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        # Two branches per layer add to the residual stream. With this scale its variance at the top does not
        # grow with depth, and the first loss is close to ln(256), the loss of a uniform guess.
        std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):  # a branch ends in Attention.out or MLP.out
                nn.init.normal_(parameter, std=std)


def next_token_loss(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats, with the softmax in fp32. Targets of -100 are ignored."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,  # int64 [batch, length]
    *,
    new_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,  # on the CPU
) -> Tensor:  # int64 [batch, length + new_tokens]
    """Append `new_tokens` sampled tokens to the prompt. With `temperature=0`, select the most likely token.

    The function only calls `model(ids)`. It therefore works for a sharded model if all ranks pass the same arguments.
    The number of forwards depends on `new_tokens` but not on the sampled tokens. If a rank stopped early, the other
    ranks would wait forever in a gather.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    ids = prompt
    for _ in range(new_tokens):
        logits = model(ids[:, -context:])[:, -1].float().cpu()
        ids = torch.cat([ids, _sample(logits, temperature, top_k, generator).to(ids.device)], dim=1)
    return ids


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:  # [batch, vocab] -> int64 [batch, 1]
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1])).values
        logits = logits.masked_fill(logits < kept[:, -1:], -math.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
