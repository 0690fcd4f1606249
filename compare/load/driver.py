"""Runs the load generator as a separate process and reads its recording."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from compare.load.client import LoadSpec
from compare.load.outcome import LoadRecording, Outcome, load_recording
from compare.load.traffic import Arrival

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 5.0  # from SIGTERM to SIGKILL

ProgressCallback = Callable[[int, int, int], None]  # sent, finished, failed


async def drive(
    spec: LoadSpec, arrivals: Sequence[Arrival], on_progress: ProgressCallback | None = None
) -> LoadRecording:
    """Make one run. The recording has an outcome for every arrival, even if the load generator died.

    Writes the arrivals and the spec next to the outcomes. Raises OSError if that fails.
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
    Path(spec.outcomes).unlink(missing_ok=True)  # of an earlier run
    path = Path(spec.outcomes).with_suffix(".spec.json")
    path.write_text(json.dumps(asdict(replace(spec, api_key=""))), encoding="utf-8")
    return path


def write_arrivals(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write arrivals in the "own" trace format, so that a run's traffic can be sent again."""
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
    """Return the PYTHONPATH with which a process finds our modules first."""
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
