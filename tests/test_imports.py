"""Import directions inside the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "layerzero"
# From the ground up; a folder may import itself and those of the floors before its own.
FLOORS = [
    ("layout", "device", "utils"),
    ("comm",),
    ("dtensor", "config"),
    ("engine",),
    ("estimates", "full_state"),
    ("sharding", "optimizers", "reports"),
    ("planning", "verification", "reliability"),
    ("checkpoint",),
    ("megatron", "integrations"),
    ("cli_planning",),
    ("cli",),
    ("__main__",),
]


def _imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported anywhere in the file, for type checking too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("layerzero."):
            assert child.module is not None
            yield child.module
        yield from _imports(child)


def _modules() -> dict[str, set[str]]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = set(_imports(ast.parse(path.read_text(encoding="utf-8"))))
    return found


def _floor(module: str) -> int | None:
    room = module.split(".")[1]
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, imported in _modules().items()
        for other in imported
        if "." in module and (mine := _floor(module)) is not None and (theirs := _floor(other)) is not None
        if theirs > mine or (theirs == mine and module.split(".")[1] != other.split(".")[1])
    ]
    assert not wrong, wrong


def test_no_module_imports_itself_through_others() -> None:
    modules = _modules()
    for start in modules:
        seen: set[str] = set()
        waiting = list(modules[start])
        while waiting:
            module = waiting.pop()
            assert module != start, f"{start} is in a circle of imports"
            if module not in seen:
                seen.add(module)
                waiting += modules.get(module, ())
