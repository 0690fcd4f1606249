"""The load generator. `drive` runs it as a separate process, `python -m compare.load.client SPEC.json`.

It is an open loop: every request starts at its scheduled time, without a limit on concurrency and without retries. The
time of a token is when this process read the bytes that contain it.
"""

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import aiohttp
import numpy as np
import uvloop

from compare.load.outcome import (
    HEAD,
    TAIL,
    TIMEOUT,
    CompletionReader,
    LatencySlo,
    LoadRecording,
    Outcome,
    body_of,
    load_recording,
    outcome_line,
    run_line,
    worst_count,
)
from compare.load.traffic import Arrival

LEAD_NS = 100_000_000  # from now to second 0 of the run
TICK_S = 0.01  # between two measurements of the event loop's lag
PROGRESS_TICKS = 50
KEEP_ALIVE_S = 2.0  # below the 5 s of servers, so that no request uses a closing connection
PRIORITY = -10
MAX_REFUSAL = 64 << 10  # bytes to read of an error response
LEAST_LAG_S, SLO_SHARE = 0.002, 0.02  # allowed lateness at the 99th percentile: seconds, or a share of the TTFT SLO
ROOT = Path(__file__).resolve().parents[2]
STOP_S = 5.0  # from SIGTERM to SIGKILL

ProgressCallback = Callable[[int, int, int], None]  # sent, finished, failed


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The input of a run. `arrivals` and `outcomes` are paths. `send` is "ids", or "text" if a server takes no ids."""

    url: str  # URL of the server, without /v1
    model: str
    arrivals: str
    outcomes: str
    slo: LatencySlo = field(default_factory=LatencySlo)
    timeout_s: float = 120.0  # timeout of a request, from its scheduled time
    send: str = "ids"
    salt: str = ""  # prevents prefix-cache hits on prompts of earlier runs
    api_key: str = ""  # passed in the environment, because the spec is written to a file


@dataclass(slots=True)
class LoadRun:
    """The state of one run. The tasks of its requests share it on the event loop."""

    spec: LoadSpec
    session: aiohttp.ClientSession
    file: BinaryIO
    recording: LoadRecording
    start_ns: int  # second 0 of the run on the monotonic clock
    bodies: Sequence[bytes]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    num_sent: int = 0
    num_ended: int = 0
    num_finished: int = 0
    lags_s: list[float] = field(default_factory=list)
    all_started: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""  # why the run cannot continue, if `broken` is set

    def now_s(self) -> float:
        return (time.monotonic_ns() - self.start_ns) / 1e9

    def start(self, index: int) -> None:
        self.tasks.append(asyncio.create_task(_request(self, self.recording.outcomes[index], self.bodies[index])))
        if len(self.tasks) == len(self.recording.outcomes):
            self.all_started.set()

    async def wait_ended(self) -> None:
        await self.all_started.wait()
        await asyncio.wait(self.tasks)

    def keep(self, outcome: Outcome) -> None:
        self.num_ended += 1
        self.num_finished += outcome.finished
        try:
            self.file.write(outcome_line(outcome).encode())
        except OSError as error:
            self.abort(f"cannot write {self.spec.outcomes}: {error.strerror}")

    def abort(self, failure: str) -> None:
        self.failure = self.failure or failure
        self.broken.set()

    def report_progress(self) -> None:
        """Print the counts, which the parent process reads."""
        counts = {"sent": self.num_sent, "finished": self.num_finished, "failed": self.num_ended - self.num_finished}
        try:
            print(json.dumps(counts), flush=True)
        except OSError:
            self.abort("the parent process no longer reads the progress")


async def _request(run: LoadRun, outcome: Outcome, body: bytes) -> None:
    """Send one request, read its answer to the end, and write its outcome."""
    reader = CompletionReader(outcome, exact=run.spec.send == "ids")
    try:
        async with asyncio.timeout(outcome.scheduled_s + run.spec.timeout_s - run.now_s()):
            url, context = f"{run.spec.url}/v1/completions", (run, outcome)
            async with run.session.post(url, data=body, trace_request_ctx=context) as response:
                if response.status != 200:
                    reader.refuse(response.status, await response.content.read(MAX_REFUSAL))
                    return
                async for piece in response.content.iter_any():
                    reader.feed(piece, run.now_s())
            reader.close()
    except (aiohttp.ClientError, OSError) as error:  # OSError includes a timeout
        if reader.is_done:  # the answer was complete before the connection timed out or broke
            reader.close()
        else:
            outcome.error = TIMEOUT if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"[:200]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        outcome.error = f"the answer is not a stream of completions: {error}"[:200]
    finally:
        outcome.ended_s = outcome.ended_s or run.now_s()
        run.counted.append(reader.counted)
        run.keep(outcome)


async def _on_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    """Record the time before a connection is made or reused, so that connecting counts as the server's time."""
    run, outcome = context.trace_request_ctx
    if outcome.sent_s is None:
        outcome.sent_s = run.now_s()
        run.num_sent += 1


