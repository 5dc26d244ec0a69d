"""DTensor subclass for sharded parameters, with its operators."""
