"""API keys, read from a file, and the authentication middleware. A request without a valid key reaches no route.

A line of the file is `tenant:sha256` or `tenant:sha256:admin`, and `#` begins a comment. `baton key` creates a key and
prints the line to add. Keys have 256 random bits, so guesses need no rate limit. A tenant's key gives access to the
API's routes. All other routes require an admin's key, except those in NO_KEY_NEEDED.
"""

import base64
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.asgi import ANONYMOUS, SCOPE_KEY, Identity, to_response
from router.http.openapi import DOCS
from router.metrics.request_metrics import RequestMetrics
from shared.errors import ConfigError, RequestError

log = logging.getLogger("baton.keys")
LINE = re.compile(r"(?P<tenant>[\w.-]{1,64}):(?P<hash>[0-9a-f]{64})(?P<admin>:admin)?", re.ASCII)
LINE_FORM = "must be tenant:sha256 or tenant:sha256:admin; `baton key TENANT` makes such a line"
MAX_KEYS = 1024  # each request's key is compared with all keys, which takes 0.05 us for each key
MAX_FILE_BYTES = 256 << 10
LOOK_S = 1.0  # seconds between checks of the file for changes
LOG_EVERY_S = 10.0
NO_KEY_NEEDED = frozenset({"/health", "/ping", "/ready"})  # these routes reveal only whether the router is up and ready


