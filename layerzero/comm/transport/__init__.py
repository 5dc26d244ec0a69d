"""Move weights and gradients between the ranks of one ZeRO-3 group.

- :mod:`base`: the interface of transports, and the traits from which memory and traffic are predicted
- :mod:`selection`: the choice between the two transports; no other module refers to a concrete transport
- :mod:`process_group`: transport over collectives, with an optional codec and post-forward shards
- :mod:`shared_memory`: transport through memory that all ranks of the group map. `shm_segment` is the mapping,
  `shm_rendezvous` its setup, `shm_counters` its synchronization, and `shm_buffers` the buffers from which gradients are
  read.
"""
