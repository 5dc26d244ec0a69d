"""Fault injection on real processes, for the faults of long runs: `make chaos`."""
