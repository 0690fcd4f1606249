"""Helpers for clients of the HTTP API."""


def bearer(api_key: str) -> dict[bytes, bytes]:
    """Return the header for an API key, or no header if the key is empty."""
    return {b"authorization": b"Bearer " + api_key.encode()} if api_key else {}
