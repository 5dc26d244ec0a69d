"""Support for torchtitan without a GPU, for tests only.

Importing this module before other modules of torchtitan makes the CPU its device. A loader of random tokens and a dummy
tokenizer allow runs without files.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.tools import utils


class _CPU:
    """``torch.cpu``, and the device functions that torchtitan calls for its log."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def get_device_properties(self, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**34, name="CPU")

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


utils.device_type, utils.device_module = "cpu", _CPU()

with warnings.catch_warnings():  # torch warns about its own code
    warnings.simplefilter("ignore")
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
    from torchtitan.trainer import Trainer

VOCABULARY, SEQUENCE, WIDTH, HEADS, LAYERS = 256, 16, 64, 4, 2


@contextmanager
def on_cpu() -> Iterator[None]:
    """Provide ``dist.set_timeout`` for a run if torch lacks it, and enable the garbage collector again at the end."""
    with mock.patch.object(dist, "set_timeout", lambda *_: None, create=True):
        try:
            yield
        finally:
            gc.enable()


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Tokenizer that is never used; the trainer always builds one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class RandomTokens(BaseDataLoader):  # type: ignore[misc]
    """Batches seeded with their number and the data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._ranks, self._rank, self._shape, self._at = dp_world_size, dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self._at * self._ranks + self._rank)
            self._at += 1
            tokens = torch.randint(0, VOCABULARY, self._shape, generator=generator)
            positions = torch.arange(self._shape[1] - 1).repeat(self._shape[0], 1)
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at = state_dict["at"]


def mixture(folder: str) -> Trainer.Config:
    """Return a config like :func:`tiny` with 8 experts, 2 for each token."""
    config, width = qwen3_moe_debug(), WIDTH // HEADS
    sizes = {"dim": WIDTH, "n_heads": HEADS, "n_kv_heads": 2, "head_dim": width}
    experts = {"num_experts": 8, "top_k": 2, "moe_hidden_dim": WIDTH, "moe_comm_backend": "standard"}
    rope = CosSinRoPE.Config(dim=width, max_seq_len=SEQUENCE, theta=1e6)
    config.model_spec.model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS, **sizes, **experts, attn_backend="flex", rope=rope
    )
    return tiny(folder, config=config)


def _llama() -> Trainer.Config:
    config, width = llama3_debugmodel(), WIDTH // HEADS
    rope = ComplexRoPE.Config(dim=width, max_seq_len=SEQUENCE, theta=5e5, scaling="llama")
    config.model_spec.model.layers = llama3._build_llama3_layers(
        n_layers=LAYERS, dim=WIDTH, n_heads=HEADS, hidden_dim=2 * WIDTH, attn_backend="flex", rope=rope
    )
    return config


def tiny(folder: str, *, steps: int = 3, config: Trainer.Config | None = None) -> Trainer.Config:
    """Return a smaller version of torchtitan's debug llama, on random tokens, with 2 micro-batches on 2 x 2 ranks.

    The original sizes (256 columns, 64 experts, 8 chunks of the loss) take minutes and test nothing more.
    """
    config = config or _llama()
    config.dump_folder = folder
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomTokens.Config()
    model = config.model_spec.model
    model.dim, model.vocab_size, model.norm.normalized_shape = WIDTH, VOCABULARY, WIDTH
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = VOCABULARY, WIDTH
    model.lm_head.in_features, model.lm_head.out_features = WIDTH, VOCABULARY
    config.loss.num_chunks, config.loss.loss_fn.global_vocab_size = 4, VOCABULARY
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are compiled
    config.training.local_batch_size, config.training.global_batch_size = 2, 16
    config.training.seq_len, config.training.steps = SEQUENCE, steps
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.lr_scheduler.warmup_steps, config.lr_scheduler.total_steps = 2, 10
    config.optimizer.implementation = "for-loop"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.data_parallel_replicate_degree = 2
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.activation_checkpoint = None
    config.debug.seed = 11
    return config


def summing(config: Trainer.Config) -> Trainer.Config:
    """Make FSDP2 reduce with plain sums: with a custom divisor it uses a premultiplied sum, which gloo lacks."""
    theirs = config.model_spec.parallelize_fn

    def parallelize(model: torch.nn.Module, **how: Any) -> torch.nn.Module:
        model = theirs(model, **how)
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = parallelize
    return config
