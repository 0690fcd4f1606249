"""The parameters with which engines pass the KV of a prompt to each other: for vLLM's connector NIXL, and for SGLang.

Engines trust these parameters and crash on malformed ones, so Baton checks the parameters before it sends them.
"""

import json
from collections.abc import Callable
from typing import Any

MAX_PARAMS_BYTES = 256 << 10
NIXL = "nixl"
# An engine that gets these parameters keeps the blocks of the prompt until their lease ends. Its answer contains the
# parameters with which another engine reads the blocks.
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TEXTS = ("remote_engine_id", "remote_request_id", "remote_host")
COUNTS = ("remote_port", "tp_size", "remote_num_tokens")


def check_params(params: object) -> dict[str, Any]:
    """Check and return NIXL's parameters, with which an engine reads the KV of a prompt.

    Raises ValueError, which names the field, if they are malformed.
    """
    if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
        raise ValueError("kv_transfer_params: do_remote_prefill is not true")
    if params.get("transfer_mode", "pull") != "pull":
        raise ValueError(f"kv_transfer_params: transfer_mode is {params['transfer_mode']!r:.40}, and must be pull")
    for name in TEXTS:
        if not isinstance(params.get(name), str) or not 0 < len(params[name]) <= 256:
            raise ValueError(f"kv_transfer_params: {name} is not a short text")
    if any(not _is_count(params.get(name)) for name in COUNTS):
        raise ValueError(f"kv_transfer_params: one of {', '.join(COUNTS)} is not a number")
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list) or not all(isinstance(row, list) and all(map(_is_count, row)) for row in groups):
        raise ValueError("kv_transfer_params: remote_block_ids is not a list of lists of numbers")
    return params


def check_bootstrap(params: object) -> dict[str, Any]:
    """Check and return SGLang's parameters, with which a decode server asks a prefill server for the KV of a prompt.

    Raises ValueError, which names the field, if they are malformed.
    """
    if not isinstance(params, dict) or params.keys() != {"bootstrap_host", "bootstrap_port", "bootstrap_room"}:
        raise ValueError("bootstrap parameters: must be a host, a port and a room")
    host, port, room = params["bootstrap_host"], params["bootstrap_port"], params["bootstrap_room"]
    if not isinstance(host, str) or not 0 < len(host) <= 256:
        raise ValueError("bootstrap_host: is not a short text")
    if type(port) is not int or not 0 < port < 2**16 or type(room) is not int or not 0 < room < 2**63:
        raise ValueError("bootstrap_port, bootstrap_room: one of them is out of range")
    return params


def read_params(data: bytes, check: Callable[[object], dict[str, Any]]) -> dict[str, Any]:
    """Return the parameters in the JSON text `data`. Raises ValueError, as `check` does, if they are malformed."""
    if len(data) > MAX_PARAMS_BYTES:
        raise ValueError(f"kv_transfer_params: more than {MAX_PARAMS_BYTES} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"kv_transfer_params: {error}") from None
    return check(found)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31
