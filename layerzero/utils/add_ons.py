"""Find add-ons by name. The core reaches add-ons only through :func:`addon`, at first use."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

ADD_ONS = {
    "extensions": "layerzero.extensions",  # all-gather extensions of tensor subclasses, such as float8
    "muon": "layerzero.muon.owner_table",  # owners, for optimizers that need full parameters
    "shared_memory": "layerzero.shared_memory",  # transport between ranks on the CPUs of one machine
    "slow_links": "layerzero.slow_links",  # encoded refreshes
    "yaml": "layerzero.integrations.yaml_file",  # settings from a YAML file
}


def has_addon(name: str) -> bool:
    """Return whether the installed package has an add-on, without importing it."""
    try:
        spec = importlib.util.find_spec(ADD_ONS[name])
    except ModuleNotFoundError:  # a package that contains it is missing
        return False
    return spec is not None and spec.origin is not None  # a folder that still contains __pycache__ has no origin


def addon(name: str) -> Any:
    """Import an add-on and return its module.

    Args:
        name: key of `ADD_ONS`.

    Raises:
        ImportError: the add-on was removed from the installed package.
    """
    module = ADD_ONS[name]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a package that the add-on needs, such as PyYAML
        raise ImportError(
            f"layerzero needs its add-on {name!r} for this, but the installed package has no module {error.name}. "
            "Install the complete package, or leave out the setting or optimizer that needs the add-on",
            name=error.name,
        ) from None
