"""Fine-tune a small GPT with LoRA adapters of PEFT; the base model is frozen, in bf16 and sharded inside a node.

torchrun --standalone --nproc-per-node 4 examples/train_lora.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig, next_token_loss
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero

CONFIG = GPTConfig(layers=2, width=64, heads=2, context=32, tied_head=False)


def main(steps: int = 40) -> tuple[list[float], dict[str, Tensor]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    base = GPT(CONFIG).bfloat16()  # untrained in this example; load your own weights
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules=["qkv", "up", "out", "head"])
    model = get_peft_model(base, adapters)  # before shard_model; adapters are in fp32

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = layerzero.shard_model(model, zero3_size=2, units={Block}, mp_policy=policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(trained, lr=1e-2), model)

    text = torch.tensor(list(b"to be or not to be, that is the question: " * 200)).unfold(0, 33, 7)
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        ids = text[torch.randint(len(text), (8,), generator=random)]
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        layerzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    # Return the tensors that PEFT saves, without a gather of the base. All ranks call this; the first gets the tensors.
    whole = layerzero.full_state_dict(model, trainable_only=True)
    saved: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        saved = get_peft_model_state_dict(model, state_dict=whole)
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {len(saved)} adapter tensors, ready for save_file")
        print(layerzero.memory(model))
    return losses, saved


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
