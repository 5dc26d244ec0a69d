"""``layerzero/utils/torch_compat.py`` is the only module of the package that names private parts of torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from benchmarks.code_size import PACKAGE
from layerzero.utils import torch_compat

COMPAT = PACKAGE / "utils" / "torch_compat.py"
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")


def _names_of_torch(tree: ast.AST) -> dict[str, str]:
    """Return the dotted names of torch that a file imports, by the name that the file gives them."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in names.items() if full.partition(".")[0] == "torch"}


def _dotted(node: ast.expr) -> str:
    """Return the dotted name that an expression is, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _private_names(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    imported = _names_of_torch(tree)
    yield from filter(PRIVATE.fullmatch, imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = _dotted(node).partition(".")
            full = f"{imported.get(root, '')}.{rest}"
            if PRIVATE.fullmatch(full):
                yield full
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            yield node.value


def test_no_other_module_names_a_private_part_of_torch() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path != COMPAT
        for name in _private_names(path.read_text(encoding="utf-8"))
    }
    assert not wrong, "name it in utils/torch_compat.py, with the reason"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("from torch.fsdp import _Policy as Policy", ["torch.fsdp._Policy"]),
        ("import torch.distributed as dist\ndist.c10d._world", ["torch.distributed.c10d._world"]),
        ("import torch\ntorch._foreach_mul_([], 2)", ["torch._foreach_mul_"]),
        ("name = 'torch._dynamo'", ["torch._dynamo"]),
        ("import torch\ntorch.ones(1)._version\n'see torch._dynamo'\ntorch.__future__.x", []),
        ("import layerzero\nlayerzero._ADD_ONS", []),
    ],
)
def test_each_form_of_a_private_name_is_found(source: str, found: list[str]) -> None:
    assert [*_private_names(source)] == found


def test_all_private_names_exist_in_this_version_of_torch() -> None:
    assert all(hasattr(torch_compat, name) for name in torch_compat.__all__)
    assert torch_compat.unflatten_state_dict(*torch_compat.flatten_state_dict({"a": {"b": 1}})) == {"a": {"b": 1}}
    assert torch_compat.module_call_code().co_name == "_call_impl"
    assert not torch_compat.is_profiling()
    assert not torch_compat.is_known_group(None)
    tables = ("pg_map", "pg_names", "pg_to_tag", "tags_to_pg", "pg_group_ranks", "pg_backend_config")
    assert all(hasattr(dist.distributed_c10d._world, table) for table in tables)
