"""Encode messages for slow links: gradients and refreshed weights between nodes, and packets of weights."""

from layerzero.slow_links.block_codecs import Float8Rows, Int4Blocks, Int8Blocks
from layerzero.slow_links.encoded_refresh import make_refresher
from layerzero.slow_links.int4_difference import Int4Difference
from layerzero.slow_links.lossless_differences import LosslessDifferences
from layerzero.slow_links.weight_packets import PacketPosition, WeightPacketError, WeightReceiver, make_packet

__all__ = [
    "Float8Rows",
    "Int4Blocks",
    "Int4Difference",
    "Int8Blocks",
    "LosslessDifferences",
    "PacketPosition",
    "WeightPacketError",
    "WeightReceiver",
    "make_packet",
    "make_refresher",
]
