"""Collect the process groups of a rank: Megatron's groups, and a ZeRO-3 group within the data-parallel group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from layerzero.checkpoint import CheckpointError
from layerzero.extend import default_device_type, group_count_fields, mesh_group, require_equal
from layerzero.megatron.versions import version, version_error

NOT_FOUND = object()  # stands for a tensor that a non-strict load has not found in a Megatron checkpoint


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups to which one rank belongs, as returned by :func:`process_groups`.

    Attributes:
        zero1: all data-parallel ranks with this rank's pipeline stage and tensor-parallel rank, including
            context-parallel ranks.
        zero3: ZeRO-3 group of this rank. It consists of consecutive ranks in `zero1`.
        tensor, pipeline: Megatron's tensor-parallel and pipeline-parallel groups.
        model: tensor-parallel and pipeline-parallel ranks that together hold one copy of the model.
        embedding: pipeline stages that hold the word embeddings. None if this rank's stage does not hold them.
        expert_zero1: ranks in `zero1` that hold the same experts as this rank. None if all ranks in `zero1` hold the
            same experts.
        expert_zero3: ranks over which the experts' compute weights are sharded. They all hold the same experts. None if
            experts are sharded in the same way as other parameters.
    """

    zero1: dist.ProcessGroup
    zero3: dist.ProcessGroup
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    model: dist.ProcessGroup
    embedding: dist.ProcessGroup | None
    expert_zero1: dist.ProcessGroup | None = None
    expert_zero3: dist.ProcessGroup | None = None

    @property
    def is_first_stage(self) -> bool:
        return dist.get_rank(self.pipeline) == 0


def process_groups(zero3_size: int, expert_zero3_size: int | None = None) -> ProcessGroups:
    """Return the process groups of this rank.

    All ranks must call this function, after Megatron has created its own groups.

    Args:
        zero3_size: S, the number of consecutive data-parallel ranks over which the compute weights are sharded.
            Context-parallel ranks are included, but tensor-parallel and pipeline-parallel ranks are not. The value 1
            means ZeRO-1. To keep the ZeRO-3 group inside a node, use at most the number of ranks per node divided by
            the tensor-parallel size.
        expert_zero3_size: number of ranks over which the compute weights of experts are sharded. Only ranks that hold
            the same experts count: the ZeRO-3 group of the experts consists of consecutive ranks of Megatron's
            expert-data-parallel group. The value 1 means ZeRO-1. If None, it consists of those ranks of the other
            parameters' ZeRO-3 group that hold the same experts.

    Raises:
        TypeError: a size is not an int.
        ValueError: `zero3_size` does not divide the data-parallel size; `expert_zero3_size` does not divide the
            expert-data-parallel size; `expert_zero3_size` is None, and `zero3_size` is neither a multiple nor a divisor
            of the expert-parallel size; some ranks that hold the same experts as this rank are not among its
            data-parallel ranks; or the arguments differ between ranks.
        RuntimeError: the version of Megatron-Core is not supported; the message names the supported versions.
    """
    from megatron.core import parallel_state  # noqa: PLC0415

    zero1 = parallel_state.get_data_parallel_group(with_context_parallel=True)
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    experts = parallel_state.get_expert_data_parallel_group()
    ranks = sorted(dist.get_process_group_ranks(zero1))
    expert_ranks = sorted(dist.get_process_group_ranks(experts))
    failure = version_error() or _layout_error(zero3_size, ranks, expert_ranks, expert_zero3_size)
    fields = {
        "zero3_size": repr(zero3_size),
        "expert_zero3_size": repr(expert_zero3_size),
        "experts": f"on {len(expert_ranks)} ranks",
        "megatron-core": version(),
    }
    zero3_ranks = _own_block(ranks, zero3_size if failure is None else 1)
    if expert_zero3_size is None or failure is not None:
        expert_zero3_ranks = [rank for rank in zero3_ranks if rank in expert_ranks]
    else:
        expert_zero3_ranks = _own_block(expert_ranks, expert_zero3_size)
    group_counts = group_count_fields(zero3_ranks, expert_zero3_ranks)
    require_equal("layerzero.megatron.process_groups", fields, ranks=ranks, groups=group_counts, failure=failure)
    device_type = default_device_type()
    if f"{device_type}:" not in dist.get_backend_config(zero1):
        device_type = "cpu"
    zero3 = mesh_group(zero3_ranks, like=zero1, device_type=device_type)
    expert_zero3 = None
    if len(expert_ranks) < len(ranks) or expert_zero3_ranks != zero3_ranks:
        expert_zero3 = mesh_group(expert_zero3_ranks, like=experts, device_type=device_type)
    if embedding is not None and dist.get_rank() not in dist.get_process_group_ranks(embedding):
        embedding = None
    return ProcessGroups(
        zero1=zero1,
        zero3=zero3,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
        embedding=embedding,
        expert_zero1=experts if len(expert_ranks) < len(ranks) else None,
        expert_zero3=expert_zero3,
    )


