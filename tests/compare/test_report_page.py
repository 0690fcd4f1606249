"""Test the report's page in a browser: complete, safe, and usable from disk, on narrow screens and by keyboard."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compare.report.page import write_report
from tests.browser import Pages, browser, needs_browser, pages
from tests.compare.reports import HOSTILE, bare, hostile, page_report

pytestmark = needs_browser
__all__ = ["browser", "pages"]  # fixtures
SECTIONS = [
    "verdict",
    "arms",
    "differences",
    "attainment",
    "efficiency",
    "strip",
    "curves",
    "phases",
    "devices",
    "prediction",
    "proof",
    "runs",
    "worst",
    "parity",
    "guide",
]
BLANK = """() => [...document.querySelectorAll('canvas')].filter(canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size < 3; }).length"""
# Returns the page's lowest contrast between a text and its background, by the formula of WCAG 2, and the text's HTML.
CONTRAST = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => { const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ground = (element) => { for (let at = element; at; at = at.parentElement) {
        const colour = parse(getComputedStyle(at).backgroundColor); if (colour[3] !== 0) return colour.slice(0, 3); } return [255, 255, 255]; };
    const texts = [...document.querySelectorAll('body *')].filter(each =>
        !/SCRIPT|NOSCRIPT/.test(each.tagName) && [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
    const of = (each) => { const [a, b] = [light(parse(getComputedStyle(each).color).slice(0, 3)), light(ground(each))].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), each.outerHTML.slice(0, 80)]; };
    return texts.map(of).sort((x, y) => x[0] - y[0])[0]; }"""


