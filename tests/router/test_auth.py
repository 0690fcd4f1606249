"""Test API keys: the key file, rejected requests, the routes that each key may use, and the isolation of tenants."""

import asyncio
import base64
import hmac
import logging
import re
import resource
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from cluster.cli import main
from compare.main import command_line
from dashboard.routes import Dashboard
from router.dispatch.requests import PoolingRule
from router.http.asgi import ANONYMOUS, Identity, deadline_of
from router.http.auth import NO_KEY_NEEDED, ApiKeys
from router.http.bodies import CompletionBody, parse_body
from router.http.parsing import build_requests, cache_namespace
from shared.config.settings import RouterSettings, resolve
from shared.errors import ConfigError, RequestError, UnavailableError
from tests.router.scripted import MODEL, ScriptedDispatcher, app_of

ACME, OTHER, ADMIN = "key-of-acme", "key-of-other", "key-of-admin"


def line(tenant: str, key: str, more: str = "") -> str:
    return f"{tenant}:{sha256(key.encode()).hexdigest()}{more}"


LINES = [line("acme", ACME), line("other", OTHER), line("ops", ADMIN, ":admin")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# our tenants\n\n" + "  # ...\n".join(LINES) + "\n")
    return path


# ---- the key file ----------------------------------------------------------------------------------------------------


def test_a_key_identifies_its_tenant(file: Path) -> None:
    keys = ApiKeys(str(file), more=line("acme", "second"))
    assert keys.identify(ACME.encode()) == Identity("acme")
    assert keys.identify(b"second") == Identity("acme")
    assert keys.identify(ADMIN.encode()) == Identity("ops", is_admin=True)
    for wrong in (b"", b"x", ACME.encode()[:-1], ACME.upper().encode(), b"\xff" * 9, b"k" * 2**20):
        assert keys.identify(wrong) is None
    assert ApiKeys("", more=",".join(LINES)).identify(OTHER.encode()) == Identity("other")
    with pytest.raises(ConfigError, match=r"^--api-keys: has 0 keys"):
        ApiKeys("", more="#")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 0 keys: must be 1 to 1024"),
        ("# no keys\n", "must be 1 to"),
        ("acme:secret-in-the-clear", "line 1: must be tenant:sha256"),
        ("\n" + line("acme", "a") + "0", "line 2: must be"),
        (line("a b", "a"), "line 1: must be"),
        (line("", "a"), "line 1: must be"),
        (line("x" * 65, "a"), "line 1: must be"),
        (line("ä", "a"), "must be"),
        (line("acme", "a", ":root"), "line 1: must be"),
        (line("acme", "a") + "\n" + line("other", "a"), "line 2: repeats an earlier key"),
        ("\n".join(line("acme", str(number)) for number in range(1025)), "has 1025 keys"),
        ("#" * (256 << 10) + "#", "larger than 256 KiB"),
    ],
)
def test_an_invalid_file_is_reported_by_line_without_its_content(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)) as raised:
        ApiKeys(str(path))
    assert "\n" not in str(raised.value)
    assert "secret-in-the-clear" not in str(raised.value)
    assert str(path) in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(str(tmp_path / "none"))


def test_a_changed_file_is_read_again_and_a_broken_one_is_ignored(file: Path, caplog: Any) -> None:
    now = [0.0]
    keys = ApiKeys(str(file), clock=lambda: now[0])
    file.write_text(line("new", "n") + "\n")
    assert keys.identify(b"n") is None, "the file is checked once a second"
    now[0] += 1
    assert keys.identify(b"n") == Identity("new")
    assert keys.identify(ACME.encode()) is None
    file.write_text("nonsense")
    now[0] += 1
    assert keys.identify(b"n") == Identity("new")
    assert "the previous keys remain valid" in caplog.text
    file.unlink()
    now[0] += 1
    assert keys.identify(b"n") == Identity("new")


