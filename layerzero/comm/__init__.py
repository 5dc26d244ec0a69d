"""Provide process groups, communicators, collectives, and agreement between ranks."""
