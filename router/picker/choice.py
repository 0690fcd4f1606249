"""Chooses routers so that requests with equal prefixes go to the same router."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from math import ceil
from typing import Any

PREFIX_CHARS = 1024  # only this many characters at the start of a field are part of the key to hash
# The fields that can make up the start of a prompt, in their order in the prompt.
PREFIX_FIELDS = ("instructions", "system", "prompt", "messages", "input", "query")
MAX_ADDRESSES = 3  # the chosen router, and others that the gateway may try if the chosen router does not answer
OVERLOAD = 1.25  # maximum number of requests of a router, as a multiple of the mean


def choose(key: bytes, under_way: Mapping[str, int]) -> list[str]:
    """Return up to MAX_ADDRESSES addresses of `under_way`, best first. `under_way` maps each address to its number of
    requests in progress, and must not be empty.

    The addresses are ordered by rendezvous hashing (Thaler and Ravishankar 1998), so if a router leaves, only the keys
    of that router move to other routers. The first routers in this order may already have too many requests. The best
    address is therefore the first one whose router stays within OVERLOAD times the mean number of requests (consistent
    hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam 2018). The other addresses keep their order.
    """
    seed = blake2b(key).digest()
    order = sorted(under_way, key=lambda address: blake2b(address.encode(), key=seed).digest())
    bound = ceil(OVERLOAD * (sum(under_way.values()) + 1) / len(under_way))
    first = next(address for address in order if under_way[address] < bound)
    order.remove(first)
    return [first, *order][:MAX_ADDRESSES]


def key_of(tenant: str, path: str, body: bytes) -> bytes:
    """Return the key to hash: the tenant, the cache salt and the beginnings of the prompt or messages (PREFIX_FIELDS).

    If the body has no prompt or is not JSON, the key is the tenant and the path. `tenant` is the value of a header.
    """
    try:
        fields = json.loads(body)
        prefix = [_head(fields[name]) for name in PREFIX_FIELDS if name in fields] if isinstance(fields, dict) else []
    except (ValueError, RecursionError):
        prefix = []
    parts = [tenant, str(fields.get("cache_salt")), *prefix] if prefix else [tenant, path]
    return json.dumps(parts).encode()


def _head(value: Any) -> str:
    """Return the first PREFIX_CHARS characters of `value` if it is a string, otherwise of its JSON encoding."""
    if isinstance(value, str):
        return value[:PREFIX_CHARS]
    text = ""
    for piece in json.JSONEncoder().iterencode(value):
        text += piece
        if len(text) >= PREFIX_CHARS:
            break
    return text[:PREFIX_CHARS]
