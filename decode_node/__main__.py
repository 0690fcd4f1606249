"""Run a decode node: `python -m decode_node --help`. The node has adapters for both roles, so it can switch roles."""

import sys

from decode_node.receiver import HandoffReceiver
from node.process import main as run_node
from prefill_node.sender import HandoffSender
from scheduler.role import DECODE
from shared.config.command_line import settings_from_command_line
from shared.config.settings import NodeSettings


def main(settings: NodeSettings) -> int:
    return run_node(settings, DECODE, {"prefill": HandoffSender, "decode": HandoffReceiver})


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(NodeSettings, sys.argv[1:], "python -m decode_node")))
