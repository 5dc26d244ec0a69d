"""Tests and measurements of layerzero on a machine with one GPU: ``python -m benchmarks.gpu``."""
