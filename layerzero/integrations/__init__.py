"""Integrations with the training loops of other packages. Each module imports the package that it is named after.

No other package of layerzero imports these modules, so import them by name:
``from layerzero.integrations.accelerate import LayerZeroAccelerator``.
"""
