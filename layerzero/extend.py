"""Names on which add-ons are built.

An add-on imports from the core only public names of ``layerzero`` and the names of this module.
"""

from __future__ import annotations

from layerzero.utils.add_ons import ADD_ONS, addon

__all__ = ["ADD_ONS", "addon"]
