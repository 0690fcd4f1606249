"""Test `POST /v1/simulate`: its answers, its limits, and that runs end at their time limit."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from dashboard import simulate
from dashboard.simulate import MAX_QUERY, MAX_RUNS, SimulateHandler
from shared.errors import RequestError, UnavailableError

SHORT = {"requests": 5, "prompt": 50, "answer": 5}


async def post(simulations: SimulateHandler, content: bytes) -> httpx.Response:
    app = Starlette(routes=[Route("/v1/simulate", simulations.__call__, methods=["POST"])])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as client:
        return await client.post("/v1/simulate", content=content)


async def test_a_query_is_answered_with_its_run_or_its_error() -> None:
    simulations = SimulateHandler()
    answer = await post(simulations, json.dumps(SHORT).encode())
    assert answer.status_code == 200
    assert len(answer.json()["requests"]) == 5
    for wrong in (b"", b"{", b"[]", json.dumps({"decode": 0}).encode(), b"[" * 100_000, b"\xff"):
        answer = await post(simulations, wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]


async def test_long_queries_and_runs_beyond_the_limits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="at most 300000 bytes"):
        await post(SimulateHandler(), b" " * (MAX_QUERY + 1))
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(simulate, "MODULE", "endless")
    simulations = SimulateHandler(limit_s=3.0)
    runs = [asyncio.create_task(post(simulations, b"{}")) for _ in range(MAX_RUNS)]
    await asyncio.sleep(0.5)
    with pytest.raises(UnavailableError, match="2 simulations are running"):
        await post(simulations, b"{}")
    for run in runs:
        with pytest.raises(UnavailableError, match="took over 3 s"):
            await run
    monkeypatch.undo()
    assert (await post(SimulateHandler(), json.dumps(SHORT).encode())).status_code == 200


async def test_a_run_ends_when_its_client_disconnects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(simulate, "MODULE", "endless")
    simulations = SimulateHandler()
    for _ in range(MAX_RUNS + 1):  # each run frees its slot for another run
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}])

        async def receive(messages: Iterator[dict[str, object]] = messages) -> dict[str, object]:
            return next(messages)

        await asyncio.wait_for(simulations(Request({"type": "http", "method": "POST"}, receive)), 60)
