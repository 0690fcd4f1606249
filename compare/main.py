"""Runs `baton compare`, from its options to its report."""

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compare.endpoint import Document, EndpointError
from compare.options import CompareOptions
from compare.planning import PreparedSession, prepare
from compare.report.document import report_of
from compare.report.page import write_report
from compare.report.terminal import TerminalReporter, show
from compare.run.deployments import Deployments, LaunchOptions, LocalStack
from compare.run.session import run_session
from shared.errors import ConfigError

NO_VERDICT = 1
BUSY = 0.5  # load per core, from other processes, that distorts the figures


async def run_compare(options: CompareOptions) -> int:
    """Return the exit status: 0 with a verdict, 1 without. Raises ConfigError for what cannot be run."""
    session = prepare(options)
    out = session.experiment.out
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        (out / "requests.jsonl").write_text("")  # remove those of an earlier session
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    reporter = TerminalReporter()
    reporter.say(f"{session.plan}; report in {out}")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores:
        reporter.say(f"the machine is busy (load {load:.1f} on {cores} cores): figures will be noisy, periods invalid")
    began = time.monotonic()
    try:
        findings = await run_session(session.experiment, _deployments(session), reporter)
    except EndpointError as error:
        if options.url:
            raise ConfigError(f"--url: {error}") from None
        print(f"baton compare: {error}", file=sys.stderr)
        return NO_VERDICT
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from None
    finally:
        reporter.close()
    reporter.say(f"measured in {(time.monotonic() - began) / 60:.1f} min")
    report = report_of(session.experiment, findings, session.on, command_line(sys.argv[1:]))
    show(report)
    return save_report(report, out)


def save_report(report: Document, out: Path) -> int:
    """Write the report, print where it is, and return the exit status. A failure is printed in one line."""
    try:
        page = write_report(report, out)
    except (OSError, ValueError) as error:
        print(f"baton compare: cannot write the report: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return NO_VERDICT
    for name in ("arrivals.jsonl", "outcomes.jsonl", "outcomes.spec.json"):  # of the last period only
        (out / name).unlink(missing_ok=True)
    print(f"report: {page}")
    return 0 if report["valid"] else NO_VERDICT


def _deployments(session: PreparedSession) -> Deployments:
    everyone, logs = session.experiment.everyone, session.experiment.out / "logs"
    launches = [session.launches.get(arm.name, LaunchOptions("")) for arm in everyone]
    stacks = [
        LocalStack(arm, launch, logs / f"arm-{number}.log", session.api_key)
        for number, (arm, launch) in enumerate(zip(everyone, launches, strict=True), 1)
    ]
    return Deployments(stacks, keeps_all=session.plan.keeps_all)


def command_line(arguments: Sequence[str]) -> str:
    """Return the command that repeats the session, without its API key, because reports are shared."""
    kept = re.sub(r"(^|\0)--api-key(=|\0)[^\0]*", r"\1--api-key\2...", "\0".join(arguments))
    return shlex.join(["baton", *(kept.split("\0") if kept else [])])
