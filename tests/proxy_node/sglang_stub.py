"""A server with the parts of the API of SGLang 0.5 that a proxy node uses. It generates tokens as the stub of vLLM
does.

The API was read in the sources of SGLang: managers/io_struct.py, managers/tokenizer_manager.py, managers/scheduler.py,
disaggregation/ and entrypoints/http_server.py.

In disaggregated mode, a prefill and a decode server get a request with the same `bootstrap_room`. The decode server
registers at the bootstrap address of the prefill server, and waits for the KV. In this stub, the bootstrap address is
the HTTP address. The prefill server waits for the registration, computes the prompt, and pushes the KV.

As in SGLang, each server waits for the other for at most `waiting_s`. It also waits if the other server has failed, or
if the connection of the request was closed. Only `/abort_request` ends the wait earlier. A decode server that got the
KV of another prompt generates wrong tokens.
"""

import asyncio
import json
import uuid
from typing import Any

from aiohttp import ClientError, ClientSession, web

from tests.proxy_node.vllm_stub import VOCABULARY, VllmStub, main

KNOBS = {"is_incremental": False, "has_metrics": True, "disaggregation_mode": "null", "waiting_s": 300.0}
PAIR_FAULTS = {  # of a prefill server
    # The transfer fails, and the prefill server does not inform the decode server (sglang#28651).
    "no_transfer": 0,
    # The prefill server gives up the request, but it pushes the KV of one token. The decode server generates from this
    # KV (sglang#30233).
    "cut_prompt": 0,
    # The prefill server reports success, but the KV does not arrive (llm-d#2433).
    "lost_push": 0,
}


class AbortedError(Exception):
    """Raised if the server gives up a request. The arguments are the message and the status."""


