"""Check the installed packages: versions and packages of other projects with the same names."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from layerzero.doctor.findings import Finding, Level

__all__ = [
    "check_apex",
    "check_extras",
    "check_imports",
    "check_layerzero",
    "check_packages",
    "installed_versions",
]

_GROUP = "packages"
_OURS = "torch-layerzero"
_FOR_DEVELOPERS = {"bench", "demo", "dev", "docs", "test"}
_IMPORTED = ("numpy", "safetensors", "xxhash", "yaml", "zstandard")  # small packages that layerzero imports on demand
# Extras for integrations. An unsupported version of their packages matters only to users of the integration.
_INTEGRATIONS = {"accelerate", "lightning", "lora", "megatron", "ray", "torchtitan", "transformers"}


def check_packages(version: str, package: Path, path: Sequence[str] = sys.path) -> list[Finding]:
    """Run all checks of this module.

    Args:
        version: version of the running layerzero.
        package: folder of the running layerzero.
        path: import path.
    """
    installed = list(distributions(path=list(path)))
    return [
        *check_layerzero(version, package, installed),
        *check_apex(path),
        *check_extras(installed),
        *check_imports(_IMPORTED),
    ]


def installed_versions(found: Iterable[Distribution]) -> dict[str, str]:
    """Return the versions of distributions, keyed by normalized name. If a name is repeated, the first one counts."""
    versions: dict[str, str] = {}
    for distribution in found:
        versions.setdefault(_normalize_name(distribution.metadata["Name"] or ""), distribution.version)
    return versions


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check_layerzero(version: str, package: Path, found: Sequence[Distribution]) -> list[Finding]:
    """Check which distributions provide the module ``layerzero``."""
    findings = []
    own = [distribution for distribution in found if _normalize_name(distribution.metadata["Name"] or "") == _OURS]
    other_versions = sorted({distribution.version for distribution in own} - {version})
    if other_versions:
        text = (
            f"Python imports layerzero {version} from {package}, but {_OURS} {', '.join(other_versions)} is installed"
        )
        findings.append(Finding(_GROUP, "problem", text, "Remove one of them from the import path, or reinstall"))
    elif own:
        findings.append(Finding(_GROUP, "ok", f"{_OURS} {version}, imported from {package}"))
    else:
        text = f"layerzero {version} is imported from {package}, and {_OURS} is not installed"
        findings.append(
            Finding(
                _GROUP, "note", text, "Install the checkout with pip, so that the versions of extras can be checked"
            )
        )
    for distribution in found:
        if _normalize_name(distribution.metadata["Name"] or "") != "layerzero":
            continue
        modules = {file.parts[0] for file in distribution.files or () if file.suffix == ".py"}
        name = f"{distribution.metadata['Name']} {distribution.version} in {distribution.locate_file('')}"
        if "layerzero" in modules:
            text = f"{name} is another project that also installs the module layerzero"
            fix = f"Run pip uninstall layerzero, then install {_OURS} again"
            findings.append(Finding(_GROUP, "problem", text, fix))
        else:
            text = f"{name} is another project; its module is {', '.join(sorted(modules)) or 'unknown'}"
            findings.append(Finding(_GROUP, "note", text, "If you do not use it, run pip uninstall layerzero"))
    return findings


def check_apex(path: Sequence[str]) -> list[Finding]:
    """Check that the module ``apex``, if present, is NVIDIA's. PyPI has an unrelated package of the same name."""
    spec = PathFinder.find_spec("apex", list(path))
    if spec is None or spec.origin is None:  # no such module, or a folder without __init__.py
        return []
    if any(Path(folder, "optimizers").is_dir() for folder in spec.submodule_search_locations or ()):
        return [Finding(_GROUP, "ok", f"NVIDIA Apex, imported from {spec.origin}")]
    text = f"{spec.origin} is not NVIDIA's Apex: it has no apex.optimizers"
    fix = "Run pip uninstall apex. Build Apex from NVIDIA's repository, or use layerzero.optimizers.adamw"
    return [Finding(_GROUP, "problem", text, fix)]


def check_extras(found: Sequence[Distribution]) -> list[Finding]:
    """Compare the installed packages of each torch-layerzero extra with the version ranges in the metadata."""
    own = next(
        (distribution for distribution in found if _normalize_name(distribution.metadata["Name"] or "") == _OURS), None
    )
    if own is None:
        return []
    try:
        from packaging.requirements import Requirement  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        return [
            Finding(
                _GROUP,
                "note",
                "package versions are not checked, because the package packaging is not installed",
                "Run pip install packaging",
            )
        ]
    versions = installed_versions(found)
    requirements = [Requirement(text) for text in own.requires or ()]
    findings, absent = [], []
    for extra in own.metadata.get_all("Provides-Extra") or ():
        if extra in _FOR_DEVELOPERS:
            continue
        needed = [req for req in requirements if req.marker and req.marker.evaluate({"extra": extra})]
        installed = {req.name: versions.get(_normalize_name(req.name)) for req in needed}
        missing = [name for name, version in installed.items() if version is None]
        unsupported = [
            req for req in needed if (version := installed[req.name]) and not req.specifier.contains(version, True)
        ]
        if installed and next(iter(installed)) in missing:  # the first requirement of an extra is its subject
            absent.append(extra)
            continue
        for req in unsupported:
            level: Level = "note" if extra in _INTEGRATIONS else "problem"
            text = f"extra {extra}: {req.name} {installed[req.name]} is installed, and {req.specifier} is supported"
            findings.append(Finding(_GROUP, level, text, f"Run pip install '{req.name}{req.specifier}'"))
        if missing:
            text = f"extra {extra}: not installed: {', '.join(missing)}"
            advice = f"If you use this extra, run pip install {' '.join(missing)}"
            findings.append(Finding(_GROUP, "note", text, advice))
        if not unsupported and not missing:
            listed = ", ".join(f"{name} {version}" for name, version in installed.items())
            findings.append(Finding(_GROUP, "ok", f"extra {extra}: {listed}"))
    if absent:
        findings.append(Finding(_GROUP, "ok", f"extras that are not installed: {', '.join(absent)}"))
    return findings


def check_imports(modules: Iterable[str]) -> list[Finding]:
    """Import each module that is installed, to find packages that were built for another Python or numpy."""
    findings = []
    for name in modules:
        try:
            if find_spec(name) is not None:
                importlib.import_module(name)
        except Exception as error:
            text = f"importing {name} failed with {type(error).__name__}: {error}"
            findings.append(Finding(_GROUP, "problem", text, "Install the package again in this environment"))
    return findings
