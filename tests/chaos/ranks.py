"""One rank of a run with an injected fault."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import checkpoint
from layerzero.dtensor.local_shard import plain
from layerzero.engine.hooks import get_state
from layerzero.layout.shard_grid import Extent
from tests.support.bits import flip
from tests.support.checkpointing import backward, sharded_net, state_digest
from tests.support.models import IntegerNet, exact_sgd, integer_net

STEPS, EVERY, LIMIT = 16, 4, 2.0


def rank_main(rank: int, world: int, folder: str, attempt: int, plan: dict[str, Any]) -> None:
    """Train from the start or from a checkpoint. The first attempt injects the fault of `plan`."""
    place, flips = Path(folder), plan.get("flip")
    _join(rank, world, place, attempt, plan)
    model, optimizer = _models(plan)
    keeper, first = _gone_on(place, attempt, plan, model, optimizer)
    logging.getLogger("layerzero").addHandler(logging.FileHandler(place / f"log.{rank}"))
    if plan.get("watch"):
        layerzero.watchdog(model, LIMIT)
    request = checkpoint.on_signal(signal.SIGTERM, model, deadline=20) if plan.get("what") == "term" else None
    if flips:
        layerzero.guard_corruption(model, optimizer, every=1)
    for step in range(first, STEPS):
        (place / f"step.{rank}").write_text(str(step))
        meets = attempt == 0 and step == plan.get("step")
        if meets:
            _meet(plan, rank, model)
        backward(model, step)
        if meets and flips and rank == plan["rank"]:
            _flip(plan, model, optimizer)
        try:
            optimizer.step()
        except layerzero.SilentDataCorruption as error:
            said = [[each.kind, list(each.ranks)] for each in error.corruptions]
            (place / f"corruption.{rank}").write_text(json.dumps(said))
            os._exit(5)
        optimizer.zero_grad()
        if attempt and step == first:
            (place / f"stepped.{rank}").write_text(str(time.time()))
        if (step + 1) % EVERY == 0 and keeper is not None:
            keeper.snapshot(_extra(model, optimizer, step + 1))
        elif (step + 1) % EVERY == 0:
            _save(place, rank, model, optimizer, step + 1, plan if attempt == 0 else {})
        if plan.get("what") in ("kill", "term"):
            time.sleep(0.02)  # so that the delay of the fault falls into one of these steps
        if request is not None and request.asked():
            if (step + 1) % EVERY:
                _save(place, rank, model, optimizer, step + 1, {})
            request.leave()
    if keeper is not None:
        keeper.wait()
    (place / f"end.{rank}").write_text(state_digest(model, optimizer))
    dist.barrier()
    if keeper is not None:
        keeper.close()
    os._exit(0)


def _join(rank: int, world: int, place: Path, attempt: int, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    timeout, net = timedelta(seconds=plan.get("timeout", 40)), plan.get("network")
    store: dist.Store
    if net is None:
        store = dist.FileStore(str(place / f"store.{attempt}"), world)
    else:  # on the machine of the first rank, as launchers do
        _enter(net["namespaces"][rank])
        os.environ["GLOO_SOCKET_IFNAME"] = net["interfaces"][rank]
        store = dist.TCPStore(net["address"], 29500 + attempt, world, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _enter(namespace: str) -> None:
    """Move this process into the network namespace of an emulated node."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)


def _gone_on(place: Path, attempt: int, plan: dict[str, Any], model: Any, optimizer: Any) -> tuple[Any, int]:
    """Resume the run; return the snapshot keeper, or None with checkpoints on disk, and the first step."""
    rank, keeper = dist.get_rank(), None
    if nodes := plan.get("nodes"):
        memory = place / f"node{nodes[attempt][rank]}"
        memory.mkdir(exist_ok=True)
        keeper = checkpoint.Buddies(model, optimizer, name="chaos", memory=memory)
        found = keeper.load()
    else:
        found = checkpoint.load_latest(place / "saved", model, optimizer)
    first = 0
    if found is not None:
        first = int(found.extra["step"])
        checkpoint.set_random_states(found.extra["random"])
        assert state_digest(model, optimizer) == found.extra["digest"], "the loaded state differs from the saved state"
    (place / f"first.{attempt}.{rank}").write_text(str(first))
    return keeper, first


def _models(plan: dict[str, Any]) -> tuple[Any, Any]:
    """Return model and optimizer. Bit flips need bf16, so that masters and compute weights have separate memory.

    With a network the model is wide, so that the links carry enough bytes.
    """
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if "flip" in plan else {}
    if "network" not in plan:
        return sharded_net(2, shared_memory="off", **settings)
    model = layerzero.shard_model(wide_net(), zero3_size=2, units=IntegerNet.UNITS, shared_memory="off")
    return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)


def wide_net() -> IntegerNet:
    net, width = integer_net(), 20_000
    net.shift = nn.Parameter(torch.zeros(width))
    net.first, net.second, net.head = nn.Linear(5, width), nn.Linear(5, width), nn.Linear(width, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return net


def _extra(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    digest = state_digest(model, optimizer)
    return {"step": step, "digest": digest, "random": checkpoint.random_states(0, step)}


def _save(place: Path, rank: int, model: Any, optimizer: Any, step: int, plan: dict[str, Any]) -> None:
    real, left = os.write, [plan.get("writes", 0)]

    def full(descriptor: int, data: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    is_full = plan.get("what") == "full" and step == plan["step"] and rank == plan["rank"]
    if is_full:
        os.write = full
    try:
        checkpoint.save(place / "saved" / f"{step:06d}", model, optimizer, _extra(model, optimizer, step), keep_last=3)
    except checkpoint.CheckpointError as error:
        (place / f"failed.{rank}").write_text(str(error))
    finally:
        os.write = real


def _meet(plan: dict[str, Any], rank: int, model: Any) -> None:
    what, is_mine = plan.get("what"), rank == plan["rank"]
    if what in ("kill", "term") and rank in plan["ranks"]:
        number = signal.SIGKILL if what == "kill" else signal.SIGTERM
        threading.Timer(plan["delay"], os.kill, (os.getpid(), number)).start()
    elif what == "stop" and is_mine:
        subprocess.Popen(["sh", "-c", f"sleep {LIMIT + 6}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "late" and is_mine:
        time.sleep(LIMIT + 6)
    elif what == "skip" and not is_mine:
        get_state(model).ranks.all_gather_text("all but one say this")


def _flip(plan: dict[str, Any], model: Any, optimizer: Any) -> None:
    """Flip one bit of this rank, chosen by the seed, in the kind of memory that the plan names."""
    draw = random.Random(plan["draw"])
    lz_state = get_state(model)
    member = draw.choice([each for each in lz_state.members.values() if each.master.numel()])
    if plan["flip"] == "compute weights":
        handle = next(each for each in lz_state.handles if member in each.members)
        own = handle.weights.zero3_shard[handle.mesh_info.grid.slice_within(handle.layout, Extent.ZERO1, Extent.ZERO3)]
        start = (member.master.data_ptr() - handle.weights.master.data_ptr()) // member.master.element_size()
        flip(own, start + draw.randrange(member.master.numel()), draw.randrange(16))
        return
    tensor = {
        "masters": lambda: member.master,
        "moments": lambda: optimizer.state_by_name()[member.name]["momentum_buffer"],
        "gradients": lambda: plain(member.sharded.grad),
    }[plan["flip"]]()
    flip(tensor, draw.randrange(tensor.numel()), draw.randrange(32))
