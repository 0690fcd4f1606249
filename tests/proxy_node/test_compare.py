"""Test `baton compare --engines` over stub servers: there is a verdict only with proof that KV moved."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from compare.endpoint import EndpointError
from compare.run.engines import BYTES, COMPUTED, READ, EngineMeter, check_moved
from proxy_node import probe
from tests.cluster.comparisons import report_in, start
from tests.cluster.harness import DEMO, wait_for
from tests.proxy_node.clusters import Engines
from tests.proxy_node.vllm_stub import VOCABULARY, VllmStub

EXPIRED = "nixl_num_kv_expired_reqs_total"


@pytest.mark.parametrize(
    ("prefill", "decode", "splits", "problem"),
    [
        ({COMPUTED: 901}, {COMPUTED: 11, READ: 890, BYTES: 5000}, True, ""),
        ({COMPUTED: 1}, {COMPUTED: 901}, True, "no KV moved: the decode servers computed 900 tokens"),
        ({COMPUTED: 801}, {COMPUTED: 111, READ: 790, BYTES: 4000}, True, "read 790 tokens of prompts and computed 110,"),
        ({COMPUTED: 1}, {COMPUTED: 901}, False, ""),
        ({COMPUTED: 401}, {COMPUTED: 501, READ: 100, BYTES: 500}, False, "co-located, but 500 bytes of KV moved"),
        ({COMPUTED: 401}, {COMPUTED: 501, READ: 100, BYTES: 500}, None, ""),
        ({EXPIRED: 2}, {COMPUTED: 1}, None, "2 prompts were not read before the lease"),
    ],
)  # fmt: skip
def test_counters_of_servers_prove_that_kv_moved(
    prefill: dict[str, float], decode: dict[str, float], splits: bool | None, problem: str
) -> None:
    before = [{COMPUTED: 3.0, BYTES: 70.0}, {COMPUTED: 40.0, READ: 9.0, EXPIRED: 1.0}]
    after = [
        {name: was.get(name, 0.0) + grown.get(name, 0) for name in (COMPUTED, READ, BYTES, EXPIRED)}
        for was, grown in zip(before, (prefill, decode), strict=True)
    ]
    problems = check_moved(before, after, 1, 10, splits=splits)
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)


async def test_a_server_that_does_not_answer_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 0.2)
    async with VllmStub(is_stalled=True).serve() as url:
        with pytest.raises(EndpointError, match="no answer within"):
            await EngineMeter((url,), "", VOCABULARY).read()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path, ["a", "b"], token_s=0.004, connector="nixl", lease_s=10.0)
    try:
        for name in made.ports:
            made.start(name)
        wait_for(lambda: all(map(made.answers, made.ports)), "the servers answer")
        yield made
    finally:
        made.close()


def compared(directory: Path, urls: Iterable[str]) -> tuple[int, str]:
    """Run the command. Return its exit status and its output."""
    process = start(directory, "--engines", ",".join(urls), "--model", str(DEMO), "--duration", "1", "--seeds", "2")
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def test_replicas_and_a_pair_are_compared_on_the_same_servers(tmp_path: Path, engines: Engines) -> None:
    status, output = compared(tmp_path, engines.urls.values())
    report = report_in(tmp_path)
    assert status == (0 if report["valid"] else 1), output
    assert not report["problems"] or "invalid" in report["problems"][0], output  # runs on a busy machine can be invalid
    assert report["tokens"]["compared"]
    assert report["tokens"]["equal"]
    assert report["parity"]["equal"]
    runs = [run for run in report["runs"] if run["valid"]]
    for run in runs:
        assert (run["kv"]["bytes"] > 0, run["kv"]["handoffs"] > 0) == (run["arm"] == "disaggregated:1p1d",) * 2
    salts = [{body["cache_salt"] for body in engines.get(name, "calls")} for name in engines.ports]
    # The probe has a salt. Each of the two arms has a salt for the preflight and a salt for each seed.
    assert len(salts[0] | salts[1]) == 1 + 2 * (1 + len({run["seed"] for run in report["runs"]}))
    assert "no strip" in output


def test_a_server_that_does_not_answer_is_reported_before_an_arm_starts(tmp_path: Path) -> None:
    status, output = compared(tmp_path, ("http://127.0.0.1:9", "http://127.0.0.1:10"))
    assert status != 0
    assert "http://127.0.0.1:9: /v1/models: Cannot connect" in output
    assert "starting" not in output


@pytest.mark.exhaustive
def test_servers_that_moved_no_kv_get_no_verdict(tmp_path: Path, engines: Engines) -> None:
    engines.set("b", ignores_params=True)
    assert compared(tmp_path, engines.urls.values())[0] == 1
    assert report_in(tmp_path)["problems"][0].startswith("disaggregated:1p1d: no KV moved: the decode servers computed")
