"""The load generator. `drive` runs it as a separate process, `python -m compare.load.client`.

The load generator is an open loop: every request starts at its scheduled time, without a limit on concurrency and
without retries. The time of a token is the time at which this process read the bytes that contain it.
"""

import asyncio
import errno
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp
import numpy as np
import uvloop
from pydantic import TypeAdapter

from compare.load.outcome import TIMEOUT, CompletionReader, LatencySlo, LoadRecording, Outcome, body_of, worst_count
from compare.load.traffic import Arrival
from shared.lifecycle import python_path, set_parent_death_signal

LEAD_NS = 100_000_000  # time from the creation of the HTTP session to the start of the run
TICK_S = 0.01  # time between two measurements of the event loop's lag
KEEP_ALIVE_S = 2.0  # servers close a connection that is idle for 5 s; requests must not use a closing connection
PRIORITY = -10
MAX_REFUSAL = 64 << 10  # maximum number of bytes to read from an error response
LAG_S, LAG_SHARE = 0.002, 0.02  # the allowed p99 of lateness is the larger of LAG_S and this share of the TTFT SLO
NO_FILES = os.strerror(errno.EMFILE)
STOP_S = 5.0  # time between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The input of a run. `send` is "ids", or "text" if the server accepts no token ids."""

    url: str  # URL of the server, without /v1
    model: str
    arrivals: tuple[Arrival, ...]
    slo: LatencySlo = field(default_factory=LatencySlo)
    timeout_s: float = 120.0  # timeout of a request, counted from its scheduled time
    send: str = "ids"
    salt: str = ""  # prevents prefix-cache hits on prompts of earlier runs
    api_key: str = ""


@dataclass(slots=True)
class LoadRun:
    """The state of one run, shared by the tasks of its requests on one event loop."""

    spec: LoadSpec
    session: aiohttp.ClientSession
    start_ns: int  # start of the run on the monotonic clock
    ended: list[Outcome] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.start_ns) / 1e9

    async def request(self, outcome: Outcome, body: bytes) -> None:
        """Send one request, read its answer to the end, and record its outcome."""
        reader = CompletionReader(outcome, exact=self.spec.send == "ids")
        try:
            async with asyncio.timeout(outcome.scheduled_s + self.spec.timeout_s - self.now_s()):
                url, context = f"{self.spec.url}/v1/completions", (self, outcome)
                async with self.session.post(url, data=body, trace_request_ctx=context) as response:
                    if response.status != 200:
                        reader.refuse(response.status, await response.content.read(MAX_REFUSAL))
                    else:
                        async for piece in response.content.iter_any():
                            reader.feed(piece, self.now_s())
                        reader.close()
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            if reader.is_done:  # the answer was complete before the connection timed out or broke
                reader.close()
            else:
                outcome.error = TIMEOUT if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"[:200]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            outcome.error = f"the answer is not a stream of completions: {error}"[:200]
        outcome.ended_s = outcome.ended_s or self.now_s()
        self.counted.append(reader.counted)
        self.ended.append(outcome)

    async def measure_lag(self) -> None:
        """Measure the event loop's lag until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.lags_s.append(time.monotonic() - before - TICK_S)

    async def send_all(self, outcomes: Sequence[Outcome], bodies: Sequence[bytes]) -> None:
        """Start every request at its scheduled time, and wait until all have ended."""
        loop, stopped = asyncio.get_running_loop(), threading.Event()
        async with asyncio.TaskGroup() as group:

            def start(outcome: Outcome) -> None:
                group.create_task(self.request(outcome, bodies[outcome.index]))

            def start_on_time() -> None:
                for outcome in outcomes:
                    if stopped.wait(max(0.0, outcome.scheduled_s - self.now_s())):
                        return
                    loop.call_soon_threadsafe(start, outcome)

            try:
                await asyncio.to_thread(start_on_time)  # in a thread, because event loops sleep for whole milliseconds
            finally:
                stopped.set()


async def _on_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    """Set `sent_s` before a connection is made or reused, so that the time to connect counts as the server's time."""
    run, outcome = context.trace_request_ctx
    if outcome.sent_s is None:
        outcome.sent_s = run.now_s()


