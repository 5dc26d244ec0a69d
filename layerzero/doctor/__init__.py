"""Checks of ``layerzero doctor``: host, environment, packages, script, ranks and links. A check returns findings."""
