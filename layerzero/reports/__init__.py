"""Reports on a sharded model: memory, traffic, metrics, traces, lists of units."""
