"""The wrapper around the whole app through which every request comes: without a right key there is nothing behind it.

A tenant's key opens the API. All else, known or not, is an admin's: a route that is added is closed until it is listed.
"""

import base64
import binascii
from collections.abc import Sequence
from secrets import token_hex

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.asgi import described, label_of
from router.http.keys import ANONYMOUS, SCOPE_KEY, ApiKeys, Identity, WrongKeys
from shared.errors import RequestError, UnavailableError

NO_KEY_NEEDED = frozenset({"/health", "/ready"})  # they say one bit of the router and nothing of anybody


class AuthMiddleware:
    """An ASGI middleware. `tenants_routes` are those that a tenant's key opens; `keys` None: everybody may all."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys | None, tenants_routes: Sequence[BaseRoute], wrong_keys: WrongKeys
    ) -> None:
        self._app = app
        self._keys = keys
        self._tenants_routes = tenants_routes
        self._wrong_keys = wrong_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in NO_KEY_NEEDED:
            try:
                scope[SCOPE_KEY] = self._identity(scope)
            except (RequestError, UnavailableError) as error:
                await self._refuse(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _identity(self, scope: Scope) -> Identity:
        """Raises Rejected (401, 403) or Unavailable (429)."""
        if self._keys is None:
            return ANONYMOUS
        key, address = key_of(scope), (scope.get("client") or ("",))[0]
        if key and (wait_s := self._wrong_keys.wait_s(address, key)):
            self._wrong_keys.tell(address)
            raise UnavailableError("Too many wrong API keys came from this address.", retry_after_s=wait_s, status=429)
        identity = self._keys.identify(key) if key else None
        if identity is None:
            self._wrong_keys.tell(address)
            if key:
                self._wrong_keys.wrong(address, key)
            raise RequestError("An API key is needed: Authorization: Bearer KEY.", code="invalid_api_key", status=401)
        self._wrong_keys.right(address, key)
        if not identity.is_admin and not self._is_for_tenants(scope):
            raise RequestError("This needs the key of an admin.", code="admin_key_needed", status=403)
        return identity

    def _is_for_tenants(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self._tenants_routes)

    def _refuse(self, scope: Scope, error: RequestError | UnavailableError) -> JSONResponse:
        label = label_of(scope, token_hex(16))
        status, value, headers = described(error, label)
        if status == 401:  # with Basic, a browser asks for the key and sends it with all that a page loads
            headers["www-authenticate"] = "Bearer" if self._is_for_tenants(scope) else 'Basic realm="Baton"'
        return JSONResponse(value, status, headers | {"x-request-id": label})


def key_of(scope: Scope) -> bytes:
    """The key that the request brings, b"" for none. In a Basic header it is the password, for reading alone: a browser
    adds that header by itself, whoever makes it ask."""
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
