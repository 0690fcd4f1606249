"""Read a query from the standard input, simulate it, and write the result, or the error, as JSON."""

import json
import os
import sys

from compare.playground.interactive import simulate
from shared.errors import ConfigError


def main() -> None:
    os.nice(10)  # the router that starts this process must still serve its requests
    try:
        answer = simulate(json.loads(sys.stdin.buffer.read()))
    except (ConfigError, ValueError, RecursionError) as error:
        answer = {"error": str(error)[:300]}
    sys.stdout.write(json.dumps(answer, separators=(",", ":")))


if __name__ == "__main__":
    main()
