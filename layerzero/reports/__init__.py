"""Reports on a sharded model: memory, traffic, traces and lists of units."""
