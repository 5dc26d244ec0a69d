"""Process groups, communicators, collectives, and agreement between ranks."""
