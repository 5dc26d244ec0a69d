"""Predictions of memory and traffic from specs without tensors."""
