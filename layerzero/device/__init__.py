"""Bytes without meaning: devices, memory that is reused, places where sums wait."""
