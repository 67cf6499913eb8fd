"""Pages in a real browser: Debian's Chromium, driven by Playwright, with nothing downloaded.

A test takes the fixture ``page``. When it ends, the page must have asked for nothing beyond this machine and have
written no error to the console, which is also where a violated Content-Security-Policy is told.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what asks for more is seen, and finds nothing
)  # fmt: skip
WIDTH, HEIGHT = 1000, 800
PATIENCE_MS = 120_000


def lacking(what: str) -> NoReturn:
    """A person may test without a browser; where CI is set, a skipped test would hide that nothing was looked at."""
    reason = f"pages are not tested: {what}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of this folder."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        lacking(f"there is none of {', '.join(NAMES)} here (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        lacking("playwright is not installed (pip install playwright)")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=list(FLAGS), timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page; see above for what holds when the test ends."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    context.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    errors: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.asked, page.errors = asked, errors
    yield page
    context.close()
    assert [url for url in asked if outside(url)] == []
    assert errors == []


def outside(url: str) -> bool:
    """A request that leaves this machine."""
    parts = urlsplit(url)
    return parts.scheme not in ("file", "data", "blob", "about") and parts.hostname != "127.0.0.1"