@contextmanager
def raising_on_all_ranks(what: str, groups: ProcessGroups) -> Iterator[None]:
    """Context manager. If the body raises an error on any rank, every rank raises an error at the end.

    All ranks of all copies of the model must enter the context together. A rank whose body fails raises its own error.
    The other ranks raise an error of the same type, if it is about files, or a RuntimeError.

    Args:
        what: name of the operation in the error message.
        groups: process groups of this rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # the error is sent to the other ranks, and then raised here
        failure = error
    kind = type(failure).__name__
    text = failure and f"{what} failed on rank {dist.get_rank()}: {kind}: {failure}"
    reports = all_gather_object(groups, (kind, text))
    if failure is not None:
        raise failure
    for kind, text in reports:
        if text:
            raise _FILE_ERRORS.get(kind, RuntimeError)(text)


_FILE_ERRORS: dict[str, type[Exception]] = {
    "CheckpointError": CheckpointError,
    "FileExistsError": FileExistsError,
    "FileNotFoundError": FileNotFoundError,
    "PathTakenError": FileExistsError,
}


def all_gather_object(groups: ProcessGroups, fact: Any) -> list[Any]:
    """Gather the object `fact` from every rank, and return the objects ordered by global rank.

    All ranks of all copies of the model must call this function.
    """
    gathered: list[tuple[int, Any]] = [(dist.get_rank(), fact)]
    for group in (groups.zero1, groups.model):  # together these groups reach all ranks
        received: list[Any] = [None] * group.size()
        dist.all_gather_object(received, gathered, group=group)
        gathered = [entry for entries in received for entry in entries]
    return [fact for _, fact in sorted(gathered, key=lambda entry: entry[0])]


def _own_block(ranks: list[int], size: int) -> list[int]:
    """Return the block of `size` consecutive elements of `ranks` that contains this rank."""
    start = ranks.index(dist.get_rank()) // size * size
    return ranks[start : start + size]


def _layout_error(
    zero3_size: int, ranks: Sequence[int], expert_ranks: Sequence[int], expert_zero3_size: int | None = None
) -> Exception | None:
    """Return the error for an invalid ZeRO-3 size or expert layout; None if all are valid.

    Args:
        zero3_size, expert_zero3_size: values to check.
        ranks: data-parallel ranks.
        expert_ranks: ranks that hold the same experts as this rank.
    """
    sizes: dict[str, object] = {"zero3_size": zero3_size}
    if expert_zero3_size is not None:
        sizes["expert_zero3_size"] = expert_zero3_size
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            return TypeError(f"{name} must be an int, got {size!r}")
    if not {*expert_ranks} <= {*ranks}:
        return ValueError(
            f"the ranks {list(expert_ranks)} hold the same experts, but are not all among the data-parallel ranks "
            f"{list(ranks)} of this pipeline stage and tensor rank. Set expert_tensor_parallel_size to "
            "tensor_model_parallel_size"
        )
    world, expert_world = len(ranks), len(expert_ranks)
    ep_size = world // expert_world
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    if zero3_size < 1 or world % zero3_size:
        return ValueError(
            f"zero3_size={zero3_size} does not divide the {world} data-parallel ranks (including context-parallel "
            f"ranks) of this pipeline stage and tensor rank. Use one of {divisors}"
        )
    if expert_zero3_size is not None:
        return _expert_size_error(expert_zero3_size, expert_world, ep_size)
    if zero3_size % ep_size and ep_size % zero3_size:
        fitting = [d for d in divisors if d % ep_size == 0 or ep_size % d == 0]
        return ValueError(
            f"zero3_size={zero3_size} is neither a multiple nor a divisor of expert_model_parallel_size={ep_size}, so "
            f"more ranks of a ZeRO-3 group would share some experts than others. Use one of {fitting}, or set "
            "expert_zero3_size"
        )
    return None


def _expert_size_error(size: int, world: int, ep_size: int) -> Exception | None:
    if size >= 1 and world % size == 0:
        return None
    fitting = [divisor for divisor in range(1, world + 1) if world % divisor == 0]
    return ValueError(
        f"expert_zero3_size={size} does not divide the {world} data-parallel ranks that hold the same experts "
        f"({world * ep_size} ranks / expert_model_parallel_size={ep_size}). Use one of {fitting}"
    )
