"""Import directions inside the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "layerzero"
# Bottom layer first; a folder may import itself and the layers before its own.
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


# Import cycles that only type checkers see. Remove them; add no new ones.
KNOWN_CIRCLES = [
    {"layerzero.engine.full_precision", "layerzero.engine.handle"},
]


def _imports(node: ast.AST, *, for_types: bool) -> Iterator[str]:
    """Return the modules of the package that the file imports; `for_types` includes those under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            if for_types:
                yield from _imports(child, for_types=True)
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("layerzero."):
            assert child.module is not None
            yield child.module
        yield from _imports(child, for_types=for_types)


def _modules(*, for_types: bool) -> dict[str, set[str]]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = set(_imports(ast.parse(path.read_text(encoding="utf-8")), for_types=for_types))
    return found


def _floor(module: str) -> int | None:
    room = module.split(".")[1]
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, imported in _modules(for_types=True).items()
        for other in imported
        if "." in module and (mine := _floor(module)) is not None and (theirs := _floor(other)) is not None
        if theirs > mine or (theirs == mine and module.split(".")[1] != other.split(".")[1])
    ]
    assert not wrong, wrong


def _reached(modules: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(modules[start])
    while waiting:
        if (module := waiting.pop()) not in seen:
            seen.add(module)
            waiting += modules.get(module, ())
    return seen


def test_no_module_imports_itself_through_others() -> None:
    modules = _modules(for_types=False)
    assert not [start for start in modules if start in _reached(modules, start)]


def test_type_checkers_see_no_other_circles_than_the_known_ones() -> None:
    modules = _modules(for_types=True)
    reached = {start: _reached(modules, start) for start in modules}
    circles = {
        frozenset(other for other in reached[start] if start in reached.get(other, ()))
        for start in modules
        if start in reached[start]
    }
    assert circles == {frozenset(circle) for circle in KNOWN_CIRCLES}
