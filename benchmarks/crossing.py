"""Count the bytes that collectives send between nodes, in the same way for every scheme.

[Note: Bytes between nodes]
Backends choose their own algorithms, so the bytes on a wire depend on the backend. This module counts the fewest bytes
with which any algorithm can run a collective. Let a group have n ranks on m nodes, and let B be the size of the full
tensor: the result of an all-gather, the input of a reduce-scatter, or the tensor of an all-reduce or broadcast. Every
node lacks at least the parts of the other nodes, so all nodes together send B (m - 1) bytes in an all-gather, a
reduce-scatter or a broadcast, and twice as many in an all-reduce. In an all-to-all, each rank sends the pieces of its
input that belong to ranks of other nodes. These pieces may have different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["counted_crossings"]

# By method of ProcessGroup: index of the argument with the full tensors, and number of passes over it. The names depend
# on the version of torch.
_FULL = {
    "allreduce": (0, 2),
    "allreduce_coalesced": (0, 2),
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "allgather": (0, 1),
    "allgather_coalesced": (0, 1),
    "allgather_into_tensor_coalesced": (0, 1),
    "all_gather_single": (0, 1),
    "all_gather_single_coalesced": (0, 1),
    "_allgather_base": (0, 1),
    "reduce_scatter": (1, 1),
    "reduce_scatter_single": (1, 1),
    "reduce_scatter_single_coalesced": (1, 1),
    "reduce_scatter_tensor_coalesced": (1, 1),
    "_reduce_scatter_base": (1, 1),
}
_EXCHANGED = ("alltoall", "alltoall_base", "all_to_all_single")  # the argument with index 1 is the input


@contextmanager
def counted_crossings(node_size: int) -> Iterator[list[float]]:
    """Yield a list to which every collective of this process appends its share of the bytes between nodes.

    The sum over all ranks is the number of bytes that all nodes together send; see [Note: Bytes between nodes]. Only
    collectives that Python code launches are counted. DDP launches its own in C++, unless it has a hook.

    Args:
        node_size: number of consecutive ranks on each node.
    """
    found: list[float] = []  # list.append is atomic; layerzero launches collectives on several threads
    # From the dict of the class: an attribute of a class that is defined in C++ has lost the binding to instances.
    original = {
        name: vars(dist.ProcessGroup)[name] for name in (*_FULL, *_EXCHANGED) if name in vars(dist.ProcessGroup)
    }
    calls = {name: getattr(dist.ProcessGroup, name) for name in original}

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(group: dist.ProcessGroup, *args: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            if name in _EXCHANGED:
                here = dist.get_rank() // node_size
                pieces = zip(ranks, _pieces(len(ranks), *args[1:]), strict=True)
                crossing = sum(nbytes for rank, nbytes in pieces if rank // node_size != here)
            else:
                index, passes = _FULL[name]
                nodes = len({rank // node_size for rank in ranks})
                nbytes = sum(tensor.nbytes for tensor in _tensors(args[index]))
                crossing = passes * nbytes * (nodes - 1) / len(ranks)
            if crossing:
                found.append(crossing)
            return call(group, *args)

        return counted

    for name, call in calls.items():
        setattr(dist.ProcessGroup, name, counting(name, call))
    try:
        yield found
    finally:
        for name, method in original.items():
            setattr(dist.ProcessGroup, name, method)


def _pieces(count: int, sent: Tensor | Sequence[Tensor], *args: Any) -> list[float]:
    """Return the bytes that an all-to-all sends to each rank of the group.

    Args:
        count: number of ranks in the group.
        sent: one tensor per rank, or one tensor that is split along dim 0.
        args: further arguments of the call. For one tensor, the second is the number of rows for each rank. An empty
            list stands for equal pieces.
    """
    if not isinstance(sent, Tensor):
        return [tensor.nbytes for tensor in sent]
    splits = args[1] or [len(sent) / count] * count
    row = sent.nbytes / max(1, len(sent))
    return [rows * row for rows in splits]


def _tensors(argument: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    else:
        for each in argument:
            yield from _tensors(each)
