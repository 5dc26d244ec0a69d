"""Record a few steps of a sharded model with torch's profiler, with :func:`trace`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from layerzero.extend import get_state


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str] = "trace-rank{rank}.json") -> Iterator[profile]:
    """Record the context with torch's profiler, and write a Chrome trace when the context exits.

    Open the file in chrome://tracing or ui.perfetto.dev. layerzero's work has names such as ``layerzero.gather
    blocks.0`` (the launch of a collective), ``layerzero.wait hop1 blocks.0`` (the host waits for it), ``layerzero.add
    hop1 blocks.0`` (received gradients are added), ``layerzero.forward blocks.0``, ``layerzero.backward blocks.0`` and
    ``layerzero.update optimizer``. The ranges appear in every recording of torch's profiler. Use the profiler itself
    for its other options, such as schedules. The profiler does not see background threads, which add gradients and
    launch hop 2 on CPUs. Trace a few steps, not an entire run, because the profiler records each operator.

    Args:
        model: a sharded model.
        path: path of the file. ``{rank}`` in the path is replaced with the global rank. Not all ranks need to record a
            trace, but each rank that does needs its own file.

    Yields:
        The ``torch.profiler.profile`` that records.

    Raises:
        FileNotFoundError: the folder of `path` does not exist.

    Example::

        with layerzero.trace(model, "traces/rank{rank}.json"):
            train_step(model)
    """
    get_state(model)  # raises an error if the model is not sharded
    file = Path(str(os.fspath(path)).replace("{rank}", str(dist.get_rank())))
    if not file.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(file.parent)!r} of the trace file does not exist. Create it first")
    profiler = profile()
    try:
        with profiler:
            yield profiler
    finally:
        profiler.export_chrome_trace(str(file))
