"""The authentication middleware around the whole app. A request without a valid key reaches no route.

A tenant's key allows the API's routes. All other paths, including unknown ones, require an admin's key, so that a new
route is closed to tenants until it is listed.
"""

import base64
import binascii
import logging
import time
from collections.abc import Sequence
from secrets import token_hex

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.asgi import described, label_of
from router.http.keys import ANONYMOUS, SCOPE_KEY, ApiKeys, Identity
from router.metrics.request_metrics import RequestMetrics
from shared.errors import RequestError

log = logging.getLogger("baton.keys")
NO_KEY_NEEDED = frozenset({"/health", "/ready"})  # they reveal only whether the router is up and ready
LOG_EVERY_S = 10.0


class AuthMiddleware:
    """ASGI middleware that checks API keys. Tenants may use `tenants_routes`. If `keys` is None, any client may use
    everything."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys | None, tenants_routes: Sequence[BaseRoute], metrics: RequestMetrics
    ) -> None:
        self._app = app
        self._keys = keys
        self._tenants_routes = tenants_routes
        self._metrics = metrics
        self._next_log = 0.0
        self._num_unlogged = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in NO_KEY_NEEDED:
            try:
                scope[SCOPE_KEY] = self._identity(scope)
            except RequestError as error:
                await self._reject(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _identity(self, scope: Scope) -> Identity:
        """Return the owner of the request's key. Raises RequestError (401, 403)."""
        if self._keys is None:
            return ANONYMOUS
        key = key_of(scope)
        identity = self._keys.identify(key) if key else None
        if identity is None:
            self._count_rejection((scope.get("client") or ("?",))[0])
            raise RequestError("An API key is needed: Authorization: Bearer KEY.", code="invalid_api_key", status=401)
        if not identity.is_admin and not self._is_for_tenants(scope):
            raise RequestError("This needs the key of an admin.", code="admin_key_needed", status=403)
        return identity

    def _count_rejection(self, address: str) -> None:
        self._metrics.rejected_without_key()
        self._num_unlogged += 1
        now = time.monotonic()
        if now >= self._next_log:
            log.warning("rejected %d requests without a valid API key, the last from %s", self._num_unlogged, address)
            self._next_log, self._num_unlogged = now + LOG_EVERY_S, 0

    def _is_for_tenants(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self._tenants_routes)

    def _reject(self, scope: Scope, error: RequestError) -> JSONResponse:
        label = label_of(scope, token_hex(16))
        status, value, headers = described(error, label)
        if status == 401:  # Basic makes browsers ask for the key and send it with each of the page's requests
            headers["www-authenticate"] = "Bearer" if self._is_for_tenants(scope) else 'Basic realm="Baton"'
        return JSONResponse(value, status, headers | {"x-request-id": label})


def key_of(scope: Scope) -> bytes:
    """Return the key of a request, or b"" if it has none. A Basic header has the key as its password. It is only
    accepted for GET and HEAD, because browsers add the header to requests that other sites cause."""
    given = Headers(scope=scope).getlist("authorization")
    scheme, _, value = (given[0] if len(given) == 1 else "").partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value.encode("latin-1")
    if scheme.lower() == "basic" and scope["method"] in {"GET", "HEAD"}:
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
