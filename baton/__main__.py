"""The `baton` command, which is also run by `python -m baton`."""

import sys
from pathlib import Path


def main() -> int:
    """Run the command. The packages that it imports are in this folder or, in a checkout, in the parent folder.

    Put the packages' folder first in `sys.path`, because other installed programs may have packages of the same names.
    """
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here if (here / "cluster").is_dir() else here.parent))
    try:
        from cluster.cli import main as run

        return run()
    except KeyboardInterrupt:  # before the command handles Ctrl-C itself
        return 130


if __name__ == "__main__":
    sys.exit(main())
