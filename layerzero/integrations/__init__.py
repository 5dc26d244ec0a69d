"""layerzero in the training loops of other packages. Each module imports the package that it is named after.

Nothing of layerzero imports them: ``from layerzero.integrations.accelerate import LayerZeroAccelerator``.
"""
