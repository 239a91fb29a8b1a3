"""A headless Chromium, and pages in it that must neither complain nor talk to anybody but their server."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
PATIENCE_MS = 120_000


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """The system's Chromium, or else the one that Playwright brought."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def page_of(
    browser: Browser, url: str, *, expected: tuple[str, ...] = (), until: str | None = "ready", **options: Any
) -> Iterator[Page]:
    """The page at `url` once its state is `until`, in a context of its own.

    At the end: no uncaught error, no message on the console at all, except those that have one of `expected`
    in them, and no request to another host.
    """
    said: list[str] = []
    hosts: set[str] = set()
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(url)
        if until is not None:
            page.wait_for_selector(f'#state[data-state="{until}"]')
        yield page
    finally:
        context.close()
    unexpected = [line for line in said if not any(text in line for text in expected)]
    assert not unexpected, unexpected
    assert hosts <= {urlsplit(url).netloc, ""}, hosts
