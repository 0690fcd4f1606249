"""Failpoints: named places in the code where a test can make the process fail, as in `prefill.after_chunk:3=kill`.

`BATON_FAILPOINT` is a comma-separated list of `SITE[:N][@DETAIL]=ACTION`. The action is performed when the process
reaches the site for the N-th time: the first time by default, every time with `*`. DETAIL, usually a request id,
restricts the count to calls with that detail; with `*`, calls are counted separately for each detail. A process refuses
to start with failpoints unless `BATON_ALLOW_FAILPOINTS` is also set. A site that is not armed costs almost nothing.
The simulation uses `watcher` to inject its own faults at the same sites. The design follows FoundationDB's BUGGIFY and
the failpoints of TiKV.
"""

import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.errors import ConfigError

log = logging.getLogger("baton.failpoint")

SITES = {
    "router.placed": "a request's attempt was placed and is about to be sent; detail: its id",
    "router.received": "the router received tokens of a request; detail: its id",
    "node.taken": "a node took a request, which waits for its first step; detail: its id",
    "engine.step": "a step is about to be launched, on the engine's thread",
    "engine.slice": "a request's slice is about to be computed; detail: its id",
    "prefill.after_chunk": "a chunk of a leaving request was computed; detail: its id",
    "prefill.before_push": "rows are about to be pushed; detail: the request's id",
    "prefill.after_push": "rows were pushed; detail: the request's id",
    "prefill.before_commit": "all rows are pushed, the commit is not sent; detail: the request's id",
    "prefill.after_commit": "the commit was answered; detail: the request's id",
    "decode.reserved": "room was found and is about to be granted; detail: the request's id",
    "decode.before_check": "a commit came, its rows are about to be checked; detail: the request's id",
    "decode.received": "a decode node has all KV of a handoff and is about to answer; detail: the request's id",
    "decode.token": "a token of a request is about to be told; detail: the request's id",
    "decode.ended": "a request's last token is about to be told; detail: its id",
}
ACTIONS = "kill, stop (until SIGCONT), hang (this thread, for ever), sleep-SECONDS, raise or exit-STATUS"
ENTRY = re.compile(
    r"(?P<site>[a-z_.]+)(?::(?P<number>\*|[1-9]\d{0,8}))?(?:@(?P<detail>\*|[\w.-]+))?"
    r"=(?P<action>kill|stop|hang|raise|sleep-\d+(?:\.\d+)?|exit-\d{1,3})"
)
FOR_EVER_S = 1e8


class FailpointError(Exception):
    """The error of the action `raise`."""


@dataclass(slots=True)
class Failpoint:
    """One entry of `BATON_FAILPOINT`. A `number` of 0 means every time."""

    site: str
    number: int
    detail: str
    action: str
    passed: Counter[str] = field(default_factory=Counter)  # calls by detail if DETAIL is `*`, otherwise under ""


_failpoints: dict[str, list[Failpoint]] = {}
watcher: Callable[[str, str], None] | None = None  # set by the simulation; called with site and detail, may raise


def configure(text: str, *, allowed: bool) -> None:
    """Replace the failpoints of this process. Raises ConfigError if `text` is malformed or `allowed` is false."""
    _failpoints.clear()
    if not text:
        return
    if not allowed:
        raise ConfigError("BATON_FAILPOINT makes this process fail on purpose: needs BATON_ALLOW_FAILPOINTS=true too")
    for entry in text.split(","):
        match = ENTRY.fullmatch(entry.strip())
        if match is None or match["site"] not in SITES:
            raise ConfigError(
                f"BATON_FAILPOINT {entry!r}: must be SITE[:N][@DETAIL]=ACTION; sites: {', '.join(SITES)}; "
                f"actions: {ACTIONS}"
            )
        number = 0 if match["number"] == "*" else int(match["number"] or 1)
        failpoint = Failpoint(match["site"], number, match["detail"] or "", match["action"])
        _failpoints.setdefault(failpoint.site, []).append(failpoint)
    log.warning("this process will fail on purpose: %s", text)


def armed() -> bool:
    """Return whether any site may act. A loop asks once, and skips its calls of `reach` if not."""
    return bool(_failpoints) or watcher is not None


def reach(site: str, detail: str = "") -> None:
    """Perform the actions that are due at this site. Raises FailpointError for the action `raise`."""
    if watcher is not None:
        watcher(site, detail)
    if not _failpoints:
        return
    for failpoint in _failpoints.get(site, ()):
        if failpoint.detail not in {"", "*", detail}:
            continue
        counted = detail if failpoint.detail == "*" else ""
        failpoint.passed[counted] += 1
        if failpoint.number in {0, failpoint.passed[counted]}:
            _act(failpoint, detail)


def _act(failpoint: Failpoint, detail: str) -> None:
    name, _, number = failpoint.action.partition("-")
    log.warning("failpoint %s (%s): %s", failpoint.site, detail, failpoint.action)
    match name:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(FOR_EVER_S)
        case "sleep":
            time.sleep(float(number))
        case "exit":
            os._exit(int(number))
        case _:
            raise FailpointError(f"failpoint {failpoint.site}")
