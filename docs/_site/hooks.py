"""Settings of mkdocs in addition to mkdocs.yml: pages that are made from files elsewhere in the repository.

- The first page is README.md; CHANGELOG.md and others of the root are pages, too.
- Examples and other sources that a page links to are pages with their source; so are pages of benchmarks.
- The API reference has a page for each topic of ``API``, and mkdocstrings takes the text from docstrings.
- A link whose text is a file name shows the title of the page instead. Links to files of data become plain text.
- A part between ``<!-- tabs -->`` and ``<!-- end of tabs -->`` becomes tabs; each bold line is the title of a tab.
- Comments for the tests of snippets (tests/support/pages.py) are left out.
- The header and the footer of each page show the version of the package.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = {"index.md": "README.md", **{name: name for name in ROOT_PAGES}}
AS_SOURCE = {"LICENSE": "text", "CITATION.cff": "yaml", "layerzero/reference.py": "python"}
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}

# Public names of `layerzero` by page. Each other package has a page of its own; see `_topics`.
API = {
    "Sharding": [
        "shard_model",
        "shard_optimizer",
        "ShardedOptimizer",
        "LayerZeroConfig",
        "init_mesh",
        "mesh_from_groups",
        "close",
        "units",
        "UnitList",
        "UnitInfo",
        "UnitParameter",
        "GatherCodec",
        "Float8Rows",
        "Int4Blocks",
        "Int8Blocks",
        "Int4Difference",
    ],
    "Training loop": [
        "no_sync",
        "clip_grad_norm_",
        "register_forward_method",
        "refresh",
        "gathered",
        "EMA",
        "outer",
        "OuterSteps",
    ],
    "Full parameters": ["unsharded", "full_state_dict", "load_full_state_dict", "full_precision"],
    "Inference": ["stream_weights", "WeightSender", "WeightReceiver", "WeightPacketError"],
    "Reports": ["memory", "MemoryReport", "traffic", "TrafficReport", "trace"],
}
REST = "Guards and checks"  # all other public names of `layerzero`
PACKAGES = {"Checkpoints": "checkpoint", "Optimizers": "optimizers", "Planning": "planning", "Megatron": "megatron"}
INTEGRATIONS = {
    "Accelerate": ["accelerate"],
    "Transformers": ["transformers"],  # the first also has the public name of `pretrained`
    "Lightning and Fabric": ["lightning", "fabric"],
    "torchtitan": ["torchtitan"],
}
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
_FILE_AS_TEXT = re.compile(r"\[[\w/.-]+\.(?:md|py)\](?=\(([^)#\s]+))")
_DATA = re.compile(r"\[([^\]\n]+)\]\([^)\s]+\.json\.md\)")
_PAGE_IN_DOCSTRING = re.compile(r"(?:<code>)?\bdocs/([\w/-]+\.md)(?:</code>)?")
_TABS = re.compile(r"<!-- tabs -->\n(.*?)<!-- end of tabs -->\n", re.DOTALL)


def on_config(config: Any) -> Any:
    """Show the version in the header and the footer, and list pages that the menu does not name under More."""
    config.site_name = f"layerzero {_assigned('layerzero', '__version__')}"
    config.copyright = config.site_name
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
    for path in sorted((ROOT / "benchmarks").rglob("*.md")):
        page = f"---\nsearch: {{exclude: true}}\n---\n{path.read_text('utf-8').replace('../../docs/', '../../')}"
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=page))
    topics = _topics()
    for title, sections in topics.items():
        files.append(File.generated(config, f"api/{_slug(title)}.md", content=_api_page(title, sections)))
    files.append(File.generated(config, "api/index.md", content=_api_index(topics)))
    return files


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """Change docstrings: remove roles, such as ``:func:``, and replace names of pages by links."""
    html = re.sub(r":(?:func|class|meth|mod|attr|exc|data):(?=\s*<code)", "", html)
    if not page.file.src_uri.startswith("api/"):
        return html

    def linked(match: re.Match[str]) -> str:
        target = files.get_file_from_path(match[1])
        assert target is not None, f"{page.file.src_uri} names docs/{match[1]}, which does not exist"
        return f'<a href="{target.url_relative_to(page.file)}">{_title(target.content_string)}</a>'

    return _PAGE_IN_DOCSTRING.sub(linked, html)


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    markdown = _TABS.sub(_as_tabs, _FOR_TESTS.sub("", markdown))
    if page.file.src_uri not in PAGES and not page.file.generated_by:
        markdown = _moved(markdown, up="../" * (1 + page.file.src_uri.count("/")))
    markdown = _DATA.sub(r"`\1`", markdown)
    here = Path("/", page.file.src_uri).parent

    def titled(match: re.Match[str]) -> str:
        target = files.get_file_from_path((here / match[1]).resolve().relative_to("/").as_posix())
        return match[0] if target is None else f"[{_title(target.content_string)}]"

    return _FILE_AS_TEXT.sub(titled, markdown)


def _title(markdown: str) -> str:
    """Return the text of the first heading."""
    return re.search(r"^# (.+)$", markdown, re.MULTILINE)[1]


def _as_tabs(part: re.Match[str]) -> str:
    pieces = re.split(r"^\*\*(.+)\*\*\n", part[1], flags=re.MULTILINE)[1:]
    return "".join(
        f'=== "{title}"\n{indent(text, "    ")}' for title, text in zip(pieces[::2], pieces[1::2], strict=True)
    )


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


def _topics() -> dict[str, dict[str, list[str]]]:
    """Return the public names by page of the API reference, and by section of the page."""
    public = {name for name in _public("layerzero") if not (ROOT / "layerzero" / name).is_dir()}
    packages = {title: _public(f"layerzero/{package}") for title, package in PACKAGES.items()}
    elsewhere = set().union(*API.values(), *packages.values())
    pages = {**API, REST: sorted(public - elsewhere, key=_rank)}
    for title, names in packages.items():  # layerzero.planning.plan is layerzero.plan
        pages[title] = [name if name in public else f"{PACKAGES[title]}.{name}" for name in sorted(names, key=_rank)]
    topics = {title: {"": names} for title, names in pages.items()}
    topics["Integrations"] = {
        framework: [f"integrations.{module}.{name}" for module in modules for name in _integration(module)]
        for framework, modules in INTEGRATIONS.items()
    }
    return topics


def _rank(name: str) -> tuple[bool, str]:
    """Sort functions before classes."""
    return name[0].isupper(), name.lower()


def _integration(module: str) -> list[str]:
    return sorted(_public(f"layerzero/integrations/{module}"), key=_rank)


def _api_index(topics: dict[str, dict[str, list[str]]]) -> str:
    lines = ["# API reference", "", "All public names by topic. The text of each page comes from docstrings.", ""]
    lines += ["| topic | names |", "| --- | --- |"]
    for title, sections in topics.items():
        names = [f"[`{name}`]({_slug(title)}.md#{_where(name)})" for names in sections.values() for name in names]
        lines.append(f"| [{title}]({_slug(title)}.md) | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def _api_page(title: str, sections: dict[str, list[str]]) -> str:
    lines = [f"# {title}", ""]
    for section, names in sections.items():
        lines += [f"## {section}", ""] if section else []
        for name in names:
            lines += [f"::: {_where(name)}", *_options(name, level=3 if section else 2), ""]
    return "\n".join(lines)


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _options(name: str, level: int) -> list[str]:
    """Classes show their public methods and properties; under the name by which users know a thing."""
    last = name.rpartition(".")[2]
    options = ["    options:", f'      heading: "layerzero.{name}"', f"      heading_level: {level}"]
    if name in MEMBERS:
        options.append(f"      members: {MEMBERS[name]}")
    elif last[0].isupper():
        options += ["      members: null", '      filters: ["!^_"]']
    options.append("      show_bases: false")
    return options


def _public(package: str) -> set[str]:
    return set(_assigned(package, "__all__"))


def _assigned(module: str, name: str) -> Any:
    """The literal that a package or a file assigns to a name."""
    (value,) = [n.value for n in _parsed(module).body if isinstance(n, ast.Assign) and _target(n) == name]
    return ast.literal_eval(value)


def _target(node: ast.Assign) -> str:
    return getattr(node.targets[0], "id", "")


def _parsed(module: str) -> ast.Module:
    path = ROOT / module
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))


def _where(name: str) -> str:
    """The module that defines a public name, whose docstring is shown."""
    package, _, last = f"layerzero.{name}".rpartition(".")
    for node in _parsed(package.replace(".", "/")).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == last for alias in node.names):
            return f"{node.module}.{last}"
    return f"{package}.{last}"
