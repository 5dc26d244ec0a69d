"""Save and restore the states of random number generators, even if the number of ranks changes."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from typing import Any

import torch
import torch.distributed as dist

from layerzero.checkpoint.json_codec import PerRank
from layerzero.extend import default_device_type

_LOG = logging.getLogger("layerzero")


def seed_random_states(seed: int) -> None:
    """Seed this rank's torch, Python and NumPy generators at the start of a run.

    Each rank derives its own seed from `seed`, the number of ranks and its rank.

    Example::

        layerzero.checkpoint.seed_random_states(seed)
        if found := layerzero.checkpoint.load_latest("runs/1", model, optimizer):
            layerzero.checkpoint.set_random_states(found.extra["random"])
    """
    _seed_rank(seed, 0, dist.get_world_size(), dist.get_rank())


def random_states(seed: int, step: int) -> dict[str, Any]:
    """Return this rank's random number generator states, to be saved in ``extra``.

    The result contains the states of torch, the device, Python and, if it has been imported, NumPy.

    Args:
        seed: seed of the run, the same on all ranks.
        step: index of the current step, the same on all ranks. If a different number of ranks resumes the run, new
            states are derived from `seed` and `step`.

    Example::

        extra = {"step": step, "random": layerzero.checkpoint.random_states(seed, step)}
    """
    version, numbers, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.tensor(numbers), "following": gauss_next},
    }
    kind = default_device_type()
    if kind != "cpu":
        states[kind] = torch.get_device_module(kind).get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    return {"seed": seed, "step": step, "ranks": dist.get_world_size(), "states": PerRank(states)}


def set_random_states(saved: dict[str, Any]) -> bool:
    """Restore the generator states that :func:`random_states` returned.

    Returns:
        True if this rank's own states were restored. False if a different number of ranks saved the states. In this
        case, the function logs a warning and seeds each rank's generators reproducibly from the seed of the run, the
        step, the number of ranks and the rank.
    """
    rank, ranks, states = dist.get_rank(), dist.get_world_size(), saved["states"]
    if states is None:
        _seed_rank(saved["seed"], saved["step"], ranks, rank)
        if rank == 0:
            _LOG.warning(
                "random states of %d ranks cannot be restored on %d ranks. Each rank derives new states from seed %d, "
                "step %d, the number of ranks and its rank",
                *(saved["ranks"], ranks, saved["seed"], saved["step"]),
            )
        return False
    torch.set_rng_state(states["torch"])
    python = states["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["following"]))
    kind = default_device_type()
    if kind in states:
        torch.get_device_module(kind).set_rng_state(states[kind])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    return True


def _seed_rank(seed: int, step: int, ranks: int, rank: int) -> None:
    digest = hashlib.sha256(f"{seed}/{step}/{ranks}/{rank}".encode()).digest()
    rank_seed = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(rank_seed)
    random.seed(rank_seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(rank_seed % 2**32)
