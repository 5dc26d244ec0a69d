"""Describe the gathers of parameters whose class has an all-gather extension; see ``layerzero/extensions.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.autograd.graph import Node

from layerzero.device.buffer_pools import FullBufferPool
from layerzero.device.streams import Waitable


def has_extension(tensor: Tensor) -> bool:
    """Return whether the tensor's class has an all-gather extension as defined by FSDP2."""
    return hasattr(tensor, "fsdp_pre_all_gather") or hasattr(tensor, "fsdp_post_all_gather")


class GatheredBytes(NamedTuple):
    """Memory, in bytes, that one gathered parameter uses if its class has an all-gather extension."""

    received: tuple[int, ...]  # for each input of the gather: number of bytes received from all ranks
    made: tuple[int, ...]  # for each storage that the class has allocated: size in bytes


class ExtendedGather(Protocol):
    """Gathers of one parameter through the extension of its class.

    The other methods are those of :class:`~layerzero.engine.gathered_params.GatheredParams`.

    Attributes:
        parameter: gathered parameter, an autograd leaf.
    """

    parameter: nn.Parameter

    @property
    def extension_memory(self) -> GatheredBytes: ...

    @property
    def accumulate_grad_node(self) -> Node:
        """AccumulateGrad node of the gathered parameter."""

    def gather(self, *, name: str) -> Waitable:
        """Launch the gather of the tensors that the class sends."""

    def fill(self, storages: FullBufferPool) -> None: ...

    def free(self, storages: FullBufferPool) -> None: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def version(self) -> int: ...

    def bump_version(self) -> None: ...


# Constructor of the gathers of one parameter, which gathers it for the first time. All ranks of the ZeRO-3 group must
# call it, with the arguments of `layerzero.extensions._ExtendedGather` after its first one.
GatherExtension = Callable[..., ExtendedGather]
