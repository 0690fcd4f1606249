"""Helpers for clients of the HTTP API."""


def bearer(api_key: str) -> dict[bytes, bytes]:
    """Return the headers that carry an API key; none if it is empty."""
    return {b"authorization": b"Bearer " + api_key.encode()} if api_key else {}
