"""Provide process groups, communicators, collectives, and checks that ranks agree."""
