"""Helpers for clients of the HTTP API."""

import ssl


def bearer(api_key: str) -> dict[bytes, bytes]:
    """Return the header for an API key, or no header if the key is empty."""
    return {b"authorization": b"Bearer " + api_key.encode()} if api_key else {}


def base_url(text: str) -> str:
    """Return a router's URL. A host and port alone, such as 127.0.0.1:8000, get the scheme http."""
    return text if not text or "://" in text else f"http://{text}"


def verification(url: str) -> ssl.SSLContext | bool:
    """Return httpx's argument `verify` for a URL. With HTTPS, trust the CAs of this machine or of SSL_CERT_FILE."""
    return ssl.create_default_context() if url.startswith("https:") else False
