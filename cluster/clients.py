"""The commands that call a running router: `baton status`, `top`, `role` and `chat`."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from shared.api_client import bearer, verification, with_fix

TIMEOUT_S = 5.0
ANSWER_S = 120.0  # maximum wait for each part of a chat answer; on a busy cluster, the first part comes late
FRAME_S = 1.0  # time between two updates of `baton top`
COLUMNS = (
    *("node", "role", "state", "running", "waiting", "batch", "KV blocks", "steps/s", "busy"),
    *("handoffs", "moved", "channels"),
)
NARROW, NUM_NARROW = 110, 9  # a terminal of fewer than NARROW characters shows only NUM_NARROW columns of the table
NUM_EVENTS = 10
LEGEND = (
    "steps/s, busy: means of the last 10 s. batch: tokens of prompts (p) and\n"
    "decodes (d) in the latest step. TTFT: time to first token. TBT: time between\n"
    "tokens. TTST: time from the first to the second token."
)
CHAT_HELP = "/new forgets the conversation, /help shows this, /quit ends; Ctrl-C stops an answer"
Document = dict[str, Any]


class UnreachableError(Exception):
    """No server answers at the URL, the answer is an error, or the server is not a router. The message is one line."""


def fails_with_1(command: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit status. On an UnreachableError, print one line on stderr and return 1."""
    try:
        return run()
    except UnreachableError as error:
        print(f"baton {command}: {error}", file=sys.stderr)
        return 1


@contextmanager
def request(
    method: str,
    url: str,
    path: str,
    api_key: str,
    timeout_s: float | None = TIMEOUT_S,
    body: Document | None = None,
    on_sending: Callable[[httpx.Request], None] = lambda _: None,
) -> Iterator[httpx.Response]:
    """Send a request and yield the streamed response. Raises UnreachableError on failure or an error response."""
    limits = httpx.Timeout(timeout_s, connect=TIMEOUT_S)
    try:
        # Ignore the environment's proxy settings, because the default URL is on this machine.
        client = httpx.Client(
            timeout=limits,
            trust_env=False,
            verify=verification(url),
            headers=bearer(api_key),
            event_hooks={"request": [on_sending]},
        )
        with client, client.stream(method, url.rstrip("/") + path, json=body) as response:
            if response.is_error:
                raise UnreachableError(_reason(url, response, has_key=bool(api_key)))
            yield response
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(
            f"no router at {url}: {with_fix(error)}; give its address with --url or BATON_URL"
        ) from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise UnreachableError(f"{url} did not answer like a router of this version; is it a router?") from None


def _reason(url: str, response: httpx.Response, *, has_key: bool) -> str:
    try:
        response.read()
        error = response.json()["error"]
        message = " ".join(str(error["message"]).split())
        if error.get("code") == "unknown_url":
            ports = "with --admin-port, use that port for status and roles, and --port for answers"
            message = f"{url} does not serve this: {ports}"
    except (ValueError, KeyError, TypeError):
        message = f"{url} answered with status {response.status_code}; is it a router?"
    if response.status_code == 401:
        return (
            "the router does not accept this API key: check --api-key and BATON_API_KEY"
            if has_key
            else "the router requires an API key: give --api-key, or set BATON_API_KEY"
        )
    return f"{message} (status {response.status_code})"


# ---- status and top ------------------------------------------------------------------------------------------------


