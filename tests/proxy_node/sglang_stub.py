"""A server that speaks the API of SGLang 0.5 that a proxy node uses, as read in its sources (managers/io_struct.py,
managers/tokenizer_manager.py and entrypoints/http_server.py), and generates as the stub of vLLM does."""

import asyncio
import json
from typing import Any

from aiohttp import web

from tests.proxy_node.vllm_stub import VOCABULARY, VllmStub, main

KNOBS = {"is_incremental": False, "has_metrics": True, "disaggregation_mode": "null"}


class SglangStub(VllmStub):
    """The server. Further knobs are those in KNOBS; of the faults, it knows truncate, error_event and abort."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**(KNOBS | knobs))

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([
            web.get("/v1/models", self._models), web.get("/version", self._answers), web.get("/health", self._health),
            web.get("/metrics", self._sglang_metrics), web.get("/get_server_info", self._info),
            web.post("/generate", self._generate), web.get("/calls", self._get_calls), web.post("/knobs", self._set_knobs),
        ])  # fmt: skip
        return app

    async def _answers(self, _: web.Request) -> web.Response:
        return web.Response()  # for the tests; SGLang has no /version

    async def _info(self, _: web.Request) -> web.Response:
        mode = self.knobs["disaggregation_mode"]
        info = {"page_size": 1, "max_total_num_tokens": 65_536, "kv_cache_dtype": "auto", "disaggregation_mode": mode}
        return web.json_response(info | {"version": "0.5.23", "dp_size": 1, "internal_states": [{}]})

    async def _sglang_metrics(self, _: web.Request) -> web.Response:
        if not self.knobs["has_metrics"]:
            return web.Response(status=404)
        labels = '{engine_type="unified",model_name="stub",tp_rank="0"}'
        return web.Response(
            text=f"sglang:num_running_reqs{labels} {float(self.running)}\nsglang:num_queue_reqs{labels} 0.0\n"
            f"sglang:token_usage{labels} {self.num_blocks_used / 4096}\n"
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        params, prompt = body["sampling_params"], body["input_ids"]
        if params["top_k"] == 0 or params["top_k"] < -1:
            return web.json_response(
                {"error": {"message": f"top_k must be -1 or at least 1, got {params}"}}, status=400
            )
        stream = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        if max(prompt) >= VOCABULARY:
            await self._send(stream, {"error": {"message": "The input_ids contain values out of the vocabulary"}})
            return stream
        self.running += 1
        try:
            await self._stream_tokens(stream, body, params, prompt)
        except (asyncio.CancelledError, ConnectionError):
            self.dropped += 1
            raise
        finally:
            self.running -= 1
        return stream

    async def _stream_tokens(
        self, stream: web.StreamResponse, body: dict[str, Any], params: dict[str, Any], prompt: list[int]
    ) -> None:
        tokens, rows, tops, finish = list(prompt), [], [], None
        drawn = {"temperature": params["temperature"], "seed": params.get("sampling_seed")}
        while finish is None:
            await asyncio.sleep(self.knobs["token_s"])
            while self.knobs["is_stalled"]:  # noqa: ASYNC110 - knobs are plain values
                await asyncio.sleep(0.05)
            done = len(tokens) - len(prompt)
            if done >= 5 and self._takes("truncate"):
                return
            if done >= 5 and self._takes("error_event"):
                await self._send(stream, {"error": {"message": "planted"}})
                return
            token = self._draw(drawn, tokens, len(prompt))
            tokens.append(token)
            rows.append([-1.5, token, None])
            tops.append([[-0.5, (token + 1) % VOCABULARY, None], [-1.5, token, None]][: body["top_logprobs_num"]])
            if done >= 5 and self._takes("abort"):
                finish = {"type": "abort", "message": "planted", "status_code": None, "err_type": None}
            elif token in params["stop_token_ids"] and done >= params["min_new_tokens"]:
                finish = {"type": "stop", "matched": token}
            elif done + 1 >= params["max_new_tokens"]:
                finish = {"type": "length", "length": params["max_new_tokens"]}
            first = done if self.knobs["is_incremental"] else 0
            meta: dict[str, Any] = {"id": "r", "finish_reason": finish, "prompt_tokens": len(prompt)}
            meta |= {"completion_tokens": done + 1, "cached_tokens": 0, "weight_version": "default"}
            if body["return_logprob"]:
                meta |= {"output_token_logprobs": rows[first:], "output_top_logprobs": tops[first:]}
            await self._send(stream, {"text": "x", "output_ids": tokens[len(prompt) + first :], "meta_info": meta})
        await stream.write(b"data: [DONE]\n\n")

    async def _send(self, stream: web.StreamResponse, event: dict[str, Any]) -> None:
        await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")


if __name__ == "__main__":
    main(SglangStub)
