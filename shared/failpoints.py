"""Named places at which a test makes a process fail: `prefill.after_chunk:3=kill`. Off, passing one costs nothing.

`BATON_FAILPOINT` is a comma-separated list of `SITE[:N][@DETAIL]=ACTION`: the action is done when the site is passed
for the N-th time (the first by default; `*`: each time), counting only those with this detail, which is the site's own
(a request's id, mostly; `*`: any, each counted for itself, so that a request's N-th passing is meant). Refused unless
`BATON_ALLOW_FAILPOINTS` is set too. The simulation hangs its own faults on the same sites (`watcher`). After
FoundationDB's BUGGIFY and the failpoints of TiKV.
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
    "router.told": "tokens of a request came in; detail: its id",
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
    "decode.landed": "a handoff landed and is about to be answered; detail: the request's id",
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
    """Raised where a test asked for it."""


@dataclass(slots=True)
class Failpoint:
    """`number` 0: each time."""

    site: str
    number: int
    detail: str
    action: str
    passed: Counter[str] = field(default_factory=Counter)  # by detail, where each is counted for itself


_failpoints: dict[str, list[Failpoint]] = {}
watcher: Callable[[str, str], None] | None = None  # the simulation's: called with site and detail, may raise


def configure(text: str, *, allowed: bool) -> None:
    """For this process, from now on. Raises ConfigError when it is malformed, or not allowed."""
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
    """Whether any site may act: asked once before a loop that passes one for each of its items."""
    return bool(_failpoints) or watcher is not None


def reach(site: str, detail: str = "") -> None:
    """The process is at this site. Raises FailpointError where that was asked for."""
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
