"""Imports between the two halves of the package: the core imports no add-on, and add-ons use public names.

An add-on imports from the core only ``layerzero``, ``layerzero.extend`` and ``layerzero.optimizers``, and from other
add-ons only what their package, or its module ``extend``, lists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.code_size import PACKAGE, is_core

PUBLIC = {"layerzero", "layerzero.extend", "layerzero.optimizers", "layerzero.checkpoint.extend"}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _part(name: str) -> str:
    """Return the file or folder directly below the package to which a module belongs."""
    return name.split(".")[1] if "." in name else ""


def _disobedient() -> Iterator[str]:
    paths = {_name(path): path for path in PACKAGE.rglob("*.py")}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "layerzero":
                continue
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                imported = submodule if submodule in paths else node.module or ""
                if imported in PUBLIC:
                    continue
                to_core = is_core(paths[imported])
                if is_core(path):
                    wrong = not to_core and name != "layerzero"
                elif to_core:
                    wrong = True
                else:  # a package of another add-on, or a file of the same one
                    wrong = _part(name) != _part(imported) and imported.count(".") > 1
                if wrong:
                    yield f"{name} imports {imported}"


def test_no_import_crosses_the_halves() -> None:
    assert sorted(set(_disobedient())) == [], "use a public name or layerzero.extend"
