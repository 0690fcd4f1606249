"""The `baton` command, which is also run by `python -m baton`."""

import sys
from pathlib import Path


def main() -> int:
    """Run the command. Import its packages from this folder or, in a checkout, from the folder that contains it.

    That folder comes first in `sys.path`, because other programs may have packages of the same names.
    """
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here if (here / "cluster").is_dir() else here.parent))
    from cluster.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
