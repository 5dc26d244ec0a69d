"""Checks of ``layerzero doctor``: environment, packages, ranks and links. Each check maps values to findings."""
