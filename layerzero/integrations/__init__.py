"""Integrations with the training loops of other packages. Each module imports the package after which it is named.

No other package of layerzero imports these modules. Import them by name:
``from layerzero.integrations.accelerate import LayerZeroAccelerator``.
"""
