"""Run an endpoint picker: `python -m router.picker --help`."""

import sys

from shared import logs
from shared.config.command_line import settings_from_command_line
from shared.config.settings import PickerSettings
from shared.lifecycle import run
from shared.resolver import Resolver


def main(settings: PickerSettings, resolve: Resolver | None = None) -> int:
    """Run a picker until SIGTERM, and return the exit status. If the picker cannot start, print one line and return 2.

    `resolve` replaces the system's resolver.
    """
    logs.configure(settings.log_level, settings.log_format, "picker")
    try:
        from router.picker.server import serve

        return run(lambda lifetime: serve(lifetime, settings, resolve))
    except ModuleNotFoundError as error:
        print(f"picker: {error}: in the repository, run pip install '.[picker]'", file=sys.stderr)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        print(f"picker: cannot listen on {where}: {error.strerror or error}; choose another --port", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(PickerSettings, sys.argv[1:], "python -m router.picker")))
