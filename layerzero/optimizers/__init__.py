"""Optimizers for sharded models: the optimizer wrapper, kernels, gradient clipping and weight averaging.

:func:`adamw` and :func:`sgd` build an optimizer that runs on the fastest available kernels.
"""

from layerzero.optimizers.kernels import adamw, implementation, sgd

__all__ = ["adamw", "implementation", "sgd"]
