"""Bytes by formula, from specs without tensors."""
