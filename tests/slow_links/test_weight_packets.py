"""Packets of weights: any bits survive, and no lost, repeated or damaged packet goes unnoticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from layerzero import WeightPacketError, WeightReceiver
from layerzero.slow_links import weight_packets
from layerzero.slow_links.weight_packets import PacketPosition, make_packet
from tests.support.bits import assert_equal_bits

needs_zstandard = pytest.mark.skipif(find_spec("zstandard") is None, reason="needs zstandard: pip install zstandard")
COMPRESSIONS = ["zlib", pytest.param("zstd", marks=needs_zstandard)]


@pytest.fixture(params=COMPRESSIONS)
def compression(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "zstandard", None)
    return request.param


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_packets, "_PIECE", 8)


class Sender:
    """Sender of versions of some tensors, each in one packet for each tensor."""

    def __init__(self, name: str = "a") -> None:
        self.name, self.version = name, 0
        self._previous: dict[str, Tensor] = {}

    def packets(self, tensors: dict[str, Tensor], *, full: bool = False) -> list[bytes]:
        base = None if full or not self.version else self.version
        self.version += 1
        made = []
        for number, (name, now) in enumerate(tensors.items()):
            before = None if base is None else self._previous[name]
            place = PacketPosition(self.name, self.version, base, number, len(tensors))
            made.append(make_packet(place, [((name,), now.contiguous(), before)]))
            self._previous[name] = now.clone(memory_format=torch.contiguous_format)
        return made


def every_value(dtype: torch.dtype) -> Tensor:
    """Return all 2^16 bit patterns of a 16-bit dtype, NaN and -0 included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


