"""Trains a model of the user's plain and sharded, and says how far apart the two are: :func:`layerzero.verify`."""

from layerzero.verification.comparison import ParameterDifference, VerifyReport
from layerzero.verification.verify_model import verify

__all__ = ["ParameterDifference", "VerifyReport", "verify"]