def test_reading_the_file_is_retried_after_an_error(file: Path, caplog: Any) -> None:
    now = [0.0]
    keys = ApiKeys(str(file), clock=lambda: now[0])
    file.write_text(line("new", "n") + "\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # so that opening the file fails
    try:
        for _ in range(3):
            now[0] += 1
            assert keys.identify(ACME.encode()) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caplog.text.count("Too many open files") == 1
    now[0] += 1
    assert keys.identify(ACME.encode()) is None, "the key is revoked"


def test_every_key_is_compared_with_all_of_them(file: Path, monkeypatch: Any) -> None:
    """Every check makes the same number of comparisons, so that its duration reveals nothing about the valid keys."""
    keys, compared = ApiKeys(str(file)), []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: compared.append(len(other)) or compare(one, other))
    for key in (ACME, ADMIN, "wrong", "w" * 10_000):
        compared.clear()
        keys.identify(key.encode())
        assert compared == [32, 32, 32]


def test_baton_key_prints_a_key_and_its_line(capsys: Any, file: Path) -> None:
    assert main(["key", "acme", "--admin"]) == 0
    printed = capsys.readouterr()
    key = printed.err.strip().rpartition(" ")[2]
    assert key not in printed.out
    assert ApiKeys("", more=printed.out).identify(key.encode()) == Identity("acme", is_admin=True)
    assert main(["key", "a b"]) == 2
    assert "1 to 64 letters" in capsys.readouterr().err


# ---- authentication --------------------------------------------------------------------------------------------------


@pytest.fixture
def app(file: Path, byte_level: Any) -> Starlette:
    dispatcher = ScriptedDispatcher(lambda _, __: [5, 6, 2])
    return app_of(dispatcher, byte_level, MODEL, keys=ApiKeys(str(file)), observer=Dashboard())


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


NO_KEYS: list[Any] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": ACME},
    {"authorization": f"Token {ACME}"},
    {"authorization": f"Bearer {ACME}x"},
    {"authorization": f"Bearer {ACME}, Bearer {ACME}"},
    {"authorization": "Bearer clé".encode()},
    {"authorization": b"Bearer \xff\xfe"},
    {"authorization": "Bearer " + "k" * 2**20},
    {"authorization": f"Basic {base64.b64encode(f'x:{ACME}'.encode()).decode()}"},  # another site's form can send this
    {"authorization": "Basic %%%"},
    {"x-api-key": "wrong"},
    [("x-api-key", ACME), ("x-api-key", ACME)],
    {"x-api-key": ACME, "authorization": "Bearer wrong"},
    {"cookie": f"key={ACME}"},
    [("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {ACME}")],
]


@pytest.mark.parametrize("headers", NO_KEYS)
async def test_a_request_without_a_valid_key_is_rejected(client: httpx.AsyncClient, headers: Any) -> None:
    answer = await client.post(f"/v1/completions?api_key={ACME}", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error.pop("message") in {"An API key is needed: Authorization: Bearer KEY.", "The API key is not valid."}
    assert error == {"type": "authentication_error", "param": None, "code": "invalid_api_key"}


def paths_of(app: Starlette) -> list[str]:
    """Return one path for every route."""
    paths = [route.path if isinstance(route, Route) else f"{route.path}/page.js" for route in app.routes]
    return [re.sub(r"\{[^}]*\}", "tiny", path) for path in paths]


TRICKS = ["/nothing", "/v1/completions/", "/V1/models", "/v1/../metrics", "/v1/models/../../metrics", "//metrics"]
TRICKS += ["/health/", "/health/../metrics", "/ready%00", "/%2e/metrics", "/metrics/"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "TRACE"])
async def test_every_route_requires_a_key(app: Starlette, client: httpx.AsyncClient, method: str) -> None:
    paths = paths_of(app)
    assert len(paths) > 15
    for path in [*paths, *TRICKS]:
        answer = await client.request(method, path)
        if path in NO_KEY_NEEDED:
            allowed = {"GET", "HEAD", "POST"} if path == "/ping" else {"GET", "HEAD"}
            assert answer.status_code == (200 if method in allowed else 405), path
            continue
        assert answer.status_code == 401, path
        assert "tiny" not in answer.text, path