OTHERS: dict[str, Callable[[int], Tensor]] = {
    "fp32": lambda step: torch.tensor([1.0, float("nan"), -0.0, float("inf"), step]),
    "fp64": lambda step: torch.full((3, 7), 1 / (3 + step), dtype=torch.float64),
    "int64, without dims": torch.tensor,
    "bool": lambda step: torch.tensor([True, bool(step % 2)]),
    "fp8": lambda step: torch.arange(20.0).add(step).to(torch.float8_e4m3fn),
    "complex": lambda step: torch.tensor([complex(1, step)]),
    "empty": lambda step: torch.empty(0, 4, dtype=torch.bfloat16),
    "bf16, unchanged": lambda step: torch.ones(30, dtype=torch.bfloat16),
    "bf16, one element": lambda step: torch.tensor(1.0 + step, dtype=torch.bfloat16),
    "bf16, noise": lambda step: torch.randn(3, 11, generator=torch.Generator().manual_seed(step)).bfloat16(),
    "bf16, one piece changes": lambda step: torch.arange(24).add(torch.arange(24) // 16 * step).bfloat16(),
}


def test_tensors_of_any_dtype_and_shape_arrive(compression: str, small_pieces: None) -> None:
    sender, created = Sender(), WeightReceiver()
    given = WeightReceiver({name: make(7) for name, make in OTHERS.items()})
    for step in range(3):
        tensors = {name: make(step) for name, make in OTHERS.items()}
        packets = sender.packets(tensors, full=step == 2)
        for receiver in (created, given):
            assert [receiver.apply(packet) for packet in packets] == [False] * (len(packets) - 1) + [True]
            assert receiver.version == step + 1
            assert_equal_bits(receiver.tensors, tensors, step)


def test_only_what_has_changed_is_sent(compression: str) -> None:
    values = torch.randn(3 * weight_packets._PIECE, generator=torch.Generator().manual_seed(0)).bfloat16()
    sender, receiver = Sender(), WeightReceiver()
    (whole,) = sender.packets({"w": values})
    assert len(whole) > values.nbytes
    (nothing,) = sender.packets({"w": values})
    assert len(nothing) < 500
    moved = values.clone()
    moved.view(torch.int16)[-1000:] += 1
    (few,) = sender.packets({"w": moved})
    assert len(few) < values.nbytes / 500, "two of three pieces are equal, and most elements of the third"
    moved.view(torch.int16)[:] += torch.randint(-4, 4, moved.shape, generator=torch.Generator().manual_seed(1)).short()
    (small,) = sender.packets({"w": moved})
    assert len(small) < values.nbytes / 3, "three of 16 bits are random, in the low byte"
    (noise,) = sender.packets({"w": every_value(torch.bfloat16)[torch.randint(0, 2**16, values.shape)]})
    assert len(noise) < values.nbytes + 1000, "noise is sent as it is"
    for packet in (whole, nothing, few, small, noise):
        assert receiver.apply(packet)


def three_versions() -> tuple[Sender, list[list[bytes]]]:
    sender = Sender()
    made = [sender.packets({name: torch.full((4,), step + 1.0).bfloat16() for name in "xyz"}) for step in range(3)]
    return sender, made


def test_a_missing_or_repeated_packet_is_refused_until_all_is_sent_again() -> None:
    sender, (first, second, third) = three_versions()
    orders = {
        "the first version is missing": ([*second], 0),
        "a version is missing": ([*first, *third], 3),
        "a packet is missing": ([*first, second[0], second[2]], 4),
        "the end of a version is missing": ([*first, *second[:2], *third], 5),
        "a version is repeated": ([*first, *second, *second], 6),
        "a packet is repeated": ([*first, second[0], second[0]], 4),
        "the first packet is missing": ([*first[1:]], 0),
    }
    for case, (packets, applied) in orders.items():
        receiver = WeightReceiver()
        for packet in packets[:applied]:
            receiver.apply(packet)
        held, version = {name: value.clone() for name, value in receiver.tensors.items()}, receiver.version
        for packet in packets[applied:]:
            with pytest.raises(WeightPacketError, match=r"cannot be applied.*full=True") as refused:
                receiver.apply(packet)
        if case == "a version is missing":
            text = "packet 3 of 3 of version 3 (changes from version 2) cannot be applied: the receiver has version 1. "
            assert str(refused.value).startswith(text)
        assert_equal_bits(receiver.tensors, held, case)
        assert receiver.version == version, case
        assert version == {3: 1, 6: 2}.get(applied), f"{case}: an incomplete version has no number"
    everything = sender.packets({name: torch.full((4,), 9.0).bfloat16() for name in "xyz"}, full=True)
    assert [receiver.apply(packet) for packet in everything] == [False, False, True]
    assert receiver.version == 4 and all(value.eq(9).all() for value in receiver.tensors.values())


def test_changes_of_another_sender_are_refused() -> None:
    receiver, one, other = WeightReceiver(), Sender("one"), Sender("other")
    tensors = {"w": torch.ones(4).bfloat16()}
    for sender in (one, other):
        sender.packets(tensors)
    receiver.apply(one.packets(tensors, full=True)[0])
    with pytest.raises(WeightPacketError, match="version 2 of another sender"):
        receiver.apply(other.packets(tensors)[0])
    assert receiver.apply(one.packets(tensors)[0])


def test_a_damaged_packet_is_noticed(compression: str) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    sender = Sender()
    (whole,) = sender.packets({"w": values})
    changed = values.clone()
    changed.view(torch.int16)[:] += 3
    (packet,) = sender.packets({"w": changed})
    assert len(packet) < len(whole)
    noticed = 0
    for at in range(len(packet)):
        receiver = WeightReceiver()
        receiver.apply(whole)
        damaged = bytearray(packet)
        damaged[at] ^= 16
        try:
            receiver.apply(damaged)
        except WeightPacketError:
            noticed += 1
        else:  # a checksum of the compressed form, which is not read
            assert_equal_bits(receiver.tensors, {"w": changed}, at)
    assert noticed > len(packet) - 10
    for stop in range(len(packet)):
        with pytest.raises(WeightPacketError, match="not a complete packet"):
            WeightReceiver().apply(packet[:stop])


def test_changed_weights_of_the_receiver_are_noticed() -> None:
    sender, receiver = Sender(), WeightReceiver({"w": torch.zeros(100).bfloat16()})
    receiver.apply(sender.packets({"w": torch.ones(100).bfloat16()})[0])
    receiver.tensors["w"][2] = 5
    packet = sender.packets({"w": torch.full((100,), 2.0).bfloat16()})[0]
    with pytest.raises(WeightPacketError, match=r"wrong checksum.*weights were changed.*full=True"):
        receiver.apply(packet)
    assert receiver.version is None
    with pytest.raises(WeightPacketError, match="the receiver has no complete version"):
        receiver.apply(packet)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"v": torch.zeros(2, 3)}, "has no tensor 'w'"),
        ({"w": torch.zeros(3, 2)}, r"'w' must be .* shape \[2, 3\] and dtype float32.* has shape \[3, 2\]"),
        ({"w": torch.zeros(2, 3).bfloat16()}, r"dtype float32.* and dtype torch.bfloat16"),
        ({"w": torch.zeros(3, 2).t()}, r"contiguous tensor.* strides \(1, 2\)"),
    ],
)
def test_tensors_that_do_not_fit_are_not_written(held: dict[str, Tensor], message: str) -> None:
    (packet,) = Sender().packets({"w": torch.ones(2, 3)})
    receiver = WeightReceiver(held)
    with pytest.raises(WeightPacketError, match=message):
        receiver.apply(packet)
    assert not any(value.any() for value in held.values())


