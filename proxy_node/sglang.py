"""The API of an SGLang server, according to the source code of SGLang 0.5. This code was tested only with a stub."""

import json
import secrets
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from proxy_node.client import HEALTH_S, EngineClient, EngineFacts, Outputs, Params
from proxy_node.connectors import BootstrapParams
from proxy_node.wire import EngineFailure, EngineOutput, EventReader, cache_salt, likeliest, read_metrics
from shared.rpc.messages import Logprobs, SubmitRequest, unpack_ids

SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
BLOCK_TOKENS = 16  # size of the blocks in the router's index; the server itself caches single tokens or pages
# The server's own health check uses these parameters. With them, a server with a disaggregation mode neither waits for
# KV nor sends any. The tokens that a decode server then generates are meaningless.
ALONE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
METRICS = {
    "num_running_reqs": "num_requests_running",
    "num_queue_reqs": "num_requests_waiting",
    "token_usage": "kv_cache_usage_perc",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
}


class SglangEngine(EngineClient):
    """Calls one SGLang server by `/generate`, whose requests and answers contain token ids.

    Without `--enable-metrics`, the server's load is unknown. An answer of `/health` counts as progress, because the
    server sends it only after its scheduler has computed something.

    A server with a disaggregation mode works only in a pair. Each of the two servers gets a request with the same room
    number, and the servers connect at the bootstrap address of the prefill server. The decode server waits for up to
    300 s, even if the prefill server has failed; `/abort_request` ends the wait. A room number must not be used twice,
    because this crashes the servers.
    """

    program, needs = "SGLang", "Baton needs an SGLang server of version 0.5 or newer"
    transfer = BootstrapParams
    num_healthy = 0
    bootstrap: Params = None  # the bootstrap address, if the server is a prefill server

    async def describe(self) -> EngineFacts:
        with self.describing():
            card = json.loads(await self.get("/v1/models"))["data"][0]
            self.model, max_model_len = str(card["id"]), int(card["max_model_len"])
            info = json.loads(await self.get("/get_server_info"))
            block_tokens = max(BLOCK_TOKENS, int(info["page_size"]))
            num_blocks, version = int(info["max_total_num_tokens"]) // block_tokens, str(info["version"])
        dtype = str(info.get("kv_cache_dtype", ""))
        sizes = max_model_len, block_tokens, num_blocks, 1
        facts = EngineFacts(self.model, version, *sizes, dtype, kind="sglang", connector="")
        self.probe_params = self.bootstrap = None  # the server may have been restarted without its mode
        if (mode := info.get("disaggregation_mode") or "null") == "null":
            return facts
        self.probe_params = ALONE
        if mode == "prefill":
            host, port = urlsplit(self.url).hostname or "", int(info.get("disaggregation_bootstrap_port") or 8998)
            is_local = host in {"localhost", "127.0.0.1", "::1"}
            self.bootstrap = {"bootstrap_host": self.host if self.host and is_local else host, "bootstrap_port": port}
        backend = f"sglang {info.get('disaggregation_transfer_backend', '')}"
        resumes = "greedy, seeded" if info.get("enable_deterministic_inference") else "greedy"
        return replace(facts, role=mode, connector=backend, resumes=resumes)

    async def metrics(self) -> dict[str, float]:
        await self.get("/health")
        self.num_healthy += 1
        try:
            found = read_metrics(await self.get("/metrics"), "sglang")
        except EngineFailure as failure:
            if failure.status != 404:
                raise
            found = {}
        values = {name: found[own] for own, name in METRICS.items() if own in found}
        return values | {"iteration_tokens_total_count": self.num_healthy}

    def generate(self, submit: SubmitRequest, tokens: list[int], params: Params = None) -> Outputs:
        self.check(submit)
        body = generate_body(submit, tokens)
        if params is not None:  # the id is random, because an abort ends all requests whose id begins with the given id
            body |= params | {"rid": f"baton-{secrets.token_hex(16)}"}
        limit = body["sampling_params"]["max_new_tokens"]
        reader = GenerateReader(len(tokens), limit, self.vocab_size, body["top_logprobs_num"])
        return self.stream("/generate", submit, body, reader)

    async def stream(self, path: str, submit: SubmitRequest, body: dict[str, Any], reader: EventReader) -> Outputs:
        """Send a request. If the caller stops reading early, abort the request, because a server that waits for KV may
        not notice that the connection has closed."""
        is_over = False
        try:
            async with aclosing(super().stream(path, submit, body, reader)) as outputs:
                async for output in outputs:
                    is_over = bool(output.finish)
                    yield output
        finally:
            if "rid" in body and not is_over:
                with suppress(EngineFailure):
                    await self.fetch("POST", "/abort_request", timeout_s=HEALTH_S, json={"rid": body["rid"]})

    def check(self, submit: SubmitRequest) -> None:
        super().check(submit)
        if submit.sampling.allowed_tokens:
            raise ValueError("allowed_token_ids: SGLang does not support it; omit it")

    def offer(self) -> Params:
        room = {"bootstrap_room": 1 + secrets.randbelow(2**63 - 1)}
        return None if self.bootstrap is None else self.bootstrap | room


