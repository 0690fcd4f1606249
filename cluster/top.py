"""`baton top`: shows the nodes, the bottleneck and the latest steps live in the terminal.

It reads the router's event stream. If the output is not a terminal, it prints one plain report and exits.
"""

import json
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.status import RouterUnreachableError, refusal
from shared.api_client import bearer

COLUMNS = ("NODE", "ROLE", "STATE", "BATCH", "KV", "QUEUE", "IT/S", "BUSY")
NUM_LEFT = 3  # left-aligned columns; the others are numbers
TIMEOUT_S = 5.0  # the stream has an event every second
RETRY_S = 1.0
FRAME_S = 0.25
PASSES_KEPT = 400
STRANGE = "sent an event that is not as this version of Baton has it"
LEVELS = "▁▂▃▄▅▆▇█"
FULL_TOKENS = 2048  # a step with this many tokens or more has the full height
STYLES = {"prefill": "yellow", "decode": "blue", "over": "bold red"}
# Columns of a step in the `steps` event.
START, DURATION, PREFILL_TOKENS, NUM_DECODES = 1, 2, 8, 9


class TopView:
    """The latest contents of the event stream. The reading thread updates it, and the drawing thread reads it."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None
        self.passes: dict[str, deque[list[Any]]] = {}
        self.problem = ""

    def hear(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "status":
            self.status = data | {"nodes": sorted(data["nodes"], key=_order)}
            nodes = {node["id"] for node in data["nodes"]}
            self.passes = {name: passes for name, passes in self.passes.items() if name in nodes}
        elif kind == "steps":
            kept = self.passes.setdefault(data["node"], deque(maxlen=PASSES_KEPT))
            newest = kept[-1][START] if kept else -math.inf
            kept.extend(row for row in data["steps"] if row[START] > newest)  # a reconnect repeats some steps


def run_top(url: str, api_key: str = "") -> int:
    """Run until the user quits. Return the exit status, which is 1, after a line on stderr, if no router answers."""
    view, events = TopView(), read_events(url, api_key)
    try:
        while view.status is None:
            view.hear(*next(events))
    except (KeyError, TypeError, IndexError):
        print(f"baton top: {url} {STRANGE}", file=sys.stderr)
        return 1
    except RouterUnreachableError as error:
        print(f"baton top: {error}", file=sys.stderr)
        return 1
    except StopIteration:
        print(f"baton top: the event stream of {url} ended at once; try again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not sys.stdout.isatty():
        print("\n".join(plain_lines(view)))
        return 0
    threading.Thread(target=_keep_reading, args=(url, api_key, view, events), daemon=True).start()
    _show(view)
    return 0


def read_events(url: str, api_key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and the data of each server-sent event until the router ends the stream.

    Raises RouterUnreachableError.
    """
    try:
        # Ignore proxy settings, because the default URL is on this machine.
        where, headers = url.rstrip("/") + "/events", bearer(api_key)
        with httpx.stream("GET", where, headers=headers, timeout=TIMEOUT_S, trust_env=False) as answer:
            answer.raise_for_status()
            kind = ""
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    yield kind, json.loads(value)
    except httpx.HTTPStatusError as error:
        raise RouterUnreachableError(refusal(url, error.response.status_code)) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RouterUnreachableError(f"no router at {url}: {error or type(error).__name__}") from None
    except ValueError:
        raise RouterUnreachableError(f"{url} sent an event that is not JSON; is it a router?") from None