def test_a_tied_tensor_is_written_once_and_copied_to_its_other_names() -> None:
    first, second = (torch.tensor([1.0, step]).bfloat16() for step in (2, 3))
    packets = [
        make_packet(PacketPosition("a", 1, None, 0, 1), [(("embed", "head"), first, None)]),
        make_packet(PacketPosition("a", 2, 1, 0, 1), [(("embed", "head"), second, first)]),
    ]
    shared = torch.zeros(2).bfloat16()
    cases = {
        "one tensor": {"embed": shared, "head": shared},
        "two tensors": {"embed": torch.zeros(2).bfloat16(), "head": torch.zeros(2).bfloat16()},
        "one name": {"head": torch.zeros(2).bfloat16()},
        "created": None,
    }
    for case, tensors in cases.items():
        receiver = WeightReceiver(tensors)
        assert all(receiver.apply(packet) for packet in packets)
        assert all(torch.equal(value, second) for value in receiver.tensors.values()), case
        assert receiver.tensors.keys() == (tensors or dict.fromkeys(("embed", "head"))).keys(), case


def test_parameters_that_require_gradients_are_written() -> None:
    served = torch.nn.Linear(2, 2).bfloat16()
    receiver = WeightReceiver(dict(served.named_parameters()))
    tensors = {"weight": torch.ones(2, 2).bfloat16(), "bias": torch.zeros(2).bfloat16()}
    assert [receiver.apply(packet) for packet in Sender().packets(tensors)] == [False, True]
    assert torch.equal(served(torch.ones(1, 2).bfloat16()), torch.full((1, 2), 2.0).bfloat16())


def test_a_receiver_without_zstandard_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compressor:
        def __init__(self, **settings: object) -> None: ...

        def compress(self, data: memoryview) -> bytes:
            return b"x"

    fake = ModuleType("zstandard")
    fake.ZstdCompressor = Compressor  # type: ignore[attr-defined]
    sender, receiver = Sender(), WeightReceiver()
    receiver.apply(sender.packets({"w": torch.zeros(100).bfloat16()})[0])
    monkeypatch.setitem(sys.modules, "zstandard", fake)
    (packet,) = sender.packets({"w": torch.ones(100).bfloat16()})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ModuleNotFoundError, match="compressed with zstd, but zstandard is not installed"):
        receiver.apply(packet)
    assert receiver.version is None