def generate_body(submit: SubmitRequest, tokens: list[int]) -> dict[str, Any]:
    """Return the body of the request that continues `tokens` (the prompt and the tokens generated so far).

    The body has no `rid`: a retry would have the same `rid`, and the server refuses a `rid` that it still knows.
    """
    sampling, done = submit.sampling, len(tokens) - submit.num_prompt
    params: dict[str, Any] = {name: getattr(sampling, name) for name in SAMPLING}
    params |= {
        "top_k": sampling.top_k or -1,
        "max_new_tokens": max(1, submit.max_tokens - done),
        "min_new_tokens": max(0, submit.min_tokens - done),
        # These include the model's own stop tokens, unless the client sets `ignore_eos`.
        "stop_token_ids": unpack_ids(submit.stop_tokens),
        "ignore_eos": True,
    }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.temperature > 0:
        params["sampling_seed"] = sampling.seed % 2**63
    body: dict[str, Any] = {
        "input_ids": list(tokens),
        "sampling_params": params,
        "stream": True,
        "return_logprob": sampling.logprobs is not None,
        "top_logprobs_num": sampling.logprobs or 0,
    }
    if salt := cache_salt(submit):
        body["extra_key"] = salt
    return body


class GenerateReader(EventReader):
    """Reads the events of `/generate`. Each event repeats all earlier tokens of the answer, unless the server runs with
    `--incremental-streaming-output`."""

    num_tokens = 0

    def add(self, output: EngineOutput, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        if (num := int(meta["completion_tokens"]) - self.num_tokens) < 0:
            raise ValueError("the number of tokens falls")
        tokens = self.checked(event["output_ids"][-num:] if num else [])
        if len(tokens) != num:
            raise ValueError(f"{len(tokens)} tokens instead of {num}")
        self.num_tokens += num
        output.tokens += tokens
        if num and (rows := meta.get("output_token_logprobs")) is not None:
            output.logprobs += self._logprobs(tokens, rows[-num:], meta.get("output_top_logprobs") or [])
        if (finish := meta.get("finish_reason")) is not None:
            if finish["type"] not in {"stop", "length"}:
                text = f"the engine ended the request: {finish['type']!s:.40}: {finish.get('message')!s:.200}"
                status = finish.get("status_code") or 0
                raise EngineFailure(text, retry=status != 400, fault=None if status else "refused", status=status)
            output.finish = finish["type"]

    def _logprobs(self, tokens: list[int], rows: list[Any], tops: list[Any]) -> list[Logprobs]:
        """Return the logprobs of `tokens`. For each token, `rows` has a row [logprob, id, text], and `tops` has the
        rows of the likeliest tokens at this position."""
        tops = tops[-len(tokens) :] or [[]] * len(tokens)
        return [
            likeliest(token, float(row[0]), {int(each[1]): float(each[0]) for each in top or []}, self.num_logprobs)
            for token, row, top in zip(tokens, rows, tops, strict=True)
        ]
