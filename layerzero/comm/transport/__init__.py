"""Move weights and gradients between the ranks of one ZeRO-3 group.

- :mod:`base`: the interface of transports, and the traits from which memory and traffic are predicted
- :mod:`selection`: the choice of the transport; no other module refers to a concrete transport
- :mod:`process_group`: transport over collectives, with an optional codec and post-forward shards

The add-on ``layerzero.shared_memory`` has another transport, through memory that all ranks of the group map.
"""
