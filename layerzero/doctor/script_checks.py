"""Find mistakes in a training script without running it.

[Note: Certain mistakes only]
Each check reports calls that raise or hang whenever they run. Therefore the checks follow names only within one block
of statements, in which each statement runs after the statements before it. They stop following a name when it is
assigned again, and they do not read the bodies of nested functions. In programs with ``global`` or ``nonlocal``, they
only look for calls on one rank.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from layerzero.doctor.findings import Finding

__all__ = ["check_script", "find_mistakes"]

_GROUP = "script"
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "fully_shard"}
# Functions whose documentation says that all ranks must call them.
_ALL_RANKS = {
    *(f"layerzero.{name}" for name in ("shard_model", "shard_optimizer", "init_mesh", "full_state_dict", "unsharded")),
    *(
        f"layerzero.{name}"
        for name in ("load_full_state_dict", "clip_grad_norm_", "refresh", "fingerprint", "stream_weights")
    ),
    *(
        f"layerzero.checkpoint.{name}"
        for name in ("save", "save_async", "load", "load_latest", "load_safetensors", "load_dcp")
    ),
}
# Contexts in which the state dict of a sharded model has full tensors.
_FULL_PARAMETERS = {f"layerzero.{name}" for name in ("unsharded", "gathered", "full_precision")}


class Mistake(NamedTuple):
    """Mistake in a program, with the number of its line."""

    line: int
    text: str
    fix: str


def check_script(path: Path) -> list[Finding]:
    """Return the findings about a training script."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        text = f"{path} cannot be read: {error}"
        return [Finding(_GROUP, "problem", text, "Pass the path of a Python program")]
    findings = [Finding(_GROUP, "problem", f"{path}:{line}: {text}", fix) for line, text, fix in find_mistakes(tree)]
    return findings or [Finding(_GROUP, "ok", f"{path} has none of the mistakes that this command looks for")]


def find_mistakes(tree: ast.Module) -> list[Mistake]:
    """Return the mistakes in a program, by line. See [Note: Certain mistakes only]."""
    names = _imported_names(tree)
    called = {_full_name(call.func, names) for call in ast.walk(tree) if isinstance(call, ast.Call)}
    has_full_parameters = bool(called & _FULL_PARAMETERS)
    shards_optimizer = "shard_optimizer" in ast.unparse(tree)
    assigns_elsewhere = any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(tree))
    all_mistakes = [*_calls_on_one_rank(tree, names)]
    for block in () if assigns_elsewhere else _blocks(tree):
        all_mistakes += _double_wraps(block, names)
        all_mistakes += _steps_of_wrapped_optimizers(block, names)
        for name, later in _sharded_models(block, names):
            all_mistakes += _refused_uses(name, later, names, saves=not has_full_parameters)
            all_mistakes += [] if shards_optimizer else _unsharded_optimizers(name, later, tree, names)
    return sorted(set(all_mistakes))


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full names of imported modules and functions, keyed by their names in the program."""
    names: dict[str, str] = {}
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in names.items() if name not in bound}


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of a function, such as ``torch.save``, or an empty string if it is not imported."""
    if isinstance(node, ast.Attribute):
        prefix = _full_name(node.value, names)
        return prefix and f"{prefix}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def _blocks(tree: ast.Module) -> Iterator[Sequence[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                yield block


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the nodes inside it, except functions and classes, whose bodies may run at another time."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in _walk(node) if isinstance(each, ast.Call))


