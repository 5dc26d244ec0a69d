"""DTensor subclass of sharded parameters, its operators, and gathered parameters."""
