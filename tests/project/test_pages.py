"""Every snippet of README and docs runs unchanged; every command in them exists."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest
import typer
from torch.distributed.run import get_args_parser

from layerzero.cli import app
from tests.support.pages import PAGES, ROOT, Page, read_page, run_page
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

ALL = {path.relative_to(ROOT).as_posix(): read_page(path) for path in PAGES}
WITH_PYTHON = [name for name, page in ALL.items() if page.snippets("python")]

# Snippets that need GPUs or third-party checkouts: their number by page. A page with another such snippet raises its
# number here.
NOT_RUN = {"docs/megatron.md": 1, "docs/optimizers.md": 2}


@pytest.mark.parametrize("name", [name for name in WITH_PYTHON if not ALL[name].needs])
def test_snippets_run(name: str) -> None:
    run_everywhere(ALL[name])


def run_everywhere(page: Page) -> None:
    missing = [package for package in page.needs if find_spec(package) is None]
    if missing:
        pytest.skip(
            f"needs {', '.join(missing)}: pip install --no-deps -r requirements-loops.txt -r requirements-megatron.txt"
        )
    expected = len(page.snippets("python")) - len(page.left_out())
    assert run_ranks(run_page, page, world_size=page.ranks, timeout=240) == [expected] * page.ranks


def test_what_is_not_run_has_a_reason_and_is_counted() -> None:
    assert all(len(piece.text) > 20 for page in ALL.values() for piece in page.left_out())
    assert {name: len(page.left_out()) for name, page in ALL.items() if page.left_out()} == NOT_RUN


# Commands: in a block without a language or in a shell block, and between backticks.
COMMAND = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:python -m|layerzero(?= +(?:--)?[a-z])|make|torchrun) .+)$")
INLINE = re.compile(r"`((?:python -m|layerzero|make|torchrun) [^`]+)`")
LANGUAGES = ("text", "bash", "sh", "console")


def _commands() -> list[tuple[str, str]]:
    found = []
    for path in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        page = read_page(path)
        lines = [line for piece in page.snippets(*LANGUAGES) for line in piece.text.replace("\\\n", " ").splitlines()]
        told = [match[1] for line in lines if (match := COMMAND.match(line))]
        told += [" ".join(text.split()) for text in INLINE.findall(path.read_text(encoding="utf-8"))]
        found += [(page.name, command) for command in told]
    return found


OTHERS = {"torchtitan"}  # packages with commands in the docs


def wrong_with(command: str) -> str | None:
    """Return why a command is wrong; None if it is right."""
    words = [word for word in shlex.split(command, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    program, *rest = words
    if program == "make":
        return None if set(rest) <= TARGETS else "no such target"
    if program == "torchrun":
        return _wrong_launch(rest)
    if program == "python":
        program, rest = rest[1], rest[2:]
    if program == "layerzero":
        return _wrong_usage(rest)
    if not (ROOT / program.split(".")[0]).exists():  # from another project
        package = program.split(".")[0]
        if package in OTHERS and find_spec(package) is None:
            return None  # not in this repository
        return None if find_spec(package) and find_spec(program) else "no such module"
    return None if (ROOT / f"{program.replace('.', '/')}.py").is_file() or _is_package(program) else "no such module"


def _is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__main__.py").is_file()


def _wrong_launch(rest: list[str]) -> str | None:
    try:
        given = get_args_parser().parse_args(rest)
    except SystemExit:
        return "torchrun has no such options"
    if given.module:
        return wrong_with(shlex.join(["python", "-m", given.training_script, *given.training_script_args]))
    mine = given.training_script == "train.py"  # from the reader
    return None if mine or (ROOT / given.training_script).is_file() else "no such program"


(USAGE_ERROR,) = typer.BadParameter.__bases__  # from the click that typer includes


def _wrong_usage(rest: list[str]) -> str | None:
    commands = typer.main.get_command(app).commands
    name, *arguments = rest
    if name in ("--help", "--version"):
        return None
    if name not in commands:
        return f"no such command: {name}"
    if arguments:
        try:
            commands[name].make_context(name, arguments)
        except USAGE_ERROR as error:
            return error.format_message()
    return None


MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())


def test_every_command_exists_with_its_options() -> None:
    told = _commands()
    assert [(page, command, why) for page, command in told if (why := wrong_with(command))] == []
    assert len(told) > 50


def test_the_readme_is_short_and_code_is_at_most_78_columns_wide() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 1200 and len(lines := readme.splitlines()) <= 130 and max(map(len, lines)) <= 120
    shown = [(name, line) for name, page in ALL.items() for piece in page.pieces for line in piece.shown.splitlines()]
    assert [(name, line) for name, line in shown if len(line) > 78] == []
