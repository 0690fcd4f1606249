"""Test the endpoint picker's choice as a pure function, and its answers to messages of Envoy."""

import base64
import importlib.util
import json
import sys
from collections import Counter
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.picker.__main__ import main
from router.picker.choice import MAX_ADDRESSES, OVERLOAD, choose, key_of
from shared.config.settings import PickerSettings

ROUTERS = st.lists(st.integers(0, 255).map(lambda n: f"10.0.0.{n}:8000"), min_size=1, max_size=12, unique=True)
KEYS = st.binary(max_size=40)


@given(routers=ROUTERS, key=KEYS)
def test_the_choice_does_not_depend_on_the_order_of_the_routers(routers: list[str], key: bytes) -> None:
    chosen = choose(key, dict.fromkeys(routers, 0))
    assert chosen == choose(key, dict.fromkeys(sorted(routers), 0))
    assert len(chosen) == len(set(chosen)) == min(MAX_ADDRESSES, len(routers))


@given(routers=ROUTERS.filter(lambda routers: len(routers) > 1), keys=st.lists(KEYS, max_size=30))
def test_if_a_router_leaves_only_its_keys_move_and_each_to_its_second_choice(
    routers: list[str], keys: list[bytes]
) -> None:
    gone, *left = routers
    for key in keys:
        before, after = (choose(key, dict.fromkeys(each, 0)) for each in (routers, left))
        assert after[0] == (before[1] if before[0] == gone else before[0])


@given(routers=ROUTERS, keys=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=100))
def test_no_router_gets_more_than_its_bound_even_if_all_keys_are_equal(routers: list[str], keys: list[bytes]) -> None:
    under_way: Counter[str] = Counter(dict.fromkeys(routers, 0))
    for key in keys:
        order = choose(key, dict.fromkeys(routers, 0))
        first, *others = choose(key, under_way)
        under_way[first] += 1
        bound = ceil(OVERLOAD * under_way.total() / len(routers))
        assert under_way[first] <= bound
        if under_way[order[0]] < bound:
            assert first == order[0], "a router with room keeps its keys"
        if len(routers) <= MAX_ADDRESSES:
            assert others == [router for router in order if router != first], "the others keep their order"


def test_keys_spread_evenly_over_the_routers() -> None:
    routers = dict.fromkeys((f"10.0.0.{n}:8000" for n in range(8)), 0)
    counts = Counter(choose(str(n).encode(), routers)[0] for n in range(8000))
    assert all(850 < count < 1150 for count in counts.values())  # the standard deviation is 30


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (body(prompt="x" * 1024 + "a"), body(prompt="x" * 1024 + "b", max_tokens=7)),
        (body(prompt=[7] * 2000 + [1]), body(prompt=[7] * 2000 + [2])),
        (body(messages=[{"role": "user", "content": "x" * 2000 + "a"}]), body(messages=[{"role": "user", "content": "x" * 2000}])),
        (b"no JSON", b"[1, 2]"),
        (b"[" * 100_000, b'{"prompt": 1e999999999999, '),
        (b"\xff\xfe", b"1" * 100_000),
    ],
)  # fmt: skip
def test_requests_with_equal_prefixes_have_equal_keys(one: bytes, other: bytes) -> None:
    assert key_of("tenant", "/path", one) == key_of("tenant", "/path", other)


def test_tenants_salts_and_prefixes_have_keys_of_their_own() -> None:
    bodies = [body(prompt="x" * 1023 + "a"), body(prompt="x" * 1023 + "b"), body(messages=[{"content": "\ud800"}])]
    bodies += [body(prompt="x" * 1023 + "a", cache_salt="s"), body(input="a"), body(input="b"), b"no JSON"]
    keys = {key_of(tenant, path, each) for tenant in ("", "Bearer a") for path in ("/p", "/q") for each in bodies}
    assert len(keys) == 2 * (len(bodies) - 1) + 2 * 2, "the path counts only without a prompt"


def test_without_the_extra_the_picker_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "router.picker.server", None)
    assert main(PickerSettings(routers="routers:8000")) == 2
    assert "pip install '.[picker]'" in capsys.readouterr().err