async def generate(spec: LoadSpec) -> LoadRecording:
    """Send every request at its scheduled time, and return the recording.

    SIGTERM ends the run; the recording then has only the requests that have already ended.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # Build all requests and outcomes in advance to avoid delays during the run.
    bodies = [body_of(spec.model, due.prompt, due.max_tokens, spec.send, spec.salt) for due in spec.arrivals]
    outcomes = [
        Outcome(index, "", due.at_s, max_tokens=due.max_tokens, slo=due.slo) for index, due in enumerate(spec.arrivals)
    ]
    gc.collect()
    gc.freeze()
    gc.disable()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=None)
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # compression would bundle tokens
    headers |= {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_start.append(_on_sent)
    tracing.on_connection_reuseconn.append(_on_sent)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout, trace_configs=[tracing]
    ) as session:
        run = LoadRun(spec, session, time.monotonic_ns() + LEAD_NS)
        started_unix_ns = time.time_ns() + run.start_ns - time.monotonic_ns()
        measuring = asyncio.create_task(run.measure_lag())
        with suppress(asyncio.CancelledError):
            await run.send_all(outcomes, bodies)
        measuring.cancel()
    ended = sorted(run.ended, key=lambda outcome: outcome.index)
    problems = problems_of(ended, spec.slo, float(np.percentile(run.lags_s or [0.0], 99)))
    return LoadRecording(started_unix_ns, ended, worst_count(run.counted), problems)


def problems_of(outcomes: Sequence[Outcome], slo: LatencySlo, loop_lag_s: float = 0.0) -> list[str]:
    """Return the reasons not to use a recording, for example that the client sent its requests late.

    `loop_lag_s` is the 99th percentile of the event loop's lag, which lengthens the measured times of the server.
    """
    problems = []
    lags = [outcome.sent_s - outcome.scheduled_s for outcome in outcomes if outcome.sent_s is not None]
    allowed_s = max(LAG_S, LAG_SHARE * slo.ttft_ms / 1000)
    send_lag_s = float(np.percentile(lags, 99)) if lags else 0.0
    for what, lag_s in (("sent 1 % of the requests", send_lag_s), ("read 1 % of the answers", loop_lag_s)):
        if lag_s > allowed_s:
            problems.append(
                f"the load generator {what} over {lag_s * 1e3:.1f} ms late ({allowed_s * 1e3:.1f} ms are allowed)"
            )
    bundled = sum(outcome.error.startswith("bundled") for outcome in outcomes)
    if bundled:
        problems.append(
            f"in {bundled} requests, several tokens arrived in one event without a count, so the time between tokens "
            "cannot be measured"
        )
    failed = [outcome.error for outcome in outcomes if outcome.error.startswith("ClientConnector")]
    if count := sum(NO_FILES in error for error in failed):
        problems.append(f"{count} requests got no connection: too many open files in the client; raise ulimit -n")
    broken = ["Connect" in outcome.error or "Disconnected" in outcome.error for outcome in outcomes]
    # If the last request was not broken, the server has recovered: the run is valid, and broken requests miss the SLO.
    if broken and broken[-1]:
        problems.append(f"the server was unreachable or disconnected in {sum(broken)} of {len(outcomes)} requests")
    return problems


SPEC, RECORDING = TypeAdapter(LoadSpec), TypeAdapter(LoadRecording)


def main() -> int:
    """Read the LoadSpec from stdin, carry out the run, and write the LoadRecording to stdout, both as JSON."""
    try:
        spec = SPEC.validate_json(sys.stdin.buffer.read())
        with suppress(OSError):  # a higher priority, which needs a privilege, reduces delays of the client
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(OSError, ValueError):  # each outstanding request needs a file descriptor for its connection
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        recording = RECORDING.dump_json(uvloop.run(generate(spec)))
        # With PYTHONUNBUFFERED, sys.stdout.buffer would drop the rest of a write that a signal interrupts.
        with open(sys.stdout.fileno(), "wb", closefd=False) as out:
            out.write(recording)
    except (OSError, ValueError) as error:
        print(f"load generator: {error}", file=sys.stderr)
        return 1
    return 0


async def drive(spec: LoadSpec, recording: LoadRecording) -> None:
    """Carry out a run in a separate process, and fill in `recording`.

    `recording` gets an outcome for every arrival, even if the load generator crashes. If the call is cancelled,
    `recording` gets only the outcomes of requests that have ended. Raises OSError if the process cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "compare.load.client"),
        env=os.environ | {"PYTHONPATH": python_path(os.environ)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C at the terminal does not signal this process directly
        preexec_fn=set_parent_death_signal(os.getpid()),
    )
    exchange = asyncio.create_task(process.communicate(SPEC.dump_json(spec)))
    try:
        output, errors = await asyncio.shield(exchange)
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError, ValueError):
            _fill(recording, (await asyncio.wait_for(exchange, STOP_S))[0])
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        _fill(recording, output)
        return
    recording.outcomes = [
        Outcome(index, "", due.at_s, error="lost with the load generator", max_tokens=due.max_tokens, slo=due.slo)
        for index, due in enumerate(spec.arrivals)
    ]
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    recording.problems.append(
        lines[-1][:300] if lines else f"the load generator ended with status {process.returncode}"
    )


def _fill(recording: LoadRecording, output: bytes) -> None:
    found = RECORDING.validate_json(output)
    for name in LoadRecording.__slots__:
        setattr(recording, name, getattr(found, name))


if __name__ == "__main__":
    sys.exit(main())