async def test_a_tenant_reaches_the_api_and_only_an_admin_the_rest(app: Starlette, client: httpx.AsyncClient) -> None:
    tenants = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/tiny"}
    tenants |= {"/openapi.json", "/docs", "/version", "/v1/tokenize", "/v1/detokenize", "/v1/messages"}
    tenants |= {
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
    }
    tenants |= {f"/v1/responses{rest}" for rest in ("", "/tiny", "/tiny/cancel", "/tiny/input_items")}
    for path in [*paths_of(app), *TRICKS]:
        if path in NO_KEY_NEEDED or path == "/events":
            continue
        status = (await client.get(path, headers=bearer(ACME))).status_code
        if path in TRICKS:  # the client resolves "..", so some of these become paths for admins
            assert status in {307, 403, 404}, path
        else:
            assert (status == 403) is (path not in tenants), path
        assert (await client.get(path, headers=bearer(ADMIN))).status_code not in {401, 403}, path
    answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(OTHER))
    assert answer.status_code == 200


async def test_a_browser_can_read_with_basic_authentication(client: httpx.AsyncClient) -> None:
    for page in ("/", "/docs"):
        assert (await client.get(page)).headers["www-authenticate"].startswith("Basic ")
    basic = {"authorization": "basic " + base64.b64encode(f"any:{ADMIN}".encode()).decode()}
    assert (await client.get("/", headers=basic)).status_code == 200
    assert (await client.get("/v1/status", headers=basic)).status_code == 200
    assert (await client.post("/tokenize", json={"prompt": "a"}, headers=basic)).status_code == 401


async def test_the_admin_routes_can_have_a_port_of_their_own(app: Starlette) -> None:
    api, admin = app.state.api, app.state.admin
    assert set(paths_of(api)) & set(paths_of(admin)) == NO_KEY_NEEDED
    assert set(paths_of(api)) | set(paths_of(admin)) == set(paths_of(app))
    for part, path in ((api, "/metrics"), (api, "/"), (admin, "/v1/models")):
        transport = httpx.ASGITransport(app=part)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=bearer(ADMIN))).status_code == 404


# ---- slots, and requests of other origins ----------------------------------------------------------------------------


async def test_a_tenant_cannot_use_the_slots_of_the_others(file: Path, byte_level: Any) -> None:
    """If all slots are used, a request is refused only if its tenant already uses at least an equal share of them."""
    dispatcher = ScriptedDispatcher(lambda _, __: [5, 6, 2])
    dispatcher.hangs_after = 0
    app = app_of(dispatcher, byte_level, MODEL, keys=ApiKeys(str(file)), max_concurrent_requests=4)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

        async def ask(key: str) -> int:
            return (await client.post("/v1/completions", json={"prompt": "x"}, headers=bearer(key))).status_code

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            running = []
            for key in [ACME] * 4 + [OTHER] * 2:
                running.append(group.create_task(ask(key)))
                await dispatcher.hanging.acquire()
            assert [await ask(ACME), await ask(OTHER)] == [429, 429]
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            dispatcher.hangs_after = None
            assert await ask(ACME) == 200


PAGE = "https://app.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}
PREFLIGHT |= {"access-control-request-headers": "authorization,content-type,x-stainless-lang"}


