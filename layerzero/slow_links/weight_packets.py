"""Encode weights as packets, and apply packets to copies of the weights in a process without process groups.

[Note: Packet format]
A packet consists of the length and the CRC-32 of its header (8 bytes each, little-endian), the header (JSON) and the
data. The header describes the tensors in the packet. Each tensor is divided into pieces of 2^20 elements. The number of
bytes of a piece determines its encoding:

    0                       same bits as in the previous version
    size of the values      the values themselves
    less                    compressed difference from the previous version, for dtypes of 16 bits

`lossless_differences` encodes the differences. The receiver gets the exact bits, including those of NaN and -0. A
CRC-32 of the resulting values of each piece detects damaged packets, and receivers whose old values differ from those
of the sender.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.slow_links.lossless_differences import LosslessDifferences, memoryview_of

_FORMAT = "layerzero weights 1"
_PIECE = 1 << 20  # number of elements that are encoded together
_SEND_ALL = "Send all weights again, with WeightSender.packets(full=True)"


class WeightPacketError(RuntimeError):
    """Error for a packet that is damaged, does not fit the tensors, or does not follow the receiver's version."""


class PacketPosition(NamedTuple):
    """Position of a packet among all packets of its sender."""

    sender: str  # random name
    version: int
    base: int | None  # version to which the differences apply, or None if all values are sent
    packet: int  # number of this packet in the version, from 0
    packets: int  # number of packets in the version


class _Entry(NamedTuple):
    """Header entry for one tensor in a packet."""

    names: list[str]  # several if the tensor is tied
    dtype: str
    shape: list[int]
    sizes: list[int]  # number of bytes of each piece
    checksums: list[int]  # CRC-32 of the resulting values of each piece

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def make_packet(position: PacketPosition, tensors: Sequence[tuple[Sequence[str], Tensor, Tensor | None]]) -> bytes:
    """Encode tensors as one packet.

    Args:
        position: position of the packet.
        tensors: names, current values and previous values of each tensor. The values must be contiguous and on the CPU.
            If the previous values are None, the current values themselves are sent.
    """
    codec = LosslessDifferences.best()
    entries: list[_Entry] = []
    content: list[Any] = []
    with ThreadPoolExecutor() as pool:  # compression and checksums release the GIL
        packed = [
            [
                pool.submit(_pack_piece, new, old, codec)
                for new, old in zip(
                    _split_pieces(values), repeat(None) if before is None else _split_pieces(before), strict=False
                )
            ]
            for _, values, before in tensors
        ]
        for (names, values, _), futures in zip(tensors, packed, strict=True):
            data, checksums = zip(*(future.result() for future in futures), strict=True) if futures else ((), ())
            sizes = [len(each) for each in data]
            entries.append(_Entry(list(names), _name_of(values.dtype), list(values.shape), sizes, list(checksums)))
            content += data
    fields = {"format": _FORMAT, "compression": codec.compression, **position._asdict()}
    header = json.dumps(fields | {"tensors": [each._asdict() for each in entries]}).encode()
    start = b"".join(number.to_bytes(8, "little") for number in (len(header), zlib.crc32(header)))
    return b"".join([start, header, *content])


def _pack_piece(now: Tensor, before: Tensor | None, codec: LosslessDifferences) -> tuple[Any, int]:
    """Return the data of a piece and the checksum of its values. The data may be the memory of `now`."""
    memory = memoryview_of(now)
    if before is None:
        return memory, zlib.crc32(memory)
    if torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
        return b"", 0
    if now.element_size() != 2:
        return memory, zlib.crc32(memory)
    encoded = torch.empty(now.nbytes, dtype=torch.uint8)
    size = codec.encode(before, now, encoded)
    return bytes(memoryview_of(encoded)[:size]), zlib.crc32(memory)


