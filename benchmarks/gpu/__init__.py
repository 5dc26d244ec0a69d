"""What can be learned about layerzero on a machine with one GPU: ``python -m benchmarks.gpu``."""
