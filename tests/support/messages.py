"""All messages of the package, from its source: what docs/troubleshooting.md lists.

A message is the text that an exception, a warning or a line of the log at WARNING or above is made with, of four words
or more. Where the text is put together, what is not known before it happens is an ellipsis; where it comes from a
function or a constant of the package, its texts are taken. And it is any other text of six words or more that goes on
after a colon, a semicolon or a full stop, as those do that say a way out: some come to their exception by ways that are
not followed here. Docstrings, help of the command line and what is logged at INFO are none.

    python -m tests.support.messages      writes the list of docs/troubleshooting.md anew: `make messages`
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- messages: written by `make messages` -->", "<!-- end of messages -->"

UNKNOWN = "…"
LOGGED = {"warning", "error", "exception", "critical"}
SHORTEST, SHORTEST_ANYWHERE = 4, 6  # words
PAGES = {"plan_plots"}  # modules that write pages
NO_TROUBLE = {"info", "debug", "Option", "Argument", "add_argument", "field", "echo"}

# The folders of the package, and what a reader was doing who sees a message of theirs; what is not here comes last.
DOING = {
    "setup": "Sharding a model",
    "config": "Settings",
    "layout": "Sharding a model",
    "comm": "Ranks and exchanges",
    "storage": "Ranks and exchanges",
    "engine": "Forwards and backwards",
    "tensors": "Sharded parameters",
    "views": "Whole parameters, states and reports",
    "optimizers": "Optimizers",
    "checkpoint": "Checkpoints",
    "reliability": "Guards",
    "verification": "layerzero.verify",
    "planning": "layerzero.plan",
    "integrations": "Accelerate, Transformers, Lightning",
    "megatron": "Megatron",
}


class _Texts:
    """What strings the functions and constants of the package stand for."""

    def __init__(self, trees: dict[Path, ast.Module]) -> None:
        self._functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        self._constants: dict[str, list[ast.expr]] = defaultdict(list)
        self._busy: set[int] = set()
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self._functions[node.name].append(node)
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._constants[node.targets[0].id].append(node.value)

    def of(self, node: ast.expr, around: ast.FunctionDef | None) -> list[str]:
        """All that an expression may read as."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else [UNKNOWN]
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else UNKNOWN for part in node.values]
            return ["".join(map(str, parts))]
        if isinstance(node, ast.IfExp):
            return [*self.of(node.body, around), *self.of(node.orelse, around)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [a + b for a in self.of(node.left, around) for b in self.of(node.right, around)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self.of(node.left, around)
        if isinstance(node, ast.Name):
            return self._of_name(node.id, around)
        if isinstance(node, ast.Call):
            return self._of_call(node, around)
        return [UNKNOWN]

    def _of_name(self, name: str, around: ast.FunctionDef | None) -> list[str]:
        given = [
            node.value
            for node in (ast.walk(around) if around else ())
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        ]
        return self._once(given or self._constants.get(name, []), around)

    def _of_call(self, node: ast.Call, around: ast.FunctionDef | None) -> list[str]:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in {"format", "removeprefix", "strip"} and isinstance(node.func, ast.Attribute):
            return self.of(node.func.value, around)
        if called in {"str", "printable"} and node.args:
            return self.of(node.args[0], around)
        texts: list[str] = []
        for function in self._functions.get(called, []):
            returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
            texts += self._once([value for value in returned if _is_text(value)], function)
        return texts or [UNKNOWN]

    def _once(self, nodes: list[ast.expr], around: ast.FunctionDef | None) -> list[str]:
        texts: list[str] = []
        for node in nodes:
            if id(node) not in self._busy:
                self._busy.add(id(node))
                texts += self.of(node, around)
                self._busy.discard(id(node))
        return texts or [UNKNOWN]


def _is_text(node: ast.expr) -> bool:
    """Of a function of some name that returns anything, the texts count."""
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    return isinstance(node, ast.JoinedStr | ast.BinOp | ast.Name) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _spoken(node: ast.Call, errors: set[str]) -> ast.expr | None:
    """The text of a call that makes an exception, warns or logs."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    logs = name in LOGGED and isinstance(owner, ast.Name) and owner.id in {"_log", "log", "logger"}
    if not node.args or not (name in errors or logs or name in {"warn", "_refuse"}):
        return None
    return node.args[0]


def tidy(text: str) -> str:
    text = re.sub(r"%[-+.\d]*[sdfr]|\{[\w.!:]*\}", UNKNOWN, text)
    text = re.sub(rf"{UNKNOWN}+", UNKNOWN, " ".join(text.split()))
    return re.sub(r"'…'|\"…\"", UNKNOWN, text).strip()


def is_message(text: str, shortest: int = SHORTEST) -> bool:
    return len(re.findall(r"[A-Za-z_]{2,}", text)) >= shortest


def _goes_on(text: str) -> bool:
    """Of a text that is not seen to be spoken: that it says what is wrong, and more."""
    return is_message(text, SHORTEST_ANYWHERE) and bool(re.search(r"[;:.] |:$|^layerzero: ", text))


def _elsewhere(tree: ast.Module) -> list[str]:
    """All texts of a module that may reach a user some way."""
    silent: set[int] = set()
    for node in ast.walk(tree):
        called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if called in NO_TROUBLE:
            silent |= {id(part) for part in ast.walk(node)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent.add(id(node.value))  # a docstring
        elif isinstance(node, ast.JoinedStr):
            silent |= {id(part) for part in ast.walk(node) if part is not node}
    texts = []
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        if isinstance(node, ast.JoinedStr):
            texts.append(
                "".join(str(part.value) if isinstance(part, ast.Constant) else UNKNOWN for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


@functools.cache
def collect(package: Path = ROOT / "layerzero") -> dict[str, set[str]]:
    """Messages by what a reader was doing."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    texts = _Texts(trees)
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors = {name for name in vars(builtins) if name.endswith(("Error", "Exception", "Warning"))}
    for _ in range(3):  # exceptions of exceptions of the package
        errors |= {c.name for c in classes if any(getattr(base, "id", "") in errors for base in c.bases)}
    errors -= {"AssertionError"}  # for ourselves
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        parts = path.relative_to(package).parts
        doing = DOING.get(parts[0], "Command line")
        around: dict[int, ast.FunctionDef] = {}
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                around |= {id(node): function for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (spoken := _spoken(node, errors)) is not None:
                said = map(tidy, texts.of(spoken, around.get(id(node))))
                found[doing] |= {text for text in said if is_message(text)}
    spoken_somewhere = [text for texts_ in found.values() for text in texts_]
    for path, tree in trees.items():
        if path.stem in PAGES:
            continue
        further = {text for text in map(tidy, _elsewhere(tree)) if _goes_on(text)}
        doing = DOING.get(path.relative_to(package).parts[0], "Command line")
        found[doing] |= {text for text in further if not any(text in other for other in spoken_somewhere)}
    return found


def listed(found: dict[str, set[str]]) -> str:
    """The list of the page."""
    order = [*dict.fromkeys(DOING.values()), "Command line"]
    lines: list[str] = []
    for doing in order:
        if found.get(doing):
            lines += [f"### {doing}", ""]
            lines += [
                f"- {_as_code(text)}" for text in sorted(found[doing], key=lambda text: text.lstrip("… ").lower())
            ]
            lines.append("")
    return "\n".join(lines)


def _as_code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def written(page: str) -> str:
    """The page with its list made anew."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{listed(collect())}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
