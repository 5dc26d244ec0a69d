"""What users hold: sharded parameters, gathered ones, and tensors inside their inputs and outputs."""
