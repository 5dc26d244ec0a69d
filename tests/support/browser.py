"""Headless Chromium for tests of pages."""

from __future__ import annotations

import http.server
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

_SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
# Elements that end outside of the window, of which the page is wider than the window.
_OVERFLOW = """
const page = document.scrollingElement;
if (page.scrollWidth <= page.clientWidth) return [];
const wide = [...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > page.clientWidth);
return [`${page.scrollWidth} pixels`, ...wide.slice(0, 5).map(e => e.outerHTML.slice(0, 100))];
"""


class Browser:
    """Window of a headless Chromium.

    Attributes:
        driver: selenium's driver of the window.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(self, address: str, *, width: int) -> None:
        """Load a page in a window of `width` pixels."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # a window cannot be this narrow
        self.driver.get(address)

    def run(self, script: str) -> Any:
        """Run JavaScript in the page, and return what it returns."""
        return self.driver.execute_script(script)

    def wait(self, script: str) -> None:
        """Wait until JavaScript in the page returns true; raise an error after a minute."""
        end = time.monotonic() + 60
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"a page did not reach the state within a minute: {script}")
            time.sleep(0.05)

    def overflow(self) -> list[str]:
        """Return the width of the page and elements outside of the window; empty if the page is not too wide."""
        return self.run(_OVERFLOW)

    def errors(self) -> list[str]:
        """Return the errors on the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with an empty folder for its profile. Skips the test if a program or package is missing."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="needs selenium, to drive Chromium: pip install -r requirements-docs.txt"
    )
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs Chromium and chromedriver, on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    for switch in (*_SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder on this machine, and yield the address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
