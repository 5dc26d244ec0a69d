"""Transports of weights and gradients between the ranks of one ZeRO-3 group."""
