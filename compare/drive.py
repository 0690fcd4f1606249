"""Runs the load generator as a process of its own, and reads back what it saw."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from compare.client import Spec
from compare.outcome import Outcome, Recording, load_recording
from compare.traffic import Arrival

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 5.0  # from asking the process to end to ending it

Progress = Callable[[int, int, int], None]  # sent, finished, failed


async def drive(spec: Spec, arrivals: Sequence[Arrival], on_progress: Progress | None = None) -> Recording:
    """One run. The recording has an outcome for every arrival, also when the load generator died on the way.

    Writes the arrivals and the spec beside the outcomes. Raises OSError when those cannot be written.
    """
    path = _write(spec, arrivals)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "compare.client", str(path), env=_environment(spec), stdout=-1, stderr=-1
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        async for line in process.stdout:
            with suppress(ValueError):
                said = json.loads(line)
                if on_progress is not None:
                    on_progress(said["sent"], said["finished"], said["failed"])
        complaint, status = await errors, await process.wait()
    finally:
        errors.cancel()
        await _end(process)
    problems = [] if status == 0 else [_last_line(complaint) or f"the load generator ended with status {status}"]
    return _completed(spec, arrivals, problems)


def _write(spec: Spec, arrivals: Sequence[Arrival]) -> Path:
    """Everything that the process reads; returns its spec's path. What an earlier run left is gone."""
    write_arrivals(Path(spec.arrivals), arrivals)
    Path(spec.outcomes).unlink(missing_ok=True)
    path = Path(spec.outcomes).with_suffix(".spec.json")
    path.write_text(json.dumps(asdict(replace(spec, api_key=""))), encoding="utf-8")
    return path


def write_arrivals(path: Path, arrivals: Sequence[Arrival]) -> None:
    """In the own trace format, so that a run's traffic can be sent again."""
    with path.open("w", encoding="utf-8") as file:
        for arrival in arrivals:
            due = {"t": arrival.at_s, "prompt": arrival.prompt, "max_tokens": arrival.max_tokens}
            due |= {"session": arrival.session} if arrival.session else {}
            due |= {"slo": asdict(arrival.slo)} if arrival.slo else {}
            file.write(json.dumps(due, separators=(",", ":")) + "\n")


def _completed(spec: Spec, arrivals: Sequence[Arrival], problems: list[str]) -> Recording:
    """The recording with a failure for every request that the load generator said nothing of: none is left out."""
    path = Path(spec.outcomes)
    recording = load_recording(path) if path.exists() else Recording()
    there = {outcome.index for outcome in recording.outcomes}
    missing = [index for index in range(len(arrivals)) if index not in there]
    for index in missing:
        due = arrivals[index]
        lost = Outcome(index, "", due.at_s, error="lost with the load generator", max_tokens=due.max_tokens)
        recording.outcomes.append(replace(lost, slo=due.slo))
    recording.outcomes.sort(key=lambda outcome: outcome.index)
    recording.problems += problems
    if missing:
        recording.problems.append(f"the load generator ended before {len(missing)} of {len(arrivals)} requests did")
    return recording


def _environment(spec: Spec) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "BATON_API_KEY": spec.api_key}


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _last_line(complaint: bytes) -> str:
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