class SglangStub(VllmStub):
    """The server. It has the additional knobs KNOBS and the additional faults PAIR_FAULTS. Of the faults of VllmStub,
    it injects only truncate, error_event, abort and refuse_503."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**KNOBS)
        self.faults |= PAIR_FAULTS
        self.set(knobs)
        self.rooms: dict[int, asyncio.Future[Any]] = {}  # prefill server: the peer's URL; decode server: the KV
        self.meetings: dict[str, asyncio.Task[str]] = {}  # by request id
        self.aborted: set[str] = set()
        self.used_rooms: list[int] = []

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._address)

    @property
    def num_waiting(self) -> int:
        return sum(not task.done() for task in self.meetings.values())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([
            web.get("/v1/models", self._models), web.get("/version", self._answers), web.get("/health", self._health),
            web.get("/metrics", self._sglang_metrics), web.get("/get_server_info", self._info),
            web.post("/generate", self._generate), web.post("/abort_request", self._abort),
            web.post("/register", self._arrived), web.post("/kv", self._arrived), web.get("/pairs", self._get_pairs),
            web.get("/calls", self._get_calls), web.post("/knobs", self._set_knobs),
        ])  # fmt: skip
        return app

    async def _answers(self, _: web.Request) -> web.Response:
        return web.Response()  # SGLang has no /version, but the tests ask for it

    async def _info(self, _: web.Request) -> web.Response:
        mode = self.knobs["disaggregation_mode"]
        info = {"page_size": 1, "max_total_num_tokens": 65_536, "kv_cache_dtype": "auto", "disaggregation_mode": mode}
        info |= {"disaggregation_bootstrap_port": self._address[1], "disaggregation_transfer_backend": "mooncake"}
        info |= {"enable_deterministic_inference": self.knobs["resumes_seeded"]}
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
        if self._takes("refuse_503"):
            return web.json_response({"error": {"message": "refused"}}, status=503)
        if params["min_new_tokens"] > params["max_new_tokens"]:
            return web.json_response({"error": {"message": f"min_new_tokens is too large: {params}"}}, status=400)
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
            wrong = "" if self.knobs["disaggregation_mode"] == "null" else await self._meet_or_abort(stream, body)
            if wrong is not None:
                await self._stream_tokens(stream, body, params, prompt, wrong)
        except (asyncio.CancelledError, ConnectionError):
            self.dropped += 1
            raise
        finally:
            self.running -= 1
        return stream

    # ---- pairs --------------------------------------------------------------------------------------------------

    async def _get_pairs(self, _: web.Request) -> web.Response:
        # A reused room crashes a real server (sglang#40125).
        num_reused = len(self.used_rooms) - len(set(self.used_rooms))
        counts = {"waiting": self.num_waiting, "reused": num_reused, "met": len(self.used_rooms)}
        return web.json_response(counts | {"aborted": len(self.aborted)})

    async def _abort(self, request: web.Request) -> web.Response:
        prefix = (await request.json())["rid"]
        for rid in [rid for rid in self.meetings if prefix and rid.startswith(prefix)]:
            self.aborted.add(rid)
            self.meetings[rid].cancel()
        return web.Response()

    async def _arrived(self, request: web.Request) -> web.Response:
        """Accept the registration of a decode server, or the KV that a prefill server pushes."""
        message = await request.json()
        room = message["room"]
        if request.path == "/kv" and room not in self.rooms:
            return web.Response(status=404)
        if not (known := self._room(room)).done():
            known.set_result(message["value"])
        return web.Response()

    def _room(self, room: int) -> "asyncio.Future[Any]":
        return self.rooms.setdefault(room, asyncio.get_running_loop().create_future())

    async def _meet_or_abort(self, stream: web.StreamResponse, body: dict[str, Any]) -> str | None:
        """Return "" if the KV is right, a description if it is wrong, or None if the request was given up. A closed
        connection does not end the wait."""
        reason: dict[str, Any] = {"type": "abort", "message": "Aborted by AbortReq.", "status_code": 500}
        if "bootstrap_room" not in body:
            text = "Invalid request: Disaggregated request received without bootstrap room id."
            reason |= {"message": text, "status_code": 400}
        else:
            meeting = asyncio.ensure_future(self._meet(body))
            self.meetings[body.setdefault("rid", uuid.uuid4().hex)] = meeting
            try:
                return await asyncio.shield(meeting)
            except AbortedError as error:
                reason |= {"message": error.args[0], "status_code": error.args[1]}
            except asyncio.CancelledError:
                if not meeting.cancelled():
                    raise
        meta = {"id": "r", "finish_reason": reason, "prompt_tokens": 0, "completion_tokens": 0}
        await self._send(stream, {"text": "", "output_ids": [], "meta_info": meta})
        return None

    async def _meet(self, body: dict[str, Any]) -> str:
        is_decode, room, own = self.knobs["disaggregation_mode"] == "decode", body["bootstrap_room"], body["input_ids"]
        if body["bootstrap_host"] == "2.2.2.2":
            return "no KV" if is_decode else ""
        self.used_rooms.append(room)
        address = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/register"
        try:
            async with asyncio.timeout(self.knobs["waiting_s"]), ClientSession(raise_for_status=True) as session:
                known = self._room(room)
                while is_decode and not known.done():
                    try:
                        async with session.post(address, json={"room": room, "value": self.url}):
                            pass
                        break
                    except ClientError:
                        await asyncio.sleep(0.1)
                if is_decode:
                    return "" if await known == own else "other KV"
                peer = await known
                await asyncio.sleep(self.knobs["token_s"])
                is_cut = self._takes("cut_prompt")
                if self._takes("no_transfer"):
                    raise AbortedError("Prefill transfer failed", 500)
                if not self._takes("lost_push"):
                    async with session.post(f"{peer}/kv", json={"room": room, "value": own[:1] if is_cut else own}):
                        pass
                if is_cut:
                    raise AbortedError("Input length exceeds the maximum", 400)
        except (ClientError, TimeoutError) as error:
            raise AbortedError(f"transfer failed for request: {type(error).__name__}", 500) from None
        finally:
            self.rooms.pop(room, None)
        return ""

    async def _stream_tokens(
        self, stream: web.StreamResponse, body: dict[str, Any], params: dict[str, Any], prompt: list[int], wrong: str
    ) -> None:
        if self.knobs["disaggregation_mode"] == "prefill":
            params |= {"max_new_tokens": 1, "stop_token_ids": []}
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
            token = self._draw(drawn, tokens, len(prompt), wrong)
            tokens.append(token)
            rows.append([-1.5, token, None])
            tops.append([[-0.5, (token + 1) % VOCABULARY, None], [-1.5, token, None]][: body["top_logprobs_num"]])
            if body.get("rid") in self.aborted or (done >= 5 and self._takes("abort")):
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