# ---- the protocol ----------------------------------------------------------------------------------------------------

needs_protos = pytest.mark.skipif(
    importlib.util.find_spec("google") is None or importlib.util.find_spec("envoy") is None,
    reason="no xds-protos: pip install '.[picker]'",
)
SUBSET = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.9:1"]}}


async def answers(
    messages: list[dict[str, Any]], *, ready: int = 3, limit: int = 9, busy: int = 0
) -> list[dict[str, Any]]:
    """Send messages to a picker, and return its answers as JSON. Each of its `ready` routers has `busy` requests."""
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
    from google.protobuf.json_format import MessageToDict, ParseDict
    from grpclib.client import StreamStreamMethod
    from grpclib.testing import ChannelFor

    from router.picker.server import METHOD, Picker

    watch = SimpleNamespace(ready=frozenset(f"10.0.0.{n}:8000" for n in range(ready)))
    picker = Picker(PickerSettings(routers="routers:8000", max_concurrent_requests=limit), watch)  # type: ignore[arg-type]
    picker.under_way.update(dict.fromkeys(watch.ready, busy))
    received = []
    async with ChannelFor([picker]) as channel:
        method = StreamStreamMethod(channel, METHOD, ProcessingRequest, ProcessingResponse)
        async with method.open() as stream:
            for message in messages:
                await stream.send_message(ParseDict(message, ProcessingRequest()))
            await stream.end()
            received = [MessageToDict(answer) async for answer in stream]
    assert picker.under_way.total() == busy * ready, "a request is not counted when its stream has ended"
    return received


def head(*, end: bool = False, hint: bool = False, mode: str = "FULL_DUPLEX_STREAMED") -> dict[str, Any]:
    pairs = [{"key": ":path", "value": "/v1/completions"}, {"key": "authorization", "rawValue": encoded(b"Bearer a")}]
    message: dict[str, Any] = {"requestHeaders": {"headers": {"headers": pairs}, "endOfStream": end}}
    message["protocolConfig"] = {"requestBodyMode": mode, "responseBodyMode": "FULL_DUPLEX_STREAMED"}
    return message | ({"metadataContext": {"filterMetadata": SUBSET}} if hint else {})


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def part(content: bytes, *, end: bool = False, kind: str = "requestBody") -> dict[str, Any]:
    return {kind: {"body": encoded(content), "endOfStream": end}}


def picked(answer: dict[str, Any], kind: str = "requestHeaders") -> list[str]:
    """Return the addresses in an answer. The header and the metadata must have the same addresses."""
    (option,) = answer[kind]["response"]["headerMutation"]["setHeaders"]
    addresses = base64.b64decode(option["header"]["rawValue"]).decode()
    assert option["appendAction"] == "OVERWRITE_IF_EXISTS_OR_ADD"
    assert answer["dynamicMetadata"] == {"envoy.lb": {option["header"]["key"]: addresses}}
    return addresses.split(",")


def echoed(answer: dict[str, Any], kind: str = "requestBody") -> tuple[bytes, bool]:
    streamed = answer[kind]["response"]["bodyMutation"]["streamedResponse"]
    return base64.b64decode(streamed.get("body", "")), streamed.get("endOfStream", False)


def refused(received: list[dict[str, Any]]) -> tuple[str, str]:
    (answer,) = received
    immediate = answer["immediateResponse"]
    return immediate["status"]["code"], json.loads(base64.b64decode(immediate["body"]))["error"]["type"]


ROUTERS_3 = [f"10.0.0.{n}:8000" for n in range(3)]
PROMPT = body(prompt="x" * 100)
BY_PATH = choose(key_of("Bearer a", "/v1/completions", b""), dict.fromkeys(ROUTERS_3, 0))
BY_PROMPT = choose(key_of("Bearer a", "/v1/completions", PROMPT), dict.fromkeys(ROUTERS_3, 0))


