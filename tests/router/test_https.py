"""Test HTTPS for clients: invalid certificates are refused at the start, a certificate is renewed without a restart, and
requests have the same limits as with HTTP."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization

from cluster.cli import main
from cluster.secret import new_pem
from router.__main__ import HttpServer, listen
from router.http import certificate as certificates
from router.http.certificate import Certificate
from shared.api_client import verification
from shared.config.settings import RouterSettings, resolve
from shared.errors import ConfigError
from tests.router.scripted import MODEL, ScriptedDispatcher, app_of


def certificate_of(pem: bytes) -> bytes:
    return pem[pem.index(b"-----BEGIN CERTIFICATE") :]


def client_context(pem: bytes) -> ssl.SSLContext:
    """Return the context of a client that accepts only this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate_of(pem).decode())
    return context


@pytest.fixture
def content() -> bytes:
    return new_pem()


@pytest.fixture
def pem(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "both.pem"
    path.write_bytes(content)
    return path


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@pytest.fixture
async def port(pem: Path, byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Serve HTTPS on loopback, and provide the port. The certificate is followed as in the router."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.1)
    monkeypatch.setattr("router.__main__.HANDSHAKE_S", 5.0)
    dispatcher = ScriptedDispatcher(lambda _, __: [5, 6, 7, 2])
    certificate = Certificate(str(pem), "")
    (listener,) = listen("127.0.0.1", 0, "--port")
    server = HttpServer(app_of(dispatcher, byte_level, MODEL), listener, 100, 5.0, certificate)
    assert server.config.ssl is not None
    tasks = [asyncio.create_task(server.serve([listener]))]
    tasks += [asyncio.create_task(certificate.follow([server.config.ssl]))]
    try:
        yield listener.getsockname()[1]
    finally:
        server.drain()
        await tasks[0]
        tasks[1].cancel()


async def test_completions_are_answered_over_https_only(port: int, content: bytes) -> None:
    body = {"prompt": "a", "stream": True}
    async with httpx.AsyncClient(verify=client_context(content)) as client:
        answer = await client.post(f"https://127.0.0.1:{port}/v1/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"http://127.0.0.1:{port}/health")
    async with httpx.AsyncClient(verify=client_context(new_pem())) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"https://127.0.0.1:{port}/health")


async def test_commands_trust_the_authority_in_ssl_cert_file(
    port: int, pem: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(pem.with_name("ca.pem"), certificate_of(content))
    monkeypatch.setenv("SSL_CERT_FILE", str(pem.with_name("ca.pem")))
    context = verification("https://127.0.0.1")
    assert isinstance(context, ssl.SSLContext)
    context.check_hostname = False  # the certificate names no host
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        assert (await client.get(f"https://127.0.0.1:{port}/health")).status_code == 200


async def test_a_refused_body_gets_its_error_and_the_connection_ends(port: int, content: bytes) -> None:
    """TLS has no half-closed connections, so the server reads the rest of the body for a while, and then closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(content))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: 99999999999\r\n\r\n{")
    async with asyncio.timeout(60):
        assert (await reader.readline()).split()[1] == b"413"
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                writer.write(b" " * 1000)
    writer.close()


async def test_a_client_that_does_not_begin_its_handshake_is_disconnected(
    port: int,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(40):  # asyncio's own limit is 60 s
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
    writer.close()


async def test_a_command_with_http_in_its_url_is_advised_to_use_https(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["status", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "if the server uses HTTPS, write https:// in the URL" in capsys.readouterr().err


async def test_a_certificate_is_renewed_without_a_restart(
    port: int, pem: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def is_served(certificate: bytes) -> bool:
        async with httpx.AsyncClient(verify=client_context(certificate)) as client:
            with contextlib.suppress(httpx.ConnectError):
                return (await client.get(f"https://127.0.0.1:{port}/health")).status_code == 200
            return False

    async def until(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while True:
                if await condition():
                    return
                await asyncio.sleep(0.05)

    async def is_logged() -> bool:
        return "the previous certificate stays in use" in caplog.text

    write(pem, b"not a certificate")
    await until(is_logged)
    assert await is_served(content)
    renewed = new_pem()
    write(pem, renewed)
    await until(lambda: is_served(renewed))
    assert not await is_served(content)


def encrypted(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    return key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize("kind", ["missing", "garbage", "no key", "another key", "encrypted"])
def test_files_that_cannot_be_used_are_refused_by_name(pem: Path, content: bytes, tmp_path: Path, kind: str) -> None:
    key = tmp_path / "key.pem"
    if kind != "missing":
        pem.write_bytes(b"garbage" if kind == "garbage" else certificate_of(content))
    key.write_bytes(encrypted(content) if kind == "encrypted" else b"" if kind == "no key" else new_pem())
    cert = str(tmp_path / "none.pem") if kind == "missing" else str(pem)
    with pytest.raises(ConfigError, match=r"--ssl-certfile .*, --ssl-keyfile .*cannot be used"):
        Certificate(cert, str(key)).check()


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile is missing"):
        resolve(RouterSettings, {"ssl_keyfile": "key.pem", "model": "."}, {})
