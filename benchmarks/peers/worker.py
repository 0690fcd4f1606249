"""The worker side of `benchmarks.process.PeerProcess`: it loads one object, then answers each call with a JSON line.

This module uses only the standard library, because the peers' interpreters lack Baton's libraries.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(load: Callable[..., Any]) -> None:
    """Create an object by calling `load` with the arguments in argv, and answer calls of its methods until stdin ends.

    A call is {"call": name, "with": {...}}. Its answer is {"value": ...}, or {"error": ...} if the call failed.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr, so that their output is not mixed with the answers
    try:
        peer = load(**json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - any error is sent to the caller
        print(json.dumps({"error": _line(error)}), file=answers)
        return
    print(json.dumps({"value": peer.facts}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["call"].startswith("_"):
                raise ValueError(f"unknown call {request['call']!r}")
            answer = {"value": getattr(peer, request["call"])(**request["with"])}
        except Exception as error:  # noqa: BLE001 - as above
            answer = {"error": _line(error)}
        print(json.dumps(answer), file=answers)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
