"""Add-ons are imported by name at first use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from layerzero.utils import add_ons
from layerzero.utils.add_ons import ADD_ONS, addon, has_addon


@pytest.mark.parametrize("name", ADD_ONS)
def test_each_add_on_is_in_the_package(name: str) -> None:
    assert importlib.util.find_spec(ADD_ONS[name]) is not None
    assert has_addon(name)


def test_an_add_on_is_the_module_of_its_name() -> None:
    assert addon("muon").__name__ == ADD_ONS["muon"]


def test_a_missing_add_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(add_ons.ADD_ONS, "gone", "layerzero.gone.far")
    with pytest.raises(ImportError, match=r"add-on 'gone'.*no module layerzero\.gone\. Install the complete package"):
        addon("gone")


def test_a_missing_package_that_an_add_on_needs_is_not_taken_for_a_missing_add_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with open(f"{tmp_path}/needs_more.py", "w", encoding="utf-8") as file:
        file.write("import surely_not_installed\n")
    monkeypatch.setitem(add_ons.ADD_ONS, "needy", "needs_more")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        addon("needy")


def test_a_removed_add_on_is_missing_even_if_its_folder_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.joinpath("left_over", "__pycache__").mkdir(parents=True)
    for module in ("left_over", "left_over.far", "layerzero.gone", "layerzero.gone.far"):
        monkeypatch.setitem(add_ons.ADD_ONS, "gone", module)
        assert not has_addon("gone"), module
