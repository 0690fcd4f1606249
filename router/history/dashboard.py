"""The dashboard's files at `/` and `/page/…`: a fixed table read once, so that no request names a path on disk."""

from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
UPLOT = "vendor/uplot-1.6.32"
FILES = (
    "index.html", "page.css", "icon.svg", "strip.js", "page.js", "text.js", "feed.js", "nodes.js", "lanes.js",
    "latency.js", "requests.js", "transfers.js",
    f"{UPLOT}/uPlot.iife.min.js", f"{UPLOT}/uPlot.min.css", f"{UPLOT}/LICENSE",
)  # fmt: skip
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", "": "text/plain"}
# uPlot sets styles through the DOM, which `style-src 'self'` allows; nothing needs 'unsafe-inline'.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


def page_routes() -> list[Route]:
    """Routes of all files of the page. Raises OSError when one is not there (a broken installation)."""
    return [Route("/" if name == "index.html" else f"/page/{name}", PageFile(FOLDER / name).answer) for name in FILES]


class PageFile:
    """One file, held in memory; browsers ask each time whether it changed (ETag), so an upgrade shows at once."""

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._etag = f'"{sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "content-type": f"{TYPES[path.suffix]}; charset=utf-8",
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "etag": self._etag,
        }

    async def answer(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self._etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)
