"""Test the kinds of faults that `make chaos` injects, with fewer requests."""

import pytest

from tests.chaos import features
from tests.chaos.cancels import cancels
from tests.chaos.census import Count
from tests.chaos.drive import CLIENTS, Link, Report, Row, drive
from tests.chaos.matrix import D, P
from tests.chaos.other_clusters import kill_a_router
from tests.chaos.proxy import PARTITION, Harm
from tests.chaos.soak import LIFE_WARM_S, Sample, slopes
from tests.chaos.traffic import failures
from tests.cluster.harness import cluster
from tests.engine.build import thinned

REQUESTS = 30

# The faults are far apart, because the router fails a request that was on two dying nodes: it may be the cause.
DEATHS = Row(
    "deaths",
    "a prefill node killed in a middle chunk, another frozen in a push, a decode node killed at a last token",
    {P: ["prefill.after_chunk:6@*=kill"], D: ["decode.ended:15=kill"], "prefill-1": ["prefill.before_push:60=stop"]},
    thaw_s=3.0,
)
LINKS = Row(
    "links",
    "a KV link that is cut, flips bits and doubles data; an RPC link that is refused and falls silent",
    script=[
        # The cut comes first and is brief, because the router soon sends nothing to a node that fails repeatedly.
        Link(D, "kv", 0.0, Harm(cut_at=2000), 0.7),
        Link(D, "kv", 0.7, Harm(corrupt=0.3, double=0.1), 1.0),
        Link(D, "rpc", 1.7, Harm(refuse=True), 0.3),
        Link(D, "rpc", 2.0, PARTITION, 3.0),
    ],
    channel="tcp",
)


def nothing_is_lost(report: Report) -> None:
    assert not report.complaints()
    assert report.status["requests"]["moved"] > 0
    assert report.status["requests"]["failed"] == 0
    assert report.status["handoffs"] > REQUESTS / 2, "most prompts were computed on prefill nodes"


@pytest.mark.parametrize(
    ("channel", "kind"), thinned([("tcp", ""), ("shm", "states"), ("shm", ""), ("tcp", "windows")], 4)
)
def test_no_token_is_lost_when_nodes_die_and_freeze(channel: str, kind: str) -> None:
    report = drive(DEATHS, REQUESTS, channel, kind)
    nothing_is_lost(report)
    assert {name for name, _ in report.restarts} == {P, D}
    assert {fault.what for fault in report.faults} == {
        "prefill.after_chunk=kill",
        "decode.ended=kill",
        "prefill.before_push=stop",
    }


@pytest.mark.parametrize(
    "prefill", [2, pytest.param(0, marks=pytest.mark.exhaustive)], ids=["disaggregated", "co-located"]
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads this attribute
def test_requests_with_drafts_grammars_images_and_adapters_survive_faults(prefill: int) -> None:
    lives = {D: ["decode.token:20@*=kill"]} | ({P: ["prefill.after_chunk:4@*=kill"]} if prefill else {})
    cut = Link("decode-1", "rpc", 6.0, Harm(cut_at=9000), 0.0)
    report = drive(
        Row("features", "kills, and a cut link", lives, [cut], prefill=prefill, kind=features.KIND), REQUESTS
    )
    assert not report.complaints()
    assert report.status["requests"]["moved"] > 0
    assert (report.status["handoffs"] > 0) == (prefill > 0)


@pytest.mark.parametrize("kind", ["", pytest.param("states", marks=pytest.mark.exhaustive)])
def test_a_damaged_cut_or_silent_link_causes_no_wrong_token(kind: str) -> None:
    report = drive(LINKS, REQUESTS, kind=kind)
    nothing_is_lost(report)
    assert report.harms["corrupted"] > 0
    assert report.harms["cut"] > 0
    assert not report.restarts


def test_clients_that_disconnect_during_faults_leak_nothing() -> None:
    with cluster(2, 2, heartbeat_s=0.5, log_format="json") as running:
        counts, leaked = cancels(running, 120, fault_every_s=2.0)
    assert not leaked
    assert counts["disconnected before the answer"] > 0
    assert counts["disconnected in the answer"] > 0


def test_a_killed_router_breaks_its_own_streams_and_no_others() -> None:
    outcomes, num_cut, held = kill_a_router(30, nodes=1)
    assert not failures(outcomes)
    assert not held
    assert 0 < num_cut <= CLIENTS + 1, "streams in progress, and connections not yet accepted"


def test_a_soak_distinguishes_growth_from_fluctuation() -> None:
    """Memory that repeatedly rises by 12 MiB and falls is not a leak. Growth by 40 MiB per hour is a leak."""
    samples = [
        Sample(name, at_s, at_s, Count(pid, 100 + 12 * (at_s % 240) / 240 + leak * at_s / 3600, 5))
        for at_s in range(0, 3600, 10)
        for pid, (name, leak) in enumerate({"flat": 0.0, "leaks": 40.0}.items())
    ]
    samples += [Sample("new", at_s, at_s % 240, Count(10 + at_s // 240, at_s % 240, 5)) for at_s in range(0, 3600, 10)]
    samples += [
        Sample("short", each.at_s, each.at_s, each.count) for each in samples if each.name == "flat" and each.at_s < 460
    ]
    rows = {row[0]: row for row in slopes(samples, LIFE_WARM_S)}
    assert {name: row[-1] for name, row in rows.items()} == {"flat": "", "leaks": "memory", "new": "", "short": ""}
    assert abs(rows["short"][4]) > 1.0, "too few samples give a large slope, which its error explains"
    assert rows["leaks"][4] == pytest.approx(40, abs=5)
    assert rows["new"][1] == 15, "growth at the start of each process is not a leak"
