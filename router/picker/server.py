"""A gRPC server for Envoy's external processing (ext_proc). It picks routers for the gateway of an InferencePool.

The server follows the protocol of the Gateway API Inference Extension (proposal 004). The gateway must send request
bodies in the mode FULL_DUPLEX_STREAMED, which the extension requires, or in the mode BUFFERED.
"""

import asyncio
import json
import logging
from collections import Counter
from http import HTTPStatus
from typing import Any

import aiohttp
from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.health.check import ServiceStatus
from grpclib.health.service import Health
from grpclib.server import Server

from router.picker.choice import choose, key_of
from shared.config.settings import PickerSettings
from shared.lifecycle import ProcessLifetime, TaskGroup, wait_until
from shared.resolver import NameResolver, Resolver
from shared.rpc.connection import host_and_port

log = logging.getLogger("baton.picker")
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ENDPOINT = "x-gateway-destination-endpoint"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
COLLECTED = (ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED)
MAX_BODY_BYTES = 10 * 2**20
ASK_INTERVAL_S = 1.0


async def serve(lifetime: ProcessLifetime, settings: PickerSettings, resolve: Resolver | None) -> int:
    """Serve until the process drains. Raises OSError if the port cannot be bound."""
    host, port = host_and_port(settings.routers)
    tasks, health = TaskGroup(), ServiceStatus()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_INTERVAL_S)) as session:
        watch = RouterWatch(resolve or NameResolver(host), port, session)
        await watch.ask()
        picker = Picker(settings, watch)
        server = Server([picker, Health({picker: [health]})])
        await server.start(settings.host, settings.port)
        health.set(True)
        tasks.start(watch.keep_asking())
        log.info("listening on %s:%d for ext_proc", settings.host, settings.port)
        await lifetime.draining.wait()
        health.set(False)
        await wait_until(lambda: not picker.under_way.total(), settings.drain_timeout_s)
        server.close()
        await server.wait_closed()
        await tasks.close()
    return 0


class RouterWatch:
    """Tracks which routers are ready: it resolves the routers' host name every second, and requests `/ready` from each
    address."""

    def __init__(self, resolve: Resolver, port: int, session: aiohttp.ClientSession) -> None:
        self._resolve, self._port, self._session = resolve, port, session
        self._addresses: list[str] = []
        self._logged: tuple[frozenset[str], bool] | None = None
        self.ready: frozenset[str] = frozenset()

    async def ask(self) -> None:
        """Ask every router once. If the name does not resolve, use the previous addresses."""
        problem = ""
        try:
            found = await self._resolve()
            self._addresses = [f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in found]
        except OSError as error:
            problem = f" (the host of --routers does not resolve: {error})"
        answers = await asyncio.gather(*map(self._is_ready, self._addresses))
        ready = frozenset(address for address, is_ready in zip(self._addresses, answers, strict=True) if is_ready)
        if self._logged != (ready, bool(problem)):
            level = logging.INFO if ready and not problem else logging.WARNING
            log.log(level, "routers that are ready: %s%s", ", ".join(sorted(ready)) or "none", problem)
            self._logged = ready, bool(problem)
        self.ready = ready

    async def keep_asking(self) -> None:
        while True:
            await asyncio.sleep(ASK_INTERVAL_S)
            await self.ask()

    async def _is_ready(self, address: str) -> bool:
        try:
            async with self._session.get(f"http://{address}/ready") as response:
                return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError):
            return False


