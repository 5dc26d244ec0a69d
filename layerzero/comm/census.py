"""What all ranks of a model tell each other of its parameters, a number for each.

[Note: One order for all]
A further axis may cut a dim into parts of different sizes. Then the ranks along it lay out their parts in different
orders, and in different numbers of handles. So what they compare is listed by parameter, in the order of the names, and
each rank reads it in its own order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from layerzero.comm.collectives import Exchange, Heard, broadcast, tell_all
from layerzero.comm.everyone import Everyone

__all__ = ["Census"]


class Census:
    """Asks all ranks of a model about its parameters; see [Note: One order for all].

    Args:
        sharers: by name of a parameter: the ranks that have the same one, or a part of it.
    """

    def __init__(self, everyone: Everyone, sharers: Mapping[str, tuple[int, ...]]) -> None:
        self._everyone = everyone
        self._sharers = sharers
        self._own: Sequence[str] = ()
        self._names: list[str] = []  # sorted, the same on all ranks
        self._places = torch.empty(0, dtype=torch.int64, device="cpu")  # in `names`, of this rank's own order
        self._columns: list[tuple[list[int] | slice, Tensor]] = []  # by who counts: ranks, and places in `names`

    def include(self, names: Iterable[str]) -> None:
        """Ask about these from here on, too; the same ones on all ranks."""
        self._names = sorted({*self._names, *names})
        by_sharers: dict[tuple[int, ...], list[int]] = {}
        for place, name in enumerate(self._names):
            by_sharers.setdefault(self._sharers[name], []).append(place)
        places_of = self._everyone.places_of
        self._columns = [(places_of(ranks), torch.tensor(places, device="cpu")) for ranks, places in by_sharers.items()]
        self.follow(self._own)

    def follow(self, own: Sequence[str]) -> None:
        """Take and give numbers in this order, which may be another one on another rank."""
        self._own = own
        places = {name: place for place, name in enumerate(self._names)}
        nowhere = len(places)
        self._places = torch.tensor([places.get(name, nowhere) for name in own], dtype=torch.int64, device="cpu")

    def tell(self, own: bytearray, further: bytes) -> Heard:
        """Start to send all ranks a byte for each parameter, in this rank's order, and then the bytes `further`."""
        names = len(self._names)
        sent = torch.zeros(names + 1, dtype=torch.uint8, device="cpu")
        sent[self._places] = torch.frombuffer(own, dtype=torch.uint8)
        behind = torch.tensor(list(further), dtype=torch.uint8, device="cpu")
        return tell_all(self._everyone.control, Exchange.AGREE, torch.cat([sent[:names], behind]))

    def most(self, heard: Heard) -> bytes:
        """Wait for what has been told: the largest byte of each parameter among its sharers, in this rank's order."""
        said = heard.wait()[:, : len(self._names)]
        most = torch.zeros(len(self._names) + 1, dtype=torch.uint8, device="cpu")
        for ranks, places in self._columns:
            most[places] = said[ranks].amax(dim=0)[places]
        return bytes(most[self._places].tolist())

    def of_first(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """What the first rank says of each parameter; less than any number of which it says nothing."""
        said = torch.tensor([numbers.get(name, -1) for name in self._names], dtype=torch.int64, device="cpu")
        if self._everyone.control.size > 1 and self._names:
            broadcast(self._everyone.control, Exchange.AGREE, said)
        return dict(zip(self._names, said.tolist(), strict=True))
