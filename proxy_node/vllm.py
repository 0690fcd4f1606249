"""The API of a vLLM server."""

import json
from typing import Any

from proxy_node.client import ANSWER_S, EngineClient, EngineFacts, Outputs, Params, headers_of
from proxy_node.connectors import PREFILL_PARAMS, NixlParams
from proxy_node.wire import (
    EngineOutput,
    EventReader,
    completion_body,
    next_token_only,
    read_labels,
    read_metrics,
    reading,
)
from shared.errors import ConfigError
from shared.rpc.messages import SubmitRequest, unpack_ids

# Limits of vLLM's model runner V2: a request that exceeds them kills the engine. With `min_tokens`, vLLM takes 128 stop
# tokens, including all end tokens. One of the 128 is reserved for the tokenizer's end token, which is unknown here.
MAX_ALLOWED_TOKENS, MAX_STOP_TOKENS = 1024, 127


class VllmEngine(EngineClient):
    """Calls one vLLM server by `/v1/completions`, with token ids in requests and answers."""

    program, needs = "vLLM", "Baton needs a vLLM server of version 0.19 or newer"
    transfer = NixlParams

    async def describe(self) -> EngineFacts:
        with self.describing():
            card = json.loads(await self.get("/v1/models"))["data"][0]
            self.model, max_model_len = str(card["id"]), int(card["max_model_len"])
            version = str(json.loads(await self.get("/version"))["version"])
        caches = {each.get("engine"): each for each in read_labels(await self.get("/metrics"), "cache_config_info")}
        if len(caches) > 1:
            text = f"has {len(caches)} data-parallel engines; start one server for each engine"
            raise ConfigError(f"--engine {self.url}: {text}")
        try:
            [cache] = caches.values()
            block_tokens, num_blocks = int(cache["block_size"]), int(cache["num_gpu_blocks"])
            if block_tokens < 1 or num_blocks < 1:
                raise ValueError("there is no KV cache")
            # With several KV groups or context parallelism, a block does not hold `block_size` tokens.
            if (num_tokens := cache.get("kv_cache_size_tokens", "")).isdigit():
                num_blocks = int(num_tokens) // block_tokens + 1
            size = cache.get("kv_cache_memory_bytes", "")
            block_bytes = max(1, int(size) // num_blocks) if size.isdigit() else 1
        except (KeyError, ValueError):
            raise ConfigError(f"--engine {self.url}: /metrics lacks vllm:cache_config_info; {self.needs}") from None
        dtype = cache.get("cache_dtype", "")
        return EngineFacts(self.model, version, max_model_len, block_tokens, num_blocks, block_bytes, dtype)

    async def metrics(self) -> dict[str, float]:
        return read_metrics(await self.get("/metrics"))

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, as computed by the server's tokenizer."""
        body = {"model": self.model, "prompt": text}
        return list(json.loads(await self.fetch("POST", "/tokenize", timeout_s=ANSWER_S, json=body))["tokens"])

    def generate(self, submit: SubmitRequest, tokens: list[int], params: Params = None) -> Outputs:
        self.check(submit)
        body = completion_body(submit, tokens, self.model, params)
        return self.stream("/v1/completions", submit, body, self._reader(body))

    def _reader(self, body: dict[str, Any]) -> EventReader:
        return EventReader(len(body["prompt"]), body["max_tokens"], self.vocab_size, body["logprobs"] or 0)

    def check(self, submit: SubmitRequest) -> None:
        super().check(submit)
        if (count := len(set(unpack_ids(submit.sampling.allowed_tokens)))) > MAX_ALLOWED_TOKENS:
            raise ValueError(f"allowed_token_ids: has {count} ids, but vLLM takes at most {MAX_ALLOWED_TOKENS}")
        count = len(self.end_tokens.union(unpack_ids(submit.stop_tokens)))
        if submit.min_tokens > 0 and count > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids: has {count} ids with the model's own, but with min_tokens vLLM takes at most "
                f"{MAX_STOP_TOKENS}"
            )

    async def prefill(self, submit: SubmitRequest, tokens: list[int], offer: Params) -> tuple[EngineOutput, Params]:
        first = next_token_only(submit, tokens)
        is_last = first.max_tokens == submit.max_tokens
        # vLLM returns the parameters of the KV only in answers that are not streamed.
        body = completion_body(first, tokens, self.model, None if is_last else PREFILL_PARAMS) | {"stream": False}
        reader, output = self._reader(body), EngineOutput()
        data = await self.fetch("POST", "/v1/completions", json=body, headers=headers_of(submit))
        with reading():
            found = json.loads(data)
            reader.add(output, found)
            if output.finish == "length" and not is_last:
                output.finish = ""
            params = found.get("kv_transfer_params")
            return output, None if params is None else self.transfer.read(params)
