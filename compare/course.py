"""The course of `baton compare`, from its flags to its report."""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compare.arms import Arm
from compare.command import Choices
from compare.endpoint import Document, Endpoint, Unreachable
from compare.experiment import Places
from compare.planning import Prepared, prepared
from compare.report.page import write_report
from compare.report.schema import problems_of
from compare.result import report_of
from compare.run import run
from compare.stack import Stack, Stacks
from compare.terminal import Screen, show
from shared.errors import ConfigError

NO_VERDICT = 1
BUSY = 0.5  # load per core of somebody else, from which on it shows


async def compared(choices: Choices) -> int:
    """The exit status: 0 with a verdict, 1 without. Raises ConfigError for what cannot be run."""
    ready = prepared(choices)
    out = ready.experiment.out
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        (out / "requests.jsonl").write_text("")  # of this run alone
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    screen = Screen()
    screen.say(f"{ready.plan}; report in {out}")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores:
        screen.say(f"the machine is busy (load {load:.1f} on {cores} cores): figures will be noisy, periods invalid")
    began = time.monotonic()
    try:
        findings = await run(ready.experiment, _places(ready), screen)
    except Unreachable as error:
        if choices.url:
            raise ConfigError(f"--url: {error}") from None
        print(f"baton compare: {error}", file=sys.stderr)
        return NO_VERDICT
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from None
    finally:
        screen.close()
    screen.say(f"measured in {(time.monotonic() - began) / 60:.1f} min")
    report = report_of(ready.experiment, findings, ready.on, command_line(sys.argv[1:]))
    show(report)
    return written(report, ready)


def written(report: Document, ready: Prepared) -> int:
    """Writes the report and says where it is; the exit status. What cannot be written is told in one line."""
    try:
        page = write_report(report, ready.experiment.out)
    except ValueError:
        return _kept_raw(report, ready.experiment.out)
    except OSError as error:
        print(f"baton compare: cannot write the report: {error.strerror or error}", file=sys.stderr)
        return NO_VERDICT
    for name in ("arrivals.jsonl", "outcomes.jsonl", "outcomes.spec.json"):  # of the last period only
        (ready.experiment.out / name).unlink(missing_ok=True)
    print(f"report: {page}")
    return 0 if report["valid"] else NO_VERDICT


def _kept_raw(report: Document, out: Path) -> int:
    """A report that does not fit its schema is a fault of ours; what was measured is kept, with the faults named."""
    faults = problems_of(report)
    path = out / "report-unfit.json"
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    told = f"the report does not fit its schema ({faults[0]}{more})"
    try:
        path.write_text(json.dumps({"faults": faults, **report}, default=str) + "\n", encoding="utf-8")
        told += f": there is no page, and all figures are in {path}"
    except OSError as error:
        told += f", and cannot be kept: {error.strerror or error}"
    print(f"baton compare: {told}", file=sys.stderr)
    return NO_VERDICT


def _places(ready: Prepared) -> Places:
    everyone, out = ready.experiment.everyone, ready.experiment.out
    if ready.launches:
        stacks = [
            Stack(arm, ready.launches[arm.name], out / "logs" / f"arm-{number}.log")
            for number, arm in enumerate(everyone, 1)
        ]
        return Stacks(stacks, keeps_all=ready.keeps_all)
    return Running(everyone, ready.api_key)


class Running:
    """Stacks that somebody else started, and ends."""

    def __init__(self, arms: Sequence[Arm], api_key: str) -> None:
        self._endpoints = {arm.name: Endpoint(arm.url, api_key) for arm in arms}
        self._met: set[str] = set()

    async def up(self, name: str) -> Endpoint:
        """Raises Unreachable."""
        if name not in self._met:
            await self._endpoints[name].meet()
            self._met.add(name)
        return self._endpoints[name]

    async def end(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.close()


def command_line(arguments: Sequence[str]) -> str:
    """What to type to run it again; a report is passed on, and says no key."""
    kept = re.sub(r"(^|\0)--api-key(=|\0)[^\0]*", r"\1--api-key\2...", "\0".join(arguments))
    return shlex.join(["baton", *(kept.split("\0") if kept else [])])
