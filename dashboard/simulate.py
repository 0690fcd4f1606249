"""`POST /v1/simulate`: runs of the simulator for the page `/simulator`, each in a process of its own."""

import asyncio
import os
import sys
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from router.http.asgi import while_connected
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import python_path

MODULE = "compare.playground"  # reads a query from its standard input, and writes the result to its standard output
MAX_QUERY = 300_000  # bytes
MAX_RUNS = 2  # maximum number of runs at the same time
LIMIT_S = 120.0
JSON = "application/json; charset=utf-8"


class SimulateHandler:
    """Runs queries in processes of low priority. At most MAX_RUNS queries run at once; further queries are refused. A
    run is killed if it takes longer than LIMIT_S, or if the client disconnects."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s, self._num_runs = limit_s, 0

    async def __call__(self, request: Request) -> Response:
        query = bytearray()
        async for part in request.stream():
            query += part
            if len(query) > MAX_QUERY:
                raise RequestError(f"The query must have at most {MAX_QUERY} bytes.", status=413)
        if self._num_runs >= MAX_RUNS:
            raise UnavailableError(f"{MAX_RUNS} simulations are running; try later.", code="overloaded", status=429)
        answer = b""

        async def run() -> None:
            nonlocal answer
            answer = await self._run(bytes(query))

        self._num_runs += 1
        try:
            await while_connected(request.receive, run())
        finally:
            self._num_runs -= 1
        return Response(answer, 400 if answer.startswith(b'{"error"') else 200, media_type=JSON)

    async def _run(self, query: bytes) -> bytes:
        pipe, environment = asyncio.subprocess.PIPE, {**os.environ, "PYTHONPATH": python_path(os.environ)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", MODULE, stdin=pipe, stdout=pipe, env=environment
        )
        try:
            async with asyncio.timeout(self._limit_s):
                answer, _ = await process.communicate(query)
        except TimeoutError:
            raise UnavailableError(f"The simulation took over {self._limit_s:g} s; give fewer requests.") from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            raise UnavailableError("The simulation failed; the router's log says why.", status=500)
        return answer
