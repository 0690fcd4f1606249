"""The routes whose answers cover all workers of a router. The client may be connected to any worker.

Each worker answers the other workers on a Unix socket. No key is needed, because only the user who runs the router can
open the socket. A worker that is being restarted is left out.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.metrics.merged import MergedMetrics, merged_requests, merged_status
from shared.errors import UnavailableError

ANSWER_S = 5.0  # how long another worker may take to answer; after that, the other worker is left out
logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs each request
DEFAULT_LIMIT = 100  # number of requests that `/v1/requests` returns by default


class WholeRouter:
    """Asks all workers, and merges their answers."""

    def __init__(self, sockets: Sequence[Path], own: int) -> None:
        """`sockets` are the sockets of all workers, and `own` is the number of this worker."""
        self._sockets = [sockets[own], *sockets[:own], *sockets[own + 1 :]]

    def routes(self, paths: Sequence[str]) -> list[Route]:
        """Return routes for the paths in `paths` whose answers differ between workers."""
        whole = {
            "/v1/status": self.status,
            "/metrics": self.metrics,
            "/load": self.load,
            "/v1/requests": self.requests,
            "/v1/requests/{id}/timeline": self.timeline,
        }
        return [Route(path, handler) for path, handler in whole.items() if path in paths]

    async def status(self, request: Request) -> Response:
        return JSONResponse(merged_status([answer.json() for answer in await self._ask(request)]))

    async def metrics(self, request: Request) -> Response:
        texts = [answer.text for answer in await self._ask(request)]
        text = await asyncio.to_thread(lambda: generate_latest(MergedMetrics(texts)))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def load(self, request: Request) -> Response:
        answers: list[dict[str, Any]] = [answer.json() for answer in await self._ask(request)]
        return JSONResponse({"server_load": sum(answer["server_load"] for answer in answers)})

    async def requests(self, request: Request) -> Response:
        answers = await self._ask(request)
        if answers[0].status_code != 200:
            return _passed(answers[0])
        limit = int(request.query_params.get("limit", DEFAULT_LIMIT))
        return JSONResponse(merged_requests([answer.json() for answer in answers], limit))

    async def timeline(self, request: Request) -> Response:
        answers = await self._ask(request)
        return _passed(next((answer for answer in answers if answer.status_code == 200), answers[0]))

    async def _ask(self, request: Request) -> list[httpx.Response]:
        """Return the answers of all workers to a request. The answer of this worker comes first.

        Raises UnavailableError if no worker answers.
        """
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        found = await asyncio.gather(*(_get(socket, target) for socket in self._sockets))
        answers = [answer for answer in found if answer is not None]
        if not answers:
            raise UnavailableError(f"No worker of this router answered within {ANSWER_S:g} s.")
        return [each for each in answers if each.status_code == answers[0].status_code or each.status_code == 200]


async def _get(socket: Path, target: str) -> httpx.Response | None:
    try:
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with httpx.AsyncClient(transport=transport, timeout=ANSWER_S, trust_env=False) as client:
            return await client.get("http://worker" + target)
    except httpx.HTTPError:
        return None


def _passed(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