@needs_protos
async def test_the_body_is_collected_and_sent_back_unchanged_after_the_headers() -> None:
    parts = [part(PROMPT[:50]), part(PROMPT[50:]), part(b"", end=True)]
    reply = [{"responseHeaders": {}}, part(b"data", kind="responseBody"), {"responseTrailers": {}}]
    first, *others = await answers([head(), *parts, *reply])
    assert picked(first) == BY_PROMPT
    assert [echoed(each) for each in others[:3]] == [(PROMPT[:50], False), (PROMPT[50:], False), (b"", True)]
    assert echoed(others[4], "responseBody") == (b"data", False)
    assert [list(each) for each in (others[3], others[5])] == [["responseHeaders"], ["responseTrailers"]]


@needs_protos
async def test_a_buffered_body_stays_in_envoy_and_its_answer_changes_the_headers() -> None:
    first, second, trailers = await answers([head(mode="BUFFERED"), part(PROMPT), {"requestTrailers": {}}])
    assert first == {"requestHeaders": {}}
    assert picked(second, "requestBody") == BY_PROMPT
    assert list(trailers) == ["requestTrailers"]


@needs_protos
async def test_the_end_of_a_body_may_be_repeated() -> None:
    assert len(await answers([head(), part(PROMPT, end=True), part(PROMPT, end=True)])) == 2


@needs_protos
async def test_trailers_end_a_body() -> None:
    first, chunk, trailers = await answers([head(), part(PROMPT), {"requestTrailers": {}}])
    assert picked(first) == BY_PROMPT
    assert echoed(chunk) == (PROMPT, False)
    assert list(trailers) == ["requestTrailers"]


@needs_protos
@pytest.mark.parametrize(
    "messages",
    [
        [head(end=True)],
        [head()],
        [head(), part(PROMPT[:50])],
        [head(), part(b"no JSON", end=True)],
        [head(mode="NONE")],
        [head(mode="STREAMED"), part(PROMPT, end=True)],
    ],
    ids=["headers only", "cut", "cut in the body", "no JSON", "no bodies", "another mode"],
)
async def test_without_a_prompt_the_headers_decide(messages: list[dict[str, Any]]) -> None:
    first, *_ = await answers(messages)
    assert picked(first) == BY_PATH


@needs_protos
async def test_refusals() -> None:
    whole = [head(end=True)]
    assert refused(await answers(whole, ready=0)) == ("ServiceUnavailable", "service_unavailable_error")
    assert refused(await answers(whole, busy=9)) == ("TooManyRequests", "rate_limit_error")
    assert refused(await answers([head(end=True, hint=True)])) == ("ServiceUnavailable", "service_unavailable_error")
    mib = part(b"x" * 2**20)
    assert refused(await answers([head(), *[mib] * 10, part(b"x"), mib])) == (
        "PayloadTooLarge",
        "invalid_request_error",
    )
    exact = await answers([head(), *[mib] * 10, part(b"", end=True)])
    assert picked(exact[0]) == BY_PATH
    assert len(exact) == 12


@needs_protos
async def test_only_routers_of_the_subset_are_picked() -> None:
    allowed = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.1:8000", "10.0.0.7:8000"]}}
    (first,) = await answers([head(end=True) | {"metadataContext": {"filterMetadata": allowed}}])
    assert picked(first) == ["10.0.0.1:8000"]


@needs_protos
async def test_a_picker_that_finds_no_router_logs_once_why(caplog: pytest.LogCaptureFixture) -> None:
    import aiohttp

    from router.picker.server import RouterWatch

    answers: list[list[str]] = []

    async def resolve() -> list[str]:
        if not answers:
            raise OSError("Name or service not known")
        return answers[0]

    caplog.set_level("INFO", "baton.picker")
    async with aiohttp.ClientSession() as session:
        watch = RouterWatch(resolve, 8000, session)
        await watch.ask()
        await watch.ask()
        answers.append([])
        await watch.ask()
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "routers that are ready: none (the host of --routers does not resolve: Name or service not known)"),
        ("WARNING", "routers that are ready: none"),
    ]


@needs_protos
async def test_a_stream_without_headers_is_refused_and_the_picker_goes_on() -> None:
    from grpclib.exceptions import GRPCError

    with pytest.raises(GRPCError, match="request_headers"):
        await answers([part(PROMPT, end=True)])
