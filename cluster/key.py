"""`baton key`: creates an API key for a tenant. The key is printed once and not stored."""

import sys
from hashlib import sha256
from secrets import token_urlsafe

from router.http.keys import LINE

KEY_BYTES = 32


def make_key(tenant: str, *, is_admin: bool) -> int:
    """Print a new key to stderr, and its line for the keys file to stdout, so that `>> FILE` appends only the line.

    Return the exit status, which is 2 if the tenant's name is invalid.
    """
    key, line = new_key(tenant, is_admin=is_admin)
    if LINE.fullmatch(line) is None:
        print("baton key: a tenant's name has 1 to 64 letters, digits and . _ -", file=sys.stderr)
        return 2
    print(line)
    print(f"the key of {tenant}, shown only now: {key}", file=sys.stderr)
    return 0


def new_key(tenant: str, *, is_admin: bool) -> tuple[str, str]:
    """Return a random key and its line for the keys file."""
    key = f"baton-{token_urlsafe(KEY_BYTES)}"
    return key, f"{tenant}:{sha256(key.encode()).hexdigest()}{':admin' if is_admin else ''}"
