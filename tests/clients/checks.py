"""Run checks and report them. They run in a client's environment, so this file imports only the standard library."""

import os
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = os.environ["BATON_CLIENTS_URL"], os.environ["BATON_CLIENTS_MODEL"]
TOOLS_URL = os.environ["BATON_CLIENTS_TOOLS_URL"]  # the model of this server, "tools", calls each tool once
failures: list[str] = []


def works(name: str, run: Callable[[], Any]) -> None:
    """Run a check, which must not raise and must return a true value."""
    try:
        result = run()
        print(f"ok {name}" if result else f"FAILED {name}: {result!r}", flush=True)
        if not result:
            failures.append(name)
    except Exception as error:
        print(f"FAILED {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        failures.append(name)


def refused(name: str, run: Callable[[], Any], says: str) -> None:
    """Run a check of an unsupported feature, which must raise an error that contains `says`."""
    try:
        result = run()
    except Exception as error:
        if says in str(error):
            print(f"refused {name}", flush=True)
            return
        result = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(f"FAILED {name}: not refused with {says!r}: {result!r}", flush=True)
    failures.append(name)


def end() -> None:
    """Exit with status 1 if a check failed."""
    sys.exit(1 if failures else 0)
