"""A real browser for tests of pages: a Chromium, driven by Playwright. Where one is missing, tests are skipped.

It is the machine's own, or the one that `./dev test` has fetched; Playwright and axe-core are in the extra `dev`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.fetch_tools import BROWSERS, TOOLS, find_tool

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_WITHIN_MS = 15_000


def find_browser() -> str | None:
    """The program's path; None where the machine has none."""
    return next(filter(None, map(find_tool, BROWSERS)), None)


@contextmanager
def launched() -> Iterator[Any]:
    """A headless browser. Skips where there is none, or nothing that drives it."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives a browser, is not installed"
    )
    program = find_browser()
    if program is None:
        pytest.skip(
            "no Chromium on this machine, and none was fetched: `./dev test --all`, or apt-get install chromium"
        )
    # Root may not have its sandbox, nor may one that was unpacked and not installed; without shared memory of a size it
    # would die in a container.
    unheld = os.geteuid() == 0 or Path(program).is_relative_to(TOOLS)
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"] if unheld else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and what went wrong in it: errors of scripts, of the console, and requests that leave `origin`."""

    page: Any
    origin: str
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    received: int = 0
    """Bytes of bodies, as far as they have ended."""

    def watch(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.page.on("request", self._asked)
        self.page.on("requestfinished", self._finished)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.origin):
            self.elsewhere.append(request.url)

    def _finished(self, request: Any) -> None:
        self.received += request.sizes()["responseBodySize"]


@contextmanager
def opened(browser: Any, origin: str, *, size: dict[str, int] = DESKTOP, dark: bool = False) -> Iterator[Watched]:
    """A fresh page without cookies, which is on no address yet."""
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", reduced_motion="reduce")
    context.set_default_timeout(_WITHIN_MS)
    try:
        watched = Watched(context.new_page(), origin)
        watched.watch()
        yield watched
    finally:
        context.close()


def serious_findings(page: Any) -> list[str]:
    """What axe-core finds on the page that is serious or critical: rule and place."""
    axe = pytest.importorskip(
        "axe_playwright_python", reason="axe-playwright-python, which brings axe-core, is not installed"
    )
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['target']} {node['html'][:160]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
