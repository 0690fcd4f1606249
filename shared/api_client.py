"""Helpers for clients of the HTTP API."""

import re
import ssl

FIXES = {  # of errors of connections, by a pattern in their text
    "WRONG_VERSION_NUMBER|record layer failure": "the server does not use HTTPS: write http:// in the URL",
    "disconnected without sending": "if the server uses HTTPS, write https:// in the URL",
    "CERTIFICATE_VERIFY_FAILED": "set SSL_CERT_FILE to the file of the CA",
}


def bearer(api_key: str) -> dict[bytes, bytes]:
    """Return the header for an API key, or no header if the key is empty."""
    return {b"authorization": b"Bearer " + api_key.encode()} if api_key else {}


def base_url(text: str) -> str:
    """Return a router's URL. A host and port alone, such as 127.0.0.1:8000, get the scheme http."""
    return text if not text or "://" in text else f"http://{text}"


def verification(url: str) -> ssl.SSLContext | bool:
    """Return httpx's argument `verify` for a URL. With HTTPS, trust the CAs of this machine or of SSL_CERT_FILE."""
    return ssl.create_default_context() if url.startswith("https:") else False


def with_fix(error: Exception) -> str:
    """Return the text of an error of httpx, and the fix if one is known."""
    text = str(error).rstrip(".") or type(error).__name__
    return "; ".join([text, *(fix for pattern, fix in FIXES.items() if re.search(pattern, text))])
