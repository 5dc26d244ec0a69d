"""Trains a model of the user's plain and sharded, and says how far apart the two are: :func:`layerzero.verify`."""

from layerzero.verification.differences import ParameterDifference, VerifyReport
from layerzero.verification.run import verify

__all__ = ["ParameterDifference", "VerifyReport", "verify"]
