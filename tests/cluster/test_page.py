"""Test the dashboard in a real browser, with an artificial feed and with a running cluster."""

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser import Pages, browser, needs_browser, pages
from tests.cluster.harness import Cluster, cluster, wait_for
from tests.dashboard.page_feed import Feed, serving

pytestmark = needs_browser
__all__ = ["browser", "pages"]  # fixtures
ACCESS = """() => [...document.querySelectorAll('button, a, select, canvas[tabindex], [role=img], [role=region]')]
    .filter(each => !(each.getAttribute('aria-label') || each.textContent.trim() || each.closest('label')))
    .map(each => each.outerHTML)"""


@pytest.fixture
def serve() -> Iterator[Callable[[Feed], str]]:
    """Serve feeds until all pages are closed, because a page whose server has stopped logs errors."""
    with ExitStack() as served:
        yield lambda made: served.enter_context(serving(made))


@pytest.fixture
def opened(serve: Callable[[Feed], str], pages: Pages) -> Pages:
    """Open pages. They are closed before the feeds that they show."""
    return pages


@pytest.fixture
def feed(serve: Callable[[Feed], str]) -> tuple[Feed, str]:
    made = Feed()
    return made, serve(made)


def steps_of(page: Any, node: str) -> int:
    """Return the number of a node's steps that are in view, which the label of the node's lane states."""
    labels = page.locator("#lanes .lane span").all_inner_texts()
    found = [re.fullmatch(rf"{node}\s+([\d,]+) steps?", label) for label in labels]
    return next((int(match[1].replace(",", "")) for match in found if match), 0)


def colours_in(page: Any, lane: int) -> set[str]:
    """Return the kinds of steps whose colours are visible in a lane."""
    script = """canvas => {
        const copy = document.createElement('canvas'), seen = new Set();  // for repeated reads
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const context = copy.getContext('2d', {willReadFrequently: true});
        context.drawImage(canvas, 0, 0);
        const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(`${data[i]},${data[i+1]},${data[i+2]}`);
        return [...seen];
    }"""
    names = {"230,159,0": "prefill", "0,114,178": "decode", "193,18,31": "over"}
    seen = page.locator("#lanes canvas").nth(lane).evaluate(script)
    return {names[colour] for colour in seen if colour in names}


# ---- over a feed -----------------------------------------------------------------------------------------------------


def test_every_part_is_shown_and_has_a_name(opened: Pages, feed: tuple[Feed, str]) -> None:
    feed[0].lost_ms = feed[0].began_ms - 200_000
    page = opened(feed[1])
    page.wait_for_selector("#requests tbody tr:nth-child(2)")
    assert page.inner_text("#summary").startswith("The prefill pool is the bottleneck")
    assert page.inner_text("#model") == "stories · up to 2,048 tokens · disaggregated · Baton 0.1.0 · up 2 h 5 min"
    assert page.locator("#totals > div").nth(5).inner_text().split("\n") == ["Refused/s", "0.9", "9 in 60 s"]
    lost = [line for line in page.locator(".node").last.inner_text().split("\n") if line]
    assert lost == ["decode-2", "decode", "lost 3 min ago", "It ended its connection."]
    assert not page.locator("text=No requests yet.").is_visible()
    assert "decode-2 is lost" in page.locator("#events li").first.inner_text()
    assert page.locator("#lanes .lane").count() == 4
    assert page.locator("#summary code").inner_text().startswith("baton role decode-")
    assert page.locator(".node h3").all_inner_texts()[0].split() == ["prefill-0", "prefill", "ready"]
    assert page.locator(".node .bar").first.get_attribute("aria-label").startswith("KV: ")
    assert page.locator("#latency canvas").count() == 3
    assert "SLO of 25.0" in page.locator(".latency").nth(1).inner_text()
    assert page.get_attribute("text=Trace", "href") == "trace?last=30s"
    assert page.evaluate(ACCESS) == []


