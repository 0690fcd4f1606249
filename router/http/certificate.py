"""The certificate that a router presents to HTTPS clients."""

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError

log = logging.getLogger("baton.router")
LOOK_S = 5.0  # seconds between two checks for changes of the files


@dataclass(frozen=True, slots=True)
class Certificate:
    """The PEM files of --ssl-certfile and --ssl-keyfile.

    `check` reads them before the router starts, and `follow` reads them again after a change, on the event loop.
    """

    certfile: str
    keyfile: str  # "" if `certfile` also contains the key

    def check(self) -> None:
        """Raise ConfigError if the files cannot be used. The message never quotes their contents."""
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    async def follow(self, contexts: Sequence[ssl.SSLContext]) -> None:
        """Load the files into the contexts of the servers whenever they change, so that a certificate can be renewed
        without a restart. If they cannot be used, new connections keep the previous certificate."""
        stamp, logged = self._stamp(), ""
        while True:
            await asyncio.sleep(LOOK_S)
            if (found := self._stamp()) == stamp:
                continue
            try:
                self.check()
                for context in contexts:
                    self._load(context)
            except ConfigError as error:  # perhaps only one of the two files has been replaced so far
                if str(error) != logged:
                    log.error("%s; the previous certificate stays in use", error)
                logged = str(error)
                continue
            stamp, logged = found, ""
            log.info("read the certificate of --ssl-certfile again")

    def _load(self, context: ssl.SSLContext) -> None:
        flags = f"--ssl-certfile {self.certfile}" + (f", --ssl-keyfile {self.keyfile}" if self.keyfile else "")
        try:
            # With an empty password, OpenSSL does not prompt for the password of an encrypted key.
            context.load_cert_chain(self.certfile, self.keyfile or None, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            fix = "the files must contain a certificate chain and its private key, without a password, in PEM format"
            raise ConfigError(f"{flags}: cannot be used ({reason}): {fix}") from None

    def _stamp(self) -> list[tuple[int, ...]]:
        """Return a value that changes when a file is written or replaced."""
        stamp: list[tuple[int, ...]] = []
        for path in filter(None, (self.certfile, self.keyfile)):
            try:
                found = os.stat(path)
                stamp.append((found.st_mtime_ns, found.st_size, found.st_ino))
            except OSError:
                stamp.append(())
        return stamp
