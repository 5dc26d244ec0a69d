"""Checks of ``layerzero doctor``: host, environment, packages, ranks and links. A check returns findings."""