def test_the_strip_moves_and_colours_steps_by_their_work(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    # At most 101 steps are earlier than the page, so a count above 121 includes new steps. The view covers ten seconds.
    wait_for(lambda: steps_of(page, "decode-0") > 121, "earlier and new steps in view")
    assert colours_in(page, 0) == {"prefill"}
    wait_for(lambda: colours_in(page, 2) == {"prefill", "decode", "over"}, "mixed steps over the SLO")


def test_a_page_that_is_opened_late_shows_earlier_steps(opened: Pages, serve: Callable[[Feed], str]) -> None:
    made = Feed()
    for name in made.ends:
        made.numbers[name], made.ends[name] = 1, made.began_ms + 1e9  # no new steps follow
    page = opened(serve(made))
    wait_for(lambda: steps_of(page, "decode-0") > 50, "earlier steps")
    assert steps_of(page, "decode-0") <= 101


def test_a_step_shows_its_members_by_mouse_and_by_key_and_stops_the_strip(
    opened: Pages, feed: tuple[Feed, str]
) -> None:
    page = opened(feed[1])
    wait_for(lambda: steps_of(page, "decode-0") > 100, "steps in view")
    lane = page.locator("#lanes canvas").nth(2)
    lane.click(position={"x": lane.bounding_box()["width"] - 60, "y": 40})
    page.wait_for_selector("#step li")
    assert page.inner_text("#pause") == "Resume"
    assert page.locator("#step li.chunk, #step li.prefill").count() == 1
    first = int(re.match(r"Step (\d+) of decode-0", page.inner_text("#step"))[1])
    lane.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"document.getElementById('step').textContent.startsWith('Step {first - 1} of decode-0')")
    page.keyboard.press("Escape")
    assert not page.is_visible("#step")
    page.click("#pause")
    assert page.get_attribute("#pause", "aria-pressed") == "false"


