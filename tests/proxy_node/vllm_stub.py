"""A server with the parts of the API of vLLM 0.32 that a proxy node uses, as recorded from vLLM. Each generated token
is a hash of the tokens before it.

Start it with `python -m tests.proxy_node.vllm_stub --port 8100 --knobs '{"token_s": 0.01}'`. `POST /knobs` changes
knobs at run time, and `GET /calls` returns the bodies of all completions. A knob in `FAULTS` injects as many faults as
its value says.

With the connector NIXL, a server keeps the blocks of a prompt until their lease ends, and another server reads the
blocks by HTTP. As in vLLM, the reading server answers with wrong tokens and status 200 if the blocks have already
been read or the lease has ended. `GET /handoffs` counts these cases as `misused`.
"""

import argparse
import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, web
from tokenizers import Tokenizer

from tests.proxy_node.vllm_stand_in import CONFIG, stats, step_logger

DEMO = Path(__file__).parents[2] / "demo" / "model"
METRICS = (Path(__file__).parent / "vllm_0.32_metrics.txt").read_text()
VOCABULARY, BLOCK_TOKENS, NUM_BLOCKS = 2048, 16, 4096
KNOBS: dict[str, Any] = {
    "token_s": 0.002,  # time to generate a token
    "prompt_s": 0.0,  # time to compute a prompt; as in vLLM, the usage grows meanwhile, but no step is counted
    "tokens_per_event": 1,
    "resumes_seeded": True,  # False: a resumed answer differs, as in vLLM's runner V1
    "repeats": True,  # False: every answer differs
    "max_model_len": 8192,
    "version": "0.32.0",
    "key": "",
    "token_ids": True,  # False: answers have no ids, as in old versions
    "engines": 1,
    "metrics_s": 0.0,  # delay of /metrics and /health
    "is_stalled": False,  # True: streams stay open and are silent
    "is_unhealthy": False,
    "connector": "",  # or "nixl"
    "capacity": str(BLOCK_TOKENS * NUM_BLOCKS),  # in tokens, as /metrics reports it
    "block_size": BLOCK_TOKENS,  # the size that /metrics reports; the server itself always uses BLOCK_TOKENS
    "caches": True,  # False: the server keeps no prompts in its prefix cache
    "ignores_salts": False,
    "ignores_params": False,  # True: the server computes prompts instead of reading their KV
    "never_drops": False,  # True: requests continue after their connection has closed
    "lease_s": 30.0,
    "read_s": 0.0,  # time to read the KV of a prompt
    "steps_socket": "",  # where the plugin reports steps
}
FAULTS = {
    "refuse_503": 0, "refuse_500": 0, "refuse_429": 0, "truncate": 0, "error_event": 0, "abort": 0, "repetition": 0,
    "bad_json": 0, "bad_id": 0, "bad_type": 0, "long_line": 0, "too_many": 0,
    "no_kv": 0, "other_token": 0,
}  # fmt: skip
PROMPT_CHUNKS = 20
FAULT_AFTER = 5  # number of tokens that a stream sends before a fault