class Picker:
    """The service ExternalProcessor, with one stream for each HTTP request. `watch` checks which routers are ready.

    `under_way` maps each address to the number of open streams for which this address was the first choice.
    """

    def __init__(self, settings: PickerSettings, watch: RouterWatch) -> None:
        self._watch = watch
        self._limit = settings.max_concurrent_requests
        self._tenant_header = settings.tenant_header.lower()
        self.under_way: Counter[str] = Counter()

    def __mapping__(self) -> dict[str, Handler]:
        types = (ext_proc.ProcessingRequest, ext_proc.ProcessingResponse)
        return {METHOD: Handler(self._process, Cardinality.STREAM_STREAM, *types)}

    async def _process(self, stream: Any) -> None:
        """Pick routers when the request's body is complete, and answer Envoy's messages.

        In the mode BUFFERED, Envoy keeps the body, and the answer to the body message adds the addresses as a header.
        In the mode FULL_DUPLEX_STREAMED, the answer to the headers message adds this header, and the answers to the
        body messages return the body to Envoy. In other modes, the routers are picked by the headers alone, at once."""
        first = await stream.recv_message()
        if first is None or not first.HasField("request_headers"):
            raise GRPCError(Status.INVALID_ARGUMENT, "the first message must be request_headers")
        modes = first.protocol_config  # absent in old versions of Envoy
        mode = modes.request_body_mode if first.HasField("protocol_config") else ProcessingMode.FULL_DUPLEX_STREAMED
        has_body = mode in COLLECTED and not first.request_headers.end_of_stream
        is_buffered = has_body and mode == ProcessingMode.BUFFERED
        if is_buffered:
            await stream.send_message(_unchanged(first))
        messages, is_whole = await _collect(stream, is_buffered) if has_body else ([], False)
        body = b"".join(message.request_body.body for message in messages)
        if len(body) > MAX_BODY_BYTES:
            picked: list[str] | HTTPStatus = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        else:
            picked = self._pick(first, body if is_whole else b"")
        if isinstance(picked, HTTPStatus):
            await stream.send_message(_refusal(picked))
            return
        self.under_way[picked[0]] += 1
        try:
            await stream.send_message(_picked(",".join(picked), "request_body" if is_buffered else "request_headers"))
            for message in messages if has_body and not is_buffered else ():
                await stream.send_message(_unchanged(message, is_duplex=True))
            async for message in stream:
                is_request = message.WhichOneof("request").startswith("request_")
                # In the mode FULL_DUPLEX_STREAMED, ignore request messages: Envoy may repeat the end of the body.
                if not is_request or mode != ProcessingMode.FULL_DUPLEX_STREAMED:
                    is_duplex = modes.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
                    await stream.send_message(_unchanged(message, is_duplex=is_duplex))
        finally:
            self.under_way[picked[0]] -= 1

    def _pick(self, first: Any, body: bytes) -> list[str] | HTTPStatus:
        """Return the addresses of routers, best first, or the HTTP status with which to refuse the request."""
        ready, hints = self._watch.ready, first.metadata_context.filter_metadata
        if SUBSET_NAMESPACE in hints and SUBSET in hints[SUBSET_NAMESPACE].fields:
            subset = hints[SUBSET_NAMESPACE].fields[SUBSET].list_value.values
            ready &= {each.string_value for each in subset}
        free = {address: self.under_way[address] for address in ready if self.under_way[address] < self._limit}
        if not free:
            return HTTPStatus.TOO_MANY_REQUESTS if ready else HTTPStatus.SERVICE_UNAVAILABLE
        pairs = first.request_headers.headers.headers
        headers = {pair.key.lower(): pair.value or pair.raw_value.decode("latin-1") for pair in pairs}
        return choose(key_of(headers.get(self._tenant_header, ""), headers.get(":path", ""), body), free)


async def _collect(stream: Any, is_buffered: bool) -> tuple[list[Any], bool]:
    """Return a body's messages, including its trailers, and whether the body is complete. Stop after MAX_BODY_BYTES."""
    messages, size = [], 0
    async for message in stream:
        messages.append(message)
        size += len(message.request_body.body)
        if is_buffered or message.request_body.end_of_stream or message.HasField("request_trailers"):
            return messages, True
        if size > MAX_BODY_BYTES:
            break
    return messages, False


def _unchanged(message: Any, *, is_duplex: bool = False) -> Any:
    """Return an answer that changes nothing. In the duplex mode, the answer also returns the received part of the body
    to Envoy."""
    kind = message.WhichOneof("request")
    part = getattr(message, kind)
    if kind.endswith("_body"):
        answer = ext_proc.BodyResponse()
        if is_duplex:
            streamed = answer.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = part.body, part.end_of_stream
    else:
        answer = ext_proc.HeadersResponse() if kind.endswith("_headers") else ext_proc.TrailersResponse()
    return ext_proc.ProcessingResponse(**{kind: answer})


def _picked(addresses: str, kind: str) -> Any:
    """Return the answer to a message with headers or a body (`kind`). The answer has the addresses as a header and as
    metadata."""
    answer = ext_proc.ProcessingResponse()
    option = getattr(answer, kind).response.header_mutation.set_headers.add()
    option.append_action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    option.header.key, option.header.raw_value = ENDPOINT, addresses.encode()
    answer.dynamic_metadata.update({"envoy.lb": {ENDPOINT: addresses}})
    return answer


REFUSALS = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ("invalid_request_error", f"the body is larger than {MAX_BODY_BYTES} bytes"),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "all routers are at their limit of requests in progress"),
    HTTPStatus.SERVICE_UNAVAILABLE: ("service_unavailable_error", "no router is ready"),
}


def _refusal(status: HTTPStatus) -> Any:
    """Return an answer that makes Envoy end the request with an error in the format of OpenAI's API."""
    kind, text = REFUSALS[status]
    answer = ext_proc.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status.value
    header = immediate.headers.set_headers.add().header
    header.key, header.raw_value = "content-type", b"application/json"
    immediate.body = json.dumps({"error": {"message": text, "type": kind, "param": None, "code": None}}).encode()
    return answer
