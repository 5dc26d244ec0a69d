"""The weights and gradients of a sharded model while it trains: handles, units, passes, hooks."""
