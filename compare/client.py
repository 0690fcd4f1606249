"""The load generator, a process of its own: `python -m compare.client SPEC.json`.

Open loop: every request starts at its time, whatever the server does, and no number of them is too many. Nothing is
tried again. A token's time is when this process read the piece it came in.
"""

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import aiohttp
import numpy as np
import uvloop

from compare.outcome import TIMEOUT, Outcome, Recording, Slo, head_line, outcome_line, tail_line
from compare.stream import Listener, body_of, worst_count

LEAD_NS = 100_000_000  # from the run's second 0 back to when it is fixed
TICK_S = 0.01  # how often the event loop's lag is looked at
PROGRESS_TICKS = 50
KEEP_ALIVE_S = 2.0  # less than servers' 5 s, so that no request goes out on a connection being closed
PRIORITY = -10
MAX_REFUSAL = 64 << 10  # bytes read of an answer that is no stream
LEAST_LAG_S, SLO_SHARE = 0.002, 0.02  # how late requests may be sent, at the 99th percentile


@dataclass(frozen=True, slots=True)
class Spec:
    """A run to make. `arrivals` and `outcomes` are paths; `send`: "ids", or "text" for servers that take no ids."""

    url: str  # of the server, without /v1
    model: str
    arrivals: str
    outcomes: str
    slo: Slo = field(default_factory=Slo)
    timeout_s: float = 120.0  # of a request, from when it is due
    send: str = "ids"
    salt: str = ""  # keeps this run's prompts apart from what is cached already
    api_key: str = ""  # goes by the environment: what is written here stays beside the report


@dataclass(slots=True)
class Run:
    """What the requests of one run share."""

    spec: Spec
    session: aiohttp.ClientSession
    file: BinaryIO
    start_ns: int  # of the monotonic clock: second 0
    outcomes: list[Outcome]
    bodies: Sequence[bytes]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    num_sent: int = 0
    num_ended: int = 0
    num_finished: int = 0
    lags_s: list[float] = field(default_factory=list)
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    complaint: str = ""  # why the run cannot go on, once `broken`

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.start_ns) / 1e9

    def begin(self, index: int) -> None:
        self.tasks.append(asyncio.create_task(_ask(self, self.outcomes[index], self.bodies[index])))
        if len(self.tasks) == len(self.outcomes):
            self.all_begun.set()

    async def ended(self) -> None:
        await self.all_begun.wait()
        await asyncio.wait(self.tasks)

    def keep(self, outcome: Outcome) -> None:
        self.num_ended += 1
        self.num_finished += outcome.finished
        try:
            self.file.write(outcome_line(outcome).encode())
        except OSError as error:
            self.break_off(f"cannot write {self.spec.outcomes}: {error.strerror}")

    def break_off(self, complaint: str) -> None:
        self.complaint = self.complaint or complaint
        self.broken.set()

    def say(self) -> None:
        """Tells the parent how far the run is."""
        counts = {"sent": self.num_sent, "finished": self.num_finished, "failed": self.num_ended - self.num_finished}
        try:
            print(json.dumps(counts), flush=True)
        except OSError:
            self.break_off("nobody reads how far the run is any more")


async def _ask(run: Run, outcome: Outcome, body: bytes) -> None:
    """One request, from its time until its last word is kept."""
    listener = Listener(outcome, exact=run.spec.send == "ids")
    try:
        async with asyncio.timeout(outcome.scheduled_s + run.spec.timeout_s - run.now_s()):
            url, known = f"{run.spec.url}/v1/completions", (run, outcome)
            async with run.session.post(url, data=body, trace_request_ctx=known) as response:
                if response.status != 200:
                    listener.refused(response.status, await response.content.read(MAX_REFUSAL))
                    return
                async for piece in response.content.iter_any():
                    listener.hear(piece, run.now_s())
            listener.close()
    except (aiohttp.ClientError, OSError) as error:  # OSError: a timeout too
        if listener.is_done:  # all was said; the server kept its connection open, or broke it
            listener.close()
        else:
            outcome.error = TIMEOUT if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"[:200]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        outcome.error = f"the answer is no stream of completions: {error}"[:200]
    finally:
        outcome.ended_s = outcome.ended_s or run.now_s()
        run.counted.append(listener.counted)
        run.keep(outcome)


async def _on_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    """The request's connection is there, or begins to be made: what it took until then was the client's own time, and
    what connecting takes is the server's."""
    run, outcome = context.trace_request_ctx
    if outcome.sent_s is None:
        outcome.sent_s = run.now_s()
        run.num_sent += 1


def _tracing() -> aiohttp.TraceConfig:
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_start.append(_on_sent)
    tracing.on_connection_reuseconn.append(_on_sent)
    return tracing


