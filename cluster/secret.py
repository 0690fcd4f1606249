"""`baton secret` writes a new secret of a cluster; `baton up` has one too, so that no other user's process joins it."""

import os
import secrets
import sys
from pathlib import Path

from shared.errors import ConfigError
from shared.kv.local import private

NAME = "cluster-secret"
RANDOM_BYTES = 32


def write_secret(path: Path) -> bool:
    """A new secret that only its owner may read; whole when it appears. False: there is a file already, which stays.

    Raises OSError.
    """
    written = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(RANDOM_BYTES) + "\n")
        os.link(written, path)
    except FileExistsError:
        return False
    finally:
        written.unlink()
    return True


def run_secret(file: Path, *, if_absent: bool) -> int:
    """Returns the exit status: 1, after one line on stderr, when nothing was written and that is not well."""
    try:
        if write_secret(file) or if_absent:
            return 0
        problem = "is there already; to change it, see docs/security.md"
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    print(f"baton secret: {file}: {problem}", file=sys.stderr)
    return 1


def own_secret(directory: str) -> str:
    """The file of this user's own secret, in a private directory, written where there is none. Raises ConfigError."""
    try:
        path = private(directory).absolute() / NAME
        write_secret(path)
    except OSError as error:
        raise ConfigError(str(error)) from None
    return str(path)
