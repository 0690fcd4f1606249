"""`baton secret` writes the secret of a cluster, and `baton key` creates an API key for a tenant.

`baton up` uses a secret, so that processes of other users cannot join the cluster. API keys are printed once; only
their hashes are stored.
"""

import datetime
import os
import secrets
import sys
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shared.errors import ConfigError
from shared.kv.local import private

NAME = "cluster-secret.pem"
KEY_BYTES = 32


def new_pem() -> bytes:
    """Return a new private key and its self-signed certificate, whose validity period allows for wrong clocks."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The unique name distinguishes the new certificate from the old one while a secret is being replaced.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"baton cluster {secrets.token_hex(8)}")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoded_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return encoded_key + certificate.public_bytes(serialization.Encoding.PEM)


def write_secret(path: Path) -> bool:
    """Write a new secret file atomically, readable only by its owner. Raises OSError.

    Return False if the file already exists.
    """
    written = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(new_pem())
        os.link(written, path)
    except FileExistsError:
        return False
    finally:
        written.unlink()
    return True


def run_secret(file: Path, *, if_absent: bool) -> int:
    """Write a secret file and return 0. If that fails, print one line on stderr and return 1.

    With `if_absent`, an existing file is not an error.
    """
    try:
        if write_secret(file) or if_absent:
            return 0
        problem = "exists already; docs/security.md says how to change a secret"
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    print(f"baton secret: {file}: {problem}", file=sys.stderr)
    return 1


def own_secret(directory: str) -> str:
    """Return the path of this user's secret file. Write the file if it does not exist. Raises ConfigError."""
    try:
        path = private(directory).absolute() / NAME
        write_secret(path)
    except OSError as error:
        reason = str(error) if error.strerror is None else f"--kv-directory {directory}: {error.strerror}"
        raise ConfigError(reason) from None
    return str(path)


def make_key(tenant: str, *, is_admin: bool) -> int:
    """Print a new key to stderr, and its line for the keys file to stdout, so that `>> FILE` appends only the line.

    Return 0, or 2 if the tenant's name is invalid.
    """
    from router.http.auth import LINE  # here, because `baton up` starts faster without the modules of the router

    key, line = new_key(tenant, is_admin=is_admin)
    if LINE.fullmatch(line) is None:
        print("baton key: a tenant's name has 1 to 64 letters, digits and . _ -", file=sys.stderr)
        return 2
    print(line)
    print(f"the key of {tenant}, shown only now: {key}", file=sys.stderr)
    return 0


def new_key(tenant: str, *, is_admin: bool) -> tuple[str, str]:
    """Return a random key and its line for the keys file."""
    key = f"baton-{secrets.token_urlsafe(KEY_BYTES)}"
    return key, f"{tenant}:{sha256(key.encode()).hexdigest()}{':admin' if is_admin else ''}"
