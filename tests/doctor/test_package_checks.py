"""Installed packages, on import paths that the tests build."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

import layerzero
from layerzero.doctor.findings import Finding
from layerzero.doctor.package_checks import (
    check_apex,
    check_extras,
    check_imports,
    check_layerzero,
    check_packages,
    installed_versions,
)

PACKAGE = Path(layerzero.__file__).parent
METADATA = """Metadata-Version: 2.4
Name: {name}
Version: {version}
{rest}"""
EXTRAS = """Provides-Extra: cli
Requires-Dist: typer; extra == "cli"
Requires-Dist: numpy; extra == "cli"
Provides-Extra: checkpoint
Requires-Dist: safetensors; extra == "checkpoint"
Requires-Dist: xxhash>=3.0; extra == "checkpoint"
Provides-Extra: lora
Requires-Dist: peft<1,>=0.21; extra == "lora"
Provides-Extra: ray
Requires-Dist: ray[train]<3,>=2.60; extra == "ray"
Provides-Extra: docs
Requires-Dist: mkdocs; extra == "docs"
Requires-Dist: torch>=2.11
"""


def install(folder: Path, name: str, version: str, *, files: tuple[str, ...] = (), rest: str = "") -> None:
    """Write a distribution as pip installs it: its files, its metadata and the list of its files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(name=name, version=version, rest=rest))
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in (*files, f"{info.name}/METADATA")))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def layerzero_findings(folder: Path, version: str = "0.1.0") -> list[Finding]:
    return check_layerzero(version, PACKAGE, list(distributions(path=[str(folder)])))


def test_our_own_distribution_is_fine(tmp_path: Path) -> None:
    install(tmp_path, "torch-layerzero", "0.1.0")
    (found,) = layerzero_findings(tmp_path)
    assert found.level == "ok" and str(PACKAGE) in found.text


def test_a_checkout_that_is_not_installed_is_noted(tmp_path: Path) -> None:
    assert [each.level for each in layerzero_findings(tmp_path)] == ["note"]


def test_another_version_than_the_imported_one_is_a_problem(tmp_path: Path) -> None:
    install(tmp_path, "torch_layerzero", "0.0.9")
    (found,) = layerzero_findings(tmp_path)
    assert found.level == "problem" and "torch-layerzero 0.0.9 is installed" in found.text


def test_a_strangers_distribution_is_a_problem_if_it_installs_the_same_module(tmp_path: Path) -> None:
    install(tmp_path, "torch-layerzero", "0.1.0")
    install(tmp_path, "LayerZero", "0.5.14", files=("layerzero/__init__.py", "layerzero/Trainer.py"))
    ours, theirs = layerzero_findings(tmp_path)
    assert ours.level == "ok"
    assert theirs.level == "problem" and "LayerZero 0.5.14" in theirs.text and str(tmp_path) in theirs.text
    assert "pip uninstall layerzero" in theirs.fix


def test_a_strangers_distribution_with_another_module_is_noted(tmp_path: Path) -> None:
    install(tmp_path, "LayerZero", "0.5.14", files=("LayerZero/__init__.py",))
    _, theirs = layerzero_findings(tmp_path)
    assert theirs.level == "note" and "its module is LayerZero" in theirs.text


def test_apex_of_the_index_is_told_from_that_of_nvidia(tmp_path: Path) -> None:
    for name, module in (("stranger", "lib"), ("nvidia", "optimizers"), ("data", "")):
        (tmp_path / name / "apex" / module).mkdir(parents=True)
        if module:
            (tmp_path / name / "apex" / "__init__.py").touch()
    stranger, nvidia, data = (str(tmp_path / name) for name in ("stranger", "nvidia", "data"))
    (found,) = check_apex([stranger])
    assert found.level == "problem" and "pip uninstall apex" in found.fix
    assert [each.level for each in check_apex([nvidia])] == ["ok"]
    assert [each.level for each in check_apex([stranger, nvidia])] == ["problem"], "the first one counts"
    assert check_apex([data]) == [], "a folder without __init__.py"


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"typer": "1.0", "numpy": "2.0"}, ["ok extra cli: typer 1.0, numpy 2.0", "ok extras that are not installed"]),
        ({"typer": "1.0"}, ["note extra cli: not installed: numpy", "ok extras that are not installed"]),
        (
            {"safetensors": "1", "xxhash": "2.9"},
            ["problem extra checkpoint: xxhash 2.9 is installed, and >=3.0", "ok extras that are not installed"],
        ),
        ({"peft": "0.20"}, ["note extra lora: peft 0.20 is installed, and <1,>=0.21", "ok extras that are not"]),
        ({"peft": "0.21.0"}, ["ok extra lora: peft 0.21.0", "ok extras that are not installed: cli, checkpoint"]),
        (
            {"ray": "2.59"},
            [
                "note extra ray: ray 2.59 is installed, and <3,>=2.60",  # a note, as for all integrations
                "ok extras that are not installed: cli",
            ],
        ),
        ({}, ["ok extras that are not installed: cli, checkpoint, lora, ray"]),
    ],
)
def test_extras_are_compared_with_the_metadata(tmp_path: Path, versions: dict[str, str], expected: list[str]) -> None:
    install(tmp_path, "torch-layerzero", "0.1.0", rest=EXTRAS)
    for name, version in versions.items():
        install(tmp_path, name, version)
    found = [f"{each.level} {each.text}" for each in check_extras(list(distributions(path=[str(tmp_path)])))]
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found


def test_without_metadata_no_extra_is_compared(tmp_path: Path) -> None:
    install(tmp_path, "typer", "1.0")
    assert check_extras(list(distributions(path=[str(tmp_path)]))) == []


def test_versions_are_found_by_normalized_names(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, version in ((first, "2"), (second, "1")):
        folder.mkdir()
        install(folder, "Megatron_Core", version)
    (second / "broken-1.dist-info").mkdir()  # what an interrupted pip leaves behind
    versions = installed_versions(distributions(path=[str(first), str(second)]))
    assert versions["megatron-core"] == "2"


def test_a_package_that_cannot_be_imported_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package_of_a_test.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_imports(["json", "a_module_that_nobody_has"]) == []
    (found,) = check_imports(["broken_package_of_a_test"])
    assert found.level == "problem" and "ImportError: undefined symbol: x" in found.text


def test_this_environment_can_be_checked() -> None:
    found = check_packages(layerzero.__version__, PACKAGE)
    assert {each.group for each in found} == {"packages"}
    assert f"layerzero {layerzero.__version__}" in found[0].text
