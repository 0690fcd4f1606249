"""Test the simulator's page in a real browser: from a router, and from the single file without any server."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Pages, browser, needs_browser, pages
from tests.cluster.harness import cluster, wait_for
from tests.engine.build import thinned

ROOT = Path(__file__).parents[2]
pytestmark = needs_browser
__all__ = ["browser", "pages"]  # fixtures
NOT_FETCHED = 3  # exit status of the build without npm or access to its registry
PLACES = ("router", "file")
HAS_RED = """[...document.querySelectorAll("#lanes canvas")].some((lane) => lane.getContext("2d")
    .getImageData(0, 1, lane.width, 1).data.some((red, index, all) => index % 4 === 0 && red === 0xc1 && all[index + 1] === 0x12))"""


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The page's URLs: that of a running router and, if Pyodide can be fetched, that of the built file."""
    with cluster(prefill=0, decode=1) as running:
        found = {"router": f"{running.url}/simulator"}
        path = tmp_path_factory.mktemp("playground") / "playground.html"
        built = subprocess.run([sys.executable, ROOT / "deploy" / "playground.py", "--out", path], check=False)
        assert built.returncode in {0, NOT_FETCHED}
        yield found | ({"file": path.as_uri()} if not built.returncode else {})


@pytest.fixture
def opened(pages: Pages, urls: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the page at one of PLACES, and waits until its first run has ended."""

    def open_page(place: str, fragment: str = "", width: int = 1400, scheme: str = "light") -> Any:
        if place not in urls:
            pytest.skip("Pyodide could not be fetched from npm")
        page = pages(urls[place] + fragment, width, scheme)
        done(page)
        return page

    yield open_page
    pages.allow_refusals()


def until(page: Any, condition: str) -> None:
    """Wait for a condition in JavaScript. Playwright's own function needs `eval`, which the page forbids."""
    wait_for(lambda: page.evaluate(condition), condition, 200.0)


def done(page: Any) -> None:
    until(page, "['done', 'failed'].includes(document.getElementById('state').dataset.state)")


def row(page: Any) -> list[str]:
    """Return the cells of the latest run."""
    cells: list[str] = page.locator("#runs tr").first.locator("td").all_text_contents()
    return cells


@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_shown_and_follows_the_settings(opened: Callable[..., Any], place: str) -> None:
    page = opened(place, "#requests=60&prefill=1")
    assert "of 54 requests met the limits" in page.text_content("#summary")
    assert row(page)[:3] == ["1 prefill, 1 decode", "stall_free", "512"]
    assert page.locator("#lanes .lane").count() == 2
    assert page.locator("#figures dd").first.text_content().endswith("%")
    page.fill("[name=tbt_slo_ms]", "1")
    until(page, "document.getElementById('summary').textContent.startsWith('0%')")
    assert "waited over 1 ms between tokens" in page.text_content("#summary")
    assert page.evaluate("location.hash") == "#prefill=1&requests=60&tbt_slo_ms=1"
    page.fill("[name=rate]", "-2")
    until(page, "document.getElementById('state').dataset.state === 'failed'")
    assert page.text_content("#summary").startswith("Requests/s: ")


# JavaScript that changes the setting again as soon as the page shows the figures of a few requests. If the test itself
# made this change, the run of all requests could end first on a busy machine.
CHANGE_AT_FIRST = """() => {
  const state = document.getElementById("state");
  window.firstNote = new Promise((resolve) => new MutationObserver((_, observer) => {
    if (!state.textContent.startsWith("first")) return;
    observer.disconnect();
    location.hash = location.hash.replace("tbt_slo_ms=1", "tbt_slo_ms=2");
    resolve(document.querySelector("#figures dd.note").textContent);
  }).observe(state, { childList: true, characterData: true, subtree: true }));
}"""


@pytest.mark.parametrize("place", thinned(PLACES, 2))
def test_the_page_follows_a_control_that_moves(opened: Callable[..., Any], place: str) -> None:
    """After each change, the page first shows a run of few requests. A new change replaces a run that is not over."""
    page = opened(place, "#requests=1500&answer=20&rate=20")
    page.evaluate(CHANGE_AT_FIRST)
    page.fill("[name=tbt_slo_ms]", "1")
    assert not page.evaluate("window.firstNote").startswith("of 1,350 requests")
    done(page)
    assert page.text_content("#figures dd.note").startswith("of 1,350 requests")
    assert page.evaluate("location.hash").endswith("tbt_slo_ms=2")
    assert page.locator("#runs tr").count() == 2, "the first run and the last one"


@pytest.mark.parametrize("place", thinned(PLACES, 2))
def test_a_trace_that_makes_no_sense_is_named(opened: Callable[..., Any], place: str) -> None:
    page = opened(place, "#requests=10&trace=nonsense")
    assert page.text_content("#summary").startswith("trace: its first line matches no known format")
    page.locator("details summary").first.click()
    page.fill("[name=trace]", '{"t": 0, "prompt_len": 10, "max_tokens": 3}')
    until(page, "document.getElementById('summary').textContent.startsWith('100%')")


@pytest.mark.parametrize("place", thinned(PLACES, 2))
def test_the_best_budget_is_found_by_keyboard(opened: Callable[..., Any], place: str) -> None:
    page = opened(place, "#requests=60&rate=4&prompt=4000&budget=8192")
    page.focus("#best")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#runs tr.best').length === 1")
    assert page.locator("#runs tr").count() == 9, "the first run is among them, and the best is not listed twice"
    best = page.locator("#runs tr.best td").all_text_contents()
    rows = [row.locator("td").all_text_contents() for row in page.locator("#runs tr").all()]
    assert int(best[6].rstrip("%")) == max(int(cells[6].rstrip("%")) for cells in rows)
    assert page.text_content("#budget-shown") == best[2]
    assert page.text_content("#best-shown").startswith(f"{best[2]} tokens: {best[6]} within both limits, ")
    page.focus("[name=budget]")
    page.keyboard.press("ArrowRight")
    until(page, "document.getElementById('best-shown').textContent.startsWith('The best')")


def test_the_tour_goes_through_its_steps(opened: Callable[..., Any]) -> None:
    page = opened("router", "#requests=10")
    page.click("#tour-open")
    for number in range(1, 9):
        assert page.text_content("#tour-title").startswith(f"{number}. ")
        until(page, f"document.querySelectorAll('#runs tr').length === {number + 1}")
        done(page)
        if 3 <= number <= 6:
            assert page.evaluate(HAS_RED) == (number != 5), "answers pause for longer than the limit"
        if number < 8:
            page.click("#tour-next")
    assert page.locator("#tour-next").is_disabled()
    page.click("#tour-tries button")
    until(page, "document.querySelectorAll('#runs tr').length === 10")
    compared = page.locator("#tour-runs td:first-child").all_text_contents()
    assert compared == ["1 prefill, 1 decode, stall_free, budget 512", "2 co-located, stall_free, budget 512"]
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    assert page.locator("#tour-bar").bounding_box()["y"] == 0, "what to look at stays visible"
    page.click("#tour-close")
    assert not page.locator("#tour").is_visible()


def test_playing_shows_figures_as_they_form(opened: Callable[..., Any]) -> None:
    page = opened("router", "#requests=60")
    whole = page.text_content("#ttft-shown")
    page.click("#play")
    until(page, "Number(document.getElementById('time').value) > 100")
    page.click("#play")
    assert page.text_content("#ttft-shown") != whole
    assert page.text_content("#play") == "Play"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_does_not_scroll_sideways(opened: Callable[..., Any], scheme: str) -> None:
    page = opened("router", "#requests=60&prefill=1", 360, scheme)
    page.click("#tour-open")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
