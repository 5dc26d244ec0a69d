"""Train a small GPT, and serve it in another process that follows its weights after each step.

    torchrun --standalone --nproc-per-node 4 examples/serve_weights.py

The first rank starts the server and sends it packets over a local socket. The server has no process group and no
sharded model. After each step, the program compares the weights and the logits of both models bit by bit, and prints
how many bytes it has sent.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig, next_token_loss
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero

CONFIG = GPTConfig(layers=4, width=128, heads=2, context=64)
TEXT = torch.tensor(list(b"to be or not to be, that is the question: " * 100))
PROMPT = TEXT[None, :32]
KEY = "LAYERZERO_EXAMPLE_KEY"  # environment variable with the key of the socket


def digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Return a digest of the names and bits of some tensors, in any order."""
    each = [name.encode() + hashlib.sha256(tensor.view(torch.uint8).numpy()).digest() for name, tensor in tensors]
    return hashlib.sha256(b"".join(sorted(each))).digest()


# --- server ---


def serve(port: int) -> None:
    """Receive packets until the trainer ends. Answer each version with digests of the weights and of the logits."""
    torch.set_num_threads(1)  # as torchrun does for the trainer: other numbers may change the last bits of logits
    model = GPT(CONFIG).bfloat16()
    receiver = layerzero.WeightReceiver(model.state_dict())
    with Client(("localhost", port), authkey=bytes.fromhex(os.environ[KEY])) as connection:
        while packet := connection.recv_bytes():
            if receiver.apply(packet):
                with torch.no_grad():
                    logits = model(PROMPT)
                connection.send_bytes(digest(receiver.tensors.items()) + digest([("logits", logits)]))


# --- trainer ---


def start_server(resources: ExitStack) -> Connection:
    key = secrets.token_bytes(16)
    listener = resources.enter_context(Listener(("localhost", 0), authkey=key))
    command = [sys.executable, __file__, str(listener.address[1])]
    server = subprocess.Popen(command, env={**os.environ, KEY: key.hex()})
    resources.callback(server.wait, 60)
    connection = resources.enter_context(listener.accept())
    resources.callback(connection.send_bytes, b"")  # ends the server
    return connection


def main(steps: int = 20, lr: float = 1e-3) -> list[int]:
    """Train, and return the bytes of each version on the first rank. The first version has all values."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = GPT(CONFIG)
    whole = 2 * sum(parameter.numel() for parameter in net.parameters())  # bytes in bf16
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = layerzero.shard_model(net, zero3_size=dist.get_world_size() // 2, units={Block}, mp_policy=bf16)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=lr), model)
    sender = layerzero.WeightSender(model)
    random = torch.Generator().manual_seed(dist.get_rank())
    sent: list[int] = []
    with ExitStack() as resources:
        connection = start_server(resources) if dist.get_rank() == 0 else None
        for step in range(steps + 1):
            if step:
                batch = TEXT.unfold(0, 65, 1)[torch.randint(len(TEXT) - 64, (8,), generator=random)]
                next_token_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()
            nbytes = 0
            for packet in sender.packets():  # on all ranks; only the first one gets packets
                nbytes += len(packet)
                connection.send_bytes(packet)
            with torch.no_grad():
                logits = model(PROMPT)
            ours = digest(layerzero.stream_weights(model, rank0_only=True)) + digest([("logits", logits)])
            if connection is not None:
                if connection.recv_bytes() != ours:
                    raise RuntimeError(f"step {step}: the server's weights or logits differ from the trainer's")
                sent.append(nbytes)
                bits = 8 * nbytes / (whole / 2)
                print(f"step {step}: {whole:,} bytes of weights, {nbytes:,} sent, {bits:.2f} bits per weight; equal")
    return sent


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]))
    else:
        main()
        dist.destroy_process_group()
