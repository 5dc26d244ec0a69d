"""Train two sharded pipeline stages of two ranks each with the 1F1B schedule of torch.distributed.pipelining.

torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import Block, GPTConfig, next_token_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import layerzero

STAGES, MICRO_BATCHES, SAMPLES, LENGTH = 2, 4, 4, 32
CONFIG = GPTConfig(layers=4, width=64, heads=2, context=LENGTH)


class FirstStage(nn.Module):
    """Embeddings and the first half of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CONFIG.vocab_size, CONFIG.width)
        self.position = nn.Parameter(0.02 * torch.randn(CONFIG.context, CONFIG.width))
        self.blocks = nn.Sequential(*(Block(CONFIG) for _ in range(CONFIG.layers // 2)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.embed(ids) + self.position[: ids.shape[1]])


class LastStage(nn.Module):
    """Second half of the layers, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(CONFIG) for _ in range(CONFIG.layers // 2)))
        self.norm = nn.LayerNorm(CONFIG.width)
        self.head = nn.Linear(CONFIG.width, CONFIG.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def loss_of_micro_batch(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss divided by the micro-batches; `scale_grads` of the schedule would run before the reduction."""
    return next_token_loss(logits, targets) / MICRO_BATCHES


def main(steps: int = 20) -> list[float]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // STAGES, STAGES), mesh_dim_names=("dp", "pp"))
    index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

    torch.manual_seed(index)
    model = LastStage() if index else FirstStage()
    model = layerzero.shard_model(model, mesh=mesh["dp"], units={Block})  # over the ranks of this stage
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model)

    sent = torch.zeros(
        SAMPLES, LENGTH, CONFIG.width, requires_grad=True
    )  # shape and dtype of the tensors that stages send to each other
    out = torch.zeros(SAMPLES, LENGTH, CONFIG.vocab_size, requires_grad=True) if index else sent
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    stage = PipelineStage(
        model,
        index,
        STAGES,
        torch.device("cpu"),
        group=mesh["pp"].get_group(),
        input_args=sent if index else ids,
        output_args=out,
    )
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of_micro_batch, scale_grads=False)

    text = torch.tensor(list(b"to be or not to be, that is the question: " * 200)).unfold(0, LENGTH + 1, 7)
    losses: list[float] = []
    for step in range(steps):
        random = torch.Generator().manual_seed(1000 * step + replica)
        batch = text[torch.randint(len(text), (MICRO_BATCHES * SAMPLES,), generator=random)]
        parts: list[Tensor] = []  # losses of micro-batches, on the last stage
        with layerzero.no_sync(model):  # optimizer.step() reduces once, after all micro-batches
            if index:
                schedule.step(target=batch[:, 1:], losses=parts)
            else:
                schedule.step(batch[:, :-1])
        # The norm is over all stages.
        layerzero.clip_grad_norm_(model, 1.0, extra_groups=(mesh["pp"].get_group(),))
        optimizer.step()
        optimizer.zero_grad()
        losses += [sum(part.item() for part in parts)] if index else []
        if index and not replica and step % 5 == 4:
            print(f"step {step + 1}: loss {losses[-1]:.2f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
