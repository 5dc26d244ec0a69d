"""docs/stability.md assigns one tier to every public name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
PACKAGES = ("layerzero", "layerzero.checkpoint", "layerzero.optimizers", "layerzero.planning", "layerzero.megatron")
INTERNAL = {"__init__", "common", "yaml_file"}  # modules of layerzero.integrations without public names
TIERS = {"stable", "experimental"}  # every other name is internal


def _all_of(path: Path) -> list[str]:
    """Return the names in `__all__` of a source file, without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no __all__")


def public_names() -> Counter[str]:
    files = {package: ROOT / package.replace(".", "/") / "__init__.py" for package in PACKAGES}
    for path in (ROOT / "layerzero" / "integrations").glob("*.py"):
        if path.stem not in INTERNAL:
            files[f"layerzero.integrations.{path.stem}"] = path
    return Counter(f"{module}.{name}" for module, path in files.items() for name in _all_of(path))


def names_with_tiers(page: str) -> list[tuple[str, str]]:
    """Return qualified names and tiers from the tables of a page; a section title is the module of its names."""
    listed = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        module, _, text = section.partition("\n")
        for tier, names in re.findall(r"^\| (\w+) \| (`.+`) \|$", text, re.MULTILINE):
            listed += [(f"{module}.{name}", tier) for name in re.findall(r"`(\w+)`", names)]
    return listed


def test_each_public_name_is_on_the_page_exactly_once() -> None:
    listed = names_with_tiers(PAGE)
    assert {tier for _, tier in listed} == TIERS
    counts = Counter(name for name, _ in listed)
    public = public_names()
    assert public - counts == Counter(), "public names that the page does not list"
    assert counts - public == Counter(), "names that are listed twice, or that are not public"
