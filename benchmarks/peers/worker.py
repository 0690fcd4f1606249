"""The far side of `benchmarks.peers.session`: a process that loads one model, then answers calls, a JSON line each.

Standard library only: it runs in the peers' interpreters, which have nothing of ours installed.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(load: Callable[..., Any]) -> None:
    """Answers calls of the public methods of what `load` makes from the options in argv, until stdin ends.

    A call is {"call": name, "with": {...}}; its answer {"value": ...}, or {"error": ...} and the worker goes on.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        peer = load(**json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - whatever a peer's loading raises is told to who asked for it
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
