"""Third-party backend that counts the messages of its collectives and their bytes, as ring algorithms send them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.support import wrapped_gloo

NAME = "counting"

# Sent by this rank since it was last cleared: numbers of messages and of bytes, by the rank that receives them.
messages, nbytes = Counter[int](), Counter[int]()


class _Group(wrapped_gloo.WrappedGloo):
    NAME = NAME

    def launch(self, run: Callable[[], dist.Work], output: Tensor, given: Tensor) -> dist.Work:
        ranks = dist.get_process_group_ranks(self)
        rounds = 2 if output is given else 1  # an all-reduce scatters sums and gathers them
        piece = min(output.nbytes, given.nbytes) // (len(ranks) if output is given else 1)
        following = ranks[(ranks.index(dist.get_rank()) + 1) % len(ranks)]
        messages[following] += rounds * (len(ranks) - 1)
        nbytes[following] += rounds * (len(ranks) - 1) * piece
        return run()


def meshes(node_size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return meshes of all ranks on this backend: nodes of `node_size` ranks (replica, zero3), and one axis."""
    wrapped_gloo.register(_Group)
    world = dist.new_group(backend=NAME)
    return wrapped_gloo.mesh_on(NAME, node_size), DeviceMesh.from_group(world, "cpu")
