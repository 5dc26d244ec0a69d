"""Models, schemes and steps of the parts of ``python -m benchmarks.gpu``."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import layerzero
from benchmarks.gpu.loopback import Loopback
from examples.gpt import GPT, Block, GPTConfig, next_token_loss

WORLD, NODE = 64, 8  # ranks and ranks per node of the process groups in one process
# Layers, width and vocabulary. "llama" has four layers of the width of Llama-3 8B, with its vocabulary.
# "llama/64" has an eighth of the width, the vocabulary and the tokens.
SHAPES = {
    "small": (4, 1024, 256),
    "llama/64": (4, 512, 16_032),
    "1.3b": (24, 2048, 256),
    "7b": (32, 4096, 256),
    "llama": (4, 4096, 128_256),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_SETTINGS: dict[str, dict[str, Any]] = {
    "layerzero": {},
    "layerzero-full": {"accumulation": "full"},
    "layerzero-local": {"accumulation": "local"},
    "layerzero-apart": {},  # the embedding and the head are units of their own, unless they are tied
    "layerzero-offload-grads": {"offload": layerzero.Offload(grads=True)},
    "layerzero-offload-optimizer": {"offload": layerzero.Offload(optimizer=True)},
}
SCHEMES = ("plain", *_SETTINGS, "fsdp2-full", "fsdp2-hsdp")

Step = Callable[[list[Tensor]], Tensor]  # trains with one batch per micro-batch and returns the last loss


@contextlib.contextmanager
def one_rank(args: argparse.Namespace) -> Iterator[None]:
    """Initialize a process group of one rank, with NCCL on CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def one_of_64(groups: type[Loopback]) -> Iterator[None]:
    """Use process groups of a class, with this process as rank 0 of 64."""
    groups.start(rank=0, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def side_stream(args: argparse.Namespace) -> Iterator[None]:
    if args.device != "cuda" or not args.side_stream:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def build(args: argparse.Namespace) -> GPT:
    layers, width, vocabulary = SHAPES[args.model]
    if args.tiny:
        layers, width, vocabulary = 2, 64, 256
    torch.manual_seed(0)
    with torch.device(args.device):
        return GPT(
            GPTConfig(
                layers=layers,
                width=width,
                heads=width // 64,
                context=tokens(args),
                vocab_size=vocabulary,
                tied_head=vocabulary == 256,
            )
        )


def tokens(args: argparse.Namespace) -> int:
    return 32 if args.tiny else 128 if args.model == "llama/64" else 1024


def batches(args: argparse.Namespace, count: int) -> list[Tensor]:
    size = 1 if args.tiny else 4
    return [torch.randint(256, (size, tokens(args)), device=args.device) for _ in range(count)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def contestant(args: argparse.Namespace, scheme: str, world: int, node: int) -> tuple[nn.Module, Step]:
    """Return a model that is sharded with a scheme, and its step."""
    model: Any = build(args)
    if scheme in _SETTINGS:
        units = [name for name, module in model.named_modules() if isinstance(module, Block)]
        units += ["embed", "head"] * (scheme == "layerzero-apart" and not model.config.tied_head)
        model = layerzero.shard_model(model, zero3_size=node, units=units, mp_policy=BF16, **_SETTINGS[scheme])
        return model, stepper(model, layerzero.shard_optimizer(adamw(model), model), lambda: layerzero.no_sync(model))
    if scheme == "plain":
        model = model.to(torch.bfloat16)
        return model, stepper(model, adamw(model), contextlib.nullcontext)
    hsdp = scheme == "fsdp2-hsdp"
    shape = (world // node, node) if hsdp else (world,)
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("replicate", "shard") if hsdp else ("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)

    @contextlib.contextmanager
    def accumulate() -> Iterator[None]:
        if hsdp:
            model.set_requires_all_reduce(False)
        model.set_is_last_backward(False)
        yield
        if hsdp:
            model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)

    return model, stepper(model, adamw(model), accumulate)


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Step:
    def step(data: list[Tensor]) -> Tensor:
        for index, ids in enumerate(data):
            with contextlib.nullcontext() if index + 1 == len(data) else accumulate():
                value = next_token_loss(model(ids), ids.roll(-1, 1)) / len(data)
                value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step
