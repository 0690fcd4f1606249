"""Test clusters of a router, two proxy nodes and two stub engines, as clients see them: every process may end, freeze
and come back, and every answer is complete and right."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.harness import DEMO, ROOT, Cluster, completion, free_port, probe, wait_for
from tests.engine.build import thinned
from tests.proxy_node.clusters import ACTS, LENGTH, TIMES, Act, Engines, kill_engine, lose, repair, serving, streams
from tests.proxy_node.vllm_stub import answer

NODES = ("decode-0", "decode-1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Engines]]:
    with serving(tmp_path_factory.mktemp("engines"), NODES) as running:
        yield running


def incarnations(running: Cluster) -> dict[str, str]:
    return {name: node["address"] for name, node in running.nodes().items() if node["alive"]}


def test_an_unmodified_router_serves_engines(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    prompt = list(range(100, 140))
    assert running.complete(prompt, 30) == answer(prompt, 30)
    body = completion(running.model, prompt, 20, n=3, logprobs=2)
    choices = running.post("/v1/completions", body)["choices"]
    assert [choice["token_ids"] for choice in choices] == [answer(prompt, 20)] * 3
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [20] * 3
    text = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    assert text["usage"]["completion_tokens"] == 5
    node = running.nodes()["decode-0"]
    assert node["facts"]["engine"] == "vllm 0.32.0"
    assert node["facts"]["resumes"] == "greedy, seeded"
    assert node["facts"]["engine_url"] == engines.urls["decode-0"]
    assert running.status()["mode"] == "replicas"


def test_what_an_engine_cannot_do_is_a_400_that_says_so(served: tuple[Cluster, Engines]) -> None:
    running, _ = served
    stops = {"stop_token_ids": list(range(10, 137)), "ignore_eos": True, "min_tokens": 1}
    for field, words in (
        ({"prompt_logprobs": 1}, "SGLang servers"),
        ({"response_format": {"type": "json_object"}}, "SGLang servers"),
        ({"bad_words": ["x"]}, "SGLang servers"),
        (stops, "stop_token_ids: has 128 ids with the model's own"),
    ):
        with pytest.raises(urllib.error.HTTPError) as failure:
            running.post("/v1/completions", completion(running.model, [5, 6], 5, **field))
        assert failure.value.code == 400
        assert words in json.load(failure.value)["error"]["message"]


def test_a_client_that_leaves_stops_the_engine(served: tuple[Cluster, Engines]) -> None:
    running, engines = served

    def num_running() -> int:
        return sum(int(node["running"]) for node in running.nodes().values())

    with running.send(completion(running.model, [7, 8], 5000, stream=True)) as connection:
        assert connection.recv(1000)
        wait_for(lambda: num_running() == 1, "the request runs")
    wait_for(lambda: num_running() == 0, "the request was dropped")
    assert all(engines.answers(name) for name in NODES)


@pytest.mark.parametrize("act", thinned(ACTS, 2), ids=lambda act: act.__name__)
def test_no_client_sees_the_loss_of_an_engine_or_of_its_proxy(served: tuple[Cluster, Engines], act: Act) -> None:
    running, engines = served
    for round_ in range(TIMES):
        lose(running, engines, act, NODES[round_ % 2], round_)


def test_an_engine_that_comes_back_is_a_new_incarnation(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    before = incarnations(running)
    kill_engine(running, engines, "decode-0")
    wait_for(lambda: running.alive("router") == {"decode-1"}, "the node is lost")
    assert running.processes["decode-0"].poll() is None, "its proxy waits for it"
    row = running.nodes()["decode-0"]
    assert (row["state"], row["reason"]) == ("lost", "Its vLLM server is gone or makes no progress.")
    found = [probe(running, name, path)[0] for name in NODES for path in ("/health", "/ready", "/metrics")]
    assert found == [200, 503, 200, 200, 200, 200]
    assert "does not answer" in probe(running, "decode-0", "/ready")[1]
    repair(running, engines, "decode-0")
    after = incarnations(running)
    assert after["decode-0"] != before["decode-0"]
    assert after["decode-1"] == before["decode-1"]


def test_without_any_engine_requests_wait_and_then_go_on(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    with streams(running, [[11, 12, 13]], LENGTH):
        for name in NODES:
            kill_engine(running, engines, name)
        for name in NODES:
            engines.start(name)
    wait_for(lambda: running.alive("router") == set(NODES), "the nodes are back")


def test_an_answer_that_may_have_changed_is_marked(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    engines.knobs["resumes_seeded"] = False
    for name in NODES:
        kill_engine(running, engines, name)
        repair(running, engines, name)
        wait_for(lambda name=name: running.nodes()[name]["facts"]["resumes"] == "greedy", f"{name} has probed again")
    before = running.status()["inexact_retries"].get("seeded", 0)
    body = completion(running.model, [21, 22, 23], 400, temperature=1.0, seed=3)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(running.post, "/v1/completions", body)
        wait_for(lambda: any(node["running"] for node in running.nodes().values()), "the request runs")
        [name] = [name for name, node in running.nodes().items() if node["running"]]
        kill_engine(running, engines, name)
        assert len(answered.result()["choices"][0]["token_ids"]) == 400
    repair(running, engines, name)
    assert running.status()["inexact_retries"]["seeded"] == before + 1
    rows = running.get("/v1/requests")["requests"]
    assert [row["exact"] for row in rows if row["attempts"] > 1 and row["prompt_tokens"] == 3][:1] == [False]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_serve_ends_the_command_with_the_reason(served: tuple[Cluster, Engines]) -> None:
    _, engines = served
    engines.set("decode-1", max_model_len=4096)
    shorter = engines.refusal(engines.urls["decode-1"])
    engines.set("decode-1", max_model_len=8192)
    assert "--max-model-len 4096" in shorter
    malformed = engines.refusal("127.0.0.1:8000")
    assert "--engine '127.0.0.1:8000': must be the URL of a vLLM server" in malformed
    assert len(malformed.splitlines()) == 1


def test_baton_up_starts_a_proxy_for_each_engine(served: tuple[Cluster, Engines]) -> None:
    _, engines = served
    port = free_port()
    command = [
        sys.executable, "-m", "baton", "up", "--model", str(DEMO), "--port", str(port),
        "--engines", ",".join(engines.urls.values()),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "complete:" in line:
                    break
            assert "complete: vLLM servers, 0 prefill and 2 decode" in lines[-1], "".join(lines)
            body = json.dumps(completion("model", [5, 6, 7], 12)).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as found:
                assert json.load(found)["choices"][0]["token_ids"] == answer([5, 6, 7], 12)
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    assert process.returncode == 0
