"""Warnings about launcher settings that make a run fail or slow down."""

from __future__ import annotations

import os
from collections.abc import Mapping


def restart_warning(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if torchrun cannot restart this run, else None.

    Since torch 2.13, the rendezvous store belongs to the launcher and outlives the ranks. After a restart, process
    groups (at least gloo's) read the addresses of dead processes from the store. torch's `init_process_group` then
    fails before any code in this package runs.
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not restarts.isdigit() or int(restarts) == 0 or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        f"--max-restarts {restarts} will not work: torch's process groups fail after a restart, because torchrun's "
        "rendezvous store still has the addresses of the dead ranks. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and "
        "start with --standalone or --rdzv-backend c10d"
    )


def connections_warning(device_type: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if CUDA_DEVICE_MAX_CONNECTIONS makes the GPU serialize its streams, else None."""
    if device_type != "cuda" or environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return None
    return (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the kernels of all streams into one hardware queue. Gathers and reductions "
        "then wait for computation instead of overlapping it. Set CUDA_DEVICE_MAX_CONNECTIONS=32, or unset it "
        "(default 8). Megatron-LM requires the value 1 for tensor or context parallelism on GPUs older than Blackwell. "
        "On these GPUs, measure the speed with both values"
    )