def cors_of(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("origins", [(), ("*",), (PAGE, "http://localhost:3000")])
async def test_pages_of_allowed_origins_may_call_the_api(file: Path, byte_level: Any, origins: tuple[str, ...]) -> None:
    dispatcher = ScriptedDispatcher(lambda _, __: [5, 6, 2])
    app = app_of(dispatcher, byte_level, MODEL, keys=ApiKeys(str(file)), observer=Dashboard(), allowed_origins=origins)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        body = {"prompt": "a", "stream": True}
        own = {"origin": PAGE, **bearer(ACME)}
        stream = await client.post("/v1/completions", json=body, headers=own)
        assert (stream.status_code, stream.text.endswith("data: [DONE]\n\n")) == (200, True)
        rejected = await client.post("/v1/completions", json=body, headers={"origin": PAGE})
        assert rejected.status_code == 401
        if not origins:
            assert preflight.status_code == 401
            assert not [cors_of(each) for each in (preflight, stream, rejected) if cors_of(each)]
            return
        allowed = "*" if origins == ("*",) else PAGE
        assert preflight.status_code == 200
        assert cors_of(preflight)["access-control-allow-origin"] == allowed
        assert "x-stainless-lang" in cors_of(preflight)["access-control-allow-headers"]
        for each in (stream, rejected):
            assert cors_of(each)["access-control-allow-origin"] == allowed
            assert {"retry-after", "x-request-id"} <= set(cors_of(each)["access-control-expose-headers"].split(", "))
        stranger = await client.options("/v1/completions", headers=PREFLIGHT | {"origin": "https://app.example.evil"})
        assert (stranger.status_code == 200) is (origins == ("*",))
        for path in set(paths_of(app)) - set(paths_of(app.state.api)):
            if path != "/events":
                answer = await client.get(path, headers={"origin": PAGE, **bearer(ADMIN)})
                assert not cors_of(answer), path
                assert not cors_of(await client.options(path, headers=PREFLIGHT)), path


@pytest.mark.parametrize(
    "value", ["https://a.example/", "a.example", "https://A.example", "*.example", "null", "https://"]
)
def test_an_invalid_origin_is_reported_by_its_flag(value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--allowed-origins {value!r}")):
        resolve(RouterSettings, {"allowed_origins": value}, {})


def test_origins_are_separated_by_commas() -> None:
    given = "https://a.example, http://[::1]:3000,tauri://localhost,*"
    settings, _ = resolve(RouterSettings, {"allowed_origins": given}, {})
    assert settings.allowed_origins == ("https://a.example", "http://[::1]:3000", "tauri://localhost", "*")
    assert resolve(RouterSettings, {}, settings.environment())[0] == settings


# ---- wrong keys ------------------------------------------------------------------------------------------------------


async def test_requests_without_a_valid_key_are_counted_and_logged_at_intervals(
    client: httpx.AsyncClient, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            assert (await client.get("/v1/models", headers=bearer(f"guess-{number}"))).status_code == 401
    assert (await client.get("/v1/models", headers=bearer(ACME))).status_code == 200
    assert caplog.text.count("without a valid API key") == 1
    assert "guess" not in caplog.text
    metrics = await client.get("/metrics", headers=bearer(ADMIN))
    assert "baton_requests_without_key_total 50.0" in metrics.text


# ---- tenants ---------------------------------------------------------------------------------------------------------

names = st.text("ab\0", max_size=3)


@given(st.tuples(names, st.none() | names), st.tuples(names, st.none() | names))
def test_no_two_tenants_or_salts_share_a_cache(one: tuple[str, str | None], other: tuple[str, str | None]) -> None:
    empty = {("", None), ("", "")}  # requests cannot have an empty salt, so "" may count as no salt
    assert (cache_namespace(*one) == cache_namespace(*other)) is (one == other or {one, other} <= empty)


async def test_requests_carry_their_tenant(byte_level: Any) -> None:
    async def request_of(identity: Identity, **fields: object) -> Any:
        raw = '{"prompt": "a", "priority": -3' + "".join(f', "{k}": "{v}"' for k, v in fields.items()) + "}"
        body = parse_body(CompletionBody, raw.encode(), ["tiny"])
        (request,) = await build_requests(body, MODEL, byte_level, "id", identity=identity, deadline=7.0)
        return request

    acme = await request_of(Identity("acme"), cache_salt="s")
    assert acme.salt == cache_namespace("acme", "s")
    assert (await request_of(ANONYMOUS)).salt == b""
    assert (acme.tenant, acme.deadline, acme.priority) == ("acme", 7.0, 0)
    assert (await request_of(Identity("ops", is_admin=True))).priority == -3


async def test_the_access_log_and_the_metrics_name_the_tenant(client: httpx.AsyncClient, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "baton.access"):
        for key in (ACME, ACME, OTHER):
            await client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(key))
        await client.post("/v1/completions", json={"prompt": 5}, headers=bearer(ACME))
    assert [record.fields["tenant"] for record in caplog.records] == ["acme", "acme", "other", "acme"]
    text = (await client.get("/metrics", headers=bearer(ADMIN))).text
    assert 'baton_tenant_requests_total{model_name="tiny",tenant="acme"} 2.0' in text
    assert 'baton_tenant_generation_tokens_total{model_name="tiny",tenant="other"} 3.0' in text
    assert "baton_requests_without_key_total 0.0" in text


async def test_usage_has_each_request_once_and_no_tokens_of_refused_requests(file: Path, byte_level: Any) -> None:
    dispatcher = ScriptedDispatcher(lambda _, __: [5, 6, 2])
    dispatcher.vector = bytes(8)
    model = replace(MODEL, pooling=PoolingRule("last"))
    app = app_of(dispatcher, byte_level, model, keys=ApiKeys(str(file)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        embedded = {"input": [[1, 2], [3, 4, 5]]}
        assert (await client.post("/v1/embeddings", json=embedded, headers=bearer(ACME))).status_code == 200
        dispatcher.refuses = UnavailableError("full", status=429)
        refused = {"prompt": [1] * 9}
        assert (await client.post("/v1/completions", json=refused, headers=bearer(ACME))).status_code == 429
        text = (await client.get("/metrics", headers=bearer(ADMIN))).text
    assert 'baton_tenant_requests_total{model_name="tiny",tenant="acme"} 2.0' in text
    assert 'baton_tenant_prompt_tokens_total{model_name="tiny",tenant="acme"} 5.0' in text


# ---- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["0", "0.0", "-1", "abc", "", "nan", "inf", "1e", "1 2", "²", "0x5", "1_0", "1" * 5000]
)
def test_an_invalid_timeout_is_rejected(given: str) -> None:
    with pytest.raises(RequestError) as raised:
        deadline_of({"type": "http", "headers": [(b"x-request-timeout", given.encode())]}, 0.0, 0.0)
    assert (raised.value.status, raised.value.param) == (400, "x-request-timeout")


@pytest.mark.parametrize(
    ("given", "longest_s", "within"),
    [("2.5", 0, 2.5), ("1e9", 0, 86_400), ("1e9", 30, 30), ("7", 30, 7), (None, 30, 30), (None, 0, None)],
)
def test_a_timeout_becomes_a_deadline(given: str | None, longest_s: float, within: float | None) -> None:
    headers = [] if given is None else [(b"x-request-timeout", given.encode())]
    deadline = deadline_of({"type": "http", "headers": headers}, 100.0, longest_s)
    assert deadline == (None if within is None else 100.0 + within)
    with pytest.raises(RequestError):
        deadline_of({"type": "http", "headers": [*headers, (b"x-request-timeout", b"1")] * 2}, 100.0, longest_s)


@pytest.mark.parametrize(
    "given", [["--api-key", "secret"], ["--api-key=secret"], ["--url", "u", "--api-key", "secret", "-x"]]
)
def test_a_comparisons_report_hides_the_key(given: list[str]) -> None:
    line = command_line(["compare", *given])
    assert "secret" not in line
    assert line.startswith("baton compare ")
