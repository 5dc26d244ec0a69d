"""Provide general helpers that do not depend on sharding."""
