"""Runs a decode node: `python -m decode_node --help`."""

import sys

from node.process import main as run_node
from scheduler.role import DECODE
from shared.config.command_line import settings_from_command_line
from shared.config.settings import NodeSettings


def main(settings: NodeSettings) -> int:
    return run_node(settings, DECODE)


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(NodeSettings, sys.argv[1:], "python -m decode_node")))
