"""Test the translation between the node protocol and vLLM's API."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_node.vllm import VllmEngine
from proxy_node.wire import EngineFailure, EventReader, completion_body, read_labels, read_metrics
from shared.rpc.messages import Logprobs, Media, SamplingParams, SubmitRequest, ThinkingBudget, pack_ids

RECORDED = [  # from vLLM 0.32, with `logprobs` 2 and `return_tokens_as_token_ids`
    b'data: {"id":"cmpl-8650eaf2fcf13e47","object":"text_completion","created":1795668445,"model":"m","choices":[{"index":0,"text":".","logprobs":{"text_offset":[0],"token_logprobs":[-1.57],"tokens":["token_id:15"],"top_logprobs":[{"token_id:15":-1.57,"token_id:13":-2.2}]},"finish_reason":null,"stop_reason":null,"prompt_token_ids":[5,6,7],"token_ids":[15]}]}\n\n',
    b'data: {"id":"cmpl-8650eaf2fcf13e47","object":"text_completion","created":1795668445,"model":"m","choices":[{"index":0,"text":"\\n","logprobs":{"text_offset":[11],"token_logprobs":[-1.41],"tokens":["token_id:200"],"top_logprobs":[{"token_id:200":-1.41,"token_id:615":-0.36,"token_id:9":-0.9}]},"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":[200]}],"system_fingerprint":"vllm-0.32.0-ed22ce49"}\n\n',
    b"data: [DONE]\n\n",
]
METRICS = (Path(__file__).parent / "vllm_0.32_metrics.txt").read_text()


def submission(tokens: list[int], num_prompt: int, **more: Any) -> SubmitRequest:
    sampling = more.pop("sampling", SamplingParams(temperature=0.0))
    return SubmitRequest("r.0.1", "router", pack_ids(tokens), num_prompt, 10, sampling, **more)


def test_a_retried_request_asks_for_the_rest_of_its_tokens() -> None:
    tokens = [5, 6, 7, 8, 9]
    body = completion_body(submission(tokens, 3, min_tokens=4, stop_tokens=pack_ids([1]), salt=b"\xff/"), tokens, "m")
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == (tokens, 8, 2)
    assert (body["stop_token_ids"], body["ignore_eos"], body["cache_salt"]) == ([1], True, "ff2f")
    assert "seed" not in body, "a seed makes a greedy request slower"
    sampled = SamplingParams(temperature=0.5, seed=2**64 - 1, allowed_tokens=pack_ids([3, 4]), logit_bias={7: 1.0})
    body = completion_body(submission(tokens, 5, sampling=sampled, share_prefix=False), tokens, "m")
    assert (body["seed"], body["allowed_token_ids"], body["logit_bias"]) == (2**63 - 1, [3, 4], {7: 1.0})
    assert bytes.fromhex(body["cache_salt"]) == b"\0r.0.1", "no other request has this salt"


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"grammar": "start: /a/"}, "structured output"),
        ({"media": [Media(0, 1, 1, b"d" * 16, 1, 1)]}, "images"),
        ({"sampling": SamplingParams(prompt_logprobs=0)}, "prompt_logprobs"),
        ({"sampling": SamplingParams(bad_words=[pack_ids([4])])}, "bad_words"),
        ({"sampling": SamplingParams(thinking=ThinkingBudget(1, 1, b""))}, "thinking_token_budget"),
        ({"sampling": SamplingParams(pooling="last")}, "embeddings"),
        ({"sampling": SamplingParams(allowed_tokens=pack_ids(range(1025)))}, "allowed_token_ids: has 1025 ids.* 1024"),
        ({"stop_tokens": pack_ids(range(10, 136)), "min_tokens": 1}, "stop_token_ids: has 128 ids.* at most 127"),
    ],
)
def test_a_request_that_an_engine_cannot_take_is_refused_by_name(field: dict[str, Any], name: str) -> None:
    engine = VllmEngine("", "", 2048, end_tokens=frozenset({1, 2}))
    for refuse in (engine.check, lambda submit: engine.generate(submit, [5])):
        with pytest.raises(ValueError, match=name):
            refuse(submission([5], 1, **field))


def test_the_limits_of_vllm_do_not_count_an_id_twice() -> None:
    sampling = SamplingParams(allowed_tokens=pack_ids([*range(1024), *range(1024)]))
    engine = VllmEngine("", "", 2048, end_tokens=frozenset({1, 2}))
    engine.check(submission([5], 1, sampling=sampling, stop_tokens=pack_ids([1, 2, *range(10, 135)]), min_tokens=1))
    engine.check(submission([5], 1, stop_tokens=pack_ids(range(1000)), min_tokens=0))
    assert completion_body(submission([5], 1, sampling=sampling), [5], "m")["allowed_token_ids"] == [*range(1024)]


@given(st.data())
def test_events_are_read_from_any_pieces(data: st.DataObject) -> None:
    stream = b"".join(RECORDED)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    reader = EventReader(3, 2, 2048, 2)
    outputs = [reader.feed(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [token for output in outputs for token in output.tokens] == [15, 200]
    assert [row for output in outputs for row in output.logprobs] == [
        Logprobs(15, -1.57, 1, [15, 13], [-1.57, -2.2]),
        Logprobs(200, -1.41, 3, [615, 9], [-0.36, -0.9]),
    ]
    assert [output.finish for output in outputs if output.finish] == ["length"]


@given(st.binary(max_size=300), st.integers(0, len(RECORDED[0])))
def test_bytes_that_are_no_events_end_as_a_failure_of_the_engine(data: bytes, at: int) -> None:
    reader = EventReader(3, 2, 2048, 2)
    try:
        output = reader.feed(RECORDED[0][:at] + data + b"\n\n" + RECORDED[0][at:])
    except EngineFailure:
        return
    assert output.tokens in ([], [15])


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"token_ids": [2048], "finish_reason": None}]},
        {"choices": [{"token_ids": [-1], "finish_reason": None}]},
        {"choices": [{"token_ids": [True], "finish_reason": None}]},
        {"choices": [{"token_ids": [1, 2, 3], "finish_reason": None}]},
        {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [], "top_logprobs": []}}]},
        {"choices": None},
        {},
    ],
)
def test_an_event_with_other_tokens_than_asked_for_is_malformed(event: dict[str, Any]) -> None:
    with pytest.raises(EngineFailure, match="malformed") as failure:
        EventReader(3, 2, 2048).feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert failure.value.fault == "malformed"
    assert failure.value.retry


def test_an_event_without_an_end_is_cut_off() -> None:
    reader = EventReader(1_000_000, 2, 2048)
    reader.feed(b"data: {" + b" " * 10_000_000)  # the first event repeats the prompt, which is long
    with pytest.raises(EngineFailure, match="longer"):
        EventReader(3, 2, 2048).feed(b"data: {" + b" " * 2_000_000)


def test_a_failure_of_the_engine_is_told_apart_from_the_end_of_a_request() -> None:
    error = b'data: {"error": {"message": "Internal server error", "type": "E", "param": null, "code": 500}}\n\n'
    with pytest.raises(EngineFailure, match="Internal server error") as failure:
        EventReader(3, 2, 2048).feed(error)
    assert (failure.value.status, failure.value.is_suspicious, failure.value.retry) == (0, True, False)
    with pytest.raises(EngineFailure, match=r"^Token id 9999 is out of vocabulary") as failure:
        EventReader(3, 2, 2048).feed(
            b'data: {"error": {"message": "Token id 9999 is out of vocabulary", "code": 400}}\n\n'
        )
    assert (failure.value.status, failure.value.is_suspicious, failure.value.retry) == (400, False, False)
    with pytest.raises(EngineFailure, match="abort") as failure:
        EventReader(3, 2, 2048).feed(b'data: {"choices": [{"token_ids": [], "finish_reason": "abort"}]}\n\n')
    assert failure.value.retry
    output = EventReader(3, 2, 2048).feed(b'data: {"choices": [{"token_ids": [4], "finish_reason": "repetition"}]}\n\n')
    assert (output.tokens, output.finish) == ([4], "stop")


def test_metrics_are_summed_over_labels_and_each_engine_has_a_cache() -> None:
    text = (
        METRICS.replace("{engine}", "0")
        .replace("{block_size}", "16")
        .replace("{running}", "3")
        .replace("{steps}", "9")
        .replace("{usage}", "nan")
    )
    metrics = read_metrics(text)
    assert "kv_cache_usage_perc" not in metrics  # it is not finite
    assert metrics["num_requests_running"] == 3
    assert metrics["iteration_tokens_total_count"] == 9
    [cache] = read_labels(text, "cache_config_info")
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "4096")
    both = text + text.replace('engine="0"', 'engine="1"')
    assert read_metrics(both)["num_requests_running"] == 6
    assert [labels["engine"] for labels in read_labels(both, "cache_config_info")] == ["0", "1"]
    assert (read_metrics("<html>"), read_labels("<html>", "cache_config_info")) == ({}, [])
