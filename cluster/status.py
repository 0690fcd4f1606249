"""`baton status`: shows the status of a cluster as a table."""

import json
import sys
from typing import Any

import httpx

from shared.api_client import bearer

TIMEOUT_S = 5.0
COLUMNS = ("node", "role", "state", "running", "waiting", "KV blocks", "steps", "handoffs", "moved", "channels")


class RouterUnreachableError(Exception):
    """No Baton router answers at the URL. The message is one line."""


def show_status(url: str, api_key: str, *, as_json: bool) -> int:
    """Print the status. Return the exit status, which is 1, after one line on stderr, if no router answers."""
    try:
        status = fetch_status(url, api_key)
    except RouterUnreachableError as error:
        print(f"baton status: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(status, indent=2))
        return 0
    print(summary(status))
    rows = [row_of(node) for node in status["nodes"]]
    if sys.stdout.isatty():
        _print_table(rows)
    else:
        print("\n".join("\t".join(row) for row in [COLUMNS, *rows]))
    return 0


def fetch_status(url: str, api_key: str = "") -> dict[str, Any]:
    """Return the document of GET /v1/status. Raises RouterUnreachableError."""
    try:
        # Ignore proxy settings, because the default URL is on this machine.
        headers = bearer(api_key)
        answer = httpx.get(url.rstrip("/") + "/v1/status", headers=headers, timeout=TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        status = answer.json()
    except httpx.HTTPStatusError as error:
        raise RouterUnreachableError(refusal(url, error.response.status_code)) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RouterUnreachableError(f"no router at {url}: {error or type(error).__name__}") from None
    except ValueError:
        raise RouterUnreachableError(f"{url} did not answer with JSON; is it a router?") from None
    if not isinstance(status, dict) or not isinstance(status.get("nodes"), list):
        raise RouterUnreachableError(f"{url} did not answer with a status; is it a router?")
    return status


def refusal(url: str, status: int) -> str:
    """Return a message that explains a rejected request, and how to fix it if that is known."""
    if status in {401, 403}:
        return f"{url} requires an admin key: give --api-key, or set BATON_API_KEY"
    return f"{url} answered with status {status}; is it a router?"


def summary(status: dict[str, Any]) -> str:
    registry, requests = status.get("registry") or {}, status.get("requests") or {}
    return (
        f"{status.get('model', '?')}, {status.get('mode', '?')}; "
        f"registry {registry.get('kind', '?')}: {registry.get('state', '?')}; "
        f"requests: {requests.get('running', 0)} running, {requests.get('total', 0)} in total; "
        f"handoffs: {status.get('handoffs', 0)}, {size_text(status.get('bytes_moved', 0))} moved"
    )


def row_of(node: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a node. Blocks in use are those that are neither free nor only cached."""
    blocks = node.get("blocks") or {}
    total = blocks.get("total", 0)
    used = total - blocks.get("free", 0) - blocks.get("cached", 0)
    handoffs, failed = node.get("handoffs", 0), node.get("handoffs_failed", 0)
    channels = sorted(set((node.get("channels") or {}).values()))
    fallbacks = node.get("channel_fallbacks", 0)
    return (
        str(node.get("id", "?")),
        str(node.get("role", "?")),
        str(node.get("state", "?")) if node.get("alive", True) else "lost",
        str(node.get("running", 0)),
        str(node.get("waiting", 0)),
        f"{used}/{total}",
        str(node.get("steps", 0)),
        f"{handoffs} ({failed} failed)" if failed else str(handoffs),
        size_text(node.get("bytes_moved", 0)),
        (", ".join(channels) or "-") + (f" ({fallbacks} fell back)" if fallbacks else ""),
    )


def size_text(size: float) -> str:
    """Format a number of bytes: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS, box=None)
    for row in rows:
        style = {"ready": "green", "draining": "yellow"}.get(row[2], "red")
        table.add_row(*(Text(cell, style=style if cell is row[2] else "") for cell in row))
    Console().print(table)