def test_a_request_opens_its_timeline_with_the_keyboard(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    page.wait_for_selector("#requests tbody tr:nth-child(3)")
    page.click("#pause")
    page.locator("#requests tbody button").nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#requests .timeline canvas")
    assert "placed: least predicted time" in page.inner_text("#requests .timeline")
    page.click("#requests .timeline summary")
    spans = page.locator("#requests .timeline li").all_inner_texts()
    assert sum("prompt chunk of" in span for span in spans) == 3
    assert any("waited (behind a prompt chunk), 33.0 ms on decode-" in span for span in spans)
    page.locator("#requests tbody button").nth(1).click()
    assert page.locator("#requests .timeline").count() == 0


def test_a_refused_request_shows_its_status_and_message(opened: Pages, feed: tuple[Feed, str]) -> None:
    refused = feed[0].next_request(time.time() * 1e3) | {"state": "refused", "phases_ms": None, "transfer": None}
    feed[0].requests[refused["id"]] = refused | {"status": 429, "message": "The queue is full."}
    page = opened(feed[1])
    row = page.locator("#requests tbody tr", has=page.locator("[data-state=refused]"))
    assert row.locator(".where").inner_text() == "429: The queue is full."
    row.locator("button").click()
    page.locator("#requests .timeline", has_text="429: The queue is full. · cmpl-").wait_for()
    page.wait_for_selector("text=running")
    assert page.locator("#requests [role=img]:not([aria-label])").count() == 0


def test_terms_are_explained_on_focus_and_on_hover(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    term = page.locator("#latency .term").first
    term.focus()
    assert page.inner_text("#tip").startswith("Time to first token:")
    assert page.inner_text(f"#{term.get_attribute('aria-describedby')}") == page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")
    page.locator("#transfers .term").last.hover()
    assert "during which the request waits" in page.inner_text("#tip")
    explained = page.evaluate("""[...document.querySelectorAll('.term')]
        .every(each => document.getElementById(each.getAttribute('aria-describedby')))""")
    assert explained


def test_the_curves_of_a_latency_without_samples_are_hidden(opened: Pages, feed: tuple[Feed, str]) -> None:
    text, is_empty = opened(feed[1]).evaluate("""async () => {
        const {Latency} = await import('/page/latency.js'), place = document.createElement('div');
        document.body.append(place);
        new Latency(place).add({ttft_ms: {p50: null, p99: null, n: 0}, slo: {ttft_ms: 400}});
        return [place.firstChild.innerText, place.querySelector('.chart').classList.contains('empty')];
    }""")
    assert is_empty
    assert "No samples; SLO of 400 ms" in text
    assert "p50" not in text


def test_the_chat_streams_stops_and_shows_errors_and_its_request(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    page.wait_for_selector("#requests tbody tr")
    page.click("#chat-open")

    def send(text: str) -> Any:
        page.keyboard.type(text)  # the field for the message has the focus
        page.keyboard.press("Enter")
        return page.locator(".answer").nth(page.locator(".said").count() - 1)

    assert send("hello").locator("text=429: The queue is full. Try again in 1 s.").text_content()
    page.fill("#key", "key")
    page.focus("#prompt")
    answer = send("again")
    answer.locator("text=1 tokens").wait_for()
    assert answer.locator("p").first.inner_text() == "word0 "  # the refused message is not part of the conversation
    name = answer.locator("button").inner_text()
    send("forever").locator("text=word2").wait_for()
    page.click("#stop")
    page.locator(".answer >> text=Stopped.").wait_for()
    assert page.is_enabled("#send")
    answer.locator("button").click()
    page.wait_for_selector("#requests .timeline canvas")
    assert name in page.inner_text("#requests .timeline")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    assert page.evaluate("Object.keys(localStorage).concat(Object.keys(sessionStorage))") == []
    opened.allow_refusals()


def test_tables_keep_the_newest_rows_in_order(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    shown = page.evaluate("""async () => {
        const {Requests} = await import('/page/requests.js'), {Transfers} = await import('/page/transfers.js');
        const table = () => { const made = document.createElement('table'); made.createTBody(); return made; };
        const transfer = {bytes: 1, busy_ms: 1, hidden_ms: 1, exposed_ms: 0, channel: 'shm'};
        const one = (number) => ({id: `cmpl-${number}`, state: number % 2 ? 'failed' : 'decode', accepted_ms: number,
            prefill: 'p', decode: 'd', transfer, attempts: 1});
        const rows = table(), moved = table(), requests = new Requests(rows), transfers = new Transfers(moved, table());
        const all = [...Array(150).keys()].map(one);
        for (const part of [all.slice(20, 140), all, all.slice(0, 60), all.slice(100, 130)]) {
            requests.add(part);
            transfers.add(part);
        }
        const ids = (table) => [...table.rows].map((row) => Number(row.cells[0].textContent));
        return [ids(rows), ids(moved), [...moved.rows].slice(0, 2).map((row) => row.cells[2].textContent)];
    }""")
    assert shown == [list(range(149, 49, -1)), list(range(149, 139, -1)), ["failed", "done"]]


def test_a_paused_page_stays_as_it_is_and_shows_that_the_router_is_gone(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    page.wait_for_selector("#requests tbody tr:nth-child(2)")
    page.click("#pause")
    rows, number = page.locator("#requests tbody tr").count(), len(feed[0].requests)
    picture = page.locator("#lanes canvas").nth(2).screenshot()
    wait_for(lambda: len(feed[0].requests) > number + 2, "more requests")
    feed[0].is_gone = True
    page.wait_for_selector("text=router gone, trying again")
    assert page.inner_text("#summary").startswith("The router has not answered since ")
    assert "grayscale" in page.evaluate("getComputedStyle(document.getElementById('totals')).filter")
    feed[0].is_gone = False
    page.wait_for_selector("#link[data-state=live]")
    assert "has not answered" not in page.inner_text("#summary")
    assert page.title() == "Baton · stories"
    number = len(feed[0].requests)
    wait_for(lambda: len(feed[0].requests) > number + 1, "more requests")
    assert page.locator("#requests tbody tr").count() == rows
    assert page.locator("#lanes canvas").nth(2).screenshot() == picture
    page.click("#pause")
    wait_for(lambda: page.locator("#requests tbody tr").count() > rows, "more rows")
    wait_for(lambda: page.locator("#link").inner_text() == "live", "live again")
    opened.allow_refusals()


def test_the_page_follows_a_router_that_restarts(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    page.wait_for_selector("#requests tbody tr:nth-child(2)")
    wait_for(lambda: page.locator("#requests td[data-state=transfer]").count() > 0, "a request under way")
    feed[0].is_gone = True
    page.wait_for_selector("text=router gone, trying again")
    earlier = feed[0].requests.copy()
    feed[0].requests.clear()
    feed[0].began_ms = time.time() * 1e3
    feed[0].is_gone = False
    page.wait_for_selector("#link[data-state=live]")
    wait_for(lambda: len(feed[0].requests) > 1, "new requests")
    under_way = page.locator("#requests tr", has=page.locator("td[data-state=transfer]")).locator("button")
    titles = "each => each.map(one => one.title)"
    wait_for(lambda: not earlier.keys() & set(under_way.evaluate_all(titles)), "the old requests are removed")
    count = sum(one["state"] == "transfer" for one in feed[0].requests.values())
    assert page.inner_text("#in-flight").startswith(("None", *(str(n) for n in range(1, count + 3))))
    newest = max(event["time_ms"] for event in feed[0].node_events())
    shown = "time => new Date(time).toLocaleTimeString([], {hourCycle: 'h23'})"
    wait_for(lambda: page.locator("#events time").first.inner_text() == page.evaluate(shown, newest), "new events")
    opened.allow_refusals()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_has_no_horizontal_scroll(opened: Pages, feed: tuple[Feed, str], scheme: str) -> None:
    page = opened(feed[1], width=360, scheme=scheme)
    page.wait_for_selector("#requests tbody tr:nth-child(2)")
    page.locator("#requests tbody button").first.click()
    page.wait_for_selector("#requests .timeline canvas")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.documentElement.dataset.theme") == scheme


def test_new_requests_do_not_move_a_row_while_it_is_pressed(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    page.locator("#requests tbody tr:nth-child(2) button").hover()
    page.mouse.down()
    count = len(feed[0].requests)
    wait_for(lambda: len(feed[0].requests) > count + 2, "new requests")
    page.mouse.up()
    page.wait_for_selector("#requests .timeline canvas")
    newest = next(reversed(feed[0].requests))
    page.wait_for_selector(f"#requests button[title={newest}]")


def test_the_theme_is_kept(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1], scheme="dark")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.inner_text("#theme") == "Dark"


def test_text_has_the_contrast_of_wcag_aa_in_both_themes(opened: Pages, feed: tuple[Feed, str]) -> None:
    page = opened(feed[1])
    for scheme in ("light", "dark"):
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        values = page.evaluate("""() => { const style = getComputedStyle(document.documentElement);
            return Object.fromEntries(['paper', 'panel', 'ink', 'soft', 'over', 'decode-ink']
                .map(name => [name, style.getPropertyValue('--' + name).trim()])); }""")
        for text in ("ink", "soft", "over", "decode-ink"):
            for ground in ("paper", "panel"):
                assert contrast(values[text], values[ground]) >= 4.5, (scheme, text, ground)
        page.click("#theme")


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        shares = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_memory_is_bounded_when_steps_are_many(opened: Pages, serve: Callable[[Feed], str]) -> None:
    made = Feed(steps_per_s=1000.0)
    made.ends["decode-0"] -= 40_000.0  # so that 40,000 steps arrive at once, as after a long interruption
    page = opened(serve(made))
    page.select_option("#window", "60000")
    wait_for(lambda: steps_of(page, "decode-0") > 10_000, "steps in view")
    assert steps_of(page, "decode-0") <= 25_000
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


# ---- over a cluster --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(prefill=1, decode=1, tbt_slo_ms=50) as started:
        yield started


def test_the_page_of_a_running_cluster_is_live(opened: Pages, running: Cluster) -> None:
    with urllib.request.urlopen(running.url + "/", timeout=10) as answer:
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = opened(running.url)
    page.wait_for_selector("#link[data-state=live]")
    wait_for(lambda: page.locator(".node").count() == 2, "cards of both nodes")
    is_enough, answers = threading.Event(), []

    def send() -> None:
        while not is_enough.is_set():
            prompt = [3 + len(answers) % 1000, *range(3, 603)]  # a new prompt each time, so that no KV is cached
            answers.append(running.complete(prompt, 200))

    work = threading.Thread(target=send)
    work.start()
    try:
        wait_for(lambda: steps_of(page, "prefill-0") > 0 and steps_of(page, "decode-0") > 20, "steps of both nodes")
        before = steps_of(page, "decode-0")
        wait_for(lambda: steps_of(page, "decode-0") > before, "more steps")
        wait_for(lambda: len(answers) > 3, "a few requests")
    finally:
        is_enough.set()
        work.join()
    finished = page.locator("#requests td[data-state=finished]")
    wait_for(lambda: finished.count() == min(100, len(answers)), "all requests, finished")
    assert "prefill-0 → decode-0" in page.locator("#requests tbody tr").first.inner_text()
    wait_for(lambda: page.locator("#transfers td:text-is('done')").count() == min(10, len(answers)), "their transfers")
    page.locator("#requests tbody button").first.click()
    page.wait_for_selector("#requests .timeline canvas")
    page.click("#requests .timeline summary")
    spans = "\n".join(page.locator("#requests .timeline li").all_inner_texts())
    assert re.search(r"prompt chunk of \d+ tokens .*on prefill-0", spans)
    assert re.search(r"tokens generated.* on decode-0", spans)
    assert "KV transfer" in spans
    page.locator("#lanes canvas").nth(1 if "decode" in page.locator(".lane span").nth(1).inner_text() else 0).focus()
    page.keyboard.press("End")
    page.wait_for_selector("#step li")
    assert page.locator("#step li").first.inner_text().startswith("cmpl-")
