"""Everything that `shard_model` does: settings, units, meshes, initial values, module methods."""