def next_token(tokens: list[int], draw: str = "") -> int:
    data = b"".join(token.to_bytes(4, "little") for token in tokens[-64:])
    digest = hashlib.blake2b(data + len(tokens).to_bytes(4, "little") + draw.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def answer(prompt: list[int], count: int, draw: str = "") -> list[int]:
    """Return the greedy answer of this server. If `draw` is "seed N", return the answer for this seed."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, draw))
    return tokens[len(prompt) :]


class VllmStub:
    """The server. `knobs` and `faults` may be changed at any time."""

    def __init__(self, **knobs: Any) -> None:
        self.knobs, self.faults = KNOBS.copy(), FAULTS.copy()
        self.set(knobs)
        self.calls: list[dict[str, Any]] = []
        self.running = self.steps = 0
        self.dropped = 0  # number of requests whose connection was closed before they ended
        self.num_blocks_used = self.num_hits = self.num_computed = self.num_read = 0
        self._cached: set[tuple[str, tuple[int, ...]]] = set()  # pairs of a salt and a prompt
        self.leases: dict[str, tuple[float, int]] = {}  # request -> (end of its lease, number of its blocks)
        self.handoffs = {"kept": 0, "read": 0, "misused": 0, "bytes": 0}
        self.engine_id = secrets.token_hex(8)
        self._address = ("", 0)
        self._logger: Any = None

    def set(self, knobs: dict[str, Any]) -> None:
        for name, value in knobs.items():
            (self.faults if name in self.faults else self.knobs)[name] = value

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._check_key])
        app.add_routes([
            web.get("/v1/models", self._models), web.get("/version", self._version), web.get("/health", self._health),
            web.get("/metrics", self._metrics), web.post("/tokenize", self._tokenize), web.post("/v1/completions", self._completions),
            web.get("/calls", self._get_calls), web.post("/knobs", self._set_knobs),
            web.get("/handoffs", self._get_handoffs), web.get("/kv/{engine}/{request}", self._get_kv),
        ])  # fmt: skip
        return app

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        runner = web.AppRunner(self.app(), shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            self._address = runner.addresses[0][:2]
            yield f"http://127.0.0.1:{self._address[1]}"
        finally:
            await asyncio.sleep(0.02)  # let the server close connections that clients have just opened and closed
            await runner.cleanup()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        needs_key = self.knobs["key"] and request.path.startswith("/v1")
        if needs_key and request.headers.get("Authorization") != f"Bearer {self.knobs['key']}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "stub", "root": "stub", "max_model_len": self.knobs["max_model_len"]}]}
        )

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.knobs["version"]})

    async def _health(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.knobs["metrics_s"])
        return web.Response(status=503 if self.knobs["is_unhealthy"] else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.knobs["metrics_s"])
        usage = (self.num_blocks_used + self.num_blocks_kept) / (NUM_BLOCKS - 1)
        text = "".join(
            METRICS.replace("{engine}", str(number))
            .replace("{running}", str(self.running))
            .replace("{steps}", str(self.steps))
            .replace("{usage}", str(usage))
            .replace("{bytes}", str(self.handoffs["bytes"]))
            .replace("{hits}", str(self.num_hits))
            .replace("{computed}", str(self.num_computed))
            .replace("{read}", str(self.num_read))
            .replace("{expired}", str(len(self.leases) - self.num_kept))
            .replace("{block_size}", str(self.knobs["block_size"]))
            .replace('kv_cache_size_tokens="65536"', f'kv_cache_size_tokens="{self.knobs["capacity"]}"')
            for number in range(self.knobs["engines"])
        )
        return web.Response(text=text, content_type="text/plain")

    async def _get_calls(self, _: web.Request) -> web.Response:
        return web.json_response(self.calls)

    def _stepped(self, num_prompt: int = 0) -> None:
        self.steps += 1
        if path := self.knobs["steps_socket"]:
            os.environ["BATON_STEPS"] = path
            self._logger = self._logger or step_logger()(CONFIG)
            decodes, prompts = (0, (1, num_prompt)) if num_prompt else (1, (0, 0))
            self._logger.record(stats(self.steps, prompts, decodes, 1000 * self.knobs["token_s"]), None)

    # ---- the connector ------------------------------------------------------------------------------------------

    @property
    def num_kept(self) -> int:
        now = asyncio.get_running_loop().time()
        return sum(end > now for end, _ in self.leases.values())

    @property
    def num_blocks_kept(self) -> int:
        now = asyncio.get_running_loop().time()
        return sum(blocks for end, blocks in self.leases.values() if end > now)

    async def _get_handoffs(self, _: web.Request) -> web.Response:
        return web.json_response(self.handoffs | {"blocks_kept": self.num_blocks_kept})

    async def _get_kv(self, request: web.Request) -> web.Response:
        """Reply whether the KV of a prompt is valid: it has not been read before, and its lease has not ended. For the
        id of a former incarnation of the server, reply with status 404."""
        if request.match_info["engine"] != self.engine_id:
            return web.Response(status=404)
        end, _ = self.leases.pop(request.match_info["request"], (0.0, 0))
        is_valid = end > asyncio.get_running_loop().time()
        self.handoffs["read" if is_valid else "misused"] += 1
        return web.json_response(is_valid)

    def _keep(self, body: dict[str, Any]) -> dict[str, Any]:
        """Keep the blocks of a prompt, and return the parameters to read them."""
        self.handoffs["kept"] += 1
        name, num_blocks = f"cmpl-{self.handoffs['kept']}", -(-len(body["prompt"]) // BLOCK_TOKENS)
        self.leases[name] = (asyncio.get_running_loop().time() + self.knobs["lease_s"], num_blocks)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [list(range(num_blocks))],
            "remote_engine_id": self.engine_id, "remote_request_id": name, "remote_host": self._address[0],
            "remote_port": self._address[1], "tp_size": 1, "dcp_size": 1, "pp_size": 1,
            "remote_num_tokens": len(body["prompt"]), "remote_blocks_expiry_time": None, "transfer_mode": "pull",
        }  # fmt: skip

    def _reads(self, params: dict[str, Any]) -> bool:
        return bool(params.get("do_remote_prefill")) and not self.knobs["ignores_params"]

    async def _read(self, body: dict[str, Any]) -> str:
        """Read the KV of a prompt from another server. Return "" if the KV is valid, else "stale"."""
        params = body["kv_transfer_params"]
        await asyncio.sleep(self.knobs["read_s"])
        names = f"{params['remote_engine_id']}/{params['remote_request_id']}"
        url = f"http://{params['remote_host']}:{params['remote_port']}/kv/{names}"
        async with ClientSession(raise_for_status=True) as session, session.get(url) as answer:
            self.handoffs["bytes"] += 100 * len(body["prompt"])
            self.num_read += len(body["prompt"]) - 1
            return "" if await answer.json() else "stale"

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids})

    async def _set_knobs(self, request: web.Request) -> web.Response:
        self.set(await request.json())
        return web.Response()

    # ---- completions --------------------------------------------------------------------------------------------

    def _takes(self, fault: str) -> bool:
        self.faults[fault] -= 1
        if self.faults[fault] >= 0:
            return True
        self.faults[fault] = 0
        return False

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        self._cache(body)
        for status in (503, 500, 429):
            if self._takes(f"refuse_{status}"):
                return _error(status, "refused")
        if (worst := max(body["prompt"])) >= VOCABULARY:
            return _error(400, f"Token id {worst} is out of vocabulary")
        if "/" in body.get("cache_salt", "") or body.get("cache_salt") == "":
            return _error(400, "Parameter 'cache_salt' must be a non-empty string")
        if body["min_tokens"] > body["max_tokens"] or body["max_tokens"] < 1:
            return _error(400, "min_tokens must be from 0 to max_tokens")
        params = body.get("kv_transfer_params") or {}
        if not body["stream"]:
            return await self._complete(body, is_kept=bool(params.get("do_remote_decode")))
        content_type = "text/html" if self._takes("bad_type") else "text/event-stream"
        stream = web.StreamResponse(headers={"content-type": f"{content_type}; charset=utf-8"})
        await stream.prepare(request)
        self.running += 1
        blocks = -(-(len(body["prompt"]) + body["max_tokens"]) // BLOCK_TOKENS)
        self.num_blocks_used += blocks
        try:
            try:
                wrong = await self._read(body) if self._reads(params) else ""
                if params.get("do_remote_prefill") and self._takes("no_kv"):
                    raise ClientError("planted")
                for _ in range(PROMPT_CHUNKS if self.knobs["prompt_s"] else 0):
                    await asyncio.sleep(self.knobs["prompt_s"] / PROMPT_CHUNKS)
                    self.num_blocks_used, blocks = self.num_blocks_used + 1, blocks + 1
            except ClientError:
                await asyncio.sleep(0.4)
                event = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
                await _send(stream, {"error": event})
                return stream
            await self._stream(stream, body, wrong)
        except (asyncio.CancelledError, ConnectionError):
            self.dropped += 1
            raise
        finally:
            self.running -= not self.knobs["never_drops"]
            self.num_blocks_used -= blocks
        return stream

    async def _complete(self, body: dict[str, Any], *, is_kept: bool) -> web.Response:
        """Answer without a stream, with one token."""
        await asyncio.sleep(self.knobs["token_s"])
        while self.knobs["is_stalled"]:  # noqa: ASYNC110 - knobs are plain values
            await asyncio.sleep(0.05)
        self._stepped(len(body["prompt"]))
        token = self._draw(body, body["prompt"], len(body["prompt"]))
        if self._takes("other_token"):
            token = (token + 1) % VOCABULARY
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": [token], "logprobs": None}
        choice["finish_reason"] = "stop" if token in body["stop_token_ids"] and not body["min_tokens"] else "length"
        if (num := body.get("logprobs")) is not None:
            choice["logprobs"] = _logprobs([token], num)
        params = self._keep(body) if is_kept and self.knobs["connector"] else None
        return web.json_response({"id": "cmpl-1", "choices": [choice], "kv_transfer_params": params})

    def _cache(self, body: dict[str, Any]) -> None:
        """Count the hits of a prompt that is completely in the prefix cache, and keep the prompt there."""
        key = "" if self.knobs["ignores_salts"] else body.get("cache_salt", ""), tuple(body["prompt"])
        hits = len(body["prompt"]) // BLOCK_TOKENS * BLOCK_TOKENS if key in self._cached else 0
        self.num_hits += hits
        self.num_computed += 1 if self._reads(body.get("kv_transfer_params") or {}) else len(body["prompt"]) - hits
        if self.knobs["caches"]:
            self._cached.add(key)

    async def _stream(self, stream: web.StreamResponse, body: dict[str, Any], wrong: str) -> None:
        tokens, start = list(body["prompt"]), len(body["prompt"])
        stops, last, group = set(body["stop_token_ids"]), "", self.knobs["tokens_per_event"]
        while not last:
            await asyncio.sleep(self.knobs["token_s"])
            while self.knobs["is_stalled"]:  # noqa: ASYNC110 - knobs are plain values
                await asyncio.sleep(0.05)
            done = len(tokens) - start
            if done >= FAULT_AFTER and await self._faulted(stream):
                return
            fresh: list[int] = []
            while not last and len(fresh) < group:
                token = self._draw(body, tokens, start, wrong)
                fresh.append(token)
                tokens.append(token)
                if token in stops and len(tokens) - start > body["min_tokens"]:
                    last = "stop"
                elif len(tokens) - start >= body["max_tokens"]:
                    last = "length"
            if self._takes("too_many") if last else False:
                fresh = [*fresh, *fresh]
            self._stepped(0 if done or self._reads(body.get("kv_transfer_params") or {}) else len(body["prompt"]))
            choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": last or None}
            if self.knobs["token_ids"] and body.get("return_token_ids"):
                choice |= {"token_ids": fresh, "prompt_token_ids": body["prompt"] if done == 0 else None}
            if (num := body.get("logprobs")) is not None:
                choice["logprobs"] = _logprobs(fresh, num)
            await _send(stream, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
        await stream.write(b"data: [DONE]\n\n")

    def _draw(self, body: dict[str, Any], tokens: list[int], start: int, draw: str = "") -> int:
        if body["temperature"] > 0:
            draw += f"seed {body['seed']}"
            if not self.knobs["resumes_seeded"]:
                draw += f" token {len(tokens) - start}"
        if not self.knobs["repeats"]:
            draw += f" call {len(self.calls)}"
        return next_token(tokens, draw)

    async def _faulted(self, stream: web.StreamResponse) -> bool:
        """Inject a fault into the stream if one is due, and return whether the fault ends the stream."""
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": None, "token_ids": [1]}
        if self._takes("truncate"):
            return True
        if self._takes("error_event"):
            await _send(
                stream, {"error": {"message": "Internal server error", "type": "E", "param": None, "code": 500}}
            )
            return True
        for finish in ("abort", "repetition"):
            if self._takes(finish):
                await _send(stream, {"choices": [choice | {"finish_reason": finish, "token_ids": []}]})
                return True
        if self._takes("bad_json"):
            await stream.write(b'data: {"choices": [}\n\n')
        if self._takes("bad_id"):
            await _send(stream, {"choices": [choice | {"token_ids": [VOCABULARY]}]})
        if self._takes("long_line"):
            await stream.write(b"data: {" + b" " * (3 << 20))
        return False


async def _send(stream: web.StreamResponse, event: dict[str, Any]) -> None:
    await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _logprobs(tokens: list[int], num: int) -> dict[str, Any]:
    """Return logprobs as vLLM does: `num` likeliest tokens, of which the generated one is the second."""
    rows = []
    for token in tokens:
        others = [(token + 1 + index) % VOCABULARY for index in range(max(0, num - 1))]
        ids = [*others[:1], token, *others[1:]]
        rows.append({f"token_id:{identity}": -0.5 - rank for rank, identity in enumerate(ids)})
    return {
        "token_logprobs": [row[f"token_id:{token}"] for token, row in zip(tokens, rows, strict=True)],
        "tokens": [f"token_id:{token}" for token in tokens], "top_logprobs": rows, "text_offset": [0] * len(tokens),
    }  # fmt: skip


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "Error", "param": None, "code": status}}, status=status
    )


async def _serve(stub: VllmStub, port: int) -> None:
    async with stub.serve(port):
        await asyncio.Event().wait()


def main(kind: type[VllmStub]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--knobs", type=json.loads, default={})
    arguments = parser.parse_args()
    asyncio.run(_serve(kind(**arguments.knobs), arguments.port))


if __name__ == "__main__":
    main(VllmStub)
