"""Failpoints: named places in the code where a test can make the process fail, as in `prefill.after_chunk:3=kill`.

`BATON_FAILPOINT` is a comma-separated list of `SITE[:N][@DETAIL]=ACTION`. The action is performed when the process
reaches the site for the N-th time. N is 1 by default; `*` means every time. If DETAIL is a request id, only visits of
this request are counted; if it is `*`, the visits of each request are counted separately. A process refuses to start
with failpoints unless `BATON_ALLOW_FAILPOINTS` is also set. The simulation uses `watcher` to inject faults at the same
sites. The design follows FoundationDB's BUGGIFY and the failpoints of TiKV.
"""

import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable

from shared.errors import ConfigError

log = logging.getLogger("baton.failpoint")

# The detail of a site is a request id, or an attempt id in the router. `engine.step` has no detail.
POINTS = {
    "router": ("placed", "received"),
    "node": ("accepted",),
    "engine": ("step", "slice"),
    "prefill": ("after_chunk", "before_push", "after_push", "before_commit", "after_commit"),
    "decode": ("reserved", "before_check", "received", "token", "ended"),
}
SITES = tuple(f"{part}.{point}" for part, points in POINTS.items() for point in points)
ENTRY = re.compile(
    r"(?P<site>[a-z_.]+)(?::(?P<number>\*|[1-9]\d{0,8}))?(?:@(?P<detail>\*|[\w.-]+))?"
    r"=(?P<action>kill|stop|hang|raise|sleep-\d+(?:\.\d+)?)"
)
FOR_EVER_S = 1e8

_failpoints: list[re.Match[str]] = []
_passed: Counter[tuple[re.Match[str], str]] = Counter()  # visits of each failpoint (DETAIL `*`: for each detail)
watcher: Callable[[str, str], None] | None = None  # set by the simulation; called with a site and a detail; may raise


class FailpointError(Exception):
    """The error that the action `raise` raises."""


def configure(text: str, *, allowed: bool) -> None:
    """Replace the failpoints of this process. Raises ConfigError if `text` is malformed or `allowed` is false."""
    _failpoints.clear()
    _passed.clear()
    if text and not allowed:
        raise ConfigError("BATON_FAILPOINT makes this process fail on purpose: also set BATON_ALLOW_FAILPOINTS=true")
    for entry in text.split(",") if text else ():
        match = ENTRY.fullmatch(entry.strip())
        if match is None or match["site"] not in SITES:
            raise ConfigError(
                f"BATON_FAILPOINT {entry!r}: must be SITE[:N][@DETAIL]=ACTION; sites: {', '.join(SITES)}; actions: "
                "kill, stop (until SIGCONT), hang (this thread, forever), sleep-SECONDS or raise"
            )
        _failpoints.append(match)
    if text:
        log.warning("this process will fail on purpose: %s", text)


def armed() -> bool:
    """Return whether any failpoint is configured. If the result is False, a loop may skip its calls of `reach`."""
    return bool(_failpoints) or watcher is not None


def reach(site: str, detail: str = "") -> None:
    """Perform the actions that are due at this site. Raises FailpointError if the action is `raise`."""
    if watcher is not None:
        watcher(site, detail)
    for failpoint in _failpoints:
        if failpoint["site"] == site and failpoint["detail"] in {None, "*", detail}:
            counted = failpoint, detail if failpoint["detail"] == "*" else ""
            _passed[counted] += 1
            if failpoint["number"] == "*" or _passed[counted] == int(failpoint["number"] or 1):
                log.warning("failpoint %s (%s): %s", site, detail, failpoint["action"])
                _act(site, *failpoint["action"].split("-"))


def _act(site: str, action: str, seconds: str = "") -> None:
    if action == "raise":
        raise FailpointError(f"failpoint {site}")
    if action in {"kill", "stop"}:
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    else:
        time.sleep(float(seconds) if action == "sleep" else FOR_EVER_S)
