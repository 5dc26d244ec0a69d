"""Training of a sharded model: units, handles, passes, and the hooks that call them."""
