"""Implementation of `shard_model`: settings, units, meshes, initial values and module methods."""
