"""Reports on a sharded model: memory, traffic, metrics, traces and lists of units."""
