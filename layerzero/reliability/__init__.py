"""Detect non-finite gradients, silent data corruption and missing ranks in long runs."""
