"""Detect non-finite gradients, silent data corruption and missing ranks in long runs."""

from layerzero.reliability.local_gradient_check import LocalGradientCheck, nonfinite_text

__all__ = ["LocalGradientCheck", "nonfinite_text"]
