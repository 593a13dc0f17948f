"""A headless Chromium for the page's tests and pictures."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = [name for name, there in (("playwright", find_spec("playwright")), ("chromium", CHROMIUM)) if not there]
SIZES = {"laptop": (1280, 800), "phone": (390, 844)}


@contextlib.contextmanager
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox fails as root and in many containers, and the tests load only our own page.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser, address: str, size: str = "laptop", **options) -> Iterator:
    """Opens the page of a server. The test fails if the page logs an error or sends a request to another server."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page, wrong = context.new_page(), []
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: wrong.append(request.url) if not ours(request.url, address) else None)
    try:
        page.goto(address)
        yield page
    finally:
        context.close()
    assert not wrong, wrong


def ours(url: str, address: str) -> bool:
    return url.startswith("data:") or urlsplit(url).netloc == urlsplit(address).netloc


def ask(page, question: str | None = None) -> None:
    page.wait_for_selector("#send:not([disabled])")
    if question is not None:
        page.fill("#question", question)
    page.click("#send")
