"""Provide general helpers that are independent of sharding."""