class ApiKeys:
    """The API keys from the file of --api-keys-file and from --api-keys. A tenant may have several keys.

    The authentication middleware calls `identify` on the event loop. `identify` reads the file again after a change, so
    that keys can be added and revoked without a restart. If the file cannot be read, the previous keys remain valid.
    """

    def __init__(self, path: str, more: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys. `path` may be "" for no file; `more` has further lines, separated by commas. Raises
        ConfigError, naming the line, if a line is invalid."""
        self._path = path
        self._more = more.replace(",", "\n")
        self._clock = clock
        self._stamp = self._stamped()
        self._entries = self._read()
        self._looked = clock()
        self._logged = ""  # the error that was logged last; "" once the file is readable again

    def identify(self, key: bytes) -> Identity | None:
        """Return the owner of a key, or None if the key is invalid. The call's duration does not depend on the key."""
        if (now := self._clock()) - self._looked >= LOOK_S:
            self._looked = now
            self._reload()
        digest, found = sha256(key).digest(), None
        for known, identity in self._entries:
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    def _reload(self) -> None:
        if (stamp := self._stamped()) == self._stamp:
            return
        try:
            self._entries = self._read()
        except ConfigError as error:  # try again later: the cause may be temporary, such as a lack of file descriptors
            if str(error) != self._logged:
                log.error("%s; the previous keys remain valid", error)
            self._logged = str(error)
            return
        self._stamp, self._logged = stamp, ""
        log.info("read %d API keys", len(self._entries))

    def _stamped(self) -> tuple[int, ...]:
        """Return a value that changes when the file is written or replaced."""
        try:
            found = os.stat(self._path)
        except OSError:  # the file may not exist
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[tuple[bytes, Identity]]:
        entries: dict[bytes, Identity] = {}
        file = f"--api-keys-file {self._path}"
        for where, lines in ((file, self._text(file)), ("--api-keys", self._more)):
            for number, line in enumerate(lines.splitlines(), 1):
                entry = line.partition("#")[0].strip()
                if not entry:
                    continue
                match = LINE.fullmatch(entry)
                if match is None:  # omit the line from the message, because it may contain a key
                    raise ConfigError(f"{where}, line {number}: {LINE_FORM}")
                identity = Identity(match["tenant"], match["admin"] is not None)
                if entries.setdefault(bytes.fromhex(match["hash"]), identity) is not identity:
                    raise ConfigError(f"{where}, line {number}: repeats an earlier key; a key can have only one tenant")
        if not 0 < len(entries) <= MAX_KEYS:
            named = file if self._path else "--api-keys"
            raise ConfigError(f"{named}: has {len(entries)} keys: must be 1 to {MAX_KEYS}")
        return list(entries.items())

    def _text(self, where: str) -> str:
        if not self._path:
            return ""
        try:
            with open(self._path, "rb") as file:
                text = file.read(MAX_FILE_BYTES + 1).decode("ascii")
        except OSError as error:
            fix = f"; the file has only hashes, so let user {os.getuid()} read it (chmod a+r, or chown {os.getuid()})"
            fix = fix if isinstance(error, PermissionError) else ""
            raise ConfigError(f"{where}: cannot be read: {error.strerror or error}{fix}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: {LINE_FORM}") from None
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{where}: is larger than {MAX_FILE_BYTES >> 10} KiB")
        return text


@dataclass(eq=False)
class AuthMiddleware:
    """ASGI middleware that checks API keys. Tenants may use `tenants_routes`, and get the status 404 for paths that do
    not exist. Only admins may use `admin_routes`. If `keys` is None, any client may use all routes."""

    app: ASGIApp
    keys: ApiKeys | None
    tenants_routes: Sequence[BaseRoute]
    admin_routes: Sequence[BaseRoute]
    metrics: RequestMetrics
    _next_log: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in NO_KEY_NEEDED:
            is_for_tenants = matches(self.tenants_routes, scope) or not matches(self.admin_routes, scope)
            try:
                scope[SCOPE_KEY] = self._identity(scope, is_for_tenants)
            except RequestError as error:
                response = to_response(Request(scope), error)
                # For a page, ask for the scheme Basic: a browser then asks the user for the key, and sends the key with
                # all requests of the page.
                if error.status == 401:
                    is_page = not is_for_tenants or scope["path"] == DOCS
                    response.headers["www-authenticate"] = 'Basic realm="Baton"' if is_page else "Bearer"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _identity(self, scope: Scope, is_for_tenants: bool) -> Identity:
        """Return the owner of the request's key. Raises RequestError (401, 403)."""
        if self.keys is None:
            return ANONYMOUS
        key = key_of(scope)
        identity = self.keys.identify(key) if key else None
        if identity is None:
            self.metrics.rejected_without_key()
            if (now := time.monotonic()) >= self._next_log:
                self._next_log = now + LOG_EVERY_S
                log.warning("rejected a request without a valid API key from %s", (scope.get("client") or "?")[0])
            text = "The API key is not valid." if key else "An API key is needed: Authorization: Bearer KEY."
            raise RequestError(text, code="invalid_api_key", status=401)
        if not identity.is_admin and not is_for_tenants:
            raise RequestError("This path needs the key of an admin.", code="admin_key_needed", status=403)
        return identity


class ApiCors(CORSMiddleware):
    """ASGI middleware that lets pages of some origins call `routes` from a browser. No other route sends CORS headers.

    It answers preflight requests, which browsers send without a key. Because `allow_credentials` is not set, browsers
    add no stored credentials to the actual requests. A page must therefore send a key itself.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], routes: Sequence[BaseRoute]) -> None:
        headers = ("retry-after", "x-request-id", "traceparent")
        methods = ("GET", "HEAD", "POST", "DELETE")
        super().__init__(app, origins, allow_methods=methods, allow_headers=("*",), expose_headers=headers)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = super().__call__ if scope["type"] == "http" and matches(self._routes, scope) else self.app
        await handler(scope, receive, send)


def matches(routes: Sequence[BaseRoute], scope: Scope) -> bool:
    """Return whether the path of the request matches one of the routes."""
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)


def key_of(scope: Scope) -> bytes:
    """Return the key of a request, or b"" if there is no key. In a Basic header, the key is the password. Basic is
    accepted only for GET and HEAD, because browsers also add this header to requests that pages of other sites start.
    """
    headers = Headers(scope=scope)
    given = headers.getlist("authorization")
    if not given and len(keys := headers.getlist("x-api-key")) == 1:  # as in Anthropic's API
        return keys[0].encode("latin-1")
    scheme, _, value = (given[0] if len(given) == 1 else "").partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value.encode("latin-1")
    if scheme.lower() == "basic" and scope["method"] in {"GET", "HEAD"}:
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
