"""Every fault that a long run meets, tried on real processes: `make chaos`."""
