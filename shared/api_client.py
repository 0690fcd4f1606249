"""Helpers for clients of the HTTP API."""


def bearer(api_key: str) -> dict[bytes, bytes]:
    """Return the header for an API key, or no header if the key is empty."""
    return {b"authorization": b"Bearer " + api_key.encode()} if api_key else {}


def base_url(text: str) -> str:
    """Return a router's URL. A host and port alone, such as 127.0.0.1:8000, get the scheme http."""
    return text if not text or "://" in text else f"http://{text}"
