"""Transports of weights and gradients between the ranks of one ZeRO-3 group.

- :mod:`process_group`: gathers over collectives, with an optional codec. `post_forward_shard` keeps a part between a
  forward and its backward.
- :mod:`shared_memory`: full buffers that all ranks of a machine map. `shm_segment` is the mapping, `shm_rendezvous` its
  setup, `shm_counters` its synchronization, and `shm_buffers` the buffers that gradients are read from.

Reductions over collectives are in :mod:`layerzero.comm.collectives`.
"""