def _pace(run: Run, loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
    """Begins every request at its time. A thread, because event loops sleep in whole milliseconds."""
    for outcome in run.outcomes:
        if stopped.wait(max(0.0, outcome.scheduled_s - run.now_s())):
            return
        loop.call_soon_threadsafe(run.begin, outcome.index)


async def _watch(run: Run) -> None:
    """Measures how late the event loop is, and says how far the run has come."""
    while True:
        for _ in range(PROGRESS_TICKS):
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            run.lags_s.append(time.monotonic() - before - TICK_S)
        run.say()


async def _follow(run: Run) -> None:
    """From the first request to the last one's end. Raises OSError when the run breaks off."""
    stopped = threading.Event()
    pace = threading.Thread(target=_pace, args=(run, asyncio.get_running_loop(), stopped), daemon=True)
    watching, ended, broken = map(asyncio.create_task, (_watch(run), run.ended(), run.broken.wait()))
    pace.start()
    await asyncio.wait({ended, broken}, return_when=asyncio.FIRST_COMPLETED)
    stopped.set()
    pace.join()
    tasks = [watching, ended, broken, *run.tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if run.complaint:
        raise OSError(run.complaint)


async def generate(spec: Spec, outcomes: list[Outcome], bodies: Sequence[bytes], file: BinaryIO) -> Recording:
    """Sends every request at its time and follows each to its end. Raises OSError if outcomes cannot be kept."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=None)
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # packing would bundle tokens
    if spec.api_key:
        headers["Authorization"] = f"Bearer {spec.api_key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
    cpu_s = time.process_time()
    options: dict[str, Any] = {"headers": headers, "timeout": timeout, "trace_configs": [_tracing()]}
    async with aiohttp.ClientSession(connector=connector, **options) as session:
        start_ns = time.monotonic_ns() + LEAD_NS
        started_unix_ns = time.time_ns() + start_ns - time.monotonic_ns()
        file.write(head_line(started_unix_ns).encode())
        run = Run(spec, session, file, start_ns, outcomes, bodies)
        await _follow(run)
        run.say()
    loop_lag_s = float(np.percentile(run.lags_s or [0.0], 99))
    problems = problems_of(outcomes, spec.slo, loop_lag_s)
    return Recording(
        started_unix_ns, outcomes, worst_count(run.counted), loop_lag_s, time.process_time() - cpu_s, problems
    )


def problems_of(outcomes: Sequence[Outcome], slo: Slo, loop_lag_s: float = 0.0) -> list[str]:
    """Why what the client saw must not be used: it sent late, read late (`loop_lag_s` at the 99th percentile, which it
    would tell as the server's time), or could not see single tokens."""
    problems = []
    lags = [outcome.sent_s - outcome.scheduled_s for outcome in outcomes if outcome.sent_s is not None]
    allowed_s = max(LEAST_LAG_S, SLO_SHARE * slo.ttft_ms / 1000)
    lag_s = float(np.percentile(lags, 99)) if lags else 0.0
    if lag_s > allowed_s:
        problems.append(
            f"the load generator sent 1 % of the requests over {lag_s * 1e3:.1f} ms late; {allowed_s * 1e3:.1f} ms are"
            " allowed: give it a CPU of its own, or another machine"
        )
    if loop_lag_s > allowed_s:
        problems.append(
            f"the load generator read 1 % of what came over {loop_lag_s * 1e3:.1f} ms late; {allowed_s * 1e3:.1f} ms"
            " are allowed: give it a CPU of its own, or another machine"
        )
    bundled = sum(outcome.error.startswith("bundled") for outcome in outcomes)
    if bundled:
        problems.append(
            f"in {bundled} requests several tokens came in one event and the server does not tell how many: the time"
            " between tokens cannot be measured there"
        )
    broken = ["Connect" in outcome.error or "Disconnected" in outcome.error for outcome in outcomes]
    gone = sum(broken)
    if broken and broken[-1]:  # and did not come back: a connection broken in between is a miss like any other
        problems.append(f"the server could not be reached, or went away, in {gone} of {len(outcomes)} requests")
    return problems


def _prepare(spec: Spec) -> tuple[list[Outcome], list[bytes]]:
    """Outcomes still open, and the requests' bodies: made before the run, so that making them delays nothing."""
    outcomes, bodies = [], []
    with Path(spec.arrivals).open(encoding="utf-8") as file:
        for index, line in enumerate(file):
            due = json.loads(line)
            slo = Slo(**due["slo"]) if due.get("slo") else None
            outcomes.append(Outcome(index, "", float(due["t"]), max_tokens=int(due["max_tokens"]), slo=slo))
            bodies.append(body_of(spec.model, due["prompt"], due["max_tokens"], spec.send, spec.salt))
    return outcomes, bodies


def load_spec(path: Path) -> Spec:
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Spec(**fields | {"slo": Slo(**fields.get("slo", {})), "api_key": os.environ.get("BATON_API_KEY", "")})


def main(path: str) -> int:
    """The process: 0, or 1 with one line on stderr that says what stopped it."""
    try:
        spec = load_spec(Path(path))
        outcomes, bodies = _prepare(spec)
        with suppress(OSError):  # needs a right; its lateness would be told as the server's
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        gc.collect()
        gc.freeze()
        gc.disable()
        with Path(spec.outcomes).open("wb", buffering=0) as file:
            recording = uvloop.run(generate(spec, outcomes, bodies, file))
            file.write(tail_line(recording).encode())
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"load generator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
