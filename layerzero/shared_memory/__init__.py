"""Move weights and gradients through memory that the ranks of a ZeRO-3 group map, if they are on one machine's CPUs.

`transport` implements the interface of comm/transport/base.py. `segment` is the mapping, `rendezvous` its setup,
`counters` its synchronization, and `buffers` the buffers from which peers read gradients.
"""

from layerzero.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
