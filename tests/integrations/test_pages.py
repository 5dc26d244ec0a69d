"""Snippets of the docs that need third-party packages."""

from __future__ import annotations

import pytest

from tests.project.test_pages import ALL, run_everywhere


@pytest.mark.parametrize("name", [name for name, page in ALL.items() if page.needs])
def test_snippets_run(name: str) -> None:
    run_everywhere(ALL[name])
