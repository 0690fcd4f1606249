"""Test that clusters give the same embeddings and scores as transformers, in both modes, alone or among completions."""

import base64
import json
import struct
import urllib.error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.cluster.harness import Cluster, cluster, prompt_of
from tests.cluster.pooling_models import embedded, log_odds, make, remove_head

LAST = ("Pooling", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True})
MEAN = ("Pooling", {"pooling_mode": "mean"})
NORMALIZE = ("Normalize", {})
LOGITS = ("LogitScore", {"true_token_id": 90, "false_token_id": 91})
WAYS = [(1, "shm", 7), (1, "tcp", 64), (1, "pool", 64), (0, "auto", 512)]
STEM = prompt_of(9, 40)
INPUTS = [STEM + prompt_of(seed, length) for seed, length in enumerate((1, 30, 90, 200))]
TEXTS = ["In the beginning", "And the LORD said unto Moses, Speak unto the children of Israel. " * 5]
CLOSE = {"rel": 1e-4, "abs": 2e-5}


def close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return found == pytest.approx(wanted, **CLOSE)


def running_with(directory: Path, way: tuple[int, str, int], **more: Any) -> Any:
    prefill, channel, budget = way
    settings = {"model": directory, "runner": "torch", "kv_channel": channel, "max_num_batched_tokens": budget}
    return cluster(prefill, 1, **settings | more)


def generates(running: Cluster, model: Any, prompt: list[int], count: int) -> bool:
    """Return whether a completion equals that of transformers."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        row = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
    return running.complete(prompt, count) == row[len(prompt) :]


@pytest.mark.parametrize(
    ("modules", "pooling", "normalizes"),
    [((LAST, NORMALIZE), "last", True), pytest.param((MEAN,), "mean", False, marks=pytest.mark.exhaustive)],
)
def test_embeddings_are_those_of_transformers_in_both_modes(
    modules: Any, pooling: str, normalizes: bool, tmp_path: Path
) -> None:
    model = make(tmp_path, *modules)
    inputs = [*INPUTS, *TEXTS]
    wanted = [embedded(model, one, pooling, normalizes) for one in inputs]
    for way in WAYS:
        with running_with(tmp_path, way) as running, ThreadPoolExecutor(4) as pool:
            completions = [pool.submit(generates, running, model, prompt, 20) for prompt in INPUTS[:3]]
            for _ in range(2):  # the second time, prefixes are in the cache
                body = {"input": INPUTS, "model": running.model}
                found = running.post("/v1/embeddings", body)["data"]
                found += running.post("/v1/embeddings", {"input": TEXTS})["data"]
                assert [one["index"] for one in found] == [0, 1, 2, 3, 0, 1]
                for one, expected in zip(found, wanted, strict=True):
                    assert close(one["embedding"], expected), way
            assert all(one.result() for one in completions)
            status = running.settled()
            assert status["requests"]["failed"] == 0
            assert (status["handoffs"] == 3) if way[0] else status["handoffs"] == 0, "embeddings move no KV"
            running.idle()


def test_the_client_of_openai_gets_embeddings(tmp_path: Path) -> None:
    model = make(tmp_path, LAST, NORMALIZE)
    with running_with(tmp_path, WAYS[0]) as running:
        client = openai.OpenAI(base_url=running.url + "/v1", api_key="none")
        answer = client.embeddings.create(model=running.model, input=TEXTS, dimensions=16)
        assert [
            close(one.embedding, embedded(model, text, "last", True, 16))
            for one, text in zip(answer.data, TEXTS, strict=True)
        ] == [True, True]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2
        one = client.embeddings.create(model=running.model, input=INPUTS[0], encoding_format="float")
        assert close(one.data[0].embedding, embedded(model, INPUTS[0], "last", True))
        packed = running.post("/v1/embeddings", {"input": INPUTS[0], "encoding_format": "base64"})["data"][0]
        raw = base64.b64decode(packed["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(one.data[0].embedding, **CLOSE)
        cut = running.post("/v1/embeddings", {"input": INPUTS[3], "truncate_prompt_tokens": 20})
        assert cut["usage"] == {"prompt_tokens": 20, "total_tokens": 20, "completion_tokens": 0}
        assert close(cut["data"][0]["embedding"], embedded(model, INPUTS[3][:20], "last", True))


def test_scores_and_ranks_are_those_of_transformers_in_both_modes(tmp_path: Path) -> None:
    model = make(tmp_path, LOGITS)
    query, documents = "Who spoke?", [*TEXTS, "Moses", "<|endoftext|> of it"]
    wanted = [log_odds(model, query, one, (90, 91)) for one in documents]
    assert len({round(one, 3) for one in wanted}) == 4
    for way in WAYS:
        with running_with(tmp_path, way) as running, ThreadPoolExecutor(2) as pool:
            completion = pool.submit(generates, running, model, INPUTS[2], 20)
            asked: dict[str, Any] = {"query": query, "documents": documents, "use_activation": False}
            for path in ("/v1/rerank", "/rerank"):
                ranked = [one["relevance_score"] for one in running.post(path, asked)["results"]]
                assert close(ranked, sorted(wanted, reverse=True))
            best = max(range(4), key=lambda index: wanted[index])
            asked = {"query": query, "documents": [{"text": one} for one in documents], "top_n": 2}
            first, _ = running.post("/v1/rerank", asked)["results"]
            assert (first["document"], first["index"]) == ({"text": documents[best]}, best)
            assert first["relevance_score"] == pytest.approx(torch.tensor(wanted[best]).sigmoid().item(), abs=1e-5)
            body = {"text_1": query, "text_2": documents, "use_activation": False, "instruction": "Be strict."}
            scores = [one["score"] for one in running.post("/v1/score", body)["data"]]
            assert close(scores, [log_odds(model, query, one, (90, 91), "Be strict.") for one in documents])
            pairs = {"queries": documents, "documents": documents[::-1], "use_activation": False}
            scores = [one["score"] for one in running.post("/score", pairs)["data"]]
            pairs_of = zip(documents, documents[::-1], strict=True)
            assert close(scores, [log_odds(model, *pair, (90, 91)) for pair in pairs_of])
            assert completion.result()


def test_an_embedding_model_without_a_head_scores_by_the_cosine_and_generates_nothing(tmp_path: Path) -> None:
    model = make(tmp_path, LAST)
    remove_head(tmp_path)
    with running_with(tmp_path, (1, "shm", 64)) as running:
        vectors = torch.tensor([embedded(model, text, "last", True) for text in TEXTS])
        scores = running.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS})["data"]
        assert close([one["score"] for one in scores], (vectors @ vectors[0]).tolist())
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            running.complete("a", 4)
        assert "no output head" in json.load(refused.value)["error"]["message"]


def test_embeddings_survive_the_death_of_their_node(tmp_path: Path) -> None:
    model = make(tmp_path, LAST)
    with (
        cluster(2, 1, model=tmp_path, runner="torch", max_num_batched_tokens=16) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = [pool.submit(running.post, "/v1/embeddings", {"input": [one] * 40}) for one in (INPUTS[2], INPUTS[3])]
        running.processes["prefill-0"].kill()
        for one, prompt in zip(asked, INPUTS[2:], strict=True):
            wanted = embedded(model, prompt, "last", False)
            assert all(close(each["embedding"], wanted) for each in one.result()["data"])
