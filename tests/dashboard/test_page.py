"""Test the files of the page as they are served, and the sentence at the top of the page."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from dashboard.bottleneck import bottleneck
from dashboard.routes import FOLDER, page_routes

FILES = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}


async def get(path: str, **headers: str) -> httpx.Response:
    app = Starlette(routes=[*page_routes(), Route("/other", lambda _: None)])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.get(path, headers=headers)


# ---- files -----------------------------------------------------------------------------------------------------------


async def test_every_file_of_the_page_is_served_with_its_type_and_a_strict_policy() -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg+xml"}
    for name in FILES:
        answer = await get("/" if name == "index.html" else f"/page/{name}")
        assert answer.status_code == 200, name
        assert answer.content == (FOLDER / name).read_bytes()
        assert kinds.get(name.rpartition(".")[2], "text/plain") in answer.headers["content-type"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"


async def test_an_unchanged_file_is_not_sent_again() -> None:
    first = await get("/page/page.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await get("/page/page.js", **{"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    changed = await get("/page/page.js", **{"if-none-match": '"other"'})
    assert changed.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/../routes.py",
        "/page/%2e%2e/routes.py",
        "/page/..%2froutes.py",
        "/page/..%2f..%2fpyproject.toml",
        "/page/",
        "/page/vendor/",
    ],
)
async def test_nothing_outside_the_folder_is_served(path: str) -> None:
    assert (await get(path)).status_code == 404


def test_the_page_loads_only_its_own_files_and_has_no_inline_script_or_style() -> None:
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html) == []
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert {link.removeprefix("page/") for link in links if link.startswith("page/")} <= FILES
    for path in own_files():
        urls = set(re.findall(r"https?://[^\"'\s)]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not urls or path.name == "tour.js", path  # the tour has links to papers
        for imported in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert imported in FILES


def test_the_page_stays_small() -> None:
    sizes = {path.name: path.stat().st_size for path in own_files() if path.suffix == ".js"}
    simulator = sizes.pop("simulator.js") + sizes.pop("tour.js")
    assert sum(sizes.values()) < 54_500
    assert simulator < 29_000


def own_files() -> list[Path]:
    return [FOLDER / name for name in FILES if not name.startswith("vendor/")]


# ---- the sentence ----------------------------------------------------------------------------------------------------


def node(role: str, number: int = 0, **fields: Any) -> dict[str, Any]:
    blocks = {"free": 100, "cached": 0, "owned": 0, "reserved": 0, "quarantined": 0, "total": 100}
    whole = {"id": f"{role}-{number}", "role": role, "state": "ready", "alive": True, "running": 0, "waiting": 0}
    whole |= {"busy": 0.0, "batch": {"tokens": 0, "prefills": 0, "decodes": 0}, "blocks": blocks}
    return whole | fields


def sentence(*nodes: dict[str, Any], running: int = 0, mode: str = "", **latency: Any) -> str:
    whole = {"ttft_ms": {"p50": None, "p99": None, "n": 0}, "tbt_ms": {"p50": None, "p99": None, "n": 0}}
    whole |= {"ttst_ms": {"p50": None, "p99": None, "n": 0}, "slo": {"ttft_ms": 500.0, "tbt_ms": 50.0}} | latency
    requests = {"running": running}
    return bottleneck({"nodes": list(nodes), "mode": mode, "requests": requests, "latency": whole})


def took(p50: float, p99: float) -> dict[str, float]:
    return {"p50": p50, "p99": p99, "n": 100}


def full(**fields: Any) -> dict[str, Any]:
    return {"blocks": {"free": 1, "cached": 0, "owned": 95, "reserved": 4, "quarantined": 0, "total": 100}} | fields


def test_the_sentence_includes_the_queue_of_the_router_and_refusals() -> None:
    status = {"nodes": [node("decode", running=3, busy=0.4)], "requests": {"running": 9}}
    queued = bottleneck(status | {"totals": {"queued": 6, "refused_per_s": 0.0}})
    assert queued == "At work: 9 requests on 1 node, 40% busy, 6 queued."
    refusing = bottleneck(status | {"totals": {"queued": 0, "refused_per_s": 84.8}})
    assert refusing == "At work: 9 requests on 1 node, 40% busy, none queued. 84.8 requests/s are refused."


def test_missing_values_are_accepted() -> None:
    assert bottleneck({}) == "No node has joined: nothing can be served."
    assert "ready" in bottleneck({"nodes": [{"id": "d", "role": "decode", "state": "ready", "alive": True}]})


def test_a_lost_node_is_named_for_10_minutes_also_if_a_new_process_has_replaced_it() -> None:
    events = [{"kind": "lost", "node": f"decode-{n}", "time_ms": ms} for n, ms in enumerate((400_000, 200_000))]
    nodes = [node("prefill"), node("decode"), node("decode", 1)]
    text = bottleneck({"nodes": nodes, "router": {"time_ms": 900_000}, "events": events})
    assert text == "Idle: 3 nodes ready, no requests. Lost in the last 10 minutes: decode-0 (is back)."


def test_a_node_lost_earlier_or_never_connected_or_shut_down_since_is_not_named_as_lost_or_back() -> None:
    event = {"kind": "lost", "node": "decode-3", "time_ms": 9_900_000}
    gone = {"alive": False, "state": "lost"}
    rows = [node("decode", 1, **gone, since_ms=9_000_000), node("decode", 2, **gone, since_ms=None)]
    rows.append(node("decode", 3, alive=False, state="left", since_ms=9_950_000))
    text = bottleneck({"nodes": [node("decode"), *rows], "router": {"time_ms": 10_000_000}, "events": [event]})
    assert text == "Idle: 1 node ready, no requests. Lost in the last 10 minutes: decode-3."


def test_a_few_requests_do_not_show_that_the_handoff_is_slow() -> None:
    nodes, late = (HANDED, WELL), LATE_SECOND | {"ttst_ms": took(90, 200) | {"n": 3}}
    assert "handoff" not in sentence(*nodes, running=4, mode="disaggregated", **late)


HALF = {"free": 40, "owned": 60, "total": 100}
CACHED = {"free": 0, "cached": 90, "owned": 10, "reserved": 0, "quarantined": 0, "total": 100}
MIXED = {"tokens": 520, "prefills": 1, "decodes": 8}
LATE_SECOND = {"tbt_ms": took(10, 20), "ttst_ms": took(90, 200)}
WELL, HANDED = node("decode", running=4, busy=0.4), node("prefill", handoffs=9)
PREFILL_IS_FULL = node("prefill", waiting=14, busy=0.97)


@pytest.mark.parametrize(
    ("nodes", "given", "expected"),
    [
        ([], {}, "No node has joined: nothing can be served."),
        ([node("decode", alive=False), node("decode", 1, state="draining")], {}, "No node is ready; 2 are listed."),
        ([node("decode", alive=False, state="left")], {}, "No node is left: nothing can be served."),
        (
            [node("prefill"), node("decode", alive=False, state="lost", since_ms=1)],
            {"mode": "disaggregated"},
            "No decode node is ready: prefill nodes generate too. Lost in the last 10 minutes: decode-0.",
        ),
        (
            [node("decode"), node("prefill", 1, alive=False, state="left")],
            {"mode": "disaggregated"},
            "No prefill node is ready: decode nodes compute prompts too.",
        ),
        ([node("decode"), node("decode", 1)], {"mode": "disaggregated"}, "Idle: 2 nodes ready, no requests."),
        ([node("prefill"), node("decode")], {}, "Idle: 2 nodes ready, no requests."),
        (
            [node("decode", running=3, busy=0.4)],
            {"running": 3, "tbt_ms": took(10, 20)},
            "Keeping up and within the SLO: 3 requests on 1 node, 40% busy, none queued.",
        ),
        (
            [node("prefill", waiting=30, busy=0.6), node("decode", running=3, busy=0.4)],
            {"running": 33},
            "At work: 33 requests on 2 nodes, 50% busy, 30 queued.",
        ),
        (
            [node("decode", running=3, busy=0.95), node("decode", 1, busy=0.1)],
            {"running": 3},
            "Keeping up: 3 requests on 2 nodes, 10% to 95% busy, none queued.",
        ),
        (
            [PREFILL_IS_FULL, node("decode", busy=0.5), node("decode", 1, busy=0.3)],
            {},
            "The prefill pool is the bottleneck: 14 queued and 97% busy, while the decode pool is 60% idle. "
            "Move one node to prefill: `baton role decode-1 prefill`.",
        ),
        (
            [node("prefill", waiting=9, busy=0.97), node("decode", busy=0.8), node("decode", 1, busy=0.9)],
            {},
            "The prefill pool is at its limit: 9 queued, 97% busy.",
        ),
        (
            [node("prefill"), node("decode", **full(waiting=5, running=8, busy=0.9))],
            {"running": 13},
            "KV blocks are the bottleneck: requests hold 99% of those on decode-0, and 5 wait. "
            "Give nodes more blocks, or add a node.",
        ),
        (
            [node("prefill"), node("prefill", 1, busy=0.1), node("decode", waiting=6, busy=0.95)],
            {},
            "The decode pool is the bottleneck: 6 queued and 95% busy, while the prefill pool is 95% idle. "
            "Move one node to decode: `baton role prefill-0 decode`.",
        ),
        (
            [node("decode", waiting=6, busy=0.95)],
            {},
            "The nodes are at their limit: 6 queued and 95% busy. Add a node.",
        ),
        (
            [node("decode", running=9, busy=0.9, batch=MIXED)],
            {"running": 9, "tbt_ms": took(20, 80)},
            "Tokens come late, TBT p99 80 ms (SLO 50), and decode-0 runs prompt chunks in the same steps as decodes. "
            "Separate prefill nodes would avoid this.",
        ),
        (
            [HANDED, WELL],
            {"running": 4} | LATE_SECOND,
            "The handoff is slow: the second token comes after 90 ms (p50), later ones after 10 ms, "
            "and no decode node has a queue. Look at the KV transfers.",
        ),
        (
            [node("prefill", busy=0.2), node("decode", busy=0.1)],
            {"running": 9, "ttft_ms": took(300, 900)},
            "TTFT p99 900 ms (SLO 500), yet no node has a queue and none is more than 20% busy: "
            "either these prompts take this long even without load, or the delay is outside the nodes. "
            "The timeline of a slow request shows which.",
        ),
        (
            [node("prefill", busy=0.7), node("decode", busy=0.6)],
            {"running": 9, "ttft_ms": took(300, 900)},
            "Over the SLO: TTFT p99 900 ms (SLO 500). The load of the nodes does not show why.",
        ),
    ],
)
def test_the_sentence_names_the_bottleneck(nodes: list[dict[str, Any]], given: dict[str, Any], expected: str) -> None:
    assert sentence(*nodes, **given) == expected


@pytest.mark.parametrize(
    ("nodes", "given", "absent"),
    [
        ([PREFILL_IS_FULL, node("decode", busy=0.1)], {}, "baton role"),  # the decode pool would be empty
        ([PREFILL_IS_FULL, *(node("decode", number, busy=0.45) for number in (0, 1))], {}, "baton role"),
        ([PREFILL_IS_FULL, *(node("decode", number, busy=0.1, blocks=HALF) for number in (0, 1))], {}, "baton role"),
        ([node("prefill", waiting=2, busy=0.2), node("decode")], {"running": 2}, "prefill pool"),
        ([node("decode", blocks=CACHED, waiting=1, busy=0.5)], {"running": 1}, "KV blocks"),
        ([node("decode", running=9, batch=MIXED)], {"running": 9, "tbt_ms": took(20, 40)}, "prompt chunks"),
        ([HANDED, WELL | {"waiting": 1}], LATE_SECOND, "handoff"),
        ([HANDED, WELL], {"tbt_ms": took(0, 30), "ttst_ms": took(60, 90)}, "handoff"),  # tokens arrive in groups
        ([HANDED, WELL], {"tbt_ms": took(0.018, 30), "ttst_ms": took(56, 90)}, "handoff"),  # mostly in groups
        ([HANDED, WELL], {"tbt_ms": took(15, 30), "ttst_ms": took(45, 90)}, "handoff"),  # within the SLO
        ([HANDED, WELL], {"tbt_ms": took(0.2, 1), "ttst_ms": took(8, 20), "slo": {}}, "handoff"),  # 8 ms is not late
        ([WELL], LATE_SECOND, "handoff"),
        ([node("prefill", handoffs=0), WELL], LATE_SECOND, "handoff"),  # all prompts were computed locally
    ],
)
def test_the_sentence_names_no_cause_that_is_not_shown(
    nodes: list[dict[str, Any]], given: dict[str, Any], absent: str
) -> None:
    assert absent not in sentence(*nodes, **given)
