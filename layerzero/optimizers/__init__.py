"""What updates the masters: the wrapper of an optimizer, kernels, clipping, averages.

:func:`adamw` and :func:`sgd` build torch's optimizers on the fastest kernels at hand.
"""

from layerzero.optimizers.kernels import adamw, implementation, sgd

__all__ = ["adamw", "implementation", "sgd"]
