"""From a model to a sharded model: settings, units, initial values, guards."""
