"""Integrations with the training loops of other packages. Each module imports only the packages that it integrates.

``layerzero`` itself imports none of these modules. Import them explicitly:
``from layerzero.integrations.accelerate import LayerZeroAccelerator``.
"""
