"""Environment and data for the training loops of other packages, on ranks of :func:`tests.support.ranks.run_ranks`."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from tests.support.ranks import on_ranks


def forget_accelerators() -> None:
    """Reset Accelerate's process-wide state, because one rank process runs many tests."""
    if "accelerate" in sys.modules:
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


@contextmanager
def launched(**variables: str) -> Iterator[None]:
    """Set torchrun's environment variables, with all ranks on one node, and ignore warnings of other packages."""
    forget_accelerators()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    torchruns = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    torchruns |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, torchruns | variables), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module=r"(accelerate|transformers|lightning|peft|torch|trl|datasets|torchtitan|torchdata)\b"
        )
        yield


def on_launched_ranks(run_id: str = "", **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a test as :func:`tests.support.ranks.on_ranks` does; its body runs inside :func:`launched`.

    Args:
        run_id: torchrun's identifier of the run, without which Lightning starts the ranks itself.
    """
    variables = {"TORCHELASTIC_RUN_ID": run_id} if run_id else {}

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def in_environment(*args: Any) -> None:
            with launched(**variables):
                body(*args)

        return on_ranks(**settings)(in_environment)

    return decorate


@contextmanager
def launched_program(**variables: str) -> Iterator[None]:
    """:func:`launched` for a program that creates the process group, which the ranks of the tests have already."""
    with launched(**variables), patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        yield


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs [5] and targets [3] in {-1, 0, 1}, like those of :func:`tests.support.models.integer_batch`."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.nn.functional.one_hot(torch.randint(0, 5, (size,), generator=generator), 5).float()
        self.targets = torch.randint(-1, 2, (size, 3), generator=generator).float()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def assert_like(ours: list[float], theirs: list[float], *, rtol: float = 1e-5, atol: float | None = None) -> None:
    """Assert that two non-empty lists are equal except for rounding."""
    assert len(ours) == len(theirs) > 0
    atol = (1e-6 if rtol else 0) if atol is None else atol
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=rtol, atol=atol)
