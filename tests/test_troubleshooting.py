"""docs/troubleshooting.md lists every message of the package, and explains none that the package does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.messages import BEGIN, PAGE, collect, tidy, written

TEXT = PAGE.read_text(encoding="utf-8")
TORCHS = {"mixed dtypes", "expected m1 and m2 to have the same dtype"}  # and not ours


def test_every_message_is_on_the_page() -> None:
    missing = [text for texts in collect().values() for text in texts if text not in TEXT]
    assert not missing, "write the page's list anew: make messages"
    assert written(TEXT) == TEXT, "the page lists what is gone: make messages"


def test_what_is_explained_is_said() -> None:
    explained = re.findall(r"^\| (`.*?`) \|", TEXT.partition(BEGIN)[0], re.MULTILINE)
    keys = [key for cell in explained for key in re.findall(r"`([^`]+)`", cell) if key not in TORCHS]
    said = [text for texts in collect().values() for text in texts]
    assert len(keys) > 25
    assert [key for key in keys if not any(tidy(key) in text for text in said)] == []


MODULE = """
_AGAIN = "this is a constant: say {it} again"

class Lost(RuntimeError):
    def __init__(self, text, more): ...

def _why(name):
    if name:
        return f"{name} is missing: give it a name"
    return "nothing has a name here: leave it out"

def f(x, wrong):
    text = f"a local text for {x}: take another one"
    if x == 1:
        raise ValueError("too short: " + str(x))
    if x == 2:
        raise TypeError(_why(x))
    if x == 3:
        failure = Lost(text, 1)
    if x == 4:
        warnings.warn(_AGAIN.format(it=x))
    if x == 5:
        _log.warning("%s of %d ranks are late: look at them", x, x)
    _log.info("this is not a message of trouble: it is on the page of nobody")
    problems.append(f"{x} has come to its end by another way: look there")
    raise KeyError(f"{x!r} was {'not' if wrong else 'long'} there: use another one")
"""


def test_texts_are_found_wherever_they_come_from(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "module.py").write_text(MODULE, encoding="utf-8")
    assert collect(tmp_path) == {
        "Forwards and backwards": {
            "… is missing: give it a name",
            "nothing has a name here: leave it out",
            "a local text for …: take another one",
            "this is a constant: say … again",
            "… of … ranks are late: look at them",
            "… was … there: use another one",
            "… has come to its end by another way: look there",
        }
    }


@pytest.mark.parametrize(
    ("text", "tidied"), [("%s has  %d", "… has …"), ("'{name}' and {n:d}", "… and …"), ("……", "…")]
)
def test_what_is_not_known_yet_is_an_ellipsis(text: str, tidied: str) -> None:
    assert tidy(text) == tidied
