"""Checks for long runs: non-finite numbers, silent data corruption, missing ranks."""
