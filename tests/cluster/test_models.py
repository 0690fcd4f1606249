"""Test a cluster that serves two models: each request gets the tokens of the model that it names."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.harness import DATA, Cluster, cluster, completion, wait_for

STORIES = DATA / "stories260K"
OTHER = {"model": STORIES, "served_model_name": "stories"}
NODES = {"prefill-0", "decode-0", "prefill-1", "decode-1"}
PROMPT, COUNT = list(range(5, 45)), 40


def ask(running: Cluster, model: str, count: int = COUNT) -> list[int]:
    answer = running.post("/v1/completions", completion(model, PROMPT, count))
    assert answer["model"] == model
    return list(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    own: dict[str, dict[str, object]] = {"prefill-1": OTHER, "decode-1": OTHER}
    own["router"] = {"more_models": f"stories={STORIES}"}
    with cluster(2, 2, runner="torch", own=own, responses_store="memory") as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The answers of clusters that serve only one model, by model."""
    found = {}
    for model, settings in (("model", {}), ("stories", OTHER)):
        with cluster(0, 1, runner="torch", **settings) as single:
            found[model] = ask(single, model)
    assert found["model"] != found["stories"]
    return found


def test_each_request_goes_to_the_nodes_of_its_model(running: Cluster, alone: dict[str, list[int]]) -> None:
    assert [card["id"] for card in running.get("/v1/models")["data"]] == ["model", "stories"]
    lengths = {card["id"]: card["max_model_len"] for card in running.get("/v1/models")["data"]}
    assert running.get("/v1/models/stories")["max_model_len"] == lengths["stories"] != lengths["model"]
    with ThreadPoolExecutor(8) as pool:
        models = ["model", "stories"] * 8
        assert list(pool.map(lambda model: ask(running, model), models)) == [alone[model] for model in models]
    running.settled()
    nodes = running.nodes()
    assert {name: node["model"] for name, node in nodes.items()} == {
        name: "stories" if name.endswith("1") else "model" for name in NODES
    }
    assert all(nodes[f"prefill-{number}"]["handoffs"] >= 8 for number in range(2))
    assert running.status()["requests"]["finished"] >= 16


def test_other_endpoints_use_the_model_that_is_named(running: Cluster) -> None:
    counts = {
        model: running.post("/tokenize", {"model": model, "prompt": "Once upon a time"})["tokens"]
        for model in ("model", "stories")
    }
    assert counts["model"] != counts["stories"]
    body = {"model": "stories", "input": "Once upon a time", "max_output_tokens": 8}
    stored = running.post("/v1/responses", body)
    assert running.get(f"/v1/responses/{stored['id']}")["output"] == stored["output"]
    assert stored["model"] == "stories"
    assert running.post("/v1/completions", {"prompt": "Once", "max_tokens": 1})["model"] == "model"


def test_an_unknown_model_is_refused_with_the_names(running: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        ask(running, "other")
    assert raised.value.code == 404
    with raised.value as answer:
        message = json.load(answer)["error"]["message"]
    assert message == "The model `other` does not exist; served: `model`, `stories`."


def test_the_loss_of_one_model_does_not_concern_the_other(running: Cluster, alone: dict[str, list[int]]) -> None:
    for name in ("prefill-1", "decode-1"):
        running.send_signal(name, signal.SIGKILL)
    wait_for(lambda: running.alive("router") == {"prefill-0", "decode-0"}, "the router has lost both nodes")
    assert ask(running, "model") == alone["model"]
    assert running.get("/ready?model=model")["ready"]
    with pytest.raises(urllib.error.HTTPError) as raised:
        running.get("/ready")
    assert raised.value.code == 503
    raised.value.close()
    for name in ("prefill-1", "decode-1"):
        running.start(name)
    running.ready()
    assert ask(running, "stories") == alone["stories"]


def test_the_role_of_a_node_of_each_model_can_change(running: Cluster, alone: dict[str, list[int]]) -> None:
    for role in ("decode", "prefill"):
        assert running.post("/v1/nodes/prefill-1/role", {"role": role})["role"] == role
        assert ask(running, "stories") == alone["stories"]


def test_metrics_have_the_name_of_the_model(running: Cluster, alone: dict[str, list[int]]) -> None:
    ask(running, "stories")
    text = running.metrics()
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "each family is written once"
    samples = {family.name: family.samples for family in text_string_to_metric_families(text)}
    found = {name: {sample.labels.get("model_name") for sample in each} for name, each in samples.items()}
    for name in ("vllm:prompt_tokens", "baton_queue_requests", "baton_placements", "vllm:num_requests_running"):
        assert found[name] == {"model", "stories"}, name
    alive = {sample.labels["engine"]: sample.labels["model_name"] for sample in samples["baton_node_alive"]}
    assert alive == {name: "stories" if name.endswith("1") else "model" for name in NODES}


def test_a_node_of_an_unknown_model_gets_no_request(running: Cluster, alone: dict[str, list[int]]) -> None:
    running.own["decode-2"] = OTHER | {"served_model_name": "unknown"}
    running.start("decode-2")
    wait_for(lambda: "decode-2" in running.log("router"), "the router logs the node")
    assert "node decode-2 serves the model 'unknown', which is not among this router's" in running.log("router")
    assert ask(running, "stories") == alone["stories"]
    assert "decode-2" not in running.nodes()
    running.processes.pop("decode-2").terminate()
