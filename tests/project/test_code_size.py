"""The counts of benchmarks/code_size.py on a text whose counts are known."""

from __future__ import annotations

import ast

from benchmarks.code_size import CORE, PACKAGE, code_lines, complexity

SOURCE = '''"""A docstring
of two lines."""

import os  # a comment after code counts as code


# a comment alone
def first(values):
    """Return something."""
    text = """a string that is a value
    counts on each line"""

    def inner(value):
        return value or text

    return [each for each in values if each and (each.a or each.b)] if values else inner(values)
'''


def test_blanks_comments_and_docstrings_are_no_code_lines() -> None:
    assert code_lines(SOURCE) == {4, 8, 10, 11, 13, 14, 16}


def test_complexity_counts_decisions_but_not_those_of_inner_functions() -> None:
    first = ast.parse(SOURCE).body[2]
    assert complexity(first) == 1 + 1 + 1 + 2, "a conditional, a comprehension and two boolean operators"


def test_the_table_of_the_core_names_files_and_folders_that_exist() -> None:
    assert [name for name in sorted(CORE) if not (PACKAGE / name).exists()] == []