def _assigned_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may assign."""
    return {each.id for each in _walk(statement) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}


def _first_argument(call: ast.Call, *keywords: str) -> str:
    """Return the name of the variable that is the first argument of a call, or an empty string."""
    candidates = [*call.args[:1], *(each.value for each in call.keywords if each.arg in keywords)]
    return candidates[0].id if candidates and isinstance(candidates[0], ast.Name) else ""


def _only_call(statement: ast.stmt) -> ast.Call | None:
    """Return the call in a statement ``f(...)`` or ``x = f(...)``, or None for other statements."""
    value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    return value if isinstance(value, ast.Call) else None


def _sharded_models(block: Sequence[ast.stmt], names: dict[str, str]) -> Iterator[tuple[str, Sequence[ast.stmt]]]:
    """Yield each variable to which a sharded model is assigned, and the statements up to its next assignment."""
    for index, statement in enumerate(block):
        call = _only_call(statement)
        if call is not None and _full_name(call.func, names) == "layerzero.shard_model":
            for name in (_assigned_names(statement) | {_first_argument(call, "module", "model")}) - {""}:
                following = block[index + 1 :]
                end = next(
                    (i for i, later_statement in enumerate(following) if name in _assigned_names(later_statement)),
                    len(following),
                )
                yield name, following[:end]


def _double_wraps(block: Sequence[ast.stmt], names: dict[str, str]) -> Iterator[Mistake]:
    """Yield calls that shard a model that has a wrapper, or wrap a model that is sharded."""
    wrapped: dict[str, str] = {}  # wrapper by variable
    for statement in block:
        call = _only_call(statement)
        kind = _wrapper(call, names)
        targets = _assigned_names(statement)
        if call is not None and kind:
            model = _first_argument(call, "module", "model")
            earlier = wrapped.get(model) or _wrapper(next(iter(call.args), None), names)
            ignores = any(each.arg == "ignored_modules" for each in call.keywords)
            if earlier and (earlier == "shard_model") is not (kind == "shard_model") and not ignores:
                subject = f"{model}, which" if model else "a model that"
                text = f"{kind} is called for {subject} {earlier} already manages, and layerzero refuses such a model"
                yield Mistake(call.lineno, text, "Keep shard_model, and remove the other wrapper")
            if kind in {"shard_model", "fully_shard"} and model:  # these change the model itself
                targets = targets | {model}
            wrapped |= dict.fromkeys(targets, kind)
        else:
            for name in targets:
                wrapped.pop(name, None)


def _wrapper(node: ast.expr | None, names: dict[str, str]) -> str:
    """Return the name of the wrapper that an expression calls, such as ``shard_model``, or an empty string."""
    full = _full_name(node.func, names) if isinstance(node, ast.Call) else ""
    kind = full.rpartition(".")[2]
    is_wrapper = full == "layerzero.shard_model" or (full.startswith("torch.") and kind in _WRAPPERS)
    return kind if is_wrapper else ""


def _refused_uses(name: str, following: Sequence[ast.stmt], names: dict[str, str], *, saves: bool) -> Iterator[Mistake]:
    """Yield a mistake for each call that copies the sharded model `name` or loads it with ``assign=True``.

    If `saves` is True, also yield one for each ``torch.save`` of its state dict.
    """
    for call in (call for statement in following for call in _calls(statement)):
        full = _full_name(call.func, names)
        values = [
            each for argument in call.args[:1] for each in _literal_values(argument) if isinstance(each, ast.Call)
        ]
        if saves and full == "torch.save" and any(_method_call(each) == (name, "state_dict") for each in values):
            text = f"torch.save of {name}.state_dict(): a rank has only some rows of each parameter"
            fix = f"Call layerzero.full_state_dict({name}) on all ranks, or use layerzero.checkpoint.save"
            yield Mistake(call.lineno, text, fix)
        if full == "copy.deepcopy" and _first_argument(call, "x") == name:
            yield Mistake(call.lineno, f"copy.deepcopy of {name}, which is sharded", "Copy it before shard_model")
        assigns = any(each.arg == "assign" and ast.unparse(each.value) == "True" for each in call.keywords)
        if assigns and _method_call(call) == (name, "load_state_dict"):
            text = f"{name}.load_state_dict(assign=True) would replace sharded parameters"
            fix = f"Remove assign=True, or call layerzero.load_full_state_dict({name}, state)"
            yield Mistake(call.lineno, text, fix)


def _literal_values(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the values inside a dict, list or tuple literal, or the expression itself if it is no such literal."""
    elements = node.values if isinstance(node, ast.Dict) else getattr(node, "elts", None)
    if elements is None:
        yield node
    else:
        for element in elements:
            yield from _literal_values(element)


def _steps_of_wrapped_optimizers(block: Sequence[ast.stmt], names: dict[str, str]) -> Iterator[Mistake]:
    """Yield a mistake for each step of an optimizer that ``shard_optimizer`` has already wrapped.

    Also yield one for each call to ``shard_optimizer`` whose result is discarded.
    """
    of_torch: set[str] = set()  # variables with an optimizer of torch, whose step always runs the hook that refuses it
    for index, statement in enumerate(block):
        call = _only_call(statement)
        assigned = _assigned_names(statement)
        if call is not None and _full_name(call.func, names) == "layerzero.shard_optimizer":
            optimizer = _first_argument(call, "optimizer")
            step = _first_step(optimizer, block[index + 1 :]) if optimizer and optimizer not in assigned else None
            if step is not None and isinstance(statement, ast.Expr):
                text = f"the result of shard_optimizer is not used, and {optimizer}.step() steps the wrapped optimizer"
                yield Mistake(call.lineno, text, f"Write {optimizer} = layerzero.shard_optimizer({optimizer}, ...)")
            elif step is not None and isinstance(statement, ast.Assign) and optimizer in of_torch:
                result = ast.unparse(statement.targets[0])
                text = f"{optimizer}.step() steps the wrapped optimizer, not {result}, the result of shard_optimizer"
                yield Mistake(step.lineno, text, f"Call {result}.step()")
        of_torch -= set(assigned)
        if call is not None and _full_name(call.func, names).startswith("torch.optim."):
            of_torch |= set(assigned)


