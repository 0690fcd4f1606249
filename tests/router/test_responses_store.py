"""Test stored responses, in both stores: how they are read, resumed, continued, cancelled, deleted and taken over."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from router import responses_store
from router.http import responses_api
from router.http.auth import ApiKeys
from router.http.response_runs import Replay
from router.http.responses import dump_in_parts
from router.nodes.connection import ModelVersion
from router.responses_store import CANCELLED, MAX_BYTES, MemoryStore, RedisStore, ResponsesStore, StoredResponse
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from shared.errors import UnavailableError
from shared.lifecycle import wait_until
from shared.rpc.messages import TokenDelta
from tests.cluster.harness import RedisServer, wait_for
from tests.router.answering import ANSWER, FUNCTION, SAID, client, connecting, hermes
from tests.router.conftest import CHATML, byte_fallback_tokenizer

__all__ = ["client", "hermes"]  # fixtures
MakeStore = Callable[[], ResponsesStore]
WAIT_S = 60.0
HELLO = {"model": "tiny", "input": "Hello?"}
TOOL = {"type": "function", **FUNCTION}


def answers(client: redis.Redis) -> bool:
    with suppress(redis.RedisError):
        return bool(client.ping())
    return False


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        server.start()
        with redis.Redis(port=server.port) as client:
            wait_for(lambda: answers(client), "Redis answers")
        yield server


@pytest.fixture(params=["memory", "redis"])
async def make_store(request: pytest.FixtureRequest) -> MakeStore:
    """Return a function that opens a store. Stores in Redis share their contents."""
    if request.param == "memory":
        return MemoryStore
    server = request.getfixturevalue("redis_server")
    return lambda: RedisStore(f"redis://127.0.0.1:{server.port}", "test")


async def finished(own: openai.AsyncOpenAI, response_id: str) -> Any:
    """Wait until the response has ended, and return it."""
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in await own.responses.retrieve(response_id, stream=True)]
        assert events[0].sequence_number == 0
        return await own.responses.retrieve(response_id)


async def test_a_long_response_is_rebuilt_and_encoded_on_a_thread(client, hermes, monkeypatch):
    own, _ = await client(hermes, "abc", responses_store=MemoryStore())
    first = await own.responses.create(**HELLO)
    threads: dict[str, threading.Thread] = {}

    def recorded(name: str, call: Callable[..., Any], *args: Any) -> Any:
        threads[name] = threading.current_thread()
        return call(*args)

    add = Replay.add
    monkeypatch.setattr(Replay, "add", lambda replay, delta: recorded("rebuilt", add, replay, delta))
    monkeypatch.setattr(responses_api, "dump_in_parts", partial(recorded, "encoded", dump_in_parts))
    assert await own.responses.retrieve(first.id) == first
    assert threads.keys() == {"rebuilt", "encoded"}
    assert threading.main_thread() not in threads.values()


async def test_other_requests_run_while_a_long_response_is_followed(client, hermes, monkeypatch):
    own, _ = await client(hermes, "abc" * 20, responses_store=MemoryStore())
    first = await own.responses.create(**HELLO)
    turns, seen, add = list[None](), list[int](), Replay.add

    def recorded(replay: Replay, delta: TokenDelta) -> Any:
        seen.append(len(turns))
        asyncio.get_running_loop().call_soon(turns.append, None)
        return add(replay, delta)

    monkeypatch.setattr(Replay, "add", recorded)
    async for _ in await own.responses.retrieve(first.id, stream=True):
        pass
    assert (seen[0], seen[16], seen[-1]) == (0, 16, 48)


async def test_a_stored_response_can_be_read_continued_and_deleted(client, hermes, make_store, monkeypatch):
    own, dispatcher = await client(hermes, f"<think>{SAID}</think>Fine.", responses_store=make_store())
    first = await own.responses.create(**HELLO, instructions="Be brief.", metadata={"a": "b"})
    assert (first.store, first.metadata, first.output_text) == (True, {"a": "b"}, "Fine.")
    assert await own.responses.retrieve(first.id) == first
    second = await own.responses.create(model="tiny", input="And you?", previous_response_id=first.id)
    prompt = hermes.decode(dispatcher.answers[-1].request.prompt, skip_special_tokens=False)
    assert prompt.startswith(
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>\n<|im_start|>user\nAnd"
    )
    items = [item async for item in own.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
    assert len({item.id for item in items}) == 4
    texts = [(item.content[0].type, item.content[0].text) for item in items if item.type == "message"]
    assert texts == [("input_text", "Hello?"), ("output_text", "Fine."), ("input_text", "And you?")]
    await own.responses.delete(first.id)
    for call in (own.responses.retrieve, own.responses.delete, own.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(first.id)
    with pytest.raises(openai.NotFoundError):
        await own.responses.retrieve(f"{second.id}:log")
    with pytest.raises(openai.NotFoundError, match="does not exist") as raised:
        await own.responses.create(**HELLO, previous_response_id=first.id)
    assert raised.value.param == "previous_response_id"
    assert (await own.responses.retrieve(second.id)).previous_response_id == first.id
    for limit, words in (("MAX_CONTEXT_ITEMS", "more than 3 items"), ("MAX_CONTEXT_BYTES", "more than 0 MiB")):
        monkeypatch.setattr(f"router.http.responses_api.{limit}", 3)
        with pytest.raises(openai.BadRequestError, match=words):
            await own.responses.create(**HELLO, previous_response_id=second.id)
    unstored = await own.responses.create(**HELLO, store=False)
    with pytest.raises(openai.NotFoundError):
        await own.responses.retrieve(unstored.id)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "get_weather", "arguments": {"city": "Par',
        '{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>',
    ],
)
async def test_a_conversation_continues_after_a_call_without_valid_arguments(client, hermes, call):
    own, dispatcher = await client(hermes, f"<tool_call>\n{call}", responses_store=MemoryStore())
    first = await own.responses.create(
        **HELLO, tools=[TOOL], max_output_tokens=len(hermes.encode(f"<tool_call>\n{call}"))
    )
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "invalid"}
    await own.responses.create(model="tiny", input=[output], tools=[TOOL], previous_response_id=first.id)
    prompt = hermes.decode(dispatcher.answers[-1].request.prompt, skip_special_tokens=False)
    assert '"arguments": {}' in prompt


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        ("ab😀", {"stop": ["😀"]}),
        ('["x","STOP","y"]', {"stop": ["STOP"], "ignore_eos": True, "structured_outputs": {"regex": ".*"}}),
    ],
)
async def test_a_stop_string_ends_a_stored_response(client, answer, fields):
    """The tokenizer holds the bytes of a character back until the next token. A grammar does not disable the stop."""
    tokenizer = Tokenizer(byte_fallback_tokenizer(), {}, ChatTemplate(CHATML, {}, []))
    own, _ = await client(tokenizer, answer, responses_store=MemoryStore())
    async with asyncio.timeout(WAIT_S):
        response = await own.responses.create(**HELLO, extra_body=fields)
    assert response.output_text.strip() == answer[: answer.index(fields["stop"][0])]
    assert (await own.responses.retrieve(response.id)).output_text == response.output_text


async def test_a_stream_resumes_after_any_event(client, hermes, make_store):
    own, _ = await client(hermes, ANSWER, 3, responses_store=make_store())
    created = [event async for event in await own.responses.create(**HELLO, background=True, stream=True)]
    response_id = created[0].response.id
    assert [event.type for event in created[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in created] == list(range(len(created)))
    assert created[-1].type == "response.completed"
    for after in range(-1, len(created) + 1):
        more = {} if after < 0 else {"starting_after": after}
        events = [event async for event in await own.responses.retrieve(response_id, stream=True, **more)]
        assert events == created[after + 1 :]


async def test_a_response_in_the_background_is_followed_and_cancelled(client, hermes, make_store):
    own, dispatcher = await client(hermes, "abc " * 30, responses_store=make_store())
    dispatcher.hangs_after = 5
    response = await own.responses.create(**HELLO, background=True)
    assert (response.status, response.output) == ("queued", [])
    await dispatcher.hanging.acquire()
    stream = await own.responses.retrieve(response.id, stream=True)
    events = [await anext(stream) for _ in range(8)]
    assert (await own.responses.retrieve(response.id)).status == "in_progress"
    assert (await own.responses.cancel(response.id)).status == "cancelled"
    events += [event async for event in stream]
    assert events[-1].type == "response.cancelled"
    assert await wait_until(lambda: dispatcher.answers[0].closed == 1, WAIT_S)
    assert (await own.responses.cancel(response.id)).status == "cancelled"
    dispatcher.hangs_after = None
    done = await finished(own, (await own.responses.create(**HELLO, background=True)).id)
    assert (done.status, (await own.responses.cancel(done.id)).status) == ("completed", "completed")
    foreground = await own.responses.create(**HELLO)
    with pytest.raises(openai.BadRequestError, match="Only a response with `background`"):
        await own.responses.cancel(foreground.id)


async def test_a_deleted_response_stops(client, hermes, make_store):
    own, dispatcher = await client(hermes, "abc " * 30, responses_store=make_store())
    dispatcher.hangs_after = 5
    response = await own.responses.create(**HELLO, background=True)
    await dispatcher.hanging.acquire()
    stream = await own.responses.retrieve(response.id, stream=True)
    await own.responses.delete(response.id)
    assert [event async for event in stream] != []
    assert await wait_until(lambda: dispatcher.answers[0].closed == 1, WAIT_S)


async def test_the_client_of_a_deleted_response_gets_an_error(client, hermes):
    own, dispatcher = await client(hermes, "abc " * 30, responses_store=MemoryStore())
    dispatcher.hangs_after = 5
    answer = asyncio.create_task(own.responses.create(**HELLO))
    await dispatcher.hanging.acquire()
    await own.responses.delete(dispatcher.answers[0].request.id.partition("-")[0])
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        await answer


async def test_a_client_that_leaves_cancels_its_response(client, hermes, make_store):
    own, dispatcher = await client(hermes, "abc " * 30, responses_store=make_store())
    dispatcher.hangs_after = 5
    stream = await own.responses.create(**HELLO, stream=True)
    response_id = (await anext(stream)).response.id
    await dispatcher.hanging.acquire()
    await stream.close()
    assert (await finished(own, response_id)).status == "cancelled"
    assert dispatcher.answers[0].closed == 1


class SlowStore(RedisStore):
    """A store that creates a response only when the test allows it, even if its caller is cancelled first."""

    def __init__(self, url: str, cluster: str) -> None:
        super().__init__(url, cluster)
        self.asked = asyncio.Queue[str]()
        self.may_create, self.has_created = asyncio.Event(), asyncio.Event()

    async def create(self, response: StoredResponse, owner: str) -> None:
        self.asked.put_nowait(response.id)
        await asyncio.shield(self._create_late(response, owner))

    async def _create_late(self, response: StoredResponse, owner: str) -> None:
        await self.may_create.wait()
        await super().create(response, owner)
        self.has_created.set()


async def test_a_client_that_leaves_before_its_response_is_stored_cancels_it(client, hermes, redis_server):
    store = SlowStore(f"redis://127.0.0.1:{redis_server.port}", "test")
    own, dispatcher = await client(hermes, ANSWER, responses_store=store)
    asked = asyncio.create_task(own.responses.create(**HELLO))
    response_id = await store.asked.get()
    asked.cancel()
    async with httpx.AsyncClient() as http, asyncio.timeout(WAIT_S):
        while True:
            if not (await http.get(str(own.base_url.join("/load")))).json()["server_load"]:
                break
            await asyncio.sleep(0.05)
    store.may_create.set()
    await store.has_created.wait()
    assert (await finished(own, response_id)).status == "cancelled"
    assert dispatcher.answers == [], "nothing is generated for a client that is gone"


async def test_failures_are_statuses_or_stored(client, hermes, make_store):
    own, dispatcher = await client(hermes, "abc " * 30, responses_store=make_store())
    dispatcher.refuses = UnavailableError("full", status=429)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="full"):
            await own.responses.create(**HELLO, stream=stream)
    failed = await finished(own, (await own.responses.create(**HELLO, background=True)).id)
    assert (failed.status, failed.error.message) == ("failed", "full")
    dispatcher.refuses, dispatcher.fails_after = None, 4
    events = [event async for event in await own.responses.create(**HELLO, stream=True)]
    assert (events[-1].type, events[-1].response.error.message) == ("response.failed", "the node is gone")
    with pytest.raises(openai.BadRequestError, match="must be completed or incomplete"):
        await own.responses.create(**HELLO, previous_response_id=failed.id)


async def test_responses_in_the_background_count_as_requests_in_progress(client, hermes, make_store):
    own, dispatcher = await client(hermes, "abc " * 30, responses_store=make_store(), max_concurrent_requests=2)
    dispatcher.hangs_after = 5
    held = [await own.responses.create(**HELLO, background=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError):
        await own.responses.create(**HELLO, background=True)
    for response in held:
        await own.responses.cancel(response.id)
    dispatcher.hangs_after = None
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(openai.RateLimitError):
                assert (await own.responses.create(**HELLO)).status == "completed"
                return
            await asyncio.sleep(0.05)


async def test_a_tenant_cannot_see_the_responses_of_another(client, hermes, make_store):
    lines = ",".join(f"{name}:{sha256(name.encode()).hexdigest()}" for name in ("acme", "other"))
    lines += f",boss:{sha256(b'boss').hexdigest()}:admin"
    own, _ = await client(hermes, ANSWER, responses_store=make_store(), keys=ApiKeys("", lines))
    acme, other, boss = (own.with_options(api_key=name) for name in ("acme", "other", "boss"))
    response = await acme.responses.create(**HELLO, background=True)
    await finished(acme, response.id)
    async with httpx.AsyncClient(base_url=str(own.base_url)) as http:
        for stranger in ("other", "boss"):
            for method, path in (
                ("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"),
            ):  # fmt: skip
                answers = [
                    await http.request(
                        method, f"responses/{name}{path}", headers={"authorization": f"Bearer {stranger}"}
                    )
                    for name in (response.id, "resp_" + "0" * 32)
                ]
                assert [answer.status_code for answer in answers] == [404, 404]
                assert answers[0].json() == answers[1].json(), "the answers do not reveal that it exists"
    for stranger in (other, boss):
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.create(**HELLO, previous_response_id=response.id)
    assert (await acme.responses.retrieve(response.id)).status == "completed"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=1", "stream"),
        ("?starting_after=1", "starting_after"),
        *((f"?stream=true&starting_after={value}", "starting_after") for value in ("x", "-2", "1.5", "9" * 20, "²")),
        ("?other=1", "other"),
        *((f"/input_items?limit={value}", "limit") for value in ("0", "101", "x", "9" * 5000, "000199", "0001" * 1300)),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_1", "after"),
    ],
)
async def test_a_bad_query_is_refused_by_name(client, hermes, path, param):
    own, _ = await client(hermes, ANSWER, responses_store=MemoryStore())
    response = await own.responses.create(**HELLO)
    async with httpx.AsyncClient(base_url=str(own.base_url)) as http:
        answer = await http.get(f"responses/{response.id}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_deeply_nested_annotations_are_refused_by_name(client, hermes):
    own, _ = await client(hermes, ANSWER, responses_store=MemoryStore())
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    message = {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": deep}]}
    with pytest.raises(openai.BadRequestError, match="annotations`: is nested more than 32 levels deep"):
        await own.responses.create(model="tiny", input=[message])


async def test_without_a_store_the_error_names_the_flag(client, hermes):
    own, _ = await client(hermes, ANSWER)
    for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError, match="--responses-store"):
            await own.responses.create(**HELLO, **fields)
    with pytest.raises(openai.NotFoundError, match="--responses-store"):
        await own.responses.retrieve("resp_1")


# ---- several routers -------------------------------------------------------------------------------------------------


class HeldStore(RedisStore):
    """A store from which nothing is taken over until the test allows it."""

    def __init__(self, url: str, cluster: str) -> None:
        super().__init__(url, cluster)
        self.may_adopt = asyncio.Event()

    async def adopt(self, owner: str, limit: int) -> list[str]:
        await self.may_adopt.wait()
        return await super().adopt(owner, limit)


async def test_another_router_takes_over_and_the_first_cannot_add_anything(client, hermes, redis_server, monkeypatch):
    monkeypatch.setattr(responses_store, "PAGE", 3)
    url = f"redis://127.0.0.1:{redis_server.port}"
    text = "one two three four five six seven"
    first, dispatcher = await client(hermes, text, responses_store=HeldStore(url, "test"))
    dispatcher.hangs_after, dispatcher.version = 4, ModelVersion("weights", "build")
    response = await first.responses.create(**HELLO, background=True, temperature=0.5)
    await dispatcher.hanging.acquire()
    stream = await first.responses.retrieve(response.id, stream=True)
    events = [await anext(stream) for _ in range(6)]
    await stream.close()
    dispatcher.is_ready = False  # the first router would otherwise take its own response over
    with redis.Redis(port=redis_server.port) as client_of_redis:  # the lease ends, as if the first router were frozen
        client_of_redis.delete(f"baton:test:response:{response.id}:lease")
    second, taker = await client(hermes, text, responses_store=RedisStore(url, "test"))
    async for event in await second.responses.retrieve(
        response.id, stream=True, starting_after=events[-1].sequence_number
    ):
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == text
    continued = taker.answers[0]
    assert len(continued.request.generated) == 4
    assert continued.request.is_accepted, "it is not refused by an overloaded router"
    assert continued.request.version == ModelVersion("weights", "build"), "on nodes of the same version"
    assert continued.request.sampling.seed == dispatcher.answers[0].request.sampling.seed
    assert continued.request.id != dispatcher.answers[0].request.id
    assert await wait_until(lambda: dispatcher.answers[0].closed == 1, WAIT_S), "the first router stops"
    whole = [event async for event in await first.responses.retrieve(response.id, stream=True)]
    assert whole == events


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "unloaded"])
async def test_a_response_that_is_taken_over_keeps_its_adapter_or_fails(client, hermes, redis_server, is_loaded):
    """A router that has just started learns the adapters from its nodes. It never uses the base model instead."""
    url = f"redis://127.0.0.1:{redis_server.port}"
    async with connecting() as connect:
        own, dispatcher = await connect(hermes, "one two three", responses_store=RedisStore(url, "test"))
        dispatcher.hangs_after, dispatcher.known_adapters = 2, {"sql": "digest"}
        response = await own.responses.create(model="sql", input="Hello?", background=True)
        await dispatcher.hanging.acquire()
    store = HeldStore(url, "test")
    other, taker = await client(hermes, "one two three", responses_store=store)
    taker.new_adapters = {"sql": "digest"} if is_loaded else {}
    store.may_adopt.set()
    assert (await finished(other, response.id)).status == ("completed" if is_loaded else "failed")
    assert [answer.request.adapter for answer in taker.answers] == ["digest"] * is_loaded


class LateStore(RedisStore):
    """A store that delays its first append of entry 3 until the entry is appended a second time."""

    late: asyncio.Future[bool] | None = None

    async def append(self, response_id: str, owner: str, position: int, delta: TokenDelta, *, ends: bool) -> bool:
        own = super().append(response_id, owner, position, delta, ends=ends)
        if position != 3 or (self.late is not None and self.late.done()):
            return await own
        if self.late is None:
            self.late, self.reached = asyncio.ensure_future(self._wait(own)), asyncio.Event()
            return await asyncio.shield(self.late)
        self.reached.set()
        await self.late
        return await own

    async def _wait(self, own: Any) -> bool:
        await self.reached.wait()
        return bool(await own)


async def test_an_append_that_arrives_after_the_same_router_took_over_again_is_refused(client, hermes, redis_server):
    text, store = "one two three four five six seven", LateStore(f"redis://127.0.0.1:{redis_server.port}", "test")
    own, dispatcher = await client(hermes, text, 2, responses_store=store)
    response = await own.responses.create(**HELLO, background=True)
    assert await wait_until(lambda: store.late is not None, WAIT_S)
    dispatcher.tokens_per_piece = 1
    with redis.Redis(port=redis_server.port) as client_of_redis:  # the lease ends, as if the router were frozen
        client_of_redis.delete(f"baton:test:response:{response.id}:lease")
    assert (await finished(own, response.id)).output_text == text
    assert len(dispatcher.answers) == 2
    assert store.late.result() is False


async def test_a_router_that_stops_gives_its_responses_up_at_once(client, hermes, redis_server):
    url = f"redis://127.0.0.1:{redis_server.port}"
    async with connecting() as connect:
        own, dispatcher = await connect(hermes, "one two three", responses_store=RedisStore(url, "test"))
        dispatcher.hangs_after = 2
        response = await own.responses.create(**HELLO, background=True)
        await dispatcher.hanging.acquire()
    other, _ = await client(hermes, "one two three", responses_store=RedisStore(url, "test"))
    assert (await finished(other, response.id)).output_text == "one two three"


def stored(name: str) -> StoredResponse:
    return StoredResponse(name, "acme", False, 7, b"{}", b"[]", b"", 5, 9)


async def test_only_the_owner_of_the_lease_appends_and_only_at_the_end(make_store):
    store = make_store()
    await store.create(stored("a"), "r1")
    delta = TokenDelta("a", tokens=b"\1\0\0\0")
    assert await store.append("a", "r1", 0, delta, ends=False)
    assert not await store.append("a", "r2", 1, delta, ends=False)
    assert not await store.append("a", "r1", 2, delta, ends=False)
    assert await store.renew({"a": "r1", "b": "r1"}) == ["b"]
    assert await store.renew({"a": "r2"}) == ["a"]
    assert await store.adopt("r2", 9) == []
    assert await store.append("a", "r1", 1, TokenDelta("a", finish="stop"), ends=True)
    await store.end("a", TokenDelta("a", error=CANCELLED))
    assert [(entry.tokens, entry.finish) for entry in await store.read("a", 0)] == [(b"\1\0\0\0", ""), (b"", "stop")]
    assert await store.read("a", 1) == [TokenDelta("a", finish="stop")]
    assert await store.get("a") == stored("a")
    await store.delete("a")
    assert (await store.get("a"), await store.read("a", 0)) == (None, [])
    assert not await store.append("a", "r1", 2, delta, ends=False)
    await store.close()


async def test_an_append_whose_answer_was_lost_is_not_repeated(redis_server):
    store = RedisStore(f"redis://127.0.0.1:{redis_server.port}", "test")
    await store.create(stored("a"), "r1")
    delta = TokenDelta("a", tokens=b"\1\0\0\0")
    assert await store.append("a", "r1", 0, delta, ends=False)
    assert await store.append("a", "r1", 0, delta, ends=False)
    assert await store.read("a", 0) == [delta]
    await store.release({"a": "r1"})
    assert await store.adopt("r2", 0) == []
    assert await store.adopt("r2", 1) == ["a"]
    await store.end("a", TokenDelta("a", error=CANCELLED))
    assert await store.adopt("r3", 1) == []
    await store.close()
    redis_server.kill()
    with pytest.raises(UnavailableError):
        await store.get("a")


async def test_a_response_that_just_ended_is_not_taken_over(redis_server):
    url = f"redis://127.0.0.1:{redis_server.port}"
    first, second = RedisStore(url, "test"), RedisStore(url, "test")
    for number in range(50):
        await first.create(stored(str(number)), "r1")
        end = first.append(str(number), "r1", 0, TokenDelta("", finish="stop"), ends=True)
        taken, has_ended = await asyncio.gather(second.adopt("r2", 9), end)
        assert (taken, has_ended) == ([], True)
    await asyncio.gather(first.close(), second.close())


async def test_a_full_store_keeps_a_response_until_its_client_has_read_it(client, hermes, monkeypatch):
    monkeypatch.setattr(responses_store, "MAX_BYTES", 1)
    own, _ = await client(hermes, SAID, responses_store=MemoryStore())
    response = await own.responses.create(**HELLO)
    assert (response.status, response.output_text) == ("completed", SAID)
    with pytest.raises(openai.InternalServerError, match="full") as refused:
        await own.responses.create(**HELLO)
    assert refused.value.status_code == 503


async def test_memory_is_bounded_and_responses_under_way_stay():
    now = itertools.count(step=responses_store.UNREAD_S)
    store = MemoryStore(lambda: next(now))
    size = MAX_BYTES // 8
    for number in range(12):
        response = stored(str(number))
        response.body = bytes(size)
        await store.create(response, "r1")
        if number != 1:
            await store.end(str(number), TokenDelta("", finish="stop"))
    kept = [number for number in range(12) if await store.get(str(number)) is not None]
    assert 1 in kept
    assert 5 <= len(kept) <= 8
    assert kept[1:] == list(range(12 - len(kept) + 1, 12)), "the oldest are dropped"


async def test_a_tenant_that_fills_the_memory_does_not_drop_the_responses_of_others():
    now = itertools.count(step=2 * responses_store.UNREAD_S)
    store = MemoryStore(lambda: next(now))
    for number in range(12):
        response = stored(str(number))
        response.tenant, response.body = ("other" if number else "own"), bytes(MAX_BYTES // 8)
        await store.create(response, "r1")
        await store.end(str(number), TokenDelta("", finish="stop"))
    kept = [number for number in range(12) if await store.get(str(number)) is not None]
    assert kept[0] == 0
    assert kept[1:] == list(range(12 - len(kept) + 1, 12))


async def test_a_full_store_is_not_searched_for_every_token(monkeypatch):
    monkeypatch.setattr(responses_store, "MAX_BYTES", 1)
    store, response, reads = MemoryStore(lambda: 9.0), stored("r"), list[str]()

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            reads.append(name)
            return getattr(response, name)

    await store.create(Recorded(), "r1")
    for position in range(50):
        assert await store.append("r", "r1", position, TokenDelta("", tokens=b"t"), ends=False)
    assert reads.count("tenant") == 1


class BusyStore(MemoryStore):
    """A store with an expired lease. The record of its response never arrives."""

    is_shared = True

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.num_renewals = asyncio.Event(), 0

    async def adopt(self, owner: str, limit: int) -> list[str]:
        return ["resp_1"]

    async def get(self, response_id: str) -> StoredResponse | None:
        self.is_asked.set()
        await asyncio.Event().wait()
        return None

    async def renew(self, owners: Any) -> list[str]:
        self.num_renewals += 1
        return []


async def test_leases_are_renewed_while_responses_are_taken_over(client, hermes):
    store = BusyStore()
    await client(hermes, ANSWER, responses_store=store)
    await store.is_asked.wait()
    before = store.num_renewals
    assert await wait_until(lambda: store.num_renewals >= before + 2, WAIT_S)
