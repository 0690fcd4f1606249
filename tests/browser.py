"""A browser for tests of web pages."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the tests of pages need playwright")
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser here (looked for {', '.join(NAMES)})")
REFUSED = "Failed to load resource"  # the browser logs this for an answer with an error status


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        running.close()


class Pages:
    """Opens pages, and collects in `problems` the errors and warnings that the pages log."""

    def __init__(self, browser: Any) -> None:
        self.problems: list[str] = []
        self._browser = browser
        self._contexts: list[Any] = []

    def __call__(
        self, url: str, width: int = 1400, scheme: str = "light", prepare: Callable[[Any], object] = lambda _: None
    ) -> Any:
        """Open a page. `prepare` is called with the page before the page loads anything."""
        context = self._browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(200_000)
        page.on("console", lambda line: self.problems.append(line.text) if line.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        prepare(page)
        page.goto(url)
        return page

    def allow_refusals(self) -> None:
        """Ignore the lines that the browser has logged so far for answers with an error status."""
        self.problems[:] = [line for line in self.problems if not line.startswith(REFUSED)]

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    """Provide a `Pages`. After the test, fail if a page has logged an error or a warning."""
    opened = Pages(browser)
    yield opened
    opened.close()
    assert opened.problems == []