def _unsharded_optimizers(
    name: str, following: Sequence[ast.stmt], tree: ast.Module, names: dict[str, str]
) -> Iterator[Mistake]:
    """Yield a mistake for each optimizer that steps parameters of the sharded model `name`.

    Call this function only if the program never calls ``shard_optimizer``.
    """
    for index, statement in enumerate(following):
        call = _only_call(statement)
        if call is None or not _full_name(call.func, names).startswith("torch.optim."):
            continue
        if all(_method_call(inner_call) != (name, "parameters") for inner_call in _calls(call)):
            continue
        for optimizer in _assigned_names(statement):
            if _never_escapes(optimizer, tree, names) and _first_step(optimizer, following[index + 1 :]):
                text = f"{optimizer} updates the parameters of {name}, which is sharded"
                fix = f"Write {optimizer} = layerzero.shard_optimizer({optimizer}, {name})"
                yield Mistake(call.lineno, text, fix)


def _never_escapes(optimizer: str, tree: ast.Module, names: dict[str, str]) -> bool:
    """Return whether a program uses an optimizer only through its attributes and in calls to torch and layerzero."""
    allowed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if _full_name(call.func, names).startswith(("torch.", "layerzero.")):  # the program never calls shard_optimizer
            allowed |= {id(node) for node in call.args}
    uses = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == optimizer)
    return all(id(node) in allowed for node in uses if isinstance(node.ctx, ast.Load))


def _first_step(optimizer: str, following: Sequence[ast.stmt]) -> ast.Call | None:
    """Return the first call to ``step`` of an optimizer, or None if the variable is assigned again before it."""
    for statement in following:
        if optimizer in _assigned_names(statement):
            return None
        for call in _calls(statement):
            if _method_call(call) == (optimizer, "step"):
                return call
    return None


def _calls_on_one_rank(tree: ast.Module, names: dict[str, str]) -> Iterator[Mistake]:
    """Yield calls under a condition such as ``rank == 0`` to functions that all ranks must call."""
    assigned = _assigned_values(tree)
    ranks = {name for name, values in assigned.items() if all(_reads_rank(value, names) for value in values)}
    flags = {name for name, values in assigned.items() if all(_is_one_rank(value, ranks, names) for value in values)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.If):
            continue
        if not _is_one_rank(node.test, ranks, names) and not _is_variable(node.test, flags):
            continue
        elsewhere = {_full_name(call.func, names) for statement in node.orelse for call in _calls(statement)}
        for call in (call for statement in node.body for call in _calls(statement)):
            full = _full_name(call.func, names)
            if full in _ALL_RANKS - elsewhere:
                text = f"{full} is called under `if {ast.unparse(node.test)}:`, but it waits for the other ranks"
                yield Mistake(call.lineno, text, "Call it on all ranks, and keep only prints and writes under the if")


def _assigned_values(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """Return the values assigned to each variable. Omit variables that get values elsewhere, as in a loop or a call."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for variable, assigned in pairs:
            if isinstance(variable, ast.Name):
                values.setdefault(variable.id, []).append(assigned)
    stored_names = [
        each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]
    parameters = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    return {n: found for n, found in values.items() if len(found) == stored_names.count(n) and n not in parameters}


def _is_one_rank(test: ast.expr, ranks: set[str], names: dict[str, str]) -> bool:
    """Return whether a condition is ``rank == 0``, with any number and any expression for the rank, or ``not rank``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_variable(test.operand, ranks) or _reads_rank(test.operand, names)
    if not isinstance(test, ast.Compare) or len(test.comparators) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    number = test.comparators[0]
    is_number = isinstance(number, ast.Constant) and isinstance(number.value, int)
    return is_number and (_is_variable(test.left, ranks) or _reads_rank(test.left, names))


def _is_variable(node: ast.expr, variables: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in variables


def _reads_rank(node: ast.expr, names: dict[str, str]) -> bool:
    """Return whether an expression is ``torch.distributed.get_rank()``, or ``int()`` of RANK or LOCAL_RANK."""
    if not isinstance(node, ast.Call):
        return False
    if _full_name(node.func, names) == "torch.distributed.get_rank":
        return not node.args and not node.keywords
    texts = {f"int(os.environ['{name}'])" for name in ("RANK", "LOCAL_RANK")}
    return ast.unparse(node) in texts


def _method_call(call: ast.Call) -> tuple[str, str]:
    """Return the variable and the method of a call such as ``model.state_dict()``, or two empty strings."""
    func = call.func
    return (
        (func.value.id, func.attr) if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ("", "")
    )
