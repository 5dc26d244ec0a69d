"""Checks for long runs: non-finite gradients, silent data corruption, missing ranks."""
