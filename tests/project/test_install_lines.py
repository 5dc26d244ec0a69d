"""Install commands in the docs match the requirements of this project, under names that provide them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
READ = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "layerzero", "docs", "examples", "benchmarks", "tests")

INSTALL = re.compile(r"\bpip install((?: (?:-r [\w./-]+|-[\w-]+|\"[^\"\s]+\"|[\w.\[\],-]+))+)")
STRANGER = re.compile(r"(?<![\w-])layerzero\[[\w, -]*\]")  # old name of the distribution, with extras
OPTION_WITH_A_FILE = "-r"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = {*PROJECT["dependencies"], *(name for extra in EXTRAS.values() for name in extra)}
NAMES = {PROJECT["name"], *(re.split(r"[<>=!\[]", requirement)[0] for requirement in NEEDED)}


def _texts() -> Iterator[tuple[Path, str]]:
    for top in map(ROOT.joinpath, READ):
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in {".py", ".md", ".txt", ".yaml"} and path != Path(__file__):
                yield path, path.read_text(encoding="utf-8")


def _requirements(line: str) -> list[str]:
    """Return the requirements of a pip command without its options; requirement files as "-r FILE"."""
    words = [word.strip('"') for word in line.split()]
    asked = []
    while words:
        word = words.pop(0)
        if word == OPTION_WITH_A_FILE:
            asked.append(f"-r {words.pop(0)}")
        elif not word.startswith("-"):
            asked.append(word)
    return asked


def wrong_with(requirement: str) -> str | None:
    """Return why a requirement installs nothing or the wrong thing; None if it is right."""
    if requirement.startswith("-r "):
        return None if (ROOT / requirement[3:].rstrip(".,;:")).is_file() else "no such file"
    name, extras = re.fullmatch(r"([^\[<>=!]+)(?:\[([^\]]*)\])?.*", requirement).groups()
    if name.rstrip(",;:") not in {".", *NAMES}:
        return "not this distribution, nor a requirement of it"
    unknown = set(filter(None, re.split(", ?", extras or ""))) - EXTRAS.keys()
    return f"no such extras: {', '.join(sorted(unknown))}" if unknown else None


def test_every_install_line_brings_what_it_promises() -> None:
    asked = [
        (path.relative_to(ROOT).as_posix(), requirement)
        for path, text in _texts()
        for line in INSTALL.findall(text)
        for requirement in _requirements(line)
    ]
    wrong = [f"{path}: {requirement}: {why}" for path, requirement in asked if (why := wrong_with(requirement))]
    assert not wrong
    assert {path for path, _ in asked} >= {
        "README.md",
        "docs/checkpoints.md",
        "docs/megatron.md",
        "layerzero/__main__.py",
        "layerzero/checkpoint/checksums.py",
        "layerzero/integrations/yaml_file.py",
    }


def test_nothing_names_the_package_of_somebody_else() -> None:
    assert [path.name for path, text in _texts() if STRANGER.search(text)] == []
    assert PROJECT["name"] != "layerzero"
