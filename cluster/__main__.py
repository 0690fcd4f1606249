"""Run the `baton` command from a checkout: `python -m cluster --help`."""

import sys

from cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
