"""Settings of mkdocs in addition to mkdocs.yml: pages that are made from files elsewhere in the repository.

- The first page is README.md; CHANGELOG.md and others of the root are pages, too.
- Examples that a page links to are pages with their source.
- The API reference names what ``layerzero.__all__`` does, and mkdocstrings takes the text from docstrings.
- Comments for the tests of snippets (tests/support/pages.py) are left out.
- The footer of each page shows the version of the package.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = {"index.md": "README.md", **{name: name for name in ROOT_PAGES}}
AS_SOURCE = {"LICENSE": "text", "CITATION.cff": "yaml"}
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}

# Everything public, in the order in which a reader meets it.
API = {
    "Sharding": [
        "shard_model",
        "shard_optimizer",
        "ShardedOptimizer",
        "init_mesh",
        "mesh_from_groups",
        "LayerZeroConfig",
    ],
    "In the loop": ["no_sync", "clip_grad_norm_", "register_forward_method", "refresh", "EMA"],
    "Full parameters and states": ["unsharded", "full_state_dict", "load_full_state_dict"],
    "Checkpoints": [
        "checkpoint.save",
        "checkpoint.save_async",
        "checkpoint.load",
        "checkpoint.load_latest",
        "checkpoint.latest",
        "checkpoint.per_rank",
        "checkpoint.random_states",
        "checkpoint.set_random_states",
        "checkpoint.on_signal",
        "checkpoint.load_safetensors",
        "checkpoint.load_dcp",
        "checkpoint.reader",
        "checkpoint.Chain",
        "checkpoint.PendingSave",
        "checkpoint.Resumed",
        "checkpoint.LeaveRequest",
        "checkpoint.CheckpointError",
    ],
    "Optimizers": ["optimizers.adamw", "optimizers.sgd"],
}
REST = "Reports, guards and checks"
# Of what torch's optimizers have, what users call; the rest of the class is for the package.
MEMBERS = {
    "LayerZeroConfig": ["from_yaml", "arguments"],
    "ShardedOptimizer": [
        "step",
        "zero_grad",
        "param_groups",
        "state",
        "state_dict",
        "state_dict_by_name",
        "full_state_dict",
        "load_state_dict",
        "add_param_group",
    ],
}

_FOR_TESTS = re.compile(r"<!--\s*(?:before|after|ranks:|needs:|write:|not run:).*?-->\n?", re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Show the version in the footer, and list pages that the menu does not name under More."""
    config.copyright = f"layerzero {_assigned('layerzero', '__version__')}"
    named = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    if further := [page for page in pages if f": {page}\n" not in named]:
        config.nav.append({"More": further})
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text("utf-8"), up="")))
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in LANGUAGES]
    sources = {*AS_SOURCE, *(path.relative_to(ROOT).as_posix() for path in examples)}
    for source in sorted(sources):
        text = (ROOT / source).read_text("utf-8")
        language = AS_SOURCE.get(source) or LANGUAGES[Path(source).suffix]
        page = f"---\nsearch: {{exclude: true}}\n---\n# {Path(source).name}\n\n````{language}\n{text}````\n"
        files.append(File.generated(config, f"{source}.md", content=page))
    files.append(File.generated(config, "api.md", content=_api()))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles of docstrings, such as ``:func:``. The name in the backticks is enough."""
    return re.sub(r":(?:func|class|meth|mod|attr|exc|data):(?=\s*<code)", "", html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = _FOR_TESTS.sub("", markdown)
    if page.file.src_uri in PAGES or page.file.generated_by:
        return markdown
    return _moved(markdown, up="../" * (1 + page.file.src_uri.count("/")))


def _moved(markdown: str, up: str) -> str:
    """Links to files of the repository become links to their pages; `up` leads from a page of docs/ to the root."""

    def page_of(match: re.Match[str]) -> str:
        target = match[1]
        if up and not target.startswith(up):
            return target  # next to it, in docs/
        inside = target.removeprefix(up)
        here = up.removeprefix("../")
        if inside == "README.md":
            return f"{here}index.md"
        if inside.startswith("docs/"):
            return here + inside.removeprefix("docs/")
        return here + (inside if inside.endswith(".md") else f"{inside}.md")

    return _LINK.sub(page_of, markdown)


def _api() -> str:
    sections = {title: list(names) for title, names in API.items()}
    for title, package in (("Checkpoints", "checkpoint"), ("Optimizers", "optimizers")):  # new names come last
        names = {f"{package}.{name}" for name in _public(f"layerzero/{package}")}
        sections[title] += sorted(names - set(sections[title]), key=str.lower)
    public = {name for name in _public("layerzero") if not (ROOT / "layerzero" / name).is_dir()}
    grouped = {name for names in sections.values() for name in names}
    sections[REST] = sorted(public - grouped, key=str.lower)
    lines = ["# API", "", "Everything in `layerzero`, from its docstrings.", ""]
    for title, names in sections.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"::: {_where(name)}", *_options(name), ""]
    return "\n".join(lines)


def _options(name: str) -> list[str]:
    """Classes show their public methods and properties; under the name by which users know a thing."""
    last = name.rpartition(".")[2]
    options = ["    options:", f'      heading: "layerzero.{name}"']
    if name in MEMBERS:
        options.append(f"      members: {MEMBERS[name]}")
    elif last[0].isupper():
        options += ["      members: null", '      filters: ["!^_"]']
    options.append("      show_bases: false")
    return options


def _public(package: str) -> set[str]:
    return set(_assigned(package, "__all__"))


def _assigned(package: str, name: str) -> Any:
    """The literal that a package assigns to a name."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text("utf-8"))
    (value,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == name]
    return ast.literal_eval(value)


def _where(name: str) -> str:
    """The module that defines a public name, whose docstring is shown."""
    package, _, last = f"layerzero.{name}".rpartition(".")
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == last for alias in node.names):
            return f"{node.module}.{last}"
    return f"{package}.{last}"
