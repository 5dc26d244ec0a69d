"""Device memory, streams, buffer pools and host copies."""