def show_status(url: str, api_key: str, *, as_json: bool) -> int:
    status = fetch_status(url, api_key)
    if as_json:
        print(json.dumps(status, indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        console = Console(markup=False, highlight=False)
        console.print(_screen(status, console.width))
    else:
        rows = map("\t".join, [COLUMNS, *map(row_of, status["nodes"])])
        print("\n".join([*head(status), *rows, *tail(status, time.time())]))
    return 0


def run_top(url: str, api_key: str) -> int:
    """Show the nodes and the bottleneck until Ctrl-C. If the output is not a terminal, print the status once."""
    from rich.console import Console
    from rich.live import Live

    if not sys.stdout.isatty():
        return show_status(url, api_key, as_json=False)
    console = Console(markup=False, highlight=False)
    with Live(
        _screen(fetch_status(url, api_key), console.width), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            try:
                time.sleep(FRAME_S)
                live.update(_screen(fetch_status(url, api_key), console.width), refresh=True)
            except UnreachableError as error:
                live.update(f"{error}; trying again", refresh=True)
            except KeyboardInterrupt:
                return 0


def _screen(status: Document, width: int) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    num_columns = len(COLUMNS) if width >= NARROW else NUM_NARROW
    table = Table(
        *COLUMNS[:num_columns], box=None, pad_edge=False, padding=(0, 2, 0, 0) if width >= 100 else (0, 1, 0, 0)
    )
    for row in map(row_of, status["nodes"]):
        style = {"ready": "green", "draining": "yellow", "left": "dim"}.get(row[2], "red")
        table.add_row(*(Text(cell, style=style if cell is row[2] else "") for cell in row[:num_columns]))
    return Group(*head(status), "", table, "", *tail(status, time.time()), Text(LEGEND, style="dim"))


def fetch_status(url: str, api_key: str = "") -> Document:
    """Return the router's answer to GET /v1/status, with the nodes sorted for display. Raises UnreachableError."""
    with request("GET", url, "/v1/status", api_key) as response:
        response.read()
        status: Document = response.json()
        if not all(isinstance(node["id"], str) for node in status["nodes"]):
            raise ValueError("the id of a node is not text")
        # Prefill nodes come first, and node-2 comes before node-10.
        status["nodes"].sort(key=lambda node: (node.get("role") != "prefill", len(node["id"]), node["id"]))
        return status


def head(status: Document) -> list[str]:
    """Return the lines above the table: the cluster, its load and its latencies."""
    registry, requests, totals = (status.get(name) or {} for name in ("registry", "requests", "totals"))
    lines = [
        f"{status.get('model', '?')}, {status.get('mode', '?')}; "
        f"registry {registry.get('kind', '?')}: {registry.get('state', '?')}; "
        f"handoffs: {status.get('handoffs', 0)}, {size_text(status.get('bytes_moved', 0))} moved",
        f"now: {totals.get('running', requests.get('running', 0))} running, "
        f"{totals.get('queued', (status.get('queue') or {}).get('requests', 0))} queued; "
        f"requests since the start: {requests.get('total', 0)}",
    ]
    if totals:
        rates = [totals.get(f"{name}_per_s") or 0 for name in ("requests", "prompt_tokens", "generated_tokens")]
        lines += [
            "last 10 s: {:.1f} requests/s, {:.0f} prompt tokens/s, {:.0f} generated tokens/s".format(*rates),
            "last 60 s: " + ", ".join(f"{totals.get(name) or 0} {name}" for name in ("finished", "refused", "failed")),
        ]
    return [*lines, latency_line(status), *([str(status["summary"])] if status.get("summary") else [])]


def tail(status: Document, now: float) -> list[str]:
    """Return the lines below the table: a line for each node that was lost or has left, and the latest events."""
    gone = [node for node in status["nodes"] if node.get("state") in {"lost", "left"} and node.get("since_ms")]
    return [
        f"{node['id']}: {node['state']} {now - node['since_ms'] / 1000:.0f} s ago: {node.get('reason') or '?'}"
        for node in gone
    ] + [
        f"{time.strftime('%H:%M:%S', time.localtime(event['time_ms'] / 1000))} {event['text']}"
        for event in (status.get("events") or [])[-NUM_EVENTS:]
    ]


def row_of(node: Document) -> tuple[str, ...]:
    """Return the cells of a node's row. In the column `batch`, "512p+8d" means 512 prompt tokens and 8 decodes.

    If a node is lost or has left, its row shows only its name, role and state, because its last report is out of date.
    """
    state = str(node.get("state", "?")) if node.get("alive", True) or node.get("state") == "left" else "lost"
    named = (str(node.get("id", "?")), str(node.get("role", "?")), state)
    if state in {"lost", "left"}:
        return (*named, *["-"] * (len(COLUMNS) - len(named)))
    batch, busy, blocks = node.get("batch") or {}, node.get("busy"), node.get("blocks") or {}
    decodes, total = batch.get("decodes") or 0, blocks.get("total", 0)
    counts = {"p": (batch.get("tokens") or 0) - decodes, "d": decodes} if node.get("running") else {}
    handoffs, failed = node.get("handoffs", 0), node.get("handoffs_failed", 0)
    channels = ", ".join(sorted(set((node.get("channels") or {}).values()))) or "-"
    fallbacks = node.get("channel_fallbacks", 0)
    return (
        *named,
        str(node.get("running", 0)),
        str(node.get("waiting", 0)),
        "+".join(f"{count}{kind}" for kind, count in counts.items() if count) or "-",
        f"{total - blocks.get('free', 0) - blocks.get('cached', 0)}/{total}",  # cached blocks are not in use
        f"{node.get('steps_per_s') or 0:.0f}",
        "-" if busy is None else f"{busy:.0%}",
        f"{handoffs} ({failed} failed)" if failed else str(handoffs),
        size_text(node.get("bytes_moved", 0)),
        channels + (f" ({fallbacks} fell back)" if fallbacks else ""),
    )


def latency_line(status: Document) -> str:
    """Return the p50 and p99 latencies of the last minute, as in "TTFT 180/420 (SLO 450)"."""
    latency = status.get("latency") or {}
    parts = []
    for name in ("ttft", "tbt", "ttst"):
        value, slo = latency.get(f"{name}_ms") or {}, (latency.get("slo") or {}).get(f"{name}_ms")
        if value.get("p50") is not None:
            text = f"{name.upper()} " + "/".join(f"{value[p]:.{0 if value[p] >= 10 else 1}f}" for p in ("p50", "p99"))
            parts.append(f"{text} (SLO {slo:g})" if slo else text)
    return "last 60 s, p50/p99 ms: " + (", ".join(parts) or "no requests")


def size_text(size: float) -> str:
    """Format a number of bytes: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# ---- role ----------------------------------------------------------------------------------------------------------


def change_role(url: str, node: str, role: str, api_key: str = "") -> int:
    """Change a node's role, wait until the node has drained, and print the result."""
    path = f"/v1/nodes/{quote(node, safe='')}/role"
    with request("POST", url, path, api_key, timeout_s=None, body={"role": role}) as response:
        response.read()
        result = response.json()
        print(f"{result['node']} is a {result['role']} node now" + (f"; {result['note']}" if result["note"] else ""))
    return 0


# ---- chat ----------------------------------------------------------------------------------------------------------


def run_chat(url: str, api_key: str, system: str, **options: str | float | None) -> int:
    """Send each line of standard input as a prompt. Return 1 if the input is a pipe and a prompt got no answer, else 0.

    Each request gets the fields `options`. If an answer fails or is stopped, the conversation continues without its
    question.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - adds line editing and a history to `input`

        print(CHAT_HELP)
    first = [{"role": "system", "content": system}] if system else []
    messages, status = list(first), 0
    for prompt in _prompts(is_terminal):
        if prompt == "/new":
            messages = list(first)
            continue
        if re.fullmatch(r"/\w*", prompt):
            print(CHAT_HELP if prompt == "/help" else f"{prompt} is not a command: {CHAT_HELP}", file=sys.stderr)
            continue
        question = {"role": "user", "content": prompt}
        try:
            text = _answer(url, api_key, {"messages": [*messages, question], **options})
            messages += [question, {"role": "assistant", "content": text}]
        except KeyboardInterrupt:  # the router cancels the request when the connection closes
            print("\n[stopped]", file=sys.stderr)
            status = 1
        except UnreachableError as error:
            print(f"baton chat: {error}", file=sys.stderr)
            status = 1
    return 0 if is_terminal else status


def _prompts(is_terminal: bool) -> Iterator[str]:
    """Yield the prompts until the end of the input or /quit."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()  # discard the unfinished line, as a shell does
            continue
        if line == "/quit":
            return
        if line:
            yield line


def _answer(url: str, api_key: str, fields: Document) -> str:
    """Request an answer, print it as it arrives, and return its text. Raises UnreachableError.

    The model's reasoning and, at the end, the timing are printed to stderr.
    """
    body = {name: value for name, value in fields.items() if value is not None}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, num_tokens, num_parts, ttft_s, total_s = "", 0, 0, 0.0, 0.0
    sent: list[float] = []  # when the request was sent; creating the client before that can take long

    def on_sending(_: httpx.Request) -> None:
        sent.append(time.monotonic())

    with request("POST", url, "/v1/chat/completions", api_key, ANSWER_S, body, on_sending) as response:
        for line in response.iter_lines():
            if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise UnreachableError(event["error"]["message"])
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            delta = (event["choices"] or [{}])[0].get("delta") or {}
            for part, place in ((delta.get("reasoning_content"), sys.stderr), (delta.get("content"), sys.stdout)):
                if part:
                    total_s = time.monotonic() - sent[0]
                    ttft_s = ttft_s or total_s
                    num_parts += 1
                    text += part if place is sys.stdout else ""
                    print(part, end="", flush=True, file=place)
    print()
    # If the tokens arrived together, no rate can be computed.
    rate = f", {(num_tokens - 1) / (total_s - ttft_s):.1f} tokens/s" if num_parts > 2 and total_s > ttft_s else ""
    print(f"[{num_tokens} tokens, TTFT {1000 * ttft_s:.0f} ms{rate}]", file=sys.stderr)
    return text
