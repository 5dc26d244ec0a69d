"""Import directions inside the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "layerzero"
# Bottom layer first; a folder may import itself and the layers before its own.
FLOORS = [
    ("layout", "utils"),
    ("device",),
    ("comm",),
    ("dtensor", "config"),
    ("engine",),
    ("estimates", "full_state"),
    ("sharding", "optimizers", "reports"),
    ("extend",),
    ("extensions", "shared_memory", "slow_links", "muon", "ema"),
    ("outer_steps", "weight_stream"),
    ("integrations.yaml_file",),  # read by planning, megatron and the command line
    ("planning", "verification", "reliability", "step_trace"),
    ("checkpoint",),
    ("megatron", "integrations"),
    ("doctor",),
    ("cli",),
    ("__main__",),
]


def _is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


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
            named = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from (name for name in named if _is_module(name))
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name.startswith("layerzero."))
        yield from _imports(child, for_types=for_types)


@lru_cache
def _modules(*, for_types: bool) -> dict[str, set[str]]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = set(_imports(ast.parse(path.read_text(encoding="utf-8")), for_types=for_types))
    return found


def _floor(module: str) -> int | None:
    parts = module.split(".")
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    return floors.get(".".join(parts[1:3]), floors.get(parts[1]))


def test_every_form_of_import_is_found() -> None:
    transport = "layerzero.comm.transport"
    for line, found in (
        (f"from {transport}.base import Transport", {f"{transport}.base"}),
        (f"from {transport} import process_group, TRAITS", {transport, f"{transport}.process_group"}),
        ("from layerzero.comm import transport", {"layerzero.comm", transport}),
        (f"import {transport}.process_group as groups", {f"{transport}.process_group"}),
        ("import torch", set()),
    ):
        assert set(_imports(ast.parse(line), for_types=True)) == found, line


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, imported in _modules(for_types=True).items()
        for other in imported
        if "." in module and (mine := _floor(module)) is not None and (theirs := _floor(other)) is not None
        if theirs > mine or (theirs == mine and module.split(".")[1] != other.split(".")[1])
    ]
    assert not wrong, wrong


def test_only_the_selection_names_a_transport() -> None:
    concrete = ("layerzero.comm.transport.process_group", "layerzero.shared_memory")
    wrong = {
        module: named
        for module, imported in _modules(for_types=True).items()
        if (named := {each for each in imported if each.startswith(concrete)})
        and module != "layerzero.comm.transport.selection"
        and not module.startswith("layerzero.shared_memory")
    }
    assert not wrong, wrong


def test_no_part_of_comm_outside_a_transport_imports_one() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, imported in _modules(for_types=True).items()
        if module.startswith("layerzero.comm.") and not module.startswith("layerzero.comm.transport")
        for other in imported
        if other.startswith("layerzero.comm.transport")
    ]
    assert not wrong, wrong


def test_the_engine_is_listed_in_reading_order() -> None:
    """A file imports engine files from below it only."""
    package = PACKAGE / "engine"
    listed = re.findall(r"^- `(\w+)`: ", (package / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in package.glob("*.py") if path.stem != "__init__")
    modules = _modules(for_types=True)
    wrong = [
        f"{name} imports {other}"
        for index, name in enumerate(listed)
        for other in listed[:index]
        if f"layerzero.engine.{other}" in modules[f"layerzero.engine.{name}"]
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
    modules = _modules(for_types=True)
    assert not [start for start in modules if start in _reached(modules, start)]
