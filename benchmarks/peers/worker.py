"""The worker side of `benchmarks.process.PeerProcess`: load one object, then answer calls, one JSON line each.

Standard library only: it runs in the peers' interpreters, which lack Baton's libraries.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(load: Callable[..., Any]) -> None:
    """Answer calls to the methods of the object that `load` makes from argv, until stdin ends.

    A call is {"call": name, "with": {...}}; its answer {"value": ...}, or {"error": ...}; the worker then continues.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps library output apart from the answers
    try:
        peer = load(**json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - any error of loading is reported to the caller
        print(json.dumps({"error": _line(error)}), file=answers)
        return
    print(json.dumps({"value": peer.facts}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["call"].startswith("_"):
                raise ValueError(f"no call {asked['call']!r}")
            answer = {"value": getattr(peer, asked["call"])(**asked["with"])}
        except Exception as error:  # noqa: BLE001 - as above
            answer = {"error": _line(error)}
        print(json.dumps(answer), file=answers)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
