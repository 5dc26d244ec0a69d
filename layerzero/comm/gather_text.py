"""Gather strings from all ranks."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from layerzero.comm.collectives import Collective, Communicator, all_gather


def all_gather_text(comm: Communicator, text: str) -> list[str]:
    """Return the texts of all ranks, in rank order. All ranks of the communicator must call this function.

    Args:
        text: text of this rank.
        comm: communicator for CPU tensors.
    """
    if comm.size == 1:
        return [text]
    data = bytearray(text.encode())
    own_bytes = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    sizes = torch.zeros(comm.size, dtype=torch.int64)
    all_gather(comm, Collective.METADATA, sizes, torch.tensor([len(own_bytes)])).wait()
    longest = int(sizes.max())
    if not longest:
        return [""] * comm.size
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own_bytes)] = own_bytes
    gathered = torch.zeros(comm.size * longest, dtype=torch.uint8)
    all_gather(comm, Collective.METADATA, gathered, padded).wait()
    pieces = zip(gathered.view(comm.size, longest), sizes.tolist(), strict=True)
    return [bytes(piece[:size].tolist()).decode() for piece, size in pieces]


def require_numpy(what: str) -> None:
    """Raise ModuleNotFoundError if numpy is missing, with a clearer message than that of torch.distributed.

    torch.distributed sends objects between ranks as numpy arrays.

    Args:
        what: description of the feature that needs numpy, for the message.
    """
    if find_spec("numpy") is None:
        raise ModuleNotFoundError(
            f"{what} needs numpy, because torch sends objects between ranks as numpy arrays. Run pip install numpy"
        )
