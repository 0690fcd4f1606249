"""Test the records of a whole cluster: the phases of each request add up, and every byte and step is recorded."""

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.harness import START_S, Cluster, cluster, completion, prompt_of, wait_for

SPANS = {"queued", "chunk", "transfer", "decode"}


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    # With "always", the prefill node computes short prompts too. A drain that waited for the feed would exceed START_S.
    with cluster(max_num_batched_tokens=64, disaggregate="always", drain_timeout_s=2 * START_S) as running:
        yield running


def recorded(running: Cluster, count: int) -> list[dict[str, Any]]:
    """Wait until the nodes have reported all phases of the latest `count` requests, and return these requests."""

    def latest() -> list[dict[str, Any]]:
        return list(running.get(f"/v1/requests?limit={count}")["requests"])

    wait_for(lambda: len(latest()) == count and all(row["phases_ms"] for row in latest()), "all phases are known")
    return latest()


def timeline(running: Cluster, row: dict[str, Any]) -> list[dict[str, Any]]:
    return list(running.get(f"/v1/requests/{row['id']}/timeline")["spans"])


def test_the_time_of_every_request_adds_up_and_its_spans_are_in_order(served: Cluster) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: served.complete(prompt_of(seed, 200), 12), range(8)))
    for row in recorded(served, 8):
        assert sum(row["phases_ms"].values()) == pytest.approx(row["ended_ms"] - row["accepted_ms"], abs=0.01)
        assert min(row["phases_ms"].values()) >= 0
        times = [row[f"{name}_ms"] for name in ("accepted", "first_token", "second_token", "last_token", "ended")]
        assert times == sorted(times)
        assert (row["prefill"], row["decode"], row["generated_tokens"]) == ("prefill-0", "decode-0", 12)
        wait_for(
            lambda row=row: {span["kind"] for span in timeline(served, row)} >= SPANS, "both nodes report all spans"
        )
        spans = timeline(served, row)
        assert sum(span["tokens"] for span in spans if span["kind"] == "chunk") == 200
        assert all(span["start_ms"] <= span["end_ms"] for span in spans)


def test_transfers_move_the_bytes_that_the_nodes_counted(served: Cluster) -> None:
    before = served.settled()["bytes_moved"]
    for seed in range(20, 23):
        served.complete(prompt_of(seed, 150), 4)
    moved = served.settled()["bytes_moved"] - before
    assert moved == sum(row["transfer"]["bytes"] for row in recorded(served, 3)) > 0
    events = served.get("/trace?last=900s")["traceEvents"]
    kinds = {"queued", "admitted", "first", "reserving", "transfer", "committed", "received", "ended"}
    assert {event["name"] for event in events if event["ph"] == "n"} == kinds
    pushes = [event for event in events if event.get("cat") == "transfer" and event["ph"] == "b"]
    assert sum(push["args"]["bytes"] for push in pushes) == served.status()["bytes_moved"]


def test_members_of_steps_are_the_clients_requests(served: Cluster) -> None:
    answer = served.post("/v1/completions", completion(served.model, prompt_of(30, 130), 5))
    (row,) = recorded(served, 1)
    assert row["id"] == answer["id"]
    for node, kinds, tokens in (("prefill-0", {"chunk"}, 130), ("decode-0", {"decode"}, 4)):
        since_ms = row["accepted_ms"]
        steps = served.get(f"/v1/steps?node={node}&since_ms={since_ms}")
        numbers = [step[steps["fields"].index("number")] for step in steps["steps"]]
        members = [m for number in numbers for m in served.get(f"/v1/steps/{node}/{number}")["members"]]
        assert {(member["id"], member["kind"]) for member in members} == {(answer["id"], kind) for kind in kinds}
        assert sum(member["count"] for member in members) == tokens


def test_each_step_that_the_nodes_ran_is_reported_once(served: Cluster) -> None:
    served.settled()
    for name, node in served.nodes().items():
        steps = served.get(f"/v1/steps?node={name}&limit=65536")
        numbers = [row[0] for row in steps["steps"]]
        assert numbers == list(range(node["steps"]))
        assert node["records_dropped"] == 0
        computed = sum(row[steps["fields"].index("prefill_tokens")] for row in steps["steps"])
        assert computed == node["prompt_tokens"]


def test_the_feed_reports_changes_and_does_not_delay_a_drain(served: Cluster) -> None:
    """This is the last test because it stops the router."""
    received: list[tuple[str, Any]] = []
    ended = threading.Event()

    def watch() -> None:
        with urllib.request.urlopen(served.url + "/events", timeout=START_S) as answer:
            kind = ""
            for line in answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    received.append((kind, json.loads(value)))
        ended.set()

    def unfinished() -> set[str]:
        rows = [row for kind, data in received if kind == "requests" for row in data["requests"]]
        return set({row["id"]: row["state"] for row in rows}.values()) - {"finished"}

    threading.Thread(target=watch, daemon=True).start()
    wait_for(lambda: received, "the first status")
    for seed in (40, 41):
        served.complete(prompt_of(seed, 100), 8)
    wait_for(lambda: {"status", "steps", "requests"} <= {kind for kind, _ in received}, "an event of every kind")
    wait_for(lambda: not unfinished(), "the events of both ends")
    served.send_signal("router", signal.SIGTERM)
    served.processes["router"].wait(START_S)
    assert ended.wait(START_S), "the stream does not end"