class WeightReceiver:
    """Copy of a model's weights that follows the packets of a :class:`layerzero.WeightSender`.

    The receiver needs neither a process group nor the sharded model. Its tensors are bitwise equal to the compute
    weights of the trainer after each complete version.

    Args:
        tensors: tensors to write to, by name, such as ``model.state_dict()``. They need the names, shapes and dtypes of
            the trainer's compute weights, and must be contiguous. For a tied parameter, one of its names is
            sufficient. Names that the trainer does not send are not written. If None, the first version creates the
            tensors on the CPU.

    Attributes:
        tensors: the tensors, by name.
        version: version that the tensors have. None before the first version, while a version is incomplete, and after
            an error that has left tensors of two versions.

    Example::

        served = GPT(config).bfloat16()
        receiver = layerzero.WeightReceiver(served.state_dict())
        while True:
            if receiver.apply(connection.recv_bytes()):
                answer_requests(served)  # with all weights of one version
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in (tensors or {}).items()}
        self.version: int | None = None
        self._creates = tensors is None
        self._sender = ""
        self._next: tuple[int, int] | None = None  # (version, packet) of the next packet of an incomplete version

    def apply(self, packet: bytes | bytearray | memoryview) -> bool:
        """Write the values of a packet to the tensors. Packets must be applied in the order in which they were made.

        The first version, and each version from ``WeightSender.packets(full=True)``, contains all weights. Such a
        version may follow any other version.

        Returns:
            True if the packet completes a version. If False, the tensors contain weights of two versions.

        Raises:
            WeightPacketError: the packet is damaged, does not fit the tensors, or does not follow the previous packet.
                If a version is missing, the tensors are not changed.
            ModuleNotFoundError: the packet is compressed with zstd, and zstandard is not installed.
        """
        position, codec, entries, data = _parse_packet(packet)
        self._require_next(position)
        targets = [self._targets(entry, creates=position.base is None) for entry in entries]
        self.version, self._next = None, None  # if an error follows, tensors of two versions remain
        # Threads work on CPU memory only, because the current stream of a device belongs to the calling thread.
        on_cpu = [target.cpu() for target, *_ in targets]  # the target itself if it is on the CPU
        pieces = [piece for values in on_cpu for piece in _split_pieces(values)]
        checksums = [checksum for entry in entries for checksum in entry.checksums]
        with ThreadPoolExecutor() as pool:
            if list(pool.map(partial(_decode_piece, codec), pieces, data)) != checksums:
                raise WeightPacketError(
                    f"packet {position.packet + 1} of {position.packets} of version {position.version} gives values "
                    "with a wrong checksum. The packet is damaged, or the weights were changed after the last version. "
                    f"{_SEND_ALL}"
                )
        for values, (target, *copies) in zip(on_cpu, targets, strict=True):
            for tensor in copies if values is target else (target, *copies):
                tensor.copy_(values)
        self._sender = position.sender
        if position.packet + 1 == position.packets:
            self.version = position.version
        else:
            self._next = (position.version, position.packet + 1)
        return self.version is not None

    def _require_next(self, position: PacketPosition) -> None:
        number = position.version, position.packet
        if position.base is None and position.packet == 0:
            return
        follows = (
            self._next == number if position.packet else self.version is not None and self.version == position.base
        )
        if follows and position.sender == self._sender:
            return
        state = f"version {self.version}" if self.version is not None else "no complete version"
        if self._next is not None:
            state = f"version {self._next[0]} up to packet {self._next[1]}"
        based = "" if position.base is None else f" (changes from version {position.base})"
        raise WeightPacketError(
            f"packet {position.packet + 1} of {position.packets} of version {position.version}{based} cannot be "
            f"applied: the receiver has {state}{'' if position.sender == self._sender else ' of another sender'}. A "
            f"packet is missing or was applied twice. {_SEND_ALL}"
        )

    def _targets(self, entry: _Entry, *, creates: bool) -> list[Tensor]:
        """Return the tensors for an entry. The caller writes to the first tensor and copies it to the others."""
        targets = {name: self.tensors[name] for name in entry.names if name in self.tensors}
        if not targets and creates and self._creates:
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype) or sum(entry.sizes) != entry.numel * dtype.itemsize:
                raise WeightPacketError(f"{entry.names[0]!r} has no values of dtype {entry.dtype}. {_SEND_ALL}")
            created = torch.empty(entry.shape, dtype=dtype)
            targets = dict.fromkeys(entry.names, created)
            self.tensors |= targets
        if not targets:
            raise WeightPacketError(
                f"the receiver has no tensor {entry.names[0]!r}. Pass all tensors of the trainer's state dict to "
                "WeightReceiver, or none"
            )
        for name, tensor in targets.items():
            if (list(tensor.shape), _name_of(tensor.dtype)) != (entry.shape, entry.dtype) or not tensor.is_contiguous():
                raise WeightPacketError(
                    f"{name!r} must be a contiguous tensor of shape {entry.shape} and dtype {entry.dtype}, as in the "
                    f"trainer, but has shape {list(tensor.shape)}, strides {tensor.stride()} and dtype {tensor.dtype}. "
                    "Pass such tensors to WeightReceiver, or none"
                )
        if not len(entry.sizes) == len(entry.checksums) == -(-entry.numel // _PIECE):
            raise WeightPacketError(f"the packet has a wrong number of pieces of {entry.names[0]!r}. {_SEND_ALL}")
        by_address = {tensor.data_ptr(): tensor for tensor in targets.values()}
        return list(by_address.values())


def _parse_packet(
    packet: bytes | bytearray | memoryview,
) -> tuple[PacketPosition, LosslessDifferences, list[_Entry], list[memoryview]]:
    view = memoryview(packet).cast("B")
    length, checksum = (int.from_bytes(view[start : start + 8], "little") for start in (0, 8))
    end = 16 + length
    try:
        text = bytes(view[16:end])
        header = json.loads(text)
        is_valid = header["format"] == _FORMAT and zlib.crc32(text) == checksum
        position = PacketPosition(*(header[name] for name in PacketPosition._fields))
        entries = [_Entry(**fields) for fields in header["tensors"]]
        bounds = list(accumulate((size for entry in entries for size in entry.sizes), initial=end))
        is_valid &= bounds[-1] == len(view) and all(entry.names and entry.numel >= 0 for entry in entries)
        is_valid &= all(type(number) is int for number in (position.version, position.packet, position.packets))
        codec = LosslessDifferences(header["compression"])
        data = [view[start:stop] for start, stop in pairwise(bounds)]
    except (ValueError, KeyError, TypeError, RuntimeError):
        is_valid = False
    if not is_valid:
        raise WeightPacketError(
            f"{len(view)} bytes are not a complete packet of layerzero.WeightSender. Pass each packet unchanged, and "
            "use the same version of layerzero on both sides"
        )
    return position, codec, entries, data


def _decode_piece(codec: LosslessDifferences, piece: Tensor, data: memoryview) -> int:
    """Write new values to `piece`, or apply a difference to it. Return the checksum, or 0 if `data` is empty."""
    if not len(data):
        return 0
    encoded = torch.empty(len(data), dtype=torch.uint8)
    memoryview_of(encoded)[:] = data
    try:
        codec.decode(encoded, piece)
    except (ValueError, RuntimeError) as error:
        raise WeightPacketError(f"a packet cannot be decoded: {error}. {_SEND_ALL}") from error
    return zlib.crc32(memoryview_of(piece))


def _split_pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return 1-D views of the pieces of a contiguous tensor."""
    flat = tensor.view(-1)
    return torch.split(flat, _PIECE) if flat.numel() else ()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