@pytest.fixture
def opened(pages: Pages, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that writes and opens a report. After the test, check that pages logged and fetched nothing."""
    found: list[str] = []

    def open_report(report: dict[str, Any], width: int = 1400, scheme: str = "light") -> Any:
        file = write_report(report, tmp_path)

        def watch(page: Any) -> None:
            page.on("console", lambda line: found.append(line.text))
            page.on("request", lambda request: found.append(request.url) if request.url != file.as_uri() else None)

        return pages(file.as_uri(), width, scheme, watch)

    yield open_report
    assert found == []


def ids(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all("main > section", "all => all.map(each => each.id)")
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_section_is_drawn_and_all_text_has_enough_contrast(opened: Callable[..., Any], scheme: str) -> None:
    page = opened(page_report(capacity=True), scheme=scheme)
    assert ids(page) == SECTIONS
    assert set(page.locator(".none").all_inner_texts()) == {"no request missed its SLO"}
    assert page.locator("canvas").count() == 6 + 3 + 5 + 10  # for lanes, arms, curves and the worst requests
    assert page.evaluate(BLANK) == 0
    assert page.locator(".banner").count() == 0
    page.eval_on_selector_all("details", "all => all.forEach(each => { each.open = true; })")
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where


@pytest.mark.parametrize("made", [page_report, hostile, bare])
def test_nothing_overflows_at_360_pixels(opened: Callable[..., Any], made: Callable[[], dict[str, Any]]) -> None:
    """The contents are complete, and a table that extends to the right shows a hint until it is scrolled to its end."""
    page = opened(made(), width=360)
    assert page.evaluate("document.getElementById('contents').scrollWidth") <= 360
    page.wait_for_function(
        "() => [...document.querySelectorAll('.scroll')].every(e => (e.scrollWidth > e.clientWidth) === e.matches('.beyond'))"
    )
    page.evaluate("document.querySelectorAll('.scroll').forEach(each => { each.scrollLeft = 9999; })")
    page.wait_for_function("() => !document.querySelector('.beyond')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(BLANK) == 0


def test_markup_in_names_is_shown_as_text(opened: Callable[..., Any]) -> None:
    page = opened(hostile())
    assert page.locator("img").count() == 0
    assert page.title() == f"Baton comparison: {HOSTILE}"
    assert page.locator(".sentence").inner_text() == HOSTILE
    assert page.locator("#arms thead .arm").first.inner_text() == HOSTILE
    assert page.locator("pre").inner_text() == HOSTILE


def test_every_section_without_data_shows_the_reason(opened: Callable[..., Any]) -> None:
    page = opened(bare())
    assert ids(page) == SECTIONS
    assert page.locator(".banner strong").all_inner_texts() == ["Invalid", "Not comparable"]
    for section in set(SECTIONS) - {"verdict", "guide"}:
        assert page.locator(f"#{section} .none").count() > 0, section


def test_a_report_without_a_verdict_names_facts_answers_and_runs(opened: Callable[..., Any]) -> None:
    report = page_report()
    differing = {"colocated:2": "float32", "disaggregated:1p1d": "bfloat16"}
    report["parity"]["equal"] = False
    report["parity"]["facts"][0].update(equal=False, values=differing)
    report["tokens"] = {"compared": 90, "different": [{"seed": 1, "index": n} for n in range(60)], "equal": False}
    report["runs"][1].update(valid=False, problems=["decode-1 died"], window_s=None, metrics={}, kv=None)
    report["runs"][2].update(overloaded=True, metrics={"attainment": 0.2, "ttft_p99_ms": None})
    report["worst"][0].update(spans=[], accepted_ms=None, first_token_ms=None, finish=None)
    report["traffic"]["laps"] = 3
    page = opened(report)
    assert "repeated: a row is used up to 3 times in a run" in page.locator(".facts").inner_text()
    assert "Not comparable The arms differ in undeclared facts: dtype." in page.locator(".banner").inner_text()
    assert page.locator(".sentence").count() == 0
    assert "Why" not in page.locator("#verdict").inner_text()
    assert "across arms; 60 requests differ." in page.locator("#proof").inner_text()
    assert page.locator("#proof li").count() == 50
    assert page.locator("#proof .none").inner_text() == "10 more are in report.json"
    _, invalid, overloaded = page.locator("#runs tbody tr").all_inner_texts()[:3]
    assert "invalid" in invalid
    assert "decode-1 died" in invalid
    assert "overloaded" in overloaded
    assert "20 %" in overloaded
    lost = page.locator("#worst li").first.inner_text()
    assert "TTFT –" in lost
    assert "No spans were recorded." in lost


def test_the_strip_can_be_moved_zoomed_and_used_by_keyboard(opened: Callable[..., Any]) -> None:
    page = opened(page_report())
    shown, readout = page.locator("#strip output"), page.locator("#strip .readout")
    first = shown.inner_text()
    page.get_by_role("button", name="Whole period").click()
    assert shown.inner_text() != first
    lane = page.locator(".lane").first
    lane.focus()
    lane.press("ArrowDown")
    assert readout.inner_text().startswith("decode-0: ")
    assert readout.inner_text().endswith("over the TBT SLO")
    late = readout.inner_text()
    lane.press("ArrowRight")
    assert readout.inner_text() != late
    page.get_by_role("button", name="Show a shorter time").click()
    page.get_by_role("slider").fill("1000")
    assert shown.inner_text() != first
    assert page.evaluate(BLANK) == 0


def test_a_clicked_step_shows_its_figures(opened: Callable[..., Any]) -> None:
    report = page_report()
    strip = report["strip"]["disaggregated:1p1d"]
    report["strip"] = {"disaggregated:1p1d": strip}
    start = strip["nodes"]["prefill-0"][0][0]
    strip.update(origin_ms=start, requests=[])
    strip["nodes"] = {
        "prefill-0": [[start + 100, 800.0, 512, 0, 790.0]],
        "decode-0": [[start + 1900, 100.0, 0, 3, None]],
    }
    page = opened(report)
    page.locator(".lane").first.click(position={"x": 200, "y": 20})
    readout = page.locator("#strip .readout").inner_text()
    assert readout == "prefill-0: 800 ms at 0.1 s, 512 prompt tokens, 0 decodes, predicted 790 ms"


def test_the_page_states_what_it_leaves_out(opened: Callable[..., Any]) -> None:
    report = page_report()
    strip = report["strip"]["colocated:2"]
    strip["requests"] = [{**strip["requests"][0], "id": f"cmpl-{number:06}"} for number in range(40)]
    report["notes"] = ["colocated:2 was overloaded in 1 of 6 periods"]
    report["phases"]["colocated:2"]["requests"] = {"mean": 2350, "missed": 7, "arrived": 2400}
    report["summary"]["colocated:2"]["capacity_rps"] = {
        "mean": 12.0, "low": None, "high": None, "per_seed": [None], "bounded": "above",
    }  # fmt: skip
    page = opened(report)
    page.get_by_role("button", name="Whole period").click()
    arm = page.locator(".strip-arm").first
    assert "36 of 40 requests with a timeline" in arm.inner_text()
    assert "24 more requests with a timeline not drawn here" in arm.inner_text()
    assert report["notes"][0] in page.locator("#verdict").inner_text()
    phases = page.locator("#phases").inner_text()
    assert "mean of the 2,350 that finished, of 2,400" in phases
    assert "mean of the 7 that missed" in phases
    assert page.locator("#arms tr", has_text="Capacity").locator("td").first.inner_text() == "≥ 12"


def test_figures_are_those_of_the_report(opened: Callable[..., Any]) -> None:
    report = page_report()
    report["summary"]["colocated:2"]["tbt_p99_ms"] = {"mean": 61.234, "low": 55.5, "high": 1234.4, "per_seed": []}
    page = opened(report)
    row = page.locator("#arms tr", has_text="TBT p99, ms").locator("td").first
    assert row.inner_text() == "61.2(55.5 to 1,234)"
    attainment = page.locator("#differences tr", has_text="Attainment").first.inner_text()
    assert "+27.4 points" in attainment
    assert "better" in attainment
    phases = page.locator("#phases .bar").first.get_attribute("aria-label")
    assert f"prefill {report['phases']['colocated:2']['mean']['prefill']:.0f} ms" in phases


def test_efficiency_capacities_and_predictions_are_shown(opened: Callable[..., Any]) -> None:
    page = opened(page_report(capacity=True))
    page.eval_on_selector_all("details", "all => all.forEach(each => { each.open = true; })")
    points = page.locator("#efficiency table tbody tr").all_inner_texts()
    assert points[0].split("\t") == ["colocated:2", "1", "111", "14.8"], "a token per 9 ms; 3 tokens per 0.1 s"
    names = page.locator("#efficiency .bar-name").all_inner_texts()
    assert names[-1].split("\n") == ["disaggregated:1p1d", "1 prefill, 1 decode: 4/s"]
    rows = page.locator("#prediction tbody tr").all_inner_texts()
    assert rows[0].split("\t")[1:2] + rows[0].split("\t")[-2:] == ["Attainment", "0 points", "3"]


def test_terms_are_explained_where_they_first_appear(opened: Callable[..., Any]) -> None:
    page = opened(page_report())
    explained = page.locator("#arms .guide").inner_text()
    for name in ("TTST", "Fluidity", "Interference"):
        term, tip = page.locator("#arms .term", has_text=name).first, page.locator("#tip")
        term.hover()
        assert tip.inner_text() in explained
        page.mouse.move(0, 0)
        assert not tip.is_visible()
        term.focus()
        assert tip.is_visible()
        term.press("Escape")
        assert not tip.is_visible()


def test_buttons_and_printing_work(opened: Callable[..., Any]) -> None:
    """Buttons change the theme and copy the command. A printed page is light, with all its figures unfolded."""
    page = opened(page_report())
    ground, picture = (
        "() => getComputedStyle(document.body).backgroundColor",
        "() => document.querySelector('.lane').toDataURL()",
    )
    before = page.evaluate(ground), page.evaluate(picture)
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(ground) != before[0]
    assert page.evaluate(picture) != before[1]
    page.get_by_role("button", name="Copy").click()
    page.wait_for_function("document.querySelector('.command [role=status]').textContent !== ''")
    assert page.evaluate("getSelection().toString()") == page_report()["repro"]
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
