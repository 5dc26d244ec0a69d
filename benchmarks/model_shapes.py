"""Parameter names and shapes of well-known models by sharding unit, to test layouts without weights or torch.

Names and shapes are those of common implementations (transformers for language and speech, torchvision for
ResNet, timm for ViT), derived from the configuration of each model.

    >>> gpt2("GPT-2 small", layers=12, dim=768)[0].params[2]
    ('attn.c_attn.weight', (768, 2304))
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Param = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class UnitShapes:
    """Kind of unit in a model: `copies` units with these parameters."""

    model: str
    unit: str
    copies: int
    params: tuple[Param, ...]

    @property
    def numel(self) -> int:
        """Number of elements of one copy."""
        return sum(prod(shape) for _, shape in self.params)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[Param]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, dim: int) -> Iterator[Param]:
    yield f"{name}.weight", (dim,)
    yield f"{name}.bias", (dim,)


def gpt2(model: str, *, layers: int, dim: int) -> list[UnitShapes]:
    """Return the units of GPT-2. Its linear weights are [inputs, outputs], so a row has the layer's output width."""
    block = [
        *_norm("ln_1", dim),
        ("attn.c_attn.weight", (dim, 3 * dim)),
        ("attn.c_attn.bias", (3 * dim,)),
        ("attn.c_proj.weight", (dim, dim)),
        ("attn.c_proj.bias", (dim,)),
        *_norm("ln_2", dim),
        ("mlp.c_fc.weight", (dim, 4 * dim)),
        ("mlp.c_fc.bias", (4 * dim,)),
        ("mlp.c_proj.weight", (4 * dim, dim)),
        ("mlp.c_proj.bias", (dim,)),
    ]
    root = [("wte.weight", (50257, dim)), ("wpe.weight", (1024, dim)), *_norm("ln_f", dim)]
    return [UnitShapes(model, "block", layers, tuple(block)), UnitShapes(model, "root", 1, tuple(root))]


def _llama_attention(dim: int, kv_dim: int) -> list[Param]:
    return [
        *_linear("self_attn.q_proj", dim, dim, bias=False),
        *_linear("self_attn.k_proj", kv_dim, dim, bias=False),
        *_linear("self_attn.v_proj", kv_dim, dim, bias=False),
        *_linear("self_attn.o_proj", dim, dim, bias=False),
    ]


def _llama_model(model: str, layers: int, dim: int, block: list[Param]) -> list[UnitShapes]:
    norms = [("input_layernorm.weight", (dim,)), ("post_attention_layernorm.weight", (dim,))]
    root = [
        ("model.embed_tokens.weight", (32000, dim)),
        ("model.norm.weight", (dim,)),
        ("lm_head.weight", (32000, dim)),
    ]
    return [
        UnitShapes(model, "block", layers, (*block, *norms)),
        UnitShapes(model, "root", 1, tuple(root)),
    ]


def llama(model: str, *, layers: int, dim: int, kv_dim: int, hidden: int) -> list[UnitShapes]:
    block = [
        *_llama_attention(dim, kv_dim),
        *_linear("mlp.gate_proj", hidden, dim, bias=False),
        *_linear("mlp.up_proj", hidden, dim, bias=False),
        *_linear("mlp.down_proj", dim, hidden, bias=False),
    ]
    return _llama_model(model, layers, dim, block)


def mixtral(model: str, *, layers: int, dim: int, kv_dim: int, hidden: int, experts: int) -> list[UnitShapes]:
    """Return the units of Mixtral, with separate parameters for each expert, not stacked into 3-D ones."""
    block = [*_llama_attention(dim, kv_dim), *_linear("block_sparse_moe.gate", experts, dim, bias=False)]
    for e in range(experts):
        expert = f"block_sparse_moe.experts.{e}"
        block += _linear(f"{expert}.w1", hidden, dim, bias=False)
        block += _linear(f"{expert}.w2", dim, hidden, bias=False)
        block += _linear(f"{expert}.w3", hidden, dim, bias=False)
    return _llama_model(model, layers, dim, block)


def vit(model: str, *, layers: int, dim: int) -> list[UnitShapes]:
    """Return the units of a ViT for 224 x 224 images with 16 x 16 patches: 196 positions and the class token."""
    block = [
        *_norm("norm1", dim),
        *_linear("attn.qkv", 3 * dim, dim, bias=True),
        *_linear("attn.proj", dim, dim, bias=True),
        *_norm("norm2", dim),
        *_linear("mlp.fc1", 4 * dim, dim, bias=True),
        *_linear("mlp.fc2", dim, 4 * dim, bias=True),
    ]
    root = [
        ("cls_token", (1, 1, dim)),
        ("pos_embed", (1, 197, dim)),
        ("patch_embed.proj.weight", (dim, 3, 16, 16)),
        ("patch_embed.proj.bias", (dim,)),
        *_norm("norm", dim),
        *_linear("head", 1000, dim, bias=True),
    ]
    return [UnitShapes(model, "block", layers, tuple(block)), UnitShapes(model, "root", 1, tuple(root))]


def _bottleneck(inputs: int, width: int, *, downsample: bool) -> list[Param]:
    outputs = 4 * width
    params = [
        ("conv1.weight", (width, inputs, 1, 1)),
        *_norm("bn1", width),
        ("conv2.weight", (width, width, 3, 3)),
        *_norm("bn2", width),
        ("conv3.weight", (outputs, width, 1, 1)),
        *_norm("bn3", outputs),
    ]
    if downsample:
        params += [("downsample.0.weight", (outputs, inputs, 1, 1)), *_norm("downsample.1", outputs)]
    return params


