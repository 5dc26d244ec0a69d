"""Manage device memory, streams, buffer pools and copies to the host."""