def _start_on_time(run: LoadRun, loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
    """Start every request at its scheduled time. Runs in a thread, because event loops sleep for whole milliseconds."""
    for outcome in run.recording.outcomes:
        if stopped.wait(max(0.0, outcome.scheduled_s - run.now_s())):
            return
        loop.call_soon_threadsafe(run.start, outcome.index)


async def _watch(run: LoadRun) -> None:
    """Measure the event loop's lag and report progress."""
    while True:
        for _ in range(PROGRESS_TICKS):
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            run.lags_s.append(time.monotonic() - before - TICK_S)
        run.report_progress()


async def _send_all(run: LoadRun) -> None:
    """Run all requests and wait until they have ended. Raises OSError if the run cannot continue."""
    stopped = threading.Event()
    clock = threading.Thread(target=_start_on_time, args=(run, asyncio.get_running_loop(), stopped), daemon=True)
    watching, ended, broken = map(asyncio.create_task, (_watch(run), run.wait_ended(), run.broken.wait()))
    clock.start()
    await asyncio.wait({ended, broken}, return_when=asyncio.FIRST_COMPLETED)
    stopped.set()
    clock.join()
    tasks = [watching, ended, broken, *run.tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if run.failure:
        raise OSError(run.failure)


async def generate(spec: LoadSpec, outcomes: list[Outcome], bodies: Sequence[bytes], file: BinaryIO) -> None:
    """Send every request at its scheduled time, read the answers, and write the recording. Raises OSError."""
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
        start_ns = time.monotonic_ns() + LEAD_NS
        recording = LoadRecording(time.time_ns() + start_ns - time.monotonic_ns(), outcomes)
        file.write(run_line(recording, HEAD).encode())
        run = LoadRun(spec, session, file, recording, start_ns, bodies)
        await _send_all(run)
        run.report_progress()
    recording.counted = worst_count(run.counted)
    recording.problems = problems_of(outcomes, spec.slo, float(np.percentile(run.lags_s or [0.0], 99)))
    file.write(run_line(recording, TAIL).encode())


def problems_of(outcomes: Sequence[Outcome], slo: LatencySlo, loop_lag_s: float = 0.0) -> list[str]:
    """Return the reasons not to use a recording, for example that the client sent its requests late.

    `loop_lag_s` is the event loop's lag at the 99th percentile. A lag would be counted as the server's time.
    """
    problems = []
    lags = [outcome.sent_s - outcome.scheduled_s for outcome in outcomes if outcome.sent_s is not None]
    allowed_s = max(LEAST_LAG_S, SLO_SHARE * slo.ttft_ms / 1000)
    send_lag_s = float(np.percentile(lags, 99)) if lags else 0.0
    for what, lag_s in (("sent 1 % of the requests", send_lag_s), ("read 1 % of the answers", loop_lag_s)):
        if lag_s > allowed_s:
            problems.append(
                f"the load generator {what} over {lag_s * 1e3:.1f} ms late; {allowed_s * 1e3:.1f} ms are allowed: "
                "give it a CPU of its own, or another machine"
            )
    bundled = sum(outcome.error.startswith("bundled") for outcome in outcomes)
    if bundled:
        problems.append(
            f"in {bundled} requests several tokens came in one event without a count: the time between tokens cannot "
            "be measured there"
        )
    broken = ["Connect" in outcome.error or "Disconnected" in outcome.error for outcome in outcomes]
    if broken and broken[-1]:  # otherwise the server has recovered, and the broken requests are only misses
        problems.append(f"the server was unreachable, or went away, in {sum(broken)} of {len(outcomes)} requests")
    return problems


def _prepare(spec: LoadSpec) -> tuple[list[Outcome], list[bytes]]:
    """Return empty outcomes and the bodies of the requests. Building them in advance avoids delays during the run."""
    outcomes, bodies = [], []
    with Path(spec.arrivals).open(encoding="utf-8") as file:
        for index, line in enumerate(file):
            due = json.loads(line)
            slo = LatencySlo(**due["slo"]) if due.get("slo") else None
            outcomes.append(Outcome(index, "", float(due["t"]), max_tokens=int(due["max_tokens"]), slo=slo))
            bodies.append(body_of(spec.model, due["prompt"], due["max_tokens"], spec.send, spec.salt))
    return outcomes, bodies


def main(path: str) -> int:
    """Run the load generator. Return 0, or print one line on stderr and return 1."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        api_key = os.environ.get("BATON_API_KEY", "")
        spec = LoadSpec(**fields | {"slo": LatencySlo(**fields.get("slo", {})), "api_key": api_key})
        outcomes, bodies = _prepare(spec)
        with suppress(OSError):  # needs a privilege; reduces delays of the client, which would count as the server's
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        gc.collect()
        gc.freeze()
        gc.disable()
        with Path(spec.outcomes).open("wb", buffering=0) as file:
            uvloop.run(generate(spec, outcomes, bodies, file))
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"load generator: {error}", file=sys.stderr)
        return 1
    return 0


# ---- running the load generator as a process -----------------------------------------------------------------------


async def drive(
    spec: LoadSpec, arrivals: Sequence[Arrival], on_progress: ProgressCallback | None = None
) -> LoadRecording:
    """Make one run. The recording has an outcome for every arrival, even if the load generator crashed.

    Writes the files of the arrivals and the spec for the load generator. Raises OSError if that fails.
    """
    path = _write(spec, arrivals)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "compare.load.client", str(path)),
        env=os.environ | {"PYTHONPATH": python_path(), "BATON_API_KEY": spec.api_key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        async for line in process.stdout:
            with suppress(ValueError):
                counts = json.loads(line)
                if on_progress is not None:
                    on_progress(counts["sent"], counts["finished"], counts["failed"])
        stderr, status = await errors, await process.wait()
    finally:
        errors.cancel()
        await _stop(process)
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1][:300] if lines else f"the load generator ended with status {status}"
    return _complete(spec, arrivals, [last] if status else [])


def _write(spec: LoadSpec, arrivals: Sequence[Arrival]) -> Path:
    write_arrivals(Path(spec.arrivals), arrivals)
    Path(spec.outcomes).unlink(missing_ok=True)  # left by an earlier run
    path = Path(spec.outcomes).with_suffix(".spec.json")
    path.write_text(json.dumps(asdict(replace(spec, api_key=""))), encoding="utf-8")
    return path


def write_arrivals(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write the arrivals in the trace format "own", so that the traffic can be sent again."""
    with path.open("w", encoding="utf-8") as file:
        for arrival in arrivals:
            due = {"t": arrival.at_s, "prompt": arrival.prompt, "max_tokens": arrival.max_tokens}
            due |= {"session": arrival.session} if arrival.session else {}
            due |= {"slo": asdict(arrival.slo)} if arrival.slo else {}
            file.write(json.dumps(due, separators=(",", ":")) + "\n")


def _complete(spec: LoadSpec, arrivals: Sequence[Arrival], problems: list[str]) -> LoadRecording:
    """Return the recording, with a failure added for every request that the load generator did not record."""
    path = Path(spec.outcomes)
    recording = load_recording(path) if path.exists() else LoadRecording()
    recorded = {outcome.index for outcome in recording.outcomes}
    missing = [(index, due) for index, due in enumerate(arrivals) if index not in recorded]
    for index, due in missing:
        lost = Outcome(index, "", due.at_s, error="lost with the load generator", max_tokens=due.max_tokens)
        recording.outcomes.append(replace(lost, slo=due.slo))
    recording.outcomes.sort(key=lambda outcome: outcome.index)
    recording.problems += problems
    if missing:
        recording.problems.append(f"the load generator ended before {len(missing)} of {len(arrivals)} requests did")
    return recording


def python_path() -> str:
    """Return a PYTHONPATH that begins with this checkout."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