def resnet(model: str, *, blocks: tuple[int, ...]) -> list[UnitShapes]:
    """Return the units of a ResNet in two ways: one unit per stage, and one unit per bottleneck."""
    stages: list[UnitShapes] = []
    bottlenecks: list[UnitShapes] = []
    inputs = 64
    for i, count in enumerate(blocks):
        width = 64 * 2**i
        first = _bottleneck(inputs, width, downsample=True)
        rest = _bottleneck(4 * width, width, downsample=False)
        inputs = 4 * width
        stage = [(f"0.{name}", shape) for name, shape in first]
        stage += [(f"{j}.{name}", shape) for j in range(1, count) for name, shape in rest]
        stages.append(UnitShapes(model, f"stage {i + 1}", 1, tuple(stage)))
        bottlenecks.append(UnitShapes(model, f"bottleneck {i + 1}.0", 1, tuple(first)))
        bottlenecks.append(UnitShapes(model, f"bottleneck {i + 1}.n", count - 1, tuple(rest)))
    root = [
        ("conv1.weight", (64, 3, 7, 7)),
        *_norm("bn1", 64),
        *_linear("fc", 1000, inputs, bias=True),
    ]
    return [*stages, *bottlenecks, UnitShapes(model, "root", 1, tuple(root))]


def t5(model: str, *, layers: int, dim: int, hidden: int, heads: int) -> list[UnitShapes]:
    """Return the units of T5. The first block of encoder and decoder owns the relative position bias of all blocks."""

    def attention(name: str, *, position_bias: bool) -> Iterator[Param]:
        for part in ("q", "k", "v", "o"):
            yield from _linear(f"{name}.{part}", dim, dim, bias=False)
        if position_bias:
            yield f"{name}.relative_attention_bias.weight", (32, heads)

    def block(*, decoder: bool, first: bool) -> tuple[Param, ...]:
        params = [
            *attention("layer.0.SelfAttention", position_bias=first),
            ("layer.0.layer_norm.weight", (dim,)),
        ]
        if decoder:
            params += attention("layer.1.EncDecAttention", position_bias=False)
            params += [("layer.1.layer_norm.weight", (dim,))]
        last = "layer.2" if decoder else "layer.1"
        params += _linear(f"{last}.DenseReluDense.wi", hidden, dim, bias=False)
        params += _linear(f"{last}.DenseReluDense.wo", dim, hidden, bias=False)
        params += [(f"{last}.layer_norm.weight", (dim,))]
        return tuple(params)

    root = [
        ("shared.weight", (32128, dim)),
        ("encoder.final_layer_norm.weight", (dim,)),
        ("decoder.final_layer_norm.weight", (dim,)),
    ]
    return [
        UnitShapes(model, "encoder block 0", 1, block(decoder=False, first=True)),
        UnitShapes(model, "encoder block", layers - 1, block(decoder=False, first=False)),
        UnitShapes(model, "decoder block 0", 1, block(decoder=True, first=True)),
        UnitShapes(model, "decoder block", layers - 1, block(decoder=True, first=False)),
        UnitShapes(model, "root", 1, tuple(root)),
    ]


def whisper(model: str, *, layers: int, dim: int, mels: int, vocabulary: int) -> list[UnitShapes]:
    """Return the units of Whisper, without the encoder's positions, which are fixed sinusoids and not trained."""

    def attention(name: str) -> Iterator[Param]:
        yield from _linear(f"{name}.k_proj", dim, dim, bias=False)
        for part in ("v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{name}.{part}", dim, dim, bias=True)
        yield from _norm(f"{name}_layer_norm", dim)

    def mlp() -> Iterator[Param]:
        yield from _linear("fc1", 4 * dim, dim, bias=True)
        yield from _linear("fc2", dim, 4 * dim, bias=True)
        yield from _norm("final_layer_norm", dim)

    root = [
        ("encoder.conv1.weight", (dim, mels, 3)),
        ("encoder.conv1.bias", (dim,)),
        ("encoder.conv2.weight", (dim, dim, 3)),
        ("encoder.conv2.bias", (dim,)),
        *_norm("encoder.layer_norm", dim),
        ("decoder.embed_tokens.weight", (vocabulary, dim)),
        ("decoder.embed_positions.weight", (448, dim)),
        *_norm("decoder.layer_norm", dim),
    ]
    decoder = (*attention("self_attn"), *attention("encoder_attn"), *mlp())
    return [
        UnitShapes(model, "encoder block", layers, (*attention("self_attn"), *mlp())),
        UnitShapes(model, "decoder block", layers, decoder),
        UnitShapes(model, "root", 1, tuple(root)),
    ]


UNITS: tuple[UnitShapes, ...] = (
    *gpt2("GPT-2 small", layers=12, dim=768),
    *gpt2("GPT-2 XL", layers=48, dim=1600),
    *llama("Llama 7B", layers=32, dim=4096, kv_dim=4096, hidden=11008),
    *llama("Llama 70B", layers=80, dim=8192, kv_dim=1024, hidden=28672),
    *mixtral("Mixtral 8x7B", layers=32, dim=4096, kv_dim=1024, hidden=14336, experts=8),
    *vit("ViT-B/16", layers=12, dim=768),
    *vit("ViT-L/16", layers=24, dim=1024),
    *resnet("ResNet-50", blocks=(3, 4, 6, 3)),
    *t5("T5-base", layers=12, dim=768, hidden=3072, heads=12),
    *t5("T5-large", layers=24, dim=1024, hidden=4096, heads=16),
    *whisper("Whisper small", layers=12, dim=768, mels=80, vocabulary=51865),
    *whisper("Whisper large-v3", layers=32, dim=1280, mels=128, vocabulary=51866),
)
