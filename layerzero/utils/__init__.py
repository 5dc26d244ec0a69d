"""Helpers that know nothing about sharding."""
