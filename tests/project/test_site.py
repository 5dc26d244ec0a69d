"""The site that `make docs` builds: no page is wider than the window, and the search finds names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from layerzero import __version__
from tests.project.test_stability import public_names
from tests.support.browser import Browser, open_browser, served

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    missing = [package for package in ("mkdocs", "material", "mkdocstrings") if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, to build the site: pip install -r requirements-docs.txt")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


@pytest.mark.parametrize("width", [420, 1000, 1400])
def test_no_page_is_wider_than_the_window(site: Path, address: str, browser: Browser, width: int) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    assert len(pages) > 50 and {"index.html", "start/index.html", "api/checkpoints/index.html"} <= set(pages)
    wide = {}
    for page in pages:
        browser.show(f"{address}/{page.removesuffix('index.html')}", width=width)
        if found := [*browser.overflow(), *browser.errors()]:
            wide[page] = found
    assert wide == {}


@pytest.mark.parametrize("width", [420, 1000, 1400])
def test_charts_are_as_wide_as_the_text(address: str, browser: Browser, width: int) -> None:
    script = """return [...document.querySelectorAll(".md-content p > img")]
        .map(e => e.clientWidth - e.parentElement.clientWidth)"""
    for page in ("", "benchmarks/", "scale/"):
        browser.show(f"{address}/{page}", width=width)
        found = browser.run(script)
        assert found and all(abs(difference) <= 1 for difference in found), (page, found)


def test_wide_tables_and_code_scroll_in_their_own_box(address: str, browser: Browser) -> None:
    browser.show(f"{address}/benchmarks/", width=420)
    for box in (".md-typeset__scrollwrap", "pre > code"):
        script = f"""return [...document.querySelectorAll("{box}")].filter(e => e.scrollWidth > e.clientWidth)
            .map(e => getComputedStyle(e).overflowX)"""
        assert set(browser.run(script)) == {"auto"}, box


def search(address: str, browser: Browser, words: str) -> list[str]:
    """Type words into the search of the site, and return the addresses that it finds."""
    browser.show(f"{address}/?q={words}", width=1400)
    browser.wait("""return / matching document/.test(document.querySelector(".md-search-result__meta").textContent)""")
    links = browser.run("return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    return [re.sub(r"\?h=[^#]*", "", link.removeprefix(f"{address}/")) for link in links]  # without the marked words


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("zero3_size", "settings/#zero3_size"),
        ("clip_grad_norm_", "api/training-loop/#layerzero.optimizers.clip.clip_grad_norm_"),
        ("HSDP", "fsdp2/"),
        ("LayerZeroStrategy", "api/integrations/#layerzero.integrations.lightning.LayerZeroStrategy"),
    ],
)
def test_the_search_finds(words: str, page: str, address: str, browser: Browser) -> None:
    found = search(address, browser, words)
    assert page in found


def test_the_search_finds_nothing_where_there_is_nothing(address: str, browser: Browser) -> None:
    assert search(address, browser, "qwertzuiop") == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in site.glob("api/*/index.html"))
    headings = re.findall(r'class="doc doc-heading">\s*(layerzero\.[\w.]+)', reference)
    assert len(headings) == len(set(headings))
    same = {"layerzero.integrations.pretrained.from_pretrained"}  # shown as that of integrations.transformers
    same |= {"layerzero.planning.plan", "layerzero.planning.Plan"}  # shown as layerzero.plan and layerzero.Plan
    packages = {"layerzero.checkpoint", "layerzero.optimizers", "layerzero.planning"}
    assert set(public_names()) - set(headings) == same | packages
    assert set(headings) <= set(public_names())


def test_the_reference_groups_names_by_topic(site: Path) -> None:
    index = (site / "api" / "index.html").read_text(encoding="utf-8")
    topics = re.findall(r'<tr>\s*<td><a href="[^"]*">([^<]+)</a></td>', index)
    assert topics[:5] == ["Sharding", "Training loop", "Full parameters", "Inference", "Reports"]
    assert topics[5:] == ["Guards and checks", "Checkpoints", "Optimizers", "Planning", "Megatron", "Integrations"]
    inference = (site / "api" / "inference" / "index.html").read_text(encoding="utf-8")
    headings = re.findall(r'class="doc doc-heading">\s*(layerzero\.[\w.]+)', inference)
    names = ("stream_weights", "WeightSender", "WeightReceiver", "WeightPacketError")
    assert headings == [f"layerzero.{name}" for name in names]


def test_pages_show_the_version_and_titles_instead_of_file_names(site: Path) -> None:
    first, start = ((site / page).read_text(encoding="utf-8") for page in ("index.html", "start/index.html"))
    assert f"layerzero {__version__}" in first[first.index("<header") : first.index("</header>")]
    assert ">Start here</a>" in first and ">docs/start.md<" not in first
    assert start.count('class="tabbed-block"') == 7 and "<!-- tabs" not in start