def _keep_reading(url: str, api_key: str, view: TopView, events: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Read events until the process ends, and reconnect whenever the stream breaks."""
    while True:
        try:
            for kind, data in events:
                view.hear(kind, data)
                view.problem = ""
            view.problem = "the router ended the stream; trying again"
        except RouterUnreachableError as error:
            view.problem = f"{error}; trying again"
        except (KeyError, TypeError, IndexError):
            view.problem = f"{url} {STRANGE}; trying again"
        time.sleep(RETRY_S)
        events = read_events(url, api_key)


def _show(view: TopView) -> None:
    """Draw the screen until the user presses q or Ctrl-C."""
    console = Console()
    with _keys(sys.stdin) as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while "q" not in pressed(FRAME_S).lower():
                live.update(screen_of(view, console.width), refresh=True)
        except KeyboardInterrupt:
            pass


@contextmanager
def _keys(stream: TextIO) -> Iterator[Callable[[float], str]]:
    """Provide a function that waits up to a given time for keys and returns them. Restore the terminal afterwards."""
    if not stream.isatty():
        yield _no_keys
        return
    import termios
    import tty

    number = stream.fileno()
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> str:
        return os.read(number, 64).decode(errors="ignore") if select.select([number], [], [], seconds)[0] else ""

    tty.setcbreak(number)
    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _order(node: dict[str, Any]) -> tuple[bool, int, str]:
    """Return a sort key that puts prefill nodes first, and node-2 before node-10."""
    return node.get("role") != "prefill", len(node["id"]), node["id"]


# ---- what is shown ---------------------------------------------------------------------------------------------------


def plain_lines(view: TopView) -> list[str]:
    """Return the report for an output that is not a terminal, with cells separated by tabs."""
    status = view.status or {}
    rows = [row_of(node) for node in status["nodes"]]
    return [_summary(status), latency_line(status), *("\t".join(row) for row in [COLUMNS, *rows])]


def screen_of(view: TopView, width: int) -> Group:
    status = view.status or {"nodes": []}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if index < NUM_LEFT else "right")
    for node in status["nodes"]:
        style = STYLES["prefill" if node["role"] == "prefill" else "decode"]
        table.add_row(*(Text(cell, style=style if index == 1 else "") for index, cell in enumerate(row_of(node))))
    slo_ms = ((status.get("latency") or {}).get("slo") or {}).get("tbt_ms") or 0.0
    names = [node["id"] for node in status["nodes"]]
    label = max(map(len, names), default=0) + 2
    lanes = [
        Text.assemble(name.ljust(label), strip(list(view.passes.get(name, ()))[-max(1, width - label) :], slo_ms))
        for name in names
    ]
    legend = Text("one character a pass, height is tokens: ", style="dim")
    legend.append("prompt ", STYLES["prefill"]).append("decode ", STYLES["decode"]).append("over SLO", STYLES["over"])
    head = Text(f"{status.get('model', '?')}  {status.get('mode', '?')}  ", style="bold")
    head.append("q quits", "dim")
    problem = [Text(view.problem, style="bold red")] if view.problem else []
    blank = Text("")
    return Group(head, *problem, Text(_summary(status)), blank, table, blank, *lanes, legend, blank,
                 Text(latency_line(status)))  # fmt: skip


def _summary(status: dict[str, Any]) -> str:
    return str(status.get("summary") or f"{len(status['nodes'])} nodes")


def row_of(node: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a node in the order of COLUMNS. Blocks in use are neither free nor only cached."""
    blocks, batch = node.get("blocks") or {}, node.get("batch") or {}
    total = blocks.get("total") or 0
    used = total - (blocks.get("free") or 0) - (blocks.get("cached") or 0)
    prompt_tokens = (batch.get("tokens") or 0) - (batch.get("decodes") or 0)
    parts = [f"{prompt_tokens}p"] * (prompt_tokens > 0) + [f"{batch.get('decodes')}d"] * bool(batch.get("decodes"))
    busy = node.get("busy")
    return (
        str(node.get("id", "?")),
        str(node.get("role", "?")),
        str(node.get("state", "?")),
        ("+".join(parts) if node.get("running") else "") or "-",
        f"{used / total:.0%}" if total else "-",
        str(node.get("waiting", 0)),
        f"{node.get('steps_per_s') or 0:.0f}",
        "-" if busy is None else f"{busy:.0%}",
    )


def latency_line(status: dict[str, Any]) -> str:
    """Return the p50 and p99 latencies of the last minute, as in "TTFT 180/420 ms (SLO 450)"."""
    latency = status.get("latency") or {}
    parts = []
    for name in ("ttft", "tbt", "ttst"):
        value = latency.get(f"{name}_ms") or {}
        if value.get("p50") is None:
            continue
        slo = (latency.get("slo") or {}).get(f"{name}_ms")
        parts.append(f"{name.upper()} {value['p50']:.4g}/{value['p99']:.4g} ms" + (f" (SLO {slo:g})" if slo else ""))
    return "p50/p99 of the last minute: " + ("   ".join(parts) or "no requests")


def strip(passes: list[list[Any]], slo_ms: float) -> Text:
    """Return a chart with one character for each step.

    Its height is the logarithm of the number of tokens, and its colour shows which kind of tokens prevailed.
    """
    text = Text()
    for row in passes:
        tokens = row[PREFILL_TOKENS] + row[NUM_DECODES]
        level = min(len(LEVELS) - 1, int(len(LEVELS) * math.log2(1 + tokens) / math.log2(1 + FULL_TOKENS)))
        is_over = slo_ms > 0 and row[NUM_DECODES] > 0 and row[DURATION] > slo_ms
        kind = "over" if is_over else "prefill" if row[PREFILL_TOKENS] > row[NUM_DECODES] else "decode"
        text.append(LEVELS[level], STYLES[kind])
    return text
