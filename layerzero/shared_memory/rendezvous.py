"""Set up shared memory between the ranks on one machine, and check on each rank that it works."""

from __future__ import annotations

import logging
import socket

import torch
import torch.distributed as dist

from layerzero.extend import Collective, Communicator, boot_id, broadcast, has_peers, require_equal, timeout_of
from layerzero.shared_memory.counters import unsupported_platform_reason
from layerzero.shared_memory.segment import SegmentDescriptor, SegmentSizes, SharedSegment

_LOG = logging.getLogger("layerzero")
_SUBJECT = "shared memory of the ZeRO-3 group"


def map_shared_segment(comm: Communicator, region: SegmentSizes) -> SharedSegment | None:
    """Map one shared memory segment on all ranks of a communicator, and test that the ranks share it.

    All ranks must call this function. It returns None on all ranks if any rank fails or there is only one rank.

    Args:
        comm: communicator that supports CPU tensors.
        region: sizes of the parts of the segment.
    """
    ranks = dist.get_process_group_ranks(comm.group)
    if not has_peers(ranks):
        return None
    file, call, problem = -1, SegmentDescriptor(0, -1, 0), unsupported_platform_reason()
    if comm.rank == 0 and problem is None:
        try:
            file, call = SharedSegment.create(region, comm.size)
        except OSError as error:
            problem = str(error)
    descriptor = torch.tensor([call.process, call.file, call.token])
    broadcast(comm, Collective.METADATA, descriptor)
    call = SegmentDescriptor(*descriptor.tolist())
    memory = None
    if problem is None and call.file >= 0:
        try:
            file = file if comm.rank == 0 else SharedSegment.open(call)
            memory = SharedSegment(file, region, ranks=ranks, rank=comm.rank, timeout=timeout_of(comm.group))
            memory.reserve()
        except (OSError, ValueError) as error:
            problem = str(error)
    machine = {"host": socket.gethostname(), "boot": boot_id()}
    reason = _reason_not_to_share({**machine, "problem": problem}, ranks, problem)
    if reason is None:
        assert memory is not None
        problem = memory.visibility_error()
        reason = _reason_not_to_share({"problem": problem}, ranks, problem)
    if reason is None:
        return memory
    if comm.rank == 0:
        _LOG.warning("layerzero: ranks %s use collectives instead of shared memory: %s", ranks, reason)
    return None


def _reason_not_to_share(fields: dict[str, object], ranks: list[int], problem: str | None) -> str | None:
    """Return the reason why the ranks cannot share memory, or None if they can.

    The result is the same on all ranks.
    """
    try:
        require_equal(_SUBJECT, fields, ranks=ranks)
    except ValueError as error:
        return str(error)
    return problem
