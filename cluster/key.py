"""`baton key`: draws an API key for a tenant. The key itself is told once and kept nowhere."""

import sys
from hashlib import sha256
from secrets import token_urlsafe

from router.http.keys import LINE

KEY_BYTES = 32


def make_key(tenant: str, *, is_admin: bool) -> int:
    """Prints the line for the file of keys to stdout and the key to stderr, so that `>> FILE` keeps the line alone.
    Returns the exit status: 2 for a name that no tenant can have."""
    key, line = new_key(tenant, is_admin=is_admin)
    if LINE.fullmatch(line) is None:
        print("baton key: a tenant's name has 1 to 64 letters, digits and . _ -", file=sys.stderr)
        return 2
    print(line)
    print(f"the key of {tenant}, shown only now: {key}", file=sys.stderr)
    return 0


def new_key(tenant: str, *, is_admin: bool) -> tuple[str, str]:
    """A random key, and its line."""
    key = f"baton-{token_urlsafe(KEY_BYTES)}"
    return key, f"{tenant}:{sha256(key.encode()).hexdigest()}{':admin' if is_admin else ''}"
