"""Log formats: plain text, or one JSON object per line. A JSON line about a request contains the request's id."""

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_PEERS = 1024  # maximum number of peers that a RateLimitedLog remembers
LINE_ENDS = {ord(end): repr(end)[1:-1] for end in "\n\r\v\f\x1b\x1c\x1d\x1e\x85\u2028\u2029"}
_about: ContextVar[Mapping[str, str]] = ContextVar("about", default=NOTHING)


def about(request: str, traceparent: str) -> None:
    """Add this request and its trace to all later JSON lines of the current task and of the tasks that it starts."""
    _about.set({"request": request, "traceparent": traceparent} if traceparent else {"request": request})


def fields(**values: object) -> dict[str, Any]:
    """Return the `extra` argument that adds fields to a JSON log line. Prompts and keys must not be logged."""
    return {"fields": values}


def configure(level: str, log_format: str, process: str = "") -> None:
    """Log to stderr in the format "text" or "json". JSON lines have the field `node` with the value `process`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if log_format == "json" else TextLines(TEXT))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    logging.getLogger("grpclib").setLevel(logging.ERROR)


class TextLines(logging.Formatter):
    """Formats a record as one line of text, followed by the traceback of an exception, if any.

    Line ends in the message are escaped, so that logged input cannot forge lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        record.message = record.message.translate(LINE_ENDS)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object on one line. Line ends in messages and exceptions are escaped."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["node"] = self._process
        line |= _about.get()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def json_line(process: str, line: str, level: str = "info") -> str:
    """Wrap a line that a process printed in a JSON line. If the line is a JSON object, return it unchanged."""
    if line.startswith("{") and line.endswith("}"):
        with contextlib.suppress(ValueError):
            json.loads(line)
            return line
    given = {"name": "baton.up", "levelname": level.upper(), "msg": line}
    return JsonLines(process).format(logging.makeLogRecord(given))


class RateLimitedLog:
    """Logs the first problem with a peer as a warning, and later problems at level debug until `reset`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._peers: dict[str, None] = {}  # the peers with a problem, oldest first
        self._lock = threading.Lock()  # KV channels log from threads

    def warn(self, peer: str, text: str) -> None:
        with self._lock:
            is_new = peer not in self._peers
            if is_new and len(self._peers) >= MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[peer] = None
        self._logger.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", peer, text)

    def reset(self, peer: str) -> None:
        """Record that the peer works, so that its next problem is logged as a warning again."""
        with self._lock:
            self._peers.pop(peer, None)


peer_log = RateLimitedLog(logging.getLogger("baton.security"))
