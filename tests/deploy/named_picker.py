"""Run a picker: `python -m tests.deploy.named_picker FILE FLAGS`. FILE has the addresses of the routers."""

import sys
from pathlib import Path

from router.picker.__main__ import main
from shared.config.command_line import settings_from_command_line
from shared.config.settings import PickerSettings

FILE, *FLAGS = sys.argv[1:]


async def read_addresses() -> list[str]:
    """Return the addresses in the file."""
    return Path(FILE).read_text().split()  # noqa: ASYNC240 - a short file


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(PickerSettings, FLAGS, "named_picker"), read_addresses))
