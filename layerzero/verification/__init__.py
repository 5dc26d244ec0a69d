"""Compare plain training and sharded training of a user's model: :func:`layerzero.verify`."""

from layerzero.verification.comparison import ParameterDifference, VerifyReport
from layerzero.verification.verify_model import verify

__all__ = ["ParameterDifference", "VerifyReport", "verify"]
